"""Side-by-side measurements; `python -m benchmarks` or `make bench`. What they say is in docs/benchmarks.md."""
