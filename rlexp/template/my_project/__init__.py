"""A project on rlexp: an environment and a network of its own."""
