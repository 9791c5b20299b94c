"""The probes: what `expected` says follows from the rewards, and the documentation shows real rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.config import ConfigError, parse
from rlexp.envs import probe
from rlexp.envs.base import action_struct, in_words
from rlexp.types import Continuous, Discrete, MultiDiscrete

BOTH = [pytest.param(False, id="discrete"), pytest.param(True, id="continuous")]
EACH = list(itertools.product(probe.KINDS, (False, True), (False, True)))
NUM_ENVS, NUM_STEPS, GAMMA = 16, 12, 0.6


def make(kind: str, *, continuous: bool = False, several: bool = False):
    return probe.make(probe.Config(module="rlexp.envs.probe", kind=kind, continuous=continuous, several=several))


def lookup(table: list[probe.Known], obs: np.ndarray) -> probe.Known:
    (known,) = [k for k in table if np.array_equal(k.obs, obs)]
    return known


def other(env, chosen):
    """An action as far from the best one as can be."""
    spec, chosen = env.spec.action, np.asarray(chosen)
    if isinstance(spec, Continuous):
        return np.asarray(spec.low) + np.asarray(spec.high) - chosen
    return np.asarray(spec.num_actions) - 1 - chosen


def play(kind: str, *, continuous: bool, best: bool, several: bool = False):
    """(obs before the action, TimeStep after it) of every transition, resets left out."""
    env = make(kind, continuous=continuous, several=several)
    table = probe.expected(kind, GAMMA, continuous=continuous, several=several)
    step = jax.jit(jax.vmap(env.step))
    state, before = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), NUM_ENVS))
    out = []
    for _ in range(NUM_STEPS):
        struct = action_struct(env.spec)
        action = np.zeros((NUM_ENVS, *struct.shape), struct.dtype)
        for b in np.flatnonzero(~np.asarray(before.last)):
            chosen = lookup(table, np.asarray(before.obs[b])).action
            if chosen is not None:
                action[b] = chosen if best else other(env, chosen)
        state, after = step(state, jnp.asarray(action))
        keep = np.flatnonzero(~np.asarray(before.last))
        out += [(np.asarray(before.obs[b]), jax.tree.map(lambda x, b=b: np.asarray(x[b]), after)) for b in keep]
        before = after
    return out


@pytest.mark.parametrize(("kind", "continuous", "several"), EACH)
def test_expected_values_are_those_of_the_best_actions(kind, continuous, several):
    table = probe.expected(kind, GAMMA, continuous=continuous, several=several)
    seen = set()
    for obs, after in play(kind, continuous=continuous, several=several, best=True):
        known = lookup(table, obs)
        seen.add(float(obs[0]))
        # Bellman's equation. No table row is needed after termination; after truncation the last observation has one.
        goes_on = after.discount * lookup(table, after.obs).value if after.discount else 0.0
        assert after.reward + GAMMA * goes_on == pytest.approx(known.value, abs=1e-6)
    assert seen == {float(k.obs[0]) for k in table}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("continuous", BOTH)
@pytest.mark.parametrize("kind", ["action_reward", "obs_action_reward"])
def test_other_actions_pay_less(kind, continuous, several):
    for _, after in play(kind, continuous=continuous, several=several, best=False):
        assert after.reward <= 0.0


@pytest.mark.parametrize("kind", probe.KINDS)
def test_only_obs_reward_is_truncated(kind):
    ends = {float(after.discount) for _, after in play(kind, continuous=False, best=True) if after.last}
    assert ends == ({1.0} if kind == "obs_reward" else {0.0})


def test_faults_at_truncation_show():
    """Each fault moves the value by more than the 0.1 that learning tests allow."""
    gamma, n = 0.5, probe.OBS_REWARD_STEPS
    right = probe.expected("obs_reward", gamma)[0].value
    taken_for_the_end = np.mean([(1 - gamma**k) / (1 - gamma) for k in range(1, n + 1)])
    assert abs(right - taken_for_the_end) > 0.3  # bootstrapping from the next episode's first row gives the same mean


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("delayed_reward", ([0, 1, 2, 0], [0, 0, 1, 0], [1, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 0])),
        ("obs_reward", ([-1, -1, -1, -1, 1], [0, -1, -1, -1, 0], [1] * 5, [1, 0, 0, 0, 1], [0, 0, 0, 1, 0])),
    ],
)
def test_rows_of_the_documentation(kind, columns):
    env = make(kind)
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    for seed in range(20):  # to the first seed that draws the signs of the example
        state, timestep = reset(jax.random.key(seed))
        rows = [timestep]
        for _ in range(len(columns[0]) - 1):
            state, timestep = step(state, jnp.int32(0))
            rows.append(timestep)
        obs, reward, discount, first, last = (
            [float(np.squeeze(x)) for x in c] for c in list(zip(*rows, strict=True))[:5]
        )
        if obs == columns[0]:
            break
    assert (obs, reward, discount, first, last) == columns


def test_actions_and_bad_kind():
    assert make("obs_reward").spec.action == Discrete(1)
    words = [
        in_words(make("action_reward", continuous=c, several=s).spec)[0] for c in (False, True) for s in (False, True)
    ]
    assert words[:2] == ["2 choices", "2 and 3 choices"]
    assert words[2:] == ["1 number, within [-1, 1]", "2 numbers, each within bounds of its own"]
    assert make("obs_action_reward").spec.action == Discrete(2)
    assert make("obs_reward", several=True).spec.action == MultiDiscrete((2, 3))
    bounds = make("obs_reward", several=True, continuous=True).spec.action
    assert (bounds.shape, bounds.low.tolist(), bounds.high.tolist()) == ((2,), [-1.0, 0.0], [1.0, 4.0])
    node = {"module": "rlexp.envs.probe", "kind": "delayed_rewards", "continuous": False}
    with pytest.raises(
        ConfigError, match=r"^env.kind: 'delayed_rewards' is not allowed; .*did you mean \"delayed_reward\"\?$"
    ):
        parse(node, probe.Config, "env")
