"""Training: the loop, the compiled program, and what lies between its chunks."""
