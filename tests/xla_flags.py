"""The XLA flags under which tests compile in a third of the time. `python tests/xla_flags.py` prints them, for the Makefile.

XLA ends a process that has a flag which it does not know: what differs by jax's version is here.
"""

from importlib import metadata

QUICKLY = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    QUICKLY.append("--xla_cpu_use_fusion_emitters=false")

if __name__ == "__main__":
    print(*QUICKLY)
