"""What acts between two chunks, once an evaluation: it may change the Run, and let members leave their pack.

`between=<name>` chooses a YAML with `module:`; that module has a `Config` and `make(config) -> Between`. Early stopping by
`stop_at` is one that is always at hand; `sweeper=pbt` brings `rlexp.sweep.population`, `sweeper=tournament` `rlexp.sweep.pods`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from rlexp.config import Config, load_module
from rlexp.experiment import Experiment
from rlexp.types import Key, PyTree

# What is written of a member in each of its metric lines, from one exchange to the next; checkpoints keep it.
Told = dict[str, float | int]


class Leave(NamedTuple):
    """A member is trained no more, and that is no failure: what it has learnt is saved as it is now."""

    # finished: it has what it was to have; pruned: others are more promising; waiting: it goes on later, in another pack
    status: Literal["finished", "pruned", "waiting"]
    why: str


class Moment(NamedTuple):
    """An evaluation, as the host knows it. The same moment comes again where a killed pack goes on."""

    env_steps_before: int  # the last update of the chunk, which may cross a multiple of something
    env_steps: int
    returns: np.ndarray  # [members]; NaN for one that has failed or left
    told: Sequence[Told]
    remembered: Any = None  # by the last exchange; None where there was none


class Exchange(NamedTuple):
    """Members that go on as copies of others, all of them at once, and with which settings."""

    parents: Sequence[int]  # of each member, whom it goes on from: itself, if it goes on as it is
    settings: Mapping[str, Sequence[float]]  # {path of a traced setting: [members]}, as a configuration has it
    told: Sequence[Told]
    words: str = ""  # for people, where anything was copied
    remembered: Any = (
        None  # for the next exchange, in the form of JSON: what no metric line has. Each checkpoint holds it
    )


class Origin(NamedTuple):
    """What a job of a sweep goes on from: all that another one has learnt."""

    dir: Path  # its run directory
    update: int  # of its checkpoint
    settings: Mapping[
        str, float
    ]  # {path of a traced setting: as a configuration has it}, in the place of that one's own
    told: Told


class Finished(NamedTuple):
    """A job of a sweep that has finished."""

    config: Config
    dir: Path
    meta: Mapping[str, Any]  # of its last checkpoint


class Between(NamedTuple):
    """Called after each evaluation but the last, before the next chunk is dispatched; `returns` [members] are of it.

    Where there are several, members leave by all of them first: as they were evaluated, and nobody goes on as a copy of them.
    """

    # (key, run, returns) -> run: pure, traced, with the members as the first axis of everything. None changes nothing.
    change: Callable[[Key, PyTree, jax.Array], PyTree] | None = None
    # returns -> {member: why it leaves}, on the host; NaN stands for a member that has failed or left. Comes before `change`.
    leave: Callable[[np.ndarray], Mapping[int, Leave]] = lambda returns: {}
    # On the host, by the moment alone; None: nothing is exchanged. Comes after `change`.
    exchange: Callable[[Moment], Exchange | None] = lambda moment: None
    # What is told of members that begin. It is numbers alone: texts are for `config.yaml`.
    begin: Callable[[Sequence[Config]], Sequence[Told]] = lambda configs: [{} for _ in configs]
    # (experiment, how many members there are): raises ConfigError, before anything is made.
    check: Callable[[Experiment, int], None] = lambda experiment, num_members: None
    # As `leave`, by the moment alone. A member that is gone on with alone (`resume=…`) is not asked.
    prune: Callable[[Moment], Mapping[int, Leave]] = lambda moment: {}
    # As `prune`, of those whom nothing else lets leave: what a pack ends with that others are to take over.
    pause: Callable[[Moment], Mapping[int, Leave]] | None = None
    # Whether a pack of which at most half is left may go on as a smaller program, which costs its compilation.
    narrows: bool = False
    # Of the jobs of a sweep that are to train as one pack (the sweep's directory, their configurations): what each goes on from,
    # all of it equally far. None: they begin anew. Asked until there is a checkpoint of the pack.
    origins: Callable[[Path, Sequence[Config]], Sequence[Origin] | None] | None = None
    # (the sweep's directory, a job that has finished), before the sweep is told; after a kill once more. Raises OSError.
    enter: Callable[[Path, Finished], None] | None = None


def of(config: Config, modules: Mapping[str, str]) -> Sequence[Between]:
    """Those of a configuration. Where there are none, a chunk is dispatched before the metrics of the last one are read."""
    found = []
    if config.between is not None:
        hook: Between = load_module(modules["between"], "between").make(config.between)
        found.append(hook if config.resume is None else hook._replace(prune=Between().prune, pause=None))
    if (goal := config.stop_at.return_) is not None:
        found.append(Between(leave=lambda returns: _there(returns, goal)))
    return [*found, *(Between(prune=hook.pause) for hook in found if hook.pause)]


def leaving(hook: Between, moment: Moment) -> Mapping[int, Leave]:
    """Who leaves at an evaluation."""
    return {**hook.prune(moment), **hook.leave(moment.returns)}


def told_at_start(hooks: Sequence[Between], configs: Sequence[Config]) -> list[Told]:
    """Of each member that begins."""
    return [
        {name: x for one in of_member for name, x in one.items()}
        for of_member in zip(*(hook.begin(configs) for hook in hooks), [{}] * len(configs), strict=True)
    ]


def _there(returns: np.ndarray, goal: float) -> dict[int, Leave]:
    return {
        int(i): Leave("finished", f"its return of {returns[i]:.4g} is at least stop_at.return {goal:g}")
        for i in np.flatnonzero(returns >= goal)
    }
