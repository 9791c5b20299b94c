"""Learning from a data set: a source without environment steps, and an algorithm without environments or a learning rate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlexp.algos.base import Algorithm
from rlexp.config import Host, Number, Part, schema
from rlexp.networks.heads import Head
from rlexp.sources.base import Source, no_feedback
from rlexp.types import Batch, Mean, Trajectory, Update


class Data:
    """Observation 1 is answered by action 1, and -1 by 0."""

    @schema
    class Config:
        module: Host[str]

    @staticmethod
    def make(config: Any, *, env: Any, algorithm: Any, num_shards: int) -> Source:
        del config, env, algorithm, num_shards
        sign = jnp.array([1.0, -1.0] * 4)

        def next(data: Any, policy: Any) -> Any:
            del policy
            row = Trajectory(
                obs=sign[None, :, None],
                first=jnp.zeros((1, 8), bool),
                action=(sign[None] > 0).astype(jnp.int32),
                reward=jnp.zeros((1, 8)),
                discount=jnp.ones((1, 8)),
                valid=jnp.ones((1, 8)),
                extras=(),
            )
            trajectory = jax.tree.map(lambda x: jnp.concatenate([x, x])[None], row)
            return data + 1, Batch(trajectory, jnp.ones((1, 8))), {"env/calls": Mean(data, jnp.ones(()))}

        return Source(lambda key, policy: jnp.zeros(()), next, no_feedback)


class State(NamedTuple):
    params: Any
    hp: Any
    normaliser: Any


@schema
class Hp:
    pull: Number


class Imitate:
    """Moves the logits towards the action of the data; a critic of its own observations is made and not used."""

    @schema
    class Config:
        module: Host[str]
        source: Part
        hp: Hp

    @staticmethod
    def make(config: Any, *, spec: Any, torso_of: Any, dtype: Any, num_shards: int) -> Algorithm:
        del config, num_shards
        actor = Head(torso_of(spec), 2, scale=0.01, dtype=dtype)
        both = {"obs": spec.observation, "action": jax.ShapeDtypeStruct((3,), jnp.float32)}
        critic = Head(torso_of(spec._replace(observation=both)), 1, scale=1.0, dtype=dtype)

        def init(key: Any, hp: Any) -> State:
            zeros = jax.tree.map(lambda s: jnp.zeros((1, *s.shape)), both)
            return State({"actor": actor.init(key, zeros["obs"]), "critic": critic.init(key, zeros)}, hp, ())

        def act(policy: Any, carry: Any, timestep: Any, key: Any) -> Any:
            del key
            return jnp.argmax(actor.apply(policy, timestep.obs), axis=-1).astype(jnp.int32), carry, ()

        def update(state: State, batch: Batch) -> Any:
            rows = batch.trajectory

            def loss(params: Any) -> Any:
                log_prob = jax.nn.log_softmax(actor.apply(params, rows.obs))
                return -jnp.mean(jnp.take_along_axis(log_prob, rows.action[..., None], axis=-1))

            value, grads = jax.value_and_grad(loss)(state.params["actor"])
            moved = jax.tree.map(lambda p, g: p - state.hp["pull"] * g, state.params["actor"], grads)
            params = state.params | {"actor": moved}
            return state._replace(params=params), Update({"loss/policy": Mean(value, jnp.ones(()))})

        return Algorithm(init, lambda state, explore: state.params["actor"], lambda num_envs: (), act, update)
