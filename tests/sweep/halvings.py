"""Packs of which successive halving decides who trains on: their jobs, trained as a launcher does, and killed."""

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlexp import compose, experiment
from rlexp.machine.stop import Stop
from rlexp.storage import rundir
from rlexp.sweep import inherit, packs
from rlexp.sweep.halving import Config
from rlexp.sweep.manifest import OVER, Manifest
from rlexp.sweep.packing import Job, grouped
from rlexp.training.saves import Saves


def config(**given: Any) -> Config:
    values: dict[str, Any] = {
        "module": "rlexp.sweep.halving", "number": 0, "batch": 0, "rungs": [64, 128], "reduction": 2, "ties": False,
        "seen": [],
    }  # fmt: skip
    return Config(**values | given)


# 16 updates, an evaluation after every second one. The return is four times what the environment pays, a traced setting.
WORK = (
    "env=probe/action_reward", "algo.num_envs=4", "algo.num_steps=8", "algo.num_epochs=1", "algo.num_minibatches=1",
    "network.hidden=[4]", "eval.num_episodes=2", "eval.every_env_steps=64", "total_env_steps=320",
    "checkpoint.every_updates=3",
)  # fmt: skip
PAYS = (2.0, 5.0, 3.0, 4.0)


@functools.cache
def _composed(*overrides: str) -> dict[str, Any]:
    return compose.compose_node(["logger=quiet", "compilation_cache=null", *overrides])[0]


def pack_of(
    directory: Path,
    pays: Sequence[float] = PAYS,
    *,
    more: Sequence[str] = ("hardware.pack_devices=1",),
    work: Sequence[str] = WORK,
    plain: bool = False,
    **given: Any,
) -> list[Job]:
    """For tests with the fixture `paying`. `plain`: nobody decides anything."""
    manifest, found = Manifest(directory), []
    for number, pay in enumerate(pays):
        node = copy.deepcopy(_composed(*work, *more))
        node |= {"seed": number, "env": {"module": "traced_paying", "params": {"pay": pay}}}
        node |= {} if plain else {"between": vars(config(**given))}
        built = experiment.build(node)
        manifest.add(number, [f"env.params.pay={pay}"])
        found.append(
            Job(number, (f"env.params.pay={pay}",), built.node, built.config, built.modules, directory / str(number))
        )
    return found


def go_on(
    directory: Path, programs: packs.Programs, stop: Stop | None = None, max_pack: int | None = None, **given: Any
) -> list[tuple[str, float | None]]:
    """As a launcher does: what is not over is trained."""
    entries = Manifest(directory).jobs()
    over = {entry.number for entry in entries if entry.status in OVER}
    before = {entry.number: entry.pack for entry in entries}
    for group in grouped(pack_of(directory, **given), pack="auto", max_pack=max_pack, before=before):
        if left := packs.unfinished(group, directory, over):
            packs.train(left, directory, Manifest(directory), stop=stop or Stop(), programs=programs)
    return [(entry.status, entry.objective) for entry in Manifest(directory).jobs()]


class Killed(BaseException):
    """The process dies here."""


@contextlib.contextmanager
def killed_at(event: int) -> Iterator[list[str]]:
    """Before one of the things that are put on the disk, by its number."""
    events: list[str] = []

    def counted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def called(*args: Any, **how: Any) -> Any:
            if name != "write_json" or args[0].name in ("narrowed.json", "stretches.json"):
                events.append(name)
                if len(events) == event + 1:
                    raise Killed(name)
            return real(*args, **how)

        patch.setattr(owner, name, called)

    with pytest.MonkeyPatch.context() as patch:
        counted(patch, Saves, "_put_part")  # of who was pruned, or waits
        counted(patch, Saves, "narrow")
        counted(patch, Manifest, "settle")
        counted(patch, rundir, "write_json")
        counted(patch, inherit, "_put")
        yield events
