"""A tournament in this process: its pods as the sweeper makes them, packs one after the other, programs compiled once."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlexp import compose
from rlexp.config import Config as Whole
from rlexp.config import as_read, parse
from rlexp.machine.stop import Stop
from rlexp.sweep import leaderboard, packs, tournament
from rlexp.sweep.manifest import OVER, Manifest
from rlexp.sweep.packing import Job, fingerprint, grouped, without_launcher
from rlexp.sweep.sweepers import Setting, Sweep, Sweeper

LR, ENTROPY = "algo.hp.lr", "algo.hp.entropy_coef"
# A pod is two updates, an agent six: a pack of four pods in each of three ages.
WORK = (
    "logger=quiet", "compilation_cache=null", "hardware.pack_devices=1",
    "env=probe/action_reward", "eval.mode=sampled", "eval.num_episodes=4", "eval.every_env_steps=64", "total_env_steps=192",
    "algo.num_envs=4", "algo.num_steps=8", "algo.num_epochs=1", "algo.num_minibatches=1", "network.hidden=[4]",
)  # fmt: skip
LINE = ("sweeper=tournament", "sweeper.population=4", "sweeper.leaders=2")


def tournament_of(directory: Path, *overrides: str, grid: Sequence[Sequence[str]] = ((),)) -> Sweeper:
    """The sweeper of a command line, with intervals as Hydra gives them."""
    node, _ = compose.compose_node([*LINE, *overrides])
    read, modules = parse(node, Whole)
    intervals = {LR: {"low": 1e-4, "high": 1e-2, "log": True}, ENTROPY: {"low": 0.0, "high": 0.05}}
    given = Sweep(directory, grid, lambda job: Setting(job, read, modules), intervals, {})
    return tournament.make(read.sweeper, given)


def jobs_of(directory: Path, *overrides: str) -> list[Job]:
    """As Hydra's launcher makes them."""
    trials = next(tournament_of(directory, *WORK, *overrides).batches)
    own = without_launcher(overrides)
    return [_job(directory, number, (*own, *trial)) for number, trial in enumerate(trials)]


@functools.cache
def _composed(*overrides: str) -> tuple[dict[str, Any], Whole, dict[str, str]]:
    node, _ = compose.compose_node([*WORK, *overrides])
    config, modules = parse(node, Whole)
    return as_read(node, config), config, modules


def _job(directory: Path, number: int, overrides: tuple[str, ...]) -> Job:
    return Job(number, overrides, *_composed(*overrides), directory / str(number))


def packs_of(directory: Path, *overrides: str) -> list[list[Job]]:
    """In the order in which they are started."""
    return grouped(jobs_of(directory, *overrides), pack="auto", max_pack=None)


PROGRAMS = packs.Programs()  # of all tests: pods of all tournaments here share them


def train_pack(pack: Sequence[Job], directory: Path, *, stop: Stop | None = None) -> None:
    """What is left of it, as a launcher does in this process."""
    manifest = Manifest(directory)
    over = {entry.number for entry in manifest.jobs() if entry.status in OVER}
    left = packs.unfinished(pack, directory, over)
    if left:
        packs.train(left, directory, manifest, stop=stop or Stop(), programs=PROGRAMS)


def train(
    directory: Path, *overrides: str, order: Callable[[list[list[Job]]], list[list[Job]]] = lambda found: found
) -> Manifest:
    """A tournament, or what is left of one."""
    manifest, found = Manifest(directory), packs_of(directory, *overrides)
    for pack in found:
        for job in pack:
            manifest.add(job.number, job.overrides, str(job.number), fingerprint=fingerprint(job))
    for pack in order(found):
        train_pack(pack, directory)
    return manifest


def board(directory: Path) -> dict[str, dict[str, Any]]:
    """All that is in it, by its place."""
    found = sorted((directory / leaderboard.FOLDER).glob("*/*/*"))
    return {str(path.relative_to(directory)): json.loads(path.read_text()) for path in found}
