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
    others: int  # where episodes end together: whole ones, so that each sample has as many ends
    # Of a large world those that somebody would choose: each compiles for minutes
    sides: tuple[str, ...] = tuple(SIDES)


CHEETAH, WHOLE = "playground/cheetah_run", 1_001  # steps, with the one that resets
# by file of benchmarks/results; the later ones compile for minutes
CASES = {
    "resets": (
        Case("gymnax/cartpole", (64, 1024), 524_288, 524_288),
        Case("craftax/classic", (64, 1024), 4_096, 32_768),
    ),
    "resets_cheetah_run": (
        Case(CHEETAH, (64,), 64 * 10, 64 * WHOLE, ("each resets itself", "`auto`")),
        Case(CHEETAH, (256,), 256 * 10, 256 * WHOLE, ("each resets itself", "`auto`")),
    ),
    "resets_craftax_full": (
        Case("craftax/full", (64, 1024), 2_048, 16_384, ("each resets itself", "`share`", "`auto`")),
    ),
}


def measure(out: Path, *, rounds: int, quick: bool, say: Say, part: str = "resets") -> None:
    """What is measured is written after each size of a case.

    Args:
      part: one of CASES.
    """
    samples: dict[str, dict[str, list[Sample]]] = {}
    for case in CASES[part]:
        for num_envs in (8,) if quick else case.num_envs:
            name = _name(case, num_envs)
            say(f" {name}")
            sides = {side: _played(case, num_envs, SIDES[side], quick=quick) for side in case.sides}
            # Compiles; after it episodes do not all begin together, but where they end together
            for ask in sides.values():
                ask(0)
            samples[name] = alternate(sides, rounds=rounds, say=say)
            alone = samples[name]["each resets itself"]
            rows = [
                [side, spread(found, COST).median, ratio(alone, found, COST).median]
                for side, found in samples[name].items()
            ]
            print(table(f"{name}: CPU µs a step", ["", "median", "times cheaper"], rows))
            write(
                out / f"{part}.json",
                settings=[case._asdict() for case in CASES[part]],
                samples=samples,
                results={name: _told(found) for name, found in samples.items()},
            )


def with_table(text: str, folder: Path) -> str:
    """The page with the medians of what is kept in a folder."""
    rows = []
    for part, cases in CASES.items():
        kept = json.loads((folder / f"{part}.json").read_text())["results"]
        for case in cases:
            for num_envs in case.num_envs:
                found = kept[_name(case, num_envs)]
                rows.append(
                    [f"`{case.env}`", f"{num_envs:,}", *(_cell(found[side]) if side in found else "" for side in SIDES)]
                )
    return in_page(text, HEAD, rows)


def _name(case: Case, num_envs: int) -> str:
    return f"{case.env}, {num_envs:,} environments"


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
