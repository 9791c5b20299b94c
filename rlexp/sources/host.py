"""Steps environments of the host with the current policy: what `rollout` does, in Python, one step after the other.

The policy acts on one device, for all environments at once; the learning waits meanwhile. A checkpoint keeps the key, and of
environments that can be cloned (`HostEnv.state`) all that they are like. The others' own state cannot be saved, so that a resumed
run begins new episodes, the same ones each time.

Of several processes each steps its part of the environments, with keys of its own; what a checkpoint keeps is of none alone, and so
without the environments' state.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.config import Host, schema
from rlexp.envs.base import HostEnv, Opened
from rlexp.sources.base import HostSource, no_feedback
from rlexp.sources.rollout import clip_action
from rlexp.types import AGENT_STEPS, Batch, Key, Mean, Metrics, PyTree, TimeStep, Trajectory

GIVES = "played"


@schema
class Config:
    """Fresh trajectories of environments that run in Python, each used for one update."""

    module: Host[str]


class Data(NamedTuple):
    """What a checkpoint keeps."""

    key: Key
    world: PyTree = ()  # a Saved, of environments that can be cloned


class Saved(NamedTuple):
    """A World as arrays, of which those of 64 bits are two words each: devices have no such numbers."""

    begun: Any  # bool; before, the rest is zeros
    state: PyTree  # the environments' own
    timestep: TimeStep
    carry: PyTree
    episode_return: Any
    episode_length: Any


class World:
    """Environments [B] between two rollouts."""

    def __init__(self, envs: Opened, timestep: TimeStep, carry: PyTree, num_envs: int):
        self.envs, self.timestep, self.carry = envs, timestep, carry
        self.episode_return = np.zeros((num_envs,), np.float32)
        self.episode_length = np.zeros((num_envs,), np.float32)


class Collector(NamedTuple):
    """How rollouts of environments [B] are made, whoever makes them."""

    # -> the key of the next rollout, one for each step, seeds of the environments
    split: Callable[[Key], tuple[Key, jax.Array, jax.Array]]
    open: Callable[[jax.Array], World]  # (seeds [B]): new episodes
    # The policy, compiled: (policy, carry, time step, keys of the steps, which one) -> ((clipped action, action, extras), carry)
    act: Callable[[Any, PyTree, TimeStep, jax.Array, int], tuple[Any, PyTree]]
    # (world, policy, keys of the steps) -> a batch of NumPy arrays, with counts of what happened
    collect: Callable[[World, Any, jax.Array], tuple[Batch, Metrics]]
    shapes: Callable[[Any], tuple[Data, Batch, Metrics]]  # HostSource.shapes
    saved: Callable[[World], Saved]
    opened: Callable[[Saved], World]  # the environments as they were


def collector(
    env: HostEnv, algorithm: Algorithm, *, num_envs: int, num_steps: int, pulse: Callable[[], None] = lambda: None
) -> Collector:
    """Of [1, num_steps + 1, num_envs] trajectories; `num_envs` are those of one process, or of a part of it.

    `pulse` is called before each step; what it raises ends the rollout.
    """

    def acted(policy: Any, carry: PyTree, timestep: TimeStep, keys: jax.Array, step: Any) -> Any:
        action, carry, extras = algorithm.act(policy, carry, timestep, keys[step])
        return (clip_action(env.spec, action), action, extras), carry

    def split(key: Key) -> tuple[Key, jax.Array, jax.Array]:
        key, act_key, reset_key = jax.random.split(key, 3)
        seeds = jax.random.bits(reset_key, (jax.process_count(), num_envs), jnp.uint32)[jax.process_index()]
        return key, jax.random.split(of_this_process(act_key), num_steps), seeds

    act = jax.jit(acted)

    def open(seeds: jax.Array) -> World:
        envs = env.open(num_envs)
        try:
            return World(envs, envs.reset(np.asarray(seeds)), algorithm.carry(num_envs), num_envs)
        except BaseException:
            envs.close()
            raise

    def step(world: World, policy: Any, keys: jax.Array, t: int) -> tuple[Any, Any, TimeStep]:
        """(action, extras, what came of it). Each call here costs as a small network does: what can wait is done once a rollout."""
        pulse()
        placed, world.carry = act(policy, world.carry, world.timestep, keys, t)
        # NumPy's own way waits as device_get does, in half the time, and on a CPU without a copy.
        clipped, action, extras = jax.tree.map(np.asarray, placed)
        world.timestep = world.envs.step(clipped)
        return action, extras, world.timestep

    def collect(world: World, policy: Any, keys: jax.Array) -> tuple[Batch, Metrics]:
        memory = jax.tree.map(lambda x: np.asarray(x)[None], world.carry)
        begin = world.timestep
        actions, extras, after = zip(*(step(world, policy, keys, t) for t in range(num_steps)), strict=True)
        rows: Any = _stack((begin, *after))  # [T + 1, B]; reward, discount and info are of the step before
        valid = 1 - rows.last.astype(np.float32)  # after a last row comes a reset, which is no transition
        reward = valid[:-1] * rows.reward[1:]
        trajectory = Trajectory(
            obs=rows.obs,
            first=rows.first,
            action=_padded(_stack(actions)),
            reward=_padded(reward),
            discount=_padded(np.maximum(rows.last[:-1], rows.discount[1:])),
            valid=_padded(valid[:-1]),
            extras=_padded(_stack(extras)),
        )
        weight: Any = np.ones((1, num_envs), np.float32)
        batch = Batch(jax.tree.map(lambda x: x[None], trajectory), weight, memory=memory)
        info = {name: x[1:] for name, x in (rows.info or {}).items()}
        return batch, count(world, valid[:-1], reward, valid[:-1] * rows.last[1:], info)

    def count(
        world: World, valid: np.ndarray, reward: np.ndarray, last: np.ndarray, info: dict[str, np.ndarray]
    ) -> Metrics:
        """Of rows [T, B]: what the episodes were like that ended with them, and how many of them the agent decided."""
        returns, lengths = np.empty_like(reward), np.empty_like(reward)
        for t, goes_on in enumerate(valid):
            returns[t] = world.episode_return = goes_on * world.episode_return + reward[t]
            lengths[t] = world.episode_length = goes_on * (world.episode_length + 1)
        told = {"train/return_mean": returns, "train/length_mean": lengths}
        told |= {f"env/{name}": np.where(last > 0, x, 0.0) for name, x in info.items()}  # others may be NaN
        decided: Any = np.uint32(np.count_nonzero(valid)), np.uint32(valid.size)
        return {name: Mean((last * x).sum(), last.sum()) for name, x in told.items()} | {AGENT_STEPS: Mean(*decided)}

    def shapes(policy: Any) -> tuple[Data, Batch, Metrics]:
        def one(shape: Any, dtype: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        def rows_of(struct: Any) -> PyTree:
            return jax.tree.map(lambda s: one((1, num_steps + 1, *s.shape), s.dtype), struct)

        each, key = one((num_envs,), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
        flags = one((num_envs,), jnp.bool_)
        obs = jax.tree.map(lambda s: one((num_envs, *s.shape), s.dtype), env.spec.observation)
        timestep = TimeStep(obs, each, each, flags, flags)
        carry = jax.eval_shape(lambda: algorithm.carry(num_envs))
        action, _, extras = jax.eval_shape(algorithm.act, policy, carry, timestep, key)
        rows = rows_of(Trajectory(obs, flags, action, each, each, each, extras))
        scalar, number = one((), jnp.float32), one((), jnp.uint32)
        names = [
            "train/return_mean",
            "train/length_mean",
            *(f"env/{name}" for name in env.info),
        ]
        memory = jax.tree.map(lambda s: one((1, *s.shape), s.dtype), carry)
        return (
            Data(key),
            Batch(rows, one((1, num_envs), jnp.float32), memory=memory),
            {n: Mean(scalar, scalar) for n in names} | {AGENT_STEPS: Mean(number, number)},
        )

    def saved(world: World) -> Saved:
        assert world.envs.get_state is not None
        state = jax.tree.map(_words, world.envs.get_state())
        return Saved(np.ones((), bool), state, world.timestep, world.carry, world.episode_return, world.episode_length)

    def opened(kept: Saved) -> World:
        kept = jax.tree.map(np.asarray, kept)
        envs = env.open(num_envs)
        try:
            assert envs.set_state is not None
            envs.set_state(
                jax.tree.map(lambda x, s: np.array(x.view(s.dtype).reshape(num_envs, *s.shape)), kept.state, env.state)
            )
        except BaseException:
            envs.close()
            raise
        world = World(envs, kept.timestep, kept.carry, num_envs)
        world.episode_return, world.episode_length = kept.episode_return, kept.episode_length
        return world

    return Collector(jax.jit(split), open, act, collect, shapes, saved, opened)


def _stack(rows: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def _padded(rows: PyTree) -> PyTree:
    """With a last row of zeros: it supplies obs and first only."""
    return jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), rows)


def _words(x: np.ndarray) -> np.ndarray:
    """Of 64 bits each: two of 32, as one more axis."""
    return np.ascontiguousarray(x)[..., None].view(np.uint32) if x.dtype.itemsize == 8 else x


class Keeping(NamedTuple):
    """What a checkpoint has of environments [B], between two batches."""

    like: Saved | tuple[()]  # structs; () of environments that cannot be cloned
    nothing: PyTree  # zeros like them
    is_whole: bool  # it has what they are like: they can be cloned, and this process steps all of them

    def begun(self, world: PyTree) -> bool:
        """Whether this, of a checkpoint, has them."""
        return self.is_whole and bool(world.begun)

    def opened(self, of: Collector, world: PyTree, seeds: jax.Array) -> World:
        """Them as they were, or else new ones."""
        return of.opened(world) if self.begun(world) else of.open(seeds)


def keeping(env: HostEnv, algorithm: Algorithm, num_envs: int) -> Keeping:
    """`num_envs` are those of all processes."""
    like = _saved_like(env, algorithm, num_envs)
    nothing = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), like)
    return Keeping(like, nothing, env.state is not None and jax.process_count() == 1)


def _saved_like(env: HostEnv, algorithm: Algorithm, num_envs: int) -> Saved | tuple[()]:
    """Structs of what is saved; () of environments that cannot be cloned."""
    if env.state is None:
        return ()

    def of_all(s: Any) -> Any:
        wide = s.dtype.itemsize == 8
        return jax.ShapeDtypeStruct((num_envs, *s.shape, *([2] if wide else [])), np.uint32 if wide else s.dtype)

    each, flags = (jax.ShapeDtypeStruct((num_envs,), dtype) for dtype in (np.float32, np.bool_))
    info: Any = dict.fromkeys(env.info, each) if env.info else ()
    timestep: Any = TimeStep(jax.tree.map(of_all, env.spec.observation), each, each, flags, flags, info)  # type: ignore[arg-type]
    carry = jax.eval_shape(lambda: algorithm.carry(num_envs))
    return Saved(jax.ShapeDtypeStruct((), np.bool_), jax.tree.map(of_all, env.state), timestep, carry, each, each)


def of_this_process(key: Key) -> Key:
    """Another one in each of several processes."""
    return key if jax.process_count() == 1 else jax.random.fold_in(key, jax.process_index())


def on_those_who_act(policy: PyTree, num_devices: int) -> tuple[PyTree, ...]:
    """The policy on the device where it lies, and on those after it."""
    (device,) = jax.tree.leaves(policy)[0].devices()
    local = jax.local_devices(backend=device.platform)
    begin = local.index(device)
    return tuple(jax.device_put(policy, to) for to in local[begin : begin + max(1, num_devices)])


def make(
    config: Config, *, env: HostEnv, algorithm: Algorithm, num_envs: int, num_steps: int, num_shards: int
) -> HostSource:
    """A source of [1, num_steps + 1, num_envs] trajectories; `num_envs` are the environments of all shards."""
    del config, num_shards
    of = collector(env, algorithm, num_envs=num_envs // jax.process_count(), num_steps=num_steps)
    whole = collector(env, algorithm, num_envs=num_envs, num_steps=num_steps)
    world: World | None = None
    kept = keeping(env, algorithm, num_envs)

    def init(key: Key, policy: Any) -> Data:
        del policy
        close()
        return Data(key, kept.nothing)

    def close() -> None:
        nonlocal world
        if world is not None:
            world.envs.close()
        world = None

    def next(data: Data, policy: Any) -> tuple[Data, Batch, Metrics]:
        nonlocal world
        key, keys, seeds = of.split(data.key)
        world = world or kept.opened(of, data.world, seeds)
        batch, metrics = of.collect(world, policy, keys)
        return Data(key, of.saved(world) if kept.is_whole else kept.nothing), batch, metrics

    def shapes(policy: Any) -> tuple[Data, Batch, Metrics]:
        data, batch, metrics = whole.shapes(policy)
        return data._replace(world=kept.like), batch, metrics

    return HostSource(
        init,
        next,
        no_feedback,
        close,
        shapes,
        env_steps_per_update=num_envs * num_steps,
        goes_on=lambda data: kept.begun(data.world),
    )
