"""Processes that step environments of the host for `rlexp.sources.inference`. They hold no network and no JAX.

    python -m rlexp.workers <run directory>/workers 3

`wire` is what they and the server say to each other, `meeting` how they find it, `__main__` what a worker does; `keeper` starts
them.
"""
