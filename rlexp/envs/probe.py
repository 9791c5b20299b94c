"""Five tiny environments with known values: an algorithm that misses one has a fault, and the probe tells where.

After Andy Jones, "Debugging RL, without the agonizing pain" (andyljones.com/posts/rl-debugging.html), in this order:

  constant_reward    reward 1, then the end. One value of one observation is to be learned: loss and optimiser work.
  obs_reward         the observation is 1 or -1 and is the reward of each step. Nothing ends but by truncation, after
                     `OBS_REWARD_STEPS`: the value is right only if the last observation is bootstrapped from, and not
                     the next episode's first. (Jones's ends after one step: this is the deviation from his list.)
  delayed_reward     two steps, reward 1 at the end: discounting.
  action_reward      the reward depends on the action: the policy improves.
  obs_action_reward  the reward depends on the observation and the action: both are read, in the right rows.

The observation is float32 [1]. With `continuous` the action is float32 [1] within [-1, 1], and the two last kinds pay
1 - (action - target)², so that a value left at its initial 0 is wrong. With `several` an action has two entries, of unlike
ranges: 2 and 3 choices, or numbers within [-1, 1] and [0, 4]; the reward is the mean over both.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import Flag, Host, schema
from rlexp.envs.base import Env, Transition, episodic
from rlexp.types import Continuous, Discrete, EnvSpec, Key, MultiDiscrete, PyTree

Kind = Literal["constant_reward", "obs_reward", "delayed_reward", "action_reward", "obs_action_reward"]
KINDS: tuple[Kind, ...] = get_args(Kind)

OBS_REWARD_STEPS = 3
TARGET = (
    0.5  # of a continuous action, from the middle to the end of its range; times the observation in obs_action_reward
)
CHOICES = (2, 3)  # with `several`: the last is the best at 1, the first at -1
LOW, HIGH = np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32)


@schema
class Config:
    """One of the probes."""

    module: Host[str]
    kind: Kind
    """Which one: constant_reward, obs_reward, delayed_reward, action_reward or obs_action_reward."""
    continuous: Flag
    """Actions are numbers within [-1, 1] instead of one or two choices."""
    several: Flag = False
    """Actions have two entries: 2 and 3 choices, or with continuous numbers within [-1, 1] and [0, 4]."""


class Known(NamedTuple):
    """What a right algorithm finds at one observation."""

    obs: np.ndarray  # float32 [1]
    value: float  # of the best policy
    action: int | float | tuple | None  # the best one; None where actions do nothing


class State(NamedTuple):
    sign: jax.Array  # 1 or -1, drawn for each episode
    time: jax.Array  # steps of this episode, int32


def make(config: Config) -> Env:
    """The probe `config.kind`."""
    kind, continuous, several = config.kind, config.continuous, config.several
    spec = EnvSpec(
        name=f"probe/{kind}",
        observation=jax.ShapeDtypeStruct((1,), jnp.float32),
        action=_action(config),
        max_episode_steps={"obs_reward": OBS_REWARD_STEPS, "delayed_reward": 2}.get(kind, 1),
    )

    def observation(state: State) -> jax.Array:
        if kind == "delayed_reward":
            return state.time.astype(jnp.float32)[None]
        return state.sign[None] if kind in ("obs_reward", "obs_action_reward") else jnp.zeros((1,), jnp.float32)

    def reset(key: Key, params: PyTree) -> tuple[State, jax.Array]:
        del params
        state = State(jax.random.rademacher(key, (), jnp.float32), jnp.zeros((), jnp.int32))
        return state, observation(state)

    def reward_of(state: State, action: jax.Array) -> jax.Array | float:
        if kind == "obs_reward":
            return state.sign
        if kind == "delayed_reward":
            return jnp.where(state.time == 1, 1.0, 0.0)
        if kind == "constant_reward":
            return 1.0
        sign = state.sign if kind == "obs_action_reward" else jnp.ones((), jnp.float32)
        if several and continuous:
            return 1.0 - jnp.mean(jnp.square((action - (LOW + HIGH) / 2) / ((HIGH - LOW) / 2) - TARGET * sign))
        if several:
            right = jnp.where(sign > 0, jnp.asarray(CHOICES, jnp.int32) - 1, 0)
            return jnp.mean(jnp.where(action == right, 1.0, -1.0))
        if continuous:
            return 1.0 - jnp.square(action[0] - TARGET * sign)
        return jnp.where((action == 1) == (sign > 0), 1.0, -1.0)

    def step(key: Key, state: State, action: jax.Array, params: PyTree) -> Transition:
        del key, params
        after = State(state.sign, state.time + 1)
        terminated = kind != "obs_reward" and after.time == spec.max_episode_steps
        return Transition(after, observation(after), reward_of(state, action), terminated)

    return episodic(spec, reset, step)


def _action(config: Config) -> Discrete | MultiDiscrete | Continuous:
    if config.several:
        return Continuous((2,), LOW, HIGH) if config.continuous else MultiDiscrete(CHOICES)
    if config.continuous:
        return Continuous((1,), -1.0, 1.0)
    return Discrete(2 if config.kind in ("action_reward", "obs_action_reward") else 1)


def expected(kind: Kind, gamma: float, *, continuous: bool = False, several: bool = False) -> list[Known]:
    """The observations that matter, with the value and the action of the best policy. `gamma` in [0, 1)."""

    def known(obs: float, value: float, action: int | float | tuple | None = None) -> Known:
        return Known(np.array([obs], np.float32), value, action)

    if kind == "constant_reward":
        return [known(0.0, 1.0)]
    if kind == "obs_reward":
        return [known(1.0, 1.0 / (1.0 - gamma)), known(-1.0, -1.0 / (1.0 - gamma))]
    if kind == "delayed_reward":
        return [known(0.0, gamma), known(1.0, 1.0)]
    right, wrong = (TARGET, -TARGET) if continuous else (1, 0)
    if several and continuous:
        right, wrong = (tuple((LOW + HIGH) / 2 + sign * TARGET * (HIGH - LOW) / 2) for sign in (1, -1))
    elif several:
        right, wrong = tuple(n - 1 for n in CHOICES), (0,) * len(CHOICES)
    if kind == "action_reward":
        return [known(0.0, 1.0, right)]
    return [known(1.0, 1.0, right), known(-1.0, 1.0, wrong)]
