"""Random actions in one of the suites' environments, for suites.py; in a process of its own, which reads seeds."""

import json
import sys
import time

import jax

from benchmarks.environments import made, random_play
from benchmarks.measure import Sample
from benchmarks.worker import answer


def main() -> None:
    """Compiles once; the steps of a sample are those that the trainers take."""
    work = json.loads(sys.argv[1])
    num_steps = work["env_steps"] // work["num_envs"]
    play = random_play(made(work["env"]), num_envs=work["num_envs"], num_steps=num_steps)

    def sample(seed: int) -> Sample:
        began = time.perf_counter()
        jax.block_until_ready(play(jax.random.key(seed)))
        seconds = time.perf_counter() - began
        return {"env_steps_per_second": work["env_steps"] / seconds, "env_steps": work["env_steps"]}

    answer(sample)


if __name__ == "__main__":
    main()
