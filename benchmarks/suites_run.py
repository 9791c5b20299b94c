"""Our sides of suites.py, each in a process of its own, which reads seeds: random actions, or training.

Reads a work as JSON from the command line. Where that has `overrides` it is trained by them, with the program and the loop of
`python -m rlexp` without its log: the same training goes on from sample to sample, as Brax's does; where the work says `afresh`
each sample begins a new one, whose first resets count, as Craftax_Baselines' do.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.environments import draws, made
from benchmarks.measure import BENCH, Sample
from benchmarks.work import built, places
from benchmarks.worker import answer
from rlexp.envs.base import batched


def main() -> None:
    """Compiles once; the steps of a sample are those of all sides."""
    work = json.loads(sys.argv[1])
    do = training(work) if "overrides" in work else acting(work)

    def sample(seed: int) -> Sample:
        began = time.perf_counter()
        jax.block_until_ready(do(seed))
        seconds = time.perf_counter() - began
        return {"env_steps_per_second": work["env_steps"] / seconds, "env_steps": work["env_steps"]}

    answer(sample)


def acting(work: dict[str, Any]) -> Callable[[int], Any]:
    """Steps of random actions, which go on where those of the sample before have ended."""
    env = made(work["env"], resets=work["resets"]) if work["resets"] else made(work["env"])
    envs, draw = batched(env), draws(env, work["num_envs"])
    now = jax.jit(envs.reset)(jax.random.split(jax.random.key(0), work["num_envs"]))

    @jax.jit
    def play(now: Any, key: Any) -> Any:
        keys = jax.random.split(key, work["env_steps"] // work["num_envs"])
        return jax.lax.scan(lambda now, key: (envs.step(now[0], draw(key, now[1].obs)), None), now, keys)[0]

    def act(seed: int) -> Any:
        nonlocal now
        now = play(now, jax.random.key(seed))
        return now

    return act


def training(work: dict[str, Any]) -> Callable[[int], Any]:
    """`updates` of the training, which nothing is logged of."""
    from rlexp.training import program
    from rlexp.training.layout import layout_of
    from rlexp.training.pace import Pace

    (lead,) = built([[*work["overrides"], *places(BENCH / "runs" / "suites")]])
    compiled = program.trace([lead], layout_of([lead])).compile()
    pace = Pace(compiled, lambda: False)
    run = None

    def train(seed: int) -> Any:
        nonlocal run
        if run is None or work["afresh"]:
            run, _ = compiled.begin()
        run, counted, _ = pace.updates(run, compiled.nothing, work["updates"])
        return run, counted

    return train


if __name__ == "__main__":
    main()
