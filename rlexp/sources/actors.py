"""Actors in threads of their own step environments of the host while the learner learns: the data may be some updates old.

    learner   policy 0 ·············· learn 0 · policy 1 · learn 1 · policy 2 · …
    actors    batch 0 (policy 0) · batch 1 (policy 0) · batch 2 (policy 1) · …

This is the actor-learner half of IMPALA (arXiv:1802.01561) and Sebulba (arXiv:2104.06272). Each actor steps its part of the
environments with the newest policy that there is when it begins a batch. Batch k is learnt from in update k, all of them in
order: what an actor makes is never thrown away. `max_lag` paces the actors: batch k is not begun before policy k - max_lag is
there, so that no batch is older than that, and no more than max_lag of them wait. With 0, and one actor, it is
`rlexp.sources.host`, bit for bit.

A checkpoint keeps what that source's does: of environments that can be cloned, what they were like after the batch that was learnt
from last. After a resume the first batch is of the policy of the checkpoint; with a lag that policy depends on the clock anyway.
"""

import sys
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.config import CountOrZero, Host, Seconds, Workers, schema
from rlexp.envs.base import HostEnv
from rlexp.sources.base import HostSource, check_even, no_feedback
from rlexp.sources.host import Collector, Data, World, collector, keeping, on_those_who_act
from rlexp.types import Batch, Key, Mean, Metrics, PyTree

LOOK_S = 1.0  # a wait looks up as often, whatever happens
END_S = 20.0  # within which an actor has to end: it looks before each step of its environments

GIVES = "played"


@schema
class Config:
    """Trajectories of environments that run in Python, collected while the learner learns."""

    module: Host[str]
    max_lag: Host[CountOrZero]
    """The most updates that a batch may be behind the policy that learns from it; 0: actors and learner take turns."""
    num_actors: Workers
    """Threads, which share algo.num_envs evenly; of several processes, threads of each."""
    num_devices: Host[CountOrZero]
    """Devices that act and do not learn, from behind those of hardware.mesh; 0: the first one that learns acts too."""
    timeout_s: Host[Seconds]
    """The run ends with an error when no environment has moved for so long."""


class Stopped(Exception):
    """The source is closed: an actor ends."""


class Done(NamedTuple):
    """What one actor made."""

    key: Key  # of the next batch
    world: PyTree  # the environments after this one, as `rlexp.sources.host` saves them
    batch: Batch
    metrics: Metrics
    version: int  # the update after which its policy was made


class Board:
    """What actors and learner tell each other. All waits end: with what was waited for, an error, or the end of the source."""

    def __init__(self, *, num_actors: int, max_lag: int, timeout_s: int):
        self._changed = threading.Condition()
        self._max_lag, self._timeout_s = max_lag, timeout_s
        self._done = tuple(deque[Done]() for _ in range(num_actors))
        self._policies: tuple[PyTree, ...] = ()
        self._version = -1
        self._error: BaseException | None = None
        self._stopping = False
        self._moved = time.monotonic()

    def pulse(self) -> None:
        """An environment moves. Raises Stopped at the end."""
        self._moved = time.monotonic()
        if self._stopping:
            raise Stopped

    def policy(self, number: int, actor: int) -> tuple[PyTree, int]:
        """For batch `number`: the newest policy, on the actor's device, as soon as it is new enough, and its version."""
        with self._changed:
            while self._version < max(0, number - self._max_lag):
                if self._stopping:
                    raise Stopped
                self._changed.wait(LOOK_S)
            return self._policies[actor % len(self._policies)], self._version

    def put(self, actor: int, done: Done) -> None:
        """The actor's next batch."""
        with self._changed:
            self._done[actor].append(done)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """An actor has ended with this; the first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def publish(self, policies: tuple[PyTree, ...]) -> int:
        """The policy of the next version, once for each device that acts."""
        with self._changed:
            self._policies, self._version = policies, self._version + 1
            self._moved = time.monotonic()  # the actors may have waited for it
            self._changed.notify_all()
            return self._version

    def take(self) -> list[Done]:
        """The next batch of each actor. Raises what an actor raised, TimeoutError, and Stopped at the end."""
        with self._changed:
            while self._error is None and not all(self._done):
                if self._stopping:
                    raise Stopped
                if time.monotonic() - self._moved > self._timeout_s:
                    late = [i for i, done in enumerate(self._done) if not done]
                    raise TimeoutError(
                        f"algo.source.timeout_s: no environment has moved for {self._timeout_s} s; "
                        f"actor {', '.join(map(str, late))} has no batch"
                    )
                self._changed.wait(min(LOOK_S, self._timeout_s))
            if self._error is not None:
                raise self._error
            return [done.popleft() for done in self._done]

    def stop(self) -> None:
        """All actors are to end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()


def make(
    config: Config, *, env: HostEnv, algorithm: Algorithm, num_envs: int, num_steps: int, num_shards: int
) -> HostSource:
    """A source of [1, num_steps + 1, num_envs] trajectories; `num_envs` are the environments of all shards.

    Raises:
      ConfigError: the actors cannot share the environments evenly.
    """
    del num_shards
    check_even("num_actors", config.num_actors, num_envs)
    whole = collector(env, algorithm, num_envs=num_envs, num_steps=num_steps)
    kept = keeping(env, algorithm, num_envs)
    board: Board | None = None
    threads: list[threading.Thread] = []
    opening = threading.Lock()  # not every suite may be opened by two threads at once

    def act(board: Board, of: Collector, actor: int, key: Key, before: PyTree) -> None:
        """The life of an actor."""
        world: World | None = None
        number = 0
        try:
            while True:
                policy, version = board.policy(number, actor)
                _, keys, seeds = of.split(key if config.num_actors == 1 else jax.random.fold_in(key, actor))
                key = of.split(key)[0]  # the same for all actors: what a checkpoint keeps is theirs together
                keys = jax.device_put(
                    keys, jax.tree.leaves(policy)[0].sharding
                )  # beside the policy, whose device may be another
                if world is None:
                    with opening:
                        world = kept.opened(of, before, seeds)
                batch, metrics = of.collect(world, policy, keys)
                board.put(actor, Done(key, of.saved(world) if kept.is_whole else (), batch, metrics, version))
                number += 1
        except Stopped:
            pass
        except BaseException as error:  # whatever it is, the learner must not wait for this actor
            board.fail(error)
        finally:
            if world is not None:
                world.envs.close()

    def start(data: Data) -> Board:
        made = Board(num_actors=config.num_actors, max_lag=config.max_lag, timeout_s=config.timeout_s)
        size = num_envs // jax.process_count() // config.num_actors
        of = collector(env, algorithm, num_envs=size, num_steps=num_steps, pulse=made.pulse)
        for i in range(config.num_actors):
            before = jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size] if np.ndim(x) else x, data.world)
            args = (made, of, i, data.key, before)
            threads.append(threading.Thread(target=act, args=args, name=f"actor-{i}", daemon=True))
        for thread in threads:
            thread.start()
        return made

    def init(key: Key, policy: Any) -> Data:
        del policy
        close()
        return Data(key, kept.nothing)

    def close() -> None:
        nonlocal board
        if board is None:
            return
        board.stop()
        deadline = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        threads.clear()
        board = None
        if stuck:
            # No error: what came of it stands, and an actor's own is told by who closes the source.
            print(
                f"warning: {', '.join(stuck)} did not end within {END_S:g} s: a step or a reset of its environments hangs",
                file=sys.stderr,
                flush=True,
            )

    def next(data: Data, policy: Any) -> tuple[Data, Batch, Metrics]:
        nonlocal board
        began = time.perf_counter()
        policy = jax.block_until_ready(policy)  # the actors go on with the one they have until this one can be used
        learnt = time.perf_counter()
        playing = board = board or start(data)  # close(), in another thread, may take it away meanwhile
        version = playing.publish(on_those_who_act(policy, config.num_devices))
        parts = playing.take()
        waited = time.perf_counter() - learnt
        lag = version - min(part.version for part in parts)
        batch = jax.tree.map(lambda *x: _side_by_side(x), *(part.batch.trajectory for part in parts))
        # Of weight and memory the environments are the second axis, of rows the third.
        weight, memory = (
            jax.tree.map(lambda *x: x[0] if len(x) == 1 else np.concatenate(x, axis=1), *trees)
            for trees in ([part.batch.weight for part in parts], [part.batch.memory for part in parts])
        )
        metrics: Any = jax.tree.map(lambda *x: np.asarray(sum(x), x[0].dtype), *(part.metrics for part in parts))
        metrics |= {
            "train/lag_mean": _one(lag),
            "train/lag_at_most_share": _one(lag == config.max_lag),
            "time/learner_waited_s": _one(waited),
            "time/learnt_s": _one(learnt - began),
        }
        world = kept.nothing
        if kept.is_whole:
            worlds = [part.world for part in parts]
            world = jax.tree.map(lambda *x: np.concatenate(x) if np.ndim(x[0]) else x[0], *worlds)
        return Data(parts[0].key, world), Batch(batch, weight, memory=memory), metrics

    def shapes(policy: Any) -> tuple[Data, Batch, Metrics]:
        data, batch, metrics = whole.shapes(policy)
        scalar: Any = jax.ShapeDtypeStruct((), np.float32)
        names = ("train/lag_mean", "train/lag_at_most_share", "time/learner_waited_s", "time/learnt_s")
        return data._replace(world=kept.like), batch, metrics | {name: Mean(scalar, scalar) for name in names}

    return HostSource(
        init,
        next,
        no_feedback,
        close,
        shapes,
        env_steps_per_update=num_envs * num_steps,
        num_devices=config.num_devices,
        apart=True,
        goes_on=lambda data: kept.begun(data.world),
    )


def _side_by_side(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Rows [1, T+1, b, ...] of the actors."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)


def _one(x: Any) -> Mean:
    total: Any = np.float32(x)
    count: Any = np.float32(1)
    return Mean(total, count)
