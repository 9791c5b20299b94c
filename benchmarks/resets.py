"""What a step of random actions costs by `env.resets`: each environment's own reset, 2 resets a step, `share`, `auto`.

CPU time of one process, in which the sides of a case take turns; with it the share of the steps in which an environment waits.
"""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.environments import draws, made
from benchmarks.measure import Sample, Say, alternate, in_page, ratio, spread, table, write
from rlexp.envs.base import batched

COST, WAITS = "us_a_step", "waiting_share"
SIDES = {"each resets itself": None, "`2`": 2, "`share`": "share", "`auto`": "auto"}
HEAD = ["`env.resets`", "at once", *SIDES]


class Case(NamedTuple):
    """An environment, and how much of it is a sample, in steps of all environments together."""

    env: str
    num_envs: tuple[int, ...]
    alone: int  # where each resets itself, whose cost knows no ends
    others: int


CASES = (
    Case("gymnax/cartpole", (64, 1024), 524_288, 524_288),
    Case("craftax/classic", (64, 1024), 4_096, 32_768),
)


def measure(out: Path, *, rounds: int, quick: bool, say: Say) -> None:
    """What is measured is written after each case."""
    samples: dict[str, dict[str, list[Sample]]] = {}
    for case in CASES:
        for num_envs in (8,) if quick else case.num_envs:
            name = f"{case.env}, {num_envs:,} environments"
            say(f" {name}")
            sides = {side: _played(case, num_envs, resets, quick=quick) for side, resets in SIDES.items()}
            for (
                ask
            ) in sides.values():  # compiles; after it episodes do not all begin together, but where they end together
                ask(0)
            samples[name] = alternate(sides, rounds=rounds, say=say)
            rows = [
                [
                    side,
                    spread(of_side, COST).median,
                    ratio(samples[name]["each resets itself"], of_side, COST).of_medians,
                ]
                for side, of_side in samples[name].items()
            ]
            print(table(f"{name}: CPU µs a step", ["", "median", "times cheaper"], rows))
            write(
                out / "resets.json",
                settings=[case._asdict() for case in CASES],
                samples=samples,
                results={name: _told(found) for name, found in samples.items()},
            )


def with_table(text: str, path: Path) -> str:
    """The page with the medians of what is kept in a file."""
    kept = json.loads(path.read_text())["results"]
    rows = []
    for case in CASES:
        for num_envs in case.num_envs:
            found = kept[f"{case.env}, {num_envs:,} environments"]
            rows.append([f"`{case.env}`", f"{num_envs:,}", *(_cell(found[side]) for side in SIDES)])
    return in_page(text, HEAD, rows)


def _told(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    return {side: {key: spread(found, key)._asdict() for key in (COST, WAITS)} for side, found in samples.items()}


def _cell(found: dict[str, Any]) -> str:
    waits = found[WAITS]["median"]
    return f"{found[COST]['median']:.3g} µs" + (f", {waits:.2%} wait" if waits else "")


def _played(case: Case, num_envs: int, resets: Any, *, quick: bool) -> Callable[[int], Sample]:
    """Goes on from sample to sample."""
    env = made(case.env, resets=resets)
    envs, draw = batched(env), draws(env, num_envs)
    num_steps = 2 if quick else (case.alone if resets is None else case.others) // num_envs
    now = jax.jit(envs.reset)(jax.random.split(jax.random.key(0), num_envs))

    @functools.partial(jax.jit, donate_argnums=0)
    def play(now: Any, key: Any) -> Any:
        def step(now: Any, key: Any) -> Any:
            state, before = now
            state, after = envs.step(state, draw(key, before.obs))
            return (state, after), jnp.sum(before.last & ~after.first)

        now, waits = jax.lax.scan(step, now, jax.random.split(key, num_steps))
        return now, jnp.sum(waits)

    def sample(seed: int) -> Sample:
        nonlocal now
        began = time.process_time()
        now, waits = jax.block_until_ready(play(now, jax.random.key(seed)))
        steps = num_steps * num_envs
        return {COST: (time.process_time() - began) / steps * 1e6, WAITS: int(waits) / steps, "env_steps": steps}

    return sample
