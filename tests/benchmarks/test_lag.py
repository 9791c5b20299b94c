"""The benchmark of lag: that batches are as old as they are said to be."""

import jax
import jax.numpy as jnp
import numpy as np
from sources.test_actors import version_teller
from support import build

from benchmarks import late


def test_batches_are_of_the_policy_before_so_many_updates():
    env = build("env=gymnax/cartpole").env_of(build("env=gymnax/cartpole").settings)
    for lag in (0, 3):
        config = late.Config(module="", hp=late.Hp(lag=float(lag)))
        source = late.make(config, env=env, algorithm=version_teller(), num_envs=2, num_steps=3, num_shards=1)
        data, step, seen = source.init(jax.random.key(0), jnp.int32(0)), jax.jit(source.next), []
        for update in range(6):
            data, batch, _ = step(data, jnp.int32(update))
            seen.append(np.unique(np.asarray(batch.trajectory.extras["version"])[0, :-1]).tolist())
        assert seen == [[max(0, update - lag)] for update in range(6)]
