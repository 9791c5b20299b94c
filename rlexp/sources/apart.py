"""Inserts into a memory and samples of it that run apart, as in Reverb: a thread inserts while the learner samples.

    thread     policy · batch · may it come in? · policy · batch · …      rlexp.sources.actors or .inference make the batches
    learner    may it sample? · takes in what has come · draws, learns · policy · …

`rlexp.replay.rate_limiter` holds whichever is ahead, at most `error_buffer` samples from what `samples_per_insert` asks for. An
item is what a sample may start with: a transition, or with a network that remembers the beginning of a rollout. The learner takes
in what has come before each update; what has come and was not taken in yet is no part of a checkpoint.

Environment steps are counted by samples: update k stands for the steps that its samples are worth. What was stepped differs by at
most error_buffer / samples_per_insert items, and `agent_steps` has it exactly.
"""

import dataclasses
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from rlexp.config import ConfigError
from rlexp.replay.rate_limiter import Closed, Counts, RateLimiter, limits
from rlexp.sources.base import Apart, HostSource
from rlexp.types import Batch, Mean, Metrics, PyTree

LOOK_S = 1.0  # a wait of the thread looks up as often, whatever happens
END_S = 20.0  # within which the thread has to end
_PATH = "algo.source"
_LAG, _WAITED = "train/lag_mean", "time/learner_waited_s"
# What a source in turns says of itself, and is not so here: there is no bound in updates, and the thread waits, not the learner.
_OF_TURNS = ("train/lag_at_most_share", "time/learnt_s", _WAITED)
_OWN = (_WAITED, "replay/samples_per_insert", "replay/inserts_ahead_mean")
_MOST_LAG = 4096  # a longer one is told as this


def refuse(config: Any) -> None:
    """Raises ConfigError where inserts and samples take turns, and a key of `rlexp.sources.replay` asks for something else."""
    for name in ("error_buffer", "samples_per_insert", "min_size"):
        if (value := getattr(config, name)) is not None:
            raise ConfigError(
                f"{_PATH}.{name}: {value:g} is not allowed where inserts and samples take turns; expected null, "
                "or source=actors or source=inference, where they can run apart"
            )


def limited(config: Any, *, stride: int, of_batch: int, num_samples: int) -> tuple[Any, Apart | None, int]:
    """What a configuration of `rlexp.sources.replay` asks for: itself, with its prefill; the limits, or None where they take
    turns; and the environment steps of an update.

    Args:
      stride: environment steps of an item.
      of_batch: environment steps of a batch.
      num_samples: of the updates of a call.

    Raises:
      ConfigError: the limits would block both sides for ever, or do not go together.
    """
    ratio, least, buffer = config.samples_per_insert, config.min_size, config.error_buffer
    if buffer is None and ratio is None:
        if least is not None:
            raise ConfigError(
                f"{_PATH}.min_size: {least} means nothing without {_PATH}.error_buffer; {_PATH}.prefill_env_steps says how much "
                "is there before the first sample"
            )
        return config, None, of_batch
    if least is not None:
        if least > config.capacity // stride:
            raise ConfigError(
                f"{_PATH}.min_size: {least} is more than the {config.capacity // stride} items of {_PATH}.capacity"
            )
        config = dataclasses.replace(config, prefill_env_steps=least * stride)
    num_inserts, num_prefills = of_batch // stride, -(-config.prefill_env_steps // of_batch)
    ratio = num_samples / num_inserts if ratio is None else ratio
    found = limits(
        samples_per_insert=ratio,
        min_size=least or max(1, num_prefills * num_inserts),
        error_buffer=buffer,
        path=_PATH,
        num_inserts=num_inserts,
        num_samples=num_samples,
    )
    rounding = 1e-6 * num_samples  # which must not make both sides wait
    found = found._replace(min_diff=found.min_diff - rounding, max_diff=found.max_diff + rounding)
    steps = num_samples / ratio * stride
    whole = max(1, round(steps))
    if abs(steps - whole) > 1e-6 * steps:
        raise ConfigError(
            f"{_PATH}.samples_per_insert: {ratio:g} makes {steps:g} environment steps of the {num_samples} samples of an update; "
            f"the nearest that makes a whole number is {num_samples * stride / whole!r}"
        )
    return config, Apart(found, num_inserts, num_samples, float(config.limiter_timeout_s)), whole


def ahead_at_first(apart: Apart, num_prefills: int) -> float:
    """As `Arrived.ahead`, of a memory with so many batches, from which nothing was drawn."""
    return (num_prefills * apart.num_inserts - apart.limits.min_size) * apart.limits.samples_per_insert


def shapes(collected: Metrics) -> Metrics:
    """Of the metrics of what arrives, from those of a batch."""
    number: Any = jax.ShapeDtypeStruct((), np.float32)
    kept = {name: value for name, value in collected.items() if name not in _OF_TURNS}
    return kept | {name: Mean(number, number) for name in _OWN}


class Made(NamedTuple):
    """A batch that may come in."""

    data: PyTree  # the source's, after it
    batch: Batch
    metrics: Metrics
    update: int  # of the policy that began it


class Arrived(NamedTuple):
    """What the learner takes in before it samples."""

    data: PyTree  # the source's, after the last of these batches
    batches: list[Batch]
    metrics: Metrics
    ahead: float  # samples that may be drawn until the ratio is the one that was asked for; less than 0: inserts are behind


class Feed:
    """Calls a source's `next` in a thread of its own, and holds it and the learner to the limits, until `close`."""

    def __init__(self, source: HostSource, apart: Apart, *, data: PyTree, ahead: float, collected: Metrics):
        """`collected` are structs of the metrics of a batch."""
        self._source, self._apart, self._data, self._ahead = source, apart, data, ahead
        self._limiter = RateLimiter(apart.limits, Counts(inserts=apart.limits.min_size, samples=-ahead))
        self._zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes(collected))
        self._made = deque[Made]()
        self._newest: tuple[PyTree, int] = ((), -1)  # the policy, and after how many updates
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = False

    def exchange(self, policy: PyTree) -> Arrived:
        """Acts with this policy from now on; what has come, as soon as samples may be drawn. Raises what the source raised."""
        began, apart = time.perf_counter(), self._apart
        self._newest = policy, self._newest[1] + 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._data,), name="inserts", daemon=True)
            self._thread.start()
        try:
            self._limiter.sample(apart.num_samples, timeout_s=apart.timeout_s)
        except Closed:
            if self._error is None:
                raise
        except TimeoutError as error:
            raise TimeoutError(f"{_PATH}.limiter_timeout_s: no batch came: {error}") from error
        if self._error is not None:
            raise self._error
        waited, made = time.perf_counter() - began, list[Made]()
        while self._made:
            made.append(self._made.popleft())
        num_inserts = len(made) * apart.num_inserts
        self._ahead += num_inserts * apart.limits.samples_per_insert - apart.num_samples
        if made:
            self._data = made[-1].data
        metrics = self._zeros | self._summed(made)
        metrics |= {
            _WAITED: _mean(waited),
            "replay/samples_per_insert": _mean(apart.num_samples, num_inserts),
            "replay/inserts_ahead_mean": _mean(self._ahead),
        }
        return Arrived(self._data, [one.batch for one in made], metrics, self._ahead)

    def close(self) -> None:
        """Ends the thread, and the source with it. May be called twice."""
        self._stopping = True
        self._limiter.close()
        deadline = time.monotonic() + END_S
        while True:
            self._source.close()
            if self._thread is None or not self._thread.is_alive():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the thread that inserts did not end within {END_S:g} s: the source hangs")
            self._thread.join(0.2)  # it may have opened the source just now

    def _summed(self, made: list[Made]) -> Metrics:
        """Of what came; the lag in updates, not in batches as the source counts it."""
        if not made:
            return {}
        update = self._newest[1]
        of_each = []
        for one in made:
            lag = {_LAG: _mean(update - one.update)} if _LAG in self._zeros else {}
            of_each.append({name: x for name, x in (one.metrics | lag).items() if name not in _OF_TURNS})
        return jax.tree.map(lambda *x: np.asarray(sum(x), x[0].dtype), *of_each)

    def _run(self, data: PyTree) -> None:
        updates = deque[int](maxlen=_MOST_LAG + 1)  # of the policies that the source was given
        try:
            while not self._stopping:
                policy, update = self._newest
                updates.append(update)
                data, batch, metrics = self._source.next(data, policy)
                lag = int(metrics[_LAG].sum) if _LAG in metrics else 0
                self._insert(Made(data, batch, metrics, updates[-1 - min(lag, len(updates) - 1)]))
        except Closed:
            pass
        except BaseException as error:  # whatever it is, the learner must not wait for this thread
            if not self._stopping:
                self._error = error
                self._limiter.close()

    def _insert(self, made: Made) -> None:
        """As soon as it may be. The learner may take its time, to evaluate or to save: its end ends this wait."""
        while True:
            try:
                self._limiter.insert(self._apart.num_inserts, timeout_s=LOOK_S, then=lambda: self._made.append(made))
                return
            except TimeoutError:
                continue


def _mean(total: Any, count: Any = 1) -> Mean:
    pair: Any = np.float32(total), np.float32(count)
    return Mean(*pair)
