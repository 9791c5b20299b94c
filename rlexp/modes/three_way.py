"""The three-way report of `run=profile`: environment steps a second of the environment alone, with inference, and of training.

The environment alone is given the actions that the policy took, from the states that it took them in: the same steps, with the
same ends and resets, and nothing is drawn. What is between two of the three numbers is inference, and learning with all that
keeps trajectories.
"""

import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from rlexp.envs.base import batched
from rlexp.experiment import Experiment
from rlexp.sources.host import collector
from rlexp.sources.rollout import clip_action
from rlexp.training.layout import Layout, one_by_one
from rlexp.training.program import Run
from rlexp.types import PyTree, Shared

_LEAST = 8192  # environment steps of a call, so that to call it does not count
_LEAST_ON_HOST = 256


class Programs(NamedTuple):
    """Of a run's environments, all shards of them: what they are, [S, b, ...], is (state, time step, memory of the policy)."""

    begin: Callable[[Run, Shared], PyTree]
    # (…, a key) -> (later, (actions, extras, which began an episode)), of [S, T, b, ...]
    act: Callable[[Run, Shared, PyTree, jax.Array], tuple[PyTree, PyTree]]
    step: Callable[[Run, Shared, PyTree, PyTree], PyTree]  # (…, (state, time step), actions) -> later
    env_steps: int  # of a call of either


def programs(lead: Experiment, layout: Layout) -> Programs:
    """Compiled at their first call. Of a run of one member, whose algorithm has `num_envs` and `num_steps`."""
    algorithm, num_envs = lead.algorithm, lead.config.algo.num_envs
    num_steps = max(lead.config.algo.num_steps, -(-_LEAST // num_envs))

    def over_shards(f: Callable, shards: PyTree, given: PyTree) -> PyTree:
        def local(shards: PyTree, given: PyTree) -> PyTree:
            return one_by_one(lambda shard: f(shard, given), shards)

        if layout.mesh.shape["data"] == 1:
            return local(shards, given)
        specs: Any = {"in_specs": (P("data"), P()), "out_specs": P("data"), "axis_names": {"data"}}
        return jax.shard_map(local, mesh=layout.mesh, check_vma=False, **specs)(shards, given)

    def of_one(run: Run, shared: Shared) -> tuple[Any, PyTree]:
        state, settings = (jax.tree.map(lambda x: x[0], x) for x in (run.state, run.settings))
        return lead.env_of(settings, shared), algorithm.policy(state, True)

    def begin(run: Run, shared: Shared) -> PyTree:
        env, _ = of_one(run, shared)
        of_shard = num_envs // layout.num_shards

        def reset(key: jax.Array, given: PyTree) -> PyTree:
            return *batched(env).reset(jax.random.split(key, of_shard)), algorithm.carry(of_shard)

        return over_shards(reset, jax.random.split(jax.random.key(lead.config.seed), layout.num_shards), ())

    def act(run: Run, shared: Shared, worlds: PyTree, key: jax.Array) -> tuple[PyTree, PyTree]:
        env, policy = of_one(run, shared)

        def play(shard: PyTree, policy: PyTree) -> tuple[PyTree, PyTree]:
            def once(world: PyTree, key: jax.Array) -> tuple[PyTree, PyTree]:
                state, timestep, carry = world
                action, carry, extras = algorithm.act(policy, carry, timestep, key)
                action = clip_action(env.spec, action)
                state, timestep = batched(env).step(state, action)
                return (state, timestep, carry), (action, extras, timestep.first)

            world, key = shard
            return jax.lax.scan(once, world, jax.random.split(key, num_steps))

        return over_shards(play, (worlds, jax.random.split(key, layout.num_shards)), policy)

    def step(run: Run, shared: Shared, worlds: PyTree, actions: PyTree) -> PyTree:
        env, _ = of_one(run, shared)

        def play(shard: PyTree, given: PyTree) -> PyTree:
            # The time step is carried along, or the compiler would leave out what only the policy sees.
            return jax.lax.scan(lambda world, action: (batched(env).step(world[0], action), None), *shard)[0]

        return over_shards(play, (worlds, actions), ())

    return Programs(jax.jit(begin), jax.jit(act), jax.jit(step), num_envs * num_steps)


class Turn(NamedTuple):
    """Some steps of all environments of the host, twice the same."""

    step_s: float
    acting_s: float
    env_steps: int
    begun: int  # episodes


def on_host(lead: Experiment, run: Run, device: Any) -> Generator[Turn, None, None]:
    """The policy acts in environments that this process opens for it; then they begin anew with the same seeds, and its actions.

    Whoever steps them in training, they are stepped here one after the other with the policy. Of a run of one member. Ends with
    the generator.
    """
    num_envs = lead.config.algo.num_envs // jax.process_count()
    num_steps = max(lead.config.algo.num_steps, -(-_LEAST_ON_HOST // num_envs))
    made = collector(lead.env_of(lead.settings), lead.algorithm, num_envs=num_envs, num_steps=num_steps)
    policy = jax.jit(lambda state: lead.algorithm.policy(jax.tree.map(lambda x: x[0], state), True))(run.state)
    policy = jax.device_put(jax.device_get(policy), device)
    key, keys, seeds = made.split(jax.random.key(lead.config.seed))
    world = made.open(seeds)
    try:
        while True:
            actions, begun, began = list[Any](), 0, time.perf_counter()
            for t in range(num_steps):
                placed, world.carry = made.act(policy, world.carry, world.timestep, keys, t)
                actions.append(np.asarray(placed[0]))
                world.timestep = world.envs.step(actions[-1])
                begun += int(world.timestep.first.sum())
            acting_s = time.perf_counter() - began
            world.envs.reset(np.asarray(seeds))
            began = time.perf_counter()
            for action in actions:
                world.envs.step(action)
            yield Turn(time.perf_counter() - began, acting_s, num_envs * num_steps, begun)
            key, keys, seeds = made.split(key)
            world.timestep, world.carry = world.envs.reset(np.asarray(seeds)), lead.algorithm.carry(num_envs)
    finally:
        world.envs.close()


def report(*, step: float, acting: float, training: float, begun: int) -> dict[str, Any]:
    """Of environment steps a second: these, the shares of training's time, and what most of it goes to.

    Args:
      begun: episodes that began in the steps that were timed, and paid for a reset.
    """
    parts = {
        "environment": 1 / step,
        "inference": max(0.0, 1 / acting - 1 / step),
        "learning": max(0.0, 1 / training - 1 / acting),
    }
    total = sum(parts.values())
    return {
        "env_steps_per_second": {"step": step, "with_inference": acting, "training": training},
        "shares": {name: seconds / total for name, seconds in parts.items()},
        "bound_by": max(parts, key=lambda name: parts[name]),
        "episodes_begun": begun,
    }
