"""Parts with traced settings, and with settings that only look like them. Each class stands for a module."""

from typing import Any

import jax
import jax.numpy as jnp

from rlexp.config import Host, TracedNumber, schema
from rlexp.envs.base import Env
from rlexp.networks import mlp
from rlexp.sources import rollout
from rlexp.types import Batch, Discrete, EnvSpec, Mean, TimeStep


class Paying:
    """An environment without `episodic`: nothing of its settings is in its state."""

    @schema
    class Config:
        module: Host[str]
        params: dict[str, TracedNumber]

    @staticmethod
    def make(config: Any) -> Env:
        spec = EnvSpec("paying", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), 4)
        yes, no = jnp.ones((), bool), jnp.zeros((), bool)

        def timestep(time: Any, reward: Any, first: Any) -> TimeStep:
            return TimeStep(jnp.ones((1,)), reward, jnp.ones(()), first, time == 4)

        def reset(key: Any) -> Any:
            del key
            time = jnp.zeros((), jnp.int32)
            return time, timestep(time, jnp.zeros(()), yes)

        def step(time: Any, action: Any) -> Any:
            del action
            again = time == 4
            time = jnp.where(again, 0, time + 1)
            pay = jnp.asarray(config.params["pay"], jnp.float32)
            return time, timestep(time, jnp.where(again, 0.0, pay), jnp.where(again, yes, no))

        return Env(spec, reset, step)


class Scaling:
    """A source that multiplies the rewards of a rollout, by a number that falls to 0 over so many calls."""

    @schema
    class Config:
        module: Host[str]
        hp: dict[str, TracedNumber]

    @staticmethod
    def make(config: Any, **given: Any) -> Any:
        steps = rollout.make(rollout.Config(module=rollout.__name__), **given)

        def init(key: Any, policy: Any) -> Any:
            return steps.init(key, policy), jnp.zeros(())

        def next(data: Any, policy: Any) -> Any:
            inner, batch, metrics = steps.next(data[0], policy)
            scale = config.hp["scale"] * jnp.maximum(1.0 - data[1] / config.hp["calls"], 0.0)
            trajectory = batch.trajectory._replace(reward=scale * batch.trajectory.reward)
            metrics["env/scale"] = Mean(jnp.asarray(scale, jnp.float32), jnp.ones(()))
            return (inner, data[1] + 1.0), Batch(trajectory, batch.weight), metrics

        return steps._replace(init=init, next=next)


class Wide:
    """A network whose `params` are its sizes."""

    @schema
    class Config:
        module: Host[str]
        params: dict[str, int]

    @staticmethod
    def make(config: Any, *, observation: Any, dtype: Any) -> Any:
        return mlp.MLP(
            tuple(jax.tree.leaves(observation)), (config.params["width"],), "tanh", False, dtype, "orthogonal"
        )
