"""What a program is, and what all of them are made of, whether their environments are compiled or run on the host."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlexp.config import ConfigError
from rlexp.experiment import Experiment
from rlexp.ops.scan import scan
from rlexp.sources.base import HostSource, Source, no_feedback
from rlexp.training.evaluate import Episodes
from rlexp.types import Batch, Key, Metrics, PyTree, Settings, Update


class Run(NamedTuple):
    """A whole run: what is checkpointed, vmapped, sharded and donated."""

    state: PyTree
    data: PyTree  # the source's
    settings: Settings  # the environment and the source are built from them, inside the trace


class Program(NamedTuple):
    """What the trainer calls."""

    # (learnt=None) -> a fresh run, and what its source counted before the first update. `learnt`, if it is given, makes of the
    # fresh state the one that the source begins with, and so what is remembered before the first update.
    begin: Callable[..., tuple[Run, Metrics]]
    # (run, so many, sums) -> (run, sums): it donates the run, and adds what it counts to the sums, which are Mean of [members]
    updates: Callable[[Run, int, Metrics], tuple[Run, Metrics]]
    nothing: Metrics  # counted so far: a chunk begins with it
    evaluate: Callable[[Run, int], Episodes]  # (run, update) -> [members, num_episodes]
    compile_s: float
    executable: jax.stages.Compiled  # the chunk: its HLO, and what memory it needs
    close: Callable[[], None] = lambda: None  # ends what a source of the host has started
    at: Callable[[Path], None] = lambda directory: None  # HostSource.at

    def chunk(self, run: Run, num_updates: int) -> tuple[Run, Metrics]:
        """So many updates, and what they alone have counted. Donates the run."""
        return self.updates(run, num_updates, self.nothing)

    def init(self, learnt: Callable[[PyTree], PyTree] | None = None) -> Run:
        """A fresh run, or one with such a state: `begin`."""
        return self.begin(learnt)[0]


class Traced(NamedTuple):
    """A pack before compilation: enough to restore a checkpoint."""

    abstract_run: Run  # shapes, types and shardings
    settings: Callable[[], Settings]  # of a fresh Run, on the devices
    compile: Callable[[], Program]
    # The evaluation alone, (run.state, run.settings, update) -> [members, num_episodes]. It is the very program that a run
    # evaluates with: with other shapes, or constants for arguments, XLA rounds differently, and episodes end elsewhere.
    compile_evaluate: Callable[[], Callable[[PyTree, Settings, int], Episodes]]
    lower_chunk: Callable[[], jax.stages.Lowered]  # needs no devices: the mesh may be one that is only described
    # (run, update) -> run with data anew, from the policy as it is: for one that was saved without its memory.
    refill: Callable[[Run, int], Run]
    # The same for as many other members, which differ in data only: they are compiled once for all.
    with_members: Callable[[Sequence[Experiment]], "Traced"]


_COMPILED_S = 6 * 3600.0  # within which a program is compiled; those of minutes are large


def compiled_beside(lowered: jax.stages.Lowered) -> Callable[[], jax.stages.Compiled]:
    """Compiles in a thread, or loads from the cache, while the next program is traced; gives what waits for it, and raises what
    it raised. XLA needs none of Python for it. Several processes may have to compile in one order, and do.
    """
    if jax.process_count() > 1:
        compiled = lowered.compile()
        return lambda: compiled
    done: list[jax.stages.Compiled] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            done.append(lowered.compile())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="compile", daemon=True)
    thread.start()

    def result() -> jax.stages.Compiled:
        thread.join(_COMPILED_S)
        if failures:
            raise failures[0]
        if not done:
            raise TimeoutError(f"a program was not compiled within {_COMPILED_S / 3600:g} hours")
        return done[0]

    return result


# What a resumed run says whose environments run on the host.
FORGOTTEN = "the environments run on the host, and their own state is not kept: they begin new episodes"

REMEMBERED = "the environments run on the host, and can be cloned: they go on where they were"

# Streams of a seed: a new one never reshuffles the others.
TRAIN, EVALUATE, BETWEEN, REFILL, MEMORY = 0, 1, 2, 3, 4


def train_keys(seed: Any) -> tuple[Key, Key]:
    """Of the algorithm's state, and of the source's data."""
    state_key, data_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), TRAIN))
    return state_key, data_key


def evaluation_key(seed: Any, update: Any) -> Key:
    """The evaluation after so many updates plays the same episodes in training, after a resume, and under run=eval."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), EVALUATE), update)


def refill_key(seed: Any, update: Any) -> Key:
    """Of a source's data that begin anew after so many updates."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), REFILL), update)


def learn_from(experiment: Experiment, state: PyTree, batch: Batch) -> tuple[PyTree, Update]:
    """All U updates of a batch: (state, what each of them reports)."""
    with jax.named_scope("update"):
        return scan(experiment.algorithm.update, state, batch)


def hears(experiment: Experiment, source: Source | HostSource, updates: Update) -> bool:
    """Whether a source is told what its samples were worth.

    Raises:
      ConfigError: a replay draws by that, and the algorithm does not say it.
    """
    if updates.priority is None and getattr(experiment.config.algo.source, "selector", None) == "prioritised":
        raise ConfigError(
            f"algo.source: samples are drawn by what the algorithm finds them worth, and {experiment.modules['algo']} does not say "
            "that; expected algo.source.selector=uniform, or an algorithm that does, such as algo=dqn or algo=r2d2"
        )
    return updates.priority is not None and source.feedback is not no_feedback


def member_data(experiments: Sequence[Experiment]) -> tuple[np.ndarray, PyTree, Settings]:
    """What members differ in: (seeds, hyperparameters, other settings)."""
    seeds = np.array([e.config.seed for e in experiments], np.uint32)
    return seeds, _stack([e.hp for e in experiments]), stacked_settings(experiments)


def stacked_settings(experiments: Sequence[Experiment]) -> Settings:
    """Those of the members, as they stand in a fresh Run."""
    return _stack([e.settings for e in experiments])


def _stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *xs: np.array(xs, np.float32), *trees)
