"""The server's part of `rlexp.sources.inference`: one thread acts for all workers, and keeps what belongs to each environment.

It is an event loop, `rlexp.sources.door` is in it too, and nothing in it has a lock. What came in one turn of the loop is acted for
together, where the batch waits for no more; the answers go out in the next one, before anybody else is acted for.
"""

import asyncio
import contextlib
import logging
import queue
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import jax
import jax.numpy as jnp
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.envs.base import HostEnv, action_struct
from rlexp.sources.door import Door, Event, Failed, Joined, Left, Life, Told
from rlexp.sources.rollout import clip_action
from rlexp.sources.unrolls import Row, Unroll, Unrolls
from rlexp.types import Key, PyTree, TimeStep
from rlexp.workers import address, meeting, wire
from rlexp.workers.address import Tls
from rlexp.workers.keeper import Keeper, Start
from rlexp.workers.wire import Kind

log = logging.getLogger(__name__)

LOOK_S = 0.25  # the learner's wait looks up as often, and so does who looks for the silent
END_S = 5.0  # within which workers have to end
LOSSES = 10  # of one worker in a row, without an unroll of it; `keeper` ends the run sooner where a process has ended


class Settings(NamedTuple):
    """See `rlexp.sources.inference.Config`."""

    num_workers: int
    num_envs: int  # of one worker
    num_steps: int
    max_lag: int
    own_places: bool  # see rlexp.sources.unrolls
    batch_size: int
    batch_timeout_s: float
    start: Callable[[Path], Start] | None  # of the folder: starts workers; None: somebody else does
    address: str
    tls: Tls | None
    max_message_bytes: int
    silence_s: float
    timeout_s: float


class Counted(NamedTuple):
    """Since the batch before."""

    lost: int = 0  # lives
    calls: int = 0  # of the policy
    acted_for: int = 0  # environments, in all of them
    episodes: np.ndarray | int = 0  # sums over those that ended: return, length, the environment's own; how many


class Published(NamedTuple):
    """A policy that can be used, once for each device that acts."""

    policies: tuple[PyTree, ...]


class Structures(NamedTuple):
    """Of the trees that are kept as lists of leaves."""

    extras: Any
    memory: Any


class Player:
    """The environments [b] of a life."""

    def __init__(self, life: Life, num_envs: int):
        self.life = life
        self.message = b""  # the last ROWS
        self.heard: list[bytes] = []  # what was not looked through for the ends of episodes, and the one before
        self.waits_since: float | None = None  # for its actions
        self.acted: tuple[np.ndarray, list[np.ndarray]] | None = None  # action and extras of that row; None: it is new
        self.episode_return = np.zeros((num_envs,), np.float32)
        self.episode_length = np.zeros((num_envs,), np.float32)


class Acting:
    """From here on workers are let in; until `close`."""

    def __init__(self, settings: Settings, env: HostEnv, algorithm: Algorithm, *, key: Key, place: Path | None):
        self._settings, self._env, self._algorithm = settings, env, algorithm
        self.version = -1
        self.rows = rows_of(env, settings.num_envs)  # of the messages that unrolls are made of
        self._actions = actions_of(env, settings.num_envs)
        self._leaves = wire.rows(self.rows.leaves, len(env.info))
        self._unrolls = Unrolls(
            num_workers=settings.num_workers,
            num_steps=settings.num_steps,
            max_lag=settings.max_lag,
            own_places=settings.own_places,
        )
        act_key, seed_key = jax.random.split(key)
        self._own_key = act_key
        self._seeds = [int(x) for x in jax.device_get(jax.random.bits(seed_key, (4,), jnp.uint32))]
        self._num_lives = self._num_calls = 0
        # Of each device that acts, each for every so many-th worker: the policy, and what that remembers, of all workers
        # and one more that is nobody.
        self._policies: tuple[PyTree, ...] = ()
        self._tables: list[PyTree] = []
        self._keys: list[Key] = []
        self._act = jax.jit(self._acted, donate_argnums=(1,))
        self._most = max(1, min(settings.num_workers, settings.batch_size // settings.num_envs))  # workers at once
        self._placed: Any = None  # the structure of (clipped action, action, extras)
        self._memory_structure = jax.tree.structure(jax.eval_shape(lambda: algorithm.carry(1)))
        self._players: dict[int, Player] = {}
        self._counted = Counted()
        self._losses = [0] * settings.num_workers  # of each, since its last unroll
        self._away: dict[int, float] = {}  # of a worker: when it was lost; it has not come again
        self._ready: queue.SimpleQueue[tuple[list[Unroll], Counted]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._moved = time.monotonic()
        self._stopping = self._listened = self._woken = False
        self._looked = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None  # of a batch that waits for more

        self._own_folder = None if place else Path(tempfile.mkdtemp(prefix="rlexp-"))
        self._folder = (place or self._own_folder) / meeting.FOLDER  # type: ignore[operator]
        if jax.process_count() > 1:
            self._folder /= str(jax.process_index())  # its own workers
        token = secrets.token_hex(32)
        self._door = Door(self._hear, token=token, num_workers=settings.num_workers, rows=self.rows)
        self._keeper: Keeper | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="inference", daemon=True)
        self._thread.start()
        try:
            self._open(token)
        except BaseException:
            self.close()
            raise

    def _open(self, token: str) -> None:
        settings, spec = self._settings, self._env.spec
        # Who has the word and is silent is known before, by `Door.evict`.
        options = wire.options(settings.max_message_bytes, settings.silence_s, answer_s=settings.silence_s)
        tls = settings.tls
        pair = tls and (tls.key.read_bytes(), tls.certificate.read_bytes())
        credentials = pair and grpc.ssl_server_credentials([pair])
        port = self._in_thread(self._door.listen(settings.address, credentials, options))
        self._listened = True
        action = action_struct(spec)
        note = meeting.Note(
            address=address.reached_at(settings.address, port),
            authority=str(tls.authority.absolute()) if tls else None,
            env=dict(self._env.node or {}),
            info=list(self._env.info),
            num_envs=settings.num_envs,
            num_workers=settings.num_workers,
            observation=[(str(s.dtype), list(s.shape)) for s in jax.tree.leaves(spec.observation)],
            action=(str(action.dtype), list(action.shape)),
            max_message_bytes=settings.max_message_bytes,
            silence_s=settings.silence_s,
            path=[place for place in sys.path if place],
        )
        meeting.post(self._folder, note, token)
        self._in_thread(self._door.open())  # only now: whom it turns away, with an older note, finds this one
        self._loop.call_soon_threadsafe(self._look)
        if settings.start is not None:
            self._keeper = Keeper(settings.start(self._folder), settings.num_workers, self._fail)

    @property
    def structures(self) -> Structures:
        """As soon as there is a batch."""
        return Structures(self._placed.children()[2], self._memory_structure)

    # --- the learner's side ------------------------------------------------------------------------------------------------

    def learn_from(self, policies: tuple[PyTree, ...]) -> tuple[list[Unroll], Counted]:
        """Acts with this policy from now on, on the devices where it lies; the batch of its version.

        Raises what a worker raised, RuntimeError where one is lost again and again, and TimeoutError.
        """
        self._moved = time.monotonic()  # workers may have waited for it
        self.version += 1
        is_told = False
        if not self._stopping:
            self._loop.call_soon_threadsafe(self._hear, Published(policies))
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=min(LOOK_S, self._settings.timeout_s))
            if self._error is not None:
                raise self._error
            if self._stopping:
                raise RuntimeError("the source is closed")
            if self._keeper is not None and self._keeper.queues():
                self._moved = time.monotonic()
                if not is_told:
                    log.warning("workers wait in Slurm's queue, and the run for them")
                    is_told = True
            if time.monotonic() - self._moved > self._settings.timeout_s:
                absent = sorted(set(range(self._settings.num_workers)) - self._players.keys())
                raise TimeoutError(
                    f"algo.source.timeout_s: no environment has moved for {self._settings.timeout_s:g} s; "
                    + (f"worker {', '.join(map(str, absent))} is not here" if absent else "all workers are here")
                )

    def close(self) -> None:
        """Ends the workers, the server and the thread, and frees the port. May be called twice."""
        again, self._stopping = self._stopping, True
        if self._keeper is not None:
            self._keeper.stop()  # who ends now is not started anew
        if not again:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(2 * END_S)  # it may be within a call of the policy, and ends after that
        if not self._thread.is_alive():
            self._loop.close()
        if self._keeper is not None:
            self._keeper.close(END_S)
        if self._listened:
            meeting.remove(self._folder)
            address.free(self._settings.address)
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
        if self._thread.is_alive():
            raise TimeoutError(f"the thread that acts did not end within {2 * END_S:g} s")

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _in_thread(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Waits for it. Raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(END_S)

    async def _end(self) -> None:
        try:
            await self._door.close(END_S)
            if streams := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(streams, timeout=END_S)
        finally:
            self._loop.stop()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error

    def _hear(self, event: "Event | Published") -> None:
        """Something has happened: all that happens in this turn is acted on in the next one."""
        self._guarded(lambda: self._take_in(event))
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._guarded, self._turn)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever it raises: the learner is told, and does not wait for this thread."""
        if self._stopping or self._error is not None:
            return
        try:
            work()
        except BaseException as error:
            self._fail(error)

    def _turn(self) -> None:
        """Acts for who is due, and hands out a batch that is complete."""
        self._woken = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        candidates = self._candidates()
        if due := self._due(candidates):
            self._answer(due)
            self._wake()  # who else is due comes after these answers have gone
        elif candidates:
            wait = candidates[0].waits_since + self._settings.batch_timeout_s - time.monotonic()  # type: ignore[operator]
            self._timer = self._loop.call_later(max(0.0, wait), self._guarded, self._turn)
        if (batch := self._unrolls.take()) is not None:
            for player in self._players.values():
                self._count_episodes(player)
            counted, self._counted = self._counted, Counted()
            self._ready.put((batch, counted))

    def _look(self) -> None:
        """Gives up those who are silent, from time to time."""
        self._guarded(self._evict)
        if not self._stopping:
            self._loop.call_later(LOOK_S, self._look)

    def _evict(self) -> None:
        before, self._looked = self._looked, time.monotonic()
        # Within calls of the policy: what was said meanwhile is not read yet.
        away_s = max(0.0, self._looked - before - LOOK_S)
        for life in self._door.evict(self._settings.silence_s, away_s):
            self._hear(Left(life))
            if self._keeper is not None and life.worker >= 0:
                self._keeper.replace(life.worker)
        # A process may be stopped, and its connection cut before it is evicted.
        for worker, lost in list(self._away.items()):
            if self._keeper is not None and self._looked - lost > self._settings.silence_s + away_s:
                del self._away[worker]
                self._keeper.replace(worker, before=lost)

    def _take_in(self, event: "Event | Published") -> None:
        if isinstance(event, Told):
            if (player := self._player(event.life)) is not None:
                self._step(player, event.message)
        elif isinstance(event, Joined):
            self._welcome(event.life)
        elif isinstance(event, Left):
            if self._player(event.life) is not None:
                self._lose(event.life)
        elif isinstance(event, Failed):
            why = event.error.strip().splitlines()[-1:] or ["it failed, and said nothing"]
            raise RuntimeError(f"worker {event.life.worker}: {why[0]}\n{event.error.strip()}")
        elif isinstance(event, Published):
            self._publish(event.policies)

    def _player(self, life: Life) -> Player | None:
        """None where it has ended, or another has taken its place."""
        player = self._players.get(life.worker)
        return player if player is not None and player.life is life else None

    def _welcome(self, life: Life) -> None:
        seeds = np.random.SeedSequence([*self._seeds, life.worker, self._num_lives])
        self._num_lives += 1
        self._players[life.worker] = Player(life, self._settings.num_envs)
        self._away.pop(life.worker, None)
        told = [int(seed) for seed in seeds.generate_state(self._settings.num_envs)]
        life.answer(wire.write(Kind.WELCOME, {"seeds": told}))

    def _lose(self, life: Life) -> None:
        self._count_episodes(self._players.pop(life.worker))
        self._unrolls.drop(life)
        self._counted = self._counted._replace(lost=self._counted.lost + 1)
        self._losses[life.worker] += 1
        self._away[life.worker] = time.monotonic()
        if self._losses[life.worker] >= LOSSES:  # however slow an unroll is: it does not come to its end
            raise RuntimeError(
                f"worker {life.worker} was lost {LOSSES} times in a row before it had made an unroll of algo.num_steps steps: "
                "it ended, its connection was cut, or it answered nothing for algo.source.silence_s"
            )

    def _publish(self, policies: tuple[PyTree, ...]) -> None:
        for policy in policies[len(self._tables) :]:
            num = (self._settings.num_workers + 1) * self._settings.num_envs
            (device,) = jax.tree.leaves(policy)[0].devices()
            table, key = jax.device_put((self._algorithm.carry(num), self._own_key), device)
            self._tables.append(table)
            self._keys.append(key)
        self._policies = policies
        self._unrolls.publish()

    def _step(self, player: Player, message: bytes) -> None:
        """What came of the last actions, or the first rows of all."""
        before, player.message = player.message, message
        player.heard.append(message)
        self._moved = player.waits_since = time.monotonic()
        if not before:
            return
        if self._unrolls.under_way(player.life) is not None:  # it has not ended early
            assert player.acted is not None
            self._unrolls.add(player.life, Row(before, *player.acted), message)
        if self._unrolls.under_way(player.life) is None:  # a step alone is no progress: it may never come further
            self._losses[player.life.worker] = 0
            if self._keeper is not None:
                self._keeper.heard(player.life.worker)

    def _count_episodes(self, player: Player) -> None:
        """Of all that was heard; it is looked through in one go, since each step of it is little."""
        if len(player.heard) < 2:
            return
        rewards, last = (wire.column(leaf, player.heard) for leaf in (self._leaves.reward, self._leaves.last))
        valid, ends = 1 - last[:-1].astype(np.float32), (~last[:-1] & last[1:]).astype(np.float32)
        for i in range(len(valid)):
            player.episode_return = valid[i] * (player.episode_return + rewards[i + 1])
            player.episode_length = valid[i] * (player.episode_length + 1)
            if ends[i].any():
                own = [wire.array(leaf, player.heard[i + 1]) for leaf in self._leaves.info]
                own = [np.where(ends[i] > 0, x, 0.0) for x in own]  # others may be NaN
                sums = [np.dot(ends[i], x) for x in (player.episode_return, player.episode_length, *own)]
                ended = np.array([*sums, ends[i].sum()], np.float32)
                self._counted = self._counted._replace(episodes=self._counted.episodes + ended)
        player.heard = player.heard[-1:]

    def _candidates(self) -> list[Player]:
        """Whom the policy can act for, those who wait for longest first."""
        if not self._policies:
            return []
        waiting = [player for player in self._players.values() if player.waits_since is not None]
        waiting.sort(key=lambda player: player.waits_since or 0)
        found, begin = list[Player](), 0
        for player in waiting:
            if self._unrolls.under_way(player.life) is None:
                if not self._unrolls.may_begin(player.life.worker, begin):
                    continue
                begin += 1
            found.append(player)
        return found

    def _due(self, found: list[Player]) -> list[Player]:
        """Whom of the candidates it is to act for now; nobody as long as the batch waits for more."""
        if not found or len(found) >= self._most:
            return found[: self._most]
        if all(player.waits_since is not None for player in self._players.values()):
            return found  # nobody else is to come
        assert found[0].waits_since is not None
        return found if time.monotonic() - found[0].waits_since >= self._settings.batch_timeout_s else []

    def _answer(self, players: list[Player]) -> None:
        num = len(self._policies)
        parts = [[player for player in players if player.life.worker % num == i] for i in range(num)]
        asked = [
            (part, self._ask(i, part)) for i, part in enumerate(parts) if part
        ]  # all devices, before any is waited for
        for part, (placed, before) in asked:
            self._tell(part, placed, before)

    def _ask(self, device: int, players: list[Player]) -> tuple[Any, PyTree]:
        """What one device says for these workers, and what each remembered before."""
        num = len(players)
        room = min(self._most, 1 << (num - 1).bit_length())  # few shapes, each of which is compiled once
        # All that there is to tell goes to the device as two arrays: there each one costs more than its bytes.
        number, nobody = self._num_calls % 2**31, self._settings.num_workers
        workers = [*(player.life.worker for player in players), *[nobody] * (room - num), number]
        new = [*(player.acted is None for player in players), *[True] * (room - num), number]
        numbers = np.array([workers, new], np.int32)
        parts = [*(player.message for player in players), *[bytes(self.rows.num_bytes)] * (room - num)]
        messages = np.frombuffer(b"".join(parts), np.uint8).reshape(room, -1)
        tables, key = self._tables, self._keys[device]
        placed, before, tables[device] = self._act(self._policies[device], tables[device], numbers, messages, key)
        self._num_calls += 1
        return placed, before

    def _tell(self, players: list[Player], placed: Any, before: PyTree) -> None:
        size = self._settings.num_envs
        leaves, self._placed = jax.tree.flatten(placed)
        clipped, action, *extras = [np.asarray(leaf) for leaf in leaves]
        memory: list[np.ndarray] | None = None
        for i, player in enumerate(players):
            own = slice(i * size, (i + 1) * size)
            if self._unrolls.under_way(player.life) is None:
                memory = jax.tree.leaves(jax.device_get(before)) if memory is None else memory
                self._unrolls.begin(player.life, player.life.worker, [leaf[own] for leaf in memory])
            player.acted, player.waits_since = (action[own], [leaf[own] for leaf in extras]), None
            player.life.answer(wire.pack(Kind.ACTIONS, player.life.count - 1, self._actions, [clipped[own]]))
        self._counted = self._counted._replace(
            calls=self._counted.calls + 1, acted_for=self._counted.acted_for + len(players) * size
        )

    def _acted(self, policy: Any, table: Any, numbers: Any, messages: Any, key: Key) -> Any:
        """Of the workers in `numbers`: what to do, what each remembered (nothing, if it is new), and the table of that now."""
        size, slots, new = self._settings.num_envs, numbers[0, :-1], numbers[1, :-1] == 1
        envs = (slots[:, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(-1)
        told = wire.rows([_read(leaf, messages) for leaf in self.rows.leaves], len(self._env.info))
        obs = jax.tree.unflatten(jax.tree.structure(self._env.spec.observation), told.obs)
        begun = ~jnp.repeat(new, size)
        before = jax.tree.map(
            lambda x, start: jnp.where(begun.reshape(-1, *[1] * (x.ndim - 1)), x[envs], start),
            table,
            self._algorithm.carry(len(envs)),
        )
        timestep = TimeStep(obs, told.reward, told.discount, told.first, told.last)
        action, after, extras = self._algorithm.act(policy, before, timestep, jax.random.fold_in(key, numbers[0, -1]))
        table = jax.tree.map(lambda x, y: x.at[envs].set(y), table, after)
        return (clip_action(self._env.spec, action), action, extras), before, table


def _read(leaf: wire.Leaf, messages: jax.Array) -> jax.Array:
    """One array of all messages [n, bytes], as `wire.unpack` reads it of one; environment beside environment."""
    raw = messages[:, leaf.begin : leaf.end].reshape(-1, *leaf.shape[1:], leaf.dtype.itemsize)
    if leaf.dtype == np.bool_:
        return raw[..., 0] != 0
    if leaf.dtype.itemsize == 1:
        raw = raw[..., 0]
    return jax.lax.bitcast_convert_type(raw, leaf.dtype)


def rows_of(env: HostEnv, num_envs: int) -> wire.Layout:
    """Of what a worker tells of its environments."""
    leaves = [(str(s.dtype), tuple(s.shape)) for s in jax.tree.leaves(env.spec.observation)]
    return wire.rows_layout(num_envs, leaves, env.info)


def actions_of(env: HostEnv, num_envs: int) -> wire.Layout:
    """Of what it is told."""
    action = action_struct(env.spec)
    return wire.actions_layout(num_envs, str(action.dtype), action.shape)
