"""The evaluation of a pack in compiled environments: one program, whatever the members learn from."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.experiment import Experiment
from rlexp.training.evaluate import Episodes, evaluate
from rlexp.training.layout import Layout, over_members
from rlexp.training.parts import Run, evaluation_key, member_data
from rlexp.types import PyTree, Settings, Shared

Play = Callable[[PyTree, Settings, int], Episodes]  # (run.state, run.settings, update)


def evaluation(
    experiments: Sequence[Experiment], layout: Layout, abstract_run: Run, shared: Callable[[], Shared]
) -> Callable[[Sequence[Experiment]], Play]:
    """Gives what makes the evaluation of as many members. It is compiled once, when that is first called.

    Args:
      shared: what environments and sources share, on the devices.
    """
    lead = experiments[0]
    greedy = lead.config.eval.mode == "greedy"

    def evaluate_one(state: PyTree, settings: Settings, seed: jax.Array, update: jax.Array, shared: Shared) -> Episodes:
        policy = lead.algorithm.policy(state, not greedy)
        env, num_episodes = lead.env_of(settings, shared), lead.config.eval.num_episodes
        return evaluate(env, lead.algorithm, policy, evaluation_key(seed, update), num_episodes=num_episodes)

    def evaluate_all(
        state: PyTree, settings: Settings, seeds: jax.Array, update: jax.Array, shared: Shared
    ) -> Episodes:
        return over_members(layout, lambda s, t, k: evaluate_one(s, t, k, update, shared))(state, settings, seeds)

    @functools.cache
    def compiled() -> Any:
        seeds, *_ = jax.device_put(member_data(experiments), layout.member_sharding)
        abstract_shared = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.replicated), shared()
        )
        play = jax.jit(evaluate_all, out_shardings=layout.member_sharding, compiler_options=layout.compiler_options)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        return play.lower(abstract_run.state, abstract_run.settings, seeds, count, abstract_shared).compile()

    def of(members: Sequence[Experiment]) -> Play:
        play, (seeds, *_) = compiled(), jax.device_put(member_data(members), layout.member_sharding)
        placed = shared()
        return lambda state, settings, update: play(state, settings, seeds, np.int32(update), placed)

    return of
