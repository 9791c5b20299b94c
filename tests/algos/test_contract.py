"""What every algorithm keeps to. An algorithm is covered as soon as conf/algo/ has its YAML; names say only
which cases are quick and which slow."""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algos import recorded, toys
from jax.interpreters.partial_eval import dce_jaxpr
from support import ALGORITHMS

from rlexp import compose, experiment
from rlexp.config import ConfigError
from rlexp.envs.base import action_struct
from rlexp.experiment import Experiment

SMALL = ("logger=quiet", "env=probe/obs_action_reward")
SIZES = {"num_envs": 8, "num_steps": 16}  # of those that step environments
OF_DATA = {"sequence_length": 4, "context_length": 4, "units": 8}  # of those that do not
OF_PROBE = {"sequence_length": 1, "context_length": 1}  # whose episodes are of one step
N = 1_000  # observations that are acted on at a time
FIELDS = ("params", "opt_state", "hp", "normaliser", "key", "step")


@functools.cache
def composed(algorithm: str, *overrides: str) -> dict[str, Any]:
    return compose.compose_node([f"algo={algorithm}", *SMALL, *overrides])[0]


def build(algorithm: str, env: str = "masked", actions: str = "") -> Experiment:
    """`actions` is an override of the probe."""
    node = copy.deepcopy(composed(algorithm))
    if "torso" in node["network"]:  # a memory behind another network, where the algorithm needs one
        node["network"] |= {"units": 8, "torso": node["network"]["torso"] | {"hidden": [8]}}
    else:
        node["network"]["hidden"] = [8]
    probe = composed("ppo", actions) if actions else node
    node["env"] = {**probe["env"]} if env == "probe" else {"module": toys.__name__, "continuous": env == "continuous"}
    node["algo"]["normalize_observations"] = True
    sizes = SIZES if "num_envs" in node["algo"] else OF_DATA | OF_PROBE if env == "probe" else OF_DATA
    node["algo"] |= {name: size for name, size in sizes.items() if name in node["algo"]}
    return experiment.build(node)


def refusal(algorithm: str, env: str, actions: str = "") -> str:
    """What an algorithm says of actions that are not for it."""
    try:
        build(algorithm, env, actions)
    except ConfigError as error:
        return str(error)
    return ""


# Each algorithm in the environments whose actions it takes, and in the richest of each kind.
CASES = [(a, env) for a in ALGORITHMS for env in ("probe", "masked", "continuous") if not refusal(a, env)]
RICH = [(a, env) for a, env in CASES if env != "probe"]
# The probe's observations are plain arrays, as in all environments that algorithms are trained in elsewhere.
# Every day one kind of actions is enough for each algorithm, and for packs, which cost most, some algorithms.
FIRST = dict(reversed(RICH))
PACKED = ("dqn", "ppo")


def _is_daily(algorithm: str, env: str) -> bool:
    return FIRST[algorithm] == env or (algorithm, env) == ("ppo", "continuous")


def _cases(quick: Callable[[str, str], bool], cases: Iterable[tuple[str, str]] = RICH) -> list[Any]:
    return [pytest.param(*case, marks=() if quick(*case) else pytest.mark.slow) for case in cases]


EACH = _cases(lambda a, env: FIRST[a] == env and a in PACKED)
DAILY = _cases(_is_daily)
ALL = _cases(_is_daily, CASES)
MASKED = [a for a, env in CASES if env == "masked"]


class Case(NamedTuple):
    """An algorithm in an environment, with what one collect gave."""

    experiment: Experiment
    hp: dict[str, jax.Array]
    state: Any
    batch: Any  # of one update
    timesteps: Any  # the first ones of N episodes
    update: Any  # jitted
    act: Any  # jitted
    num_traces: list[int]


@functools.cache
def case(algorithm: str, env: str) -> Case:
    built = build(algorithm, env)
    functions = built.algorithm
    hp = {name: jnp.asarray(x, jnp.float32) for name, x in built.hp.items()}

    state_key, data_key = jax.random.split(jax.random.key(0))
    state = jax.jit(functions.init)(state_key, hp)
    batches = of_data(built, data_key) if built.on_host else jax.jit(lambda *x: collected(built, *x))(data_key, state)

    num_traces = [0]

    def update(state: Any, batch: Any) -> Any:
        num_traces[0] += 1
        return functions.update(state, batch)

    first = jax.tree.map(lambda x: x[0], batches)
    seen = first_timesteps(built.env_of(built.settings))
    return Case(built, hp, state, first, seen, jax.jit(update), jax.jit(functions.act), num_traces)


def collected(built: Experiment, key: Any, state: Any) -> Any:
    source, policy = built.source_of(built.settings), built.algorithm.policy(state, True)
    return source.next(source.init(key, policy), policy)[1]


def of_data(built: Experiment, key: Any) -> Any:
    """The first batch of recorded episodes."""
    node = {**built.node, "algo": {**built.node["algo"]}}
    node["algo"]["source"] = {**node["algo"]["source"], "path": str(recorded.of(node))}
    there = experiment.build(node)
    source = there.source_of(there.settings)
    batches = source.next(source.init(key, ()), ())[1]
    source.close()
    return jax.tree.map(jnp.asarray, batches)


def first_timesteps(env: Any) -> Any:
    """Of N episodes."""
    return jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(5), N))[1]


def bits(tree: Any) -> list[bytes]:
    def leaf(x: jax.Array) -> bytes:
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return [leaf(x) for x in jax.tree.leaves(tree)]


def abstract(tree: Any) -> Any:
    return jax.eval_shape(lambda x: x, tree)


def structs(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), abstract(tree))


def assert_close(a: Any, b: Any) -> None:
    """Of two programs for the same sums."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-4, atol=1e-5)


def test_all_algorithms_are_here():
    assert {"bc", "c51", "decision_transformer", "dqn", "impala", "iql", "ppo", "pqn", "r2d2", "sac", "td3"} <= set(
        ALGORITHMS
    )
    assert {algorithm for algorithm, _ in RICH} == set(ALGORITHMS)


@pytest.mark.parametrize(("algorithm", "env"), ALL)
class TestShapes:
    def test_state_holds_what_every_state_holds_in_strong_arrays(self, algorithm, env):
        c = case(algorithm, env)
        assert set(FIELDS) <= set(c.state._fields)
        for path, leaf in jax.tree_util.tree_leaves_with_path(c.state):
            name = jax.tree_util.keystr(path)
            assert isinstance(leaf, jax.Array), name
            assert leaf.size > 0, name
        assert not [x for x in jax.tree.leaves(abstract(c.state)) if x.weak_type]
        assert jax.dtypes.issubdtype(c.state.key.dtype, jax.dtypes.prng_key)
        assert structs(c.state.step) == ((), jnp.int32, False)
        assert int(c.state.step) == 0
        assert bits(c.state.hp) == bits(c.hp)
        assert "total_updates" in c.state.hp

    def test_an_update_keeps_shapes_and_types_and_counts_itself(self, algorithm, env):
        c = case(algorithm, env)
        state, out = c.update(c.state, c.batch)
        assert structs(state) == structs(c.state)
        assert int(state.step) == 1
        assert bits(state.hp) == bits(c.hp)
        assert bits(state.params) != bits(c.state.params)
        assert float(state.normaliser.count) == np.asarray(c.batch.trajectory.valid[:-1]).sum()  # build() asks for it
        if out.priority is not None:
            assert out.priority.shape == c.batch.weight.shape

    def test_metrics_are_losses_finite_and_counted(self, algorithm, env):
        c = case(algorithm, env)
        metrics = c.update(c.state, c.batch)[1].metrics
        assert {"loss/lr", "loss/grad_norm"} <= set(metrics)
        for name, metric in metrics.items():
            assert name.startswith("loss/")
            assert structs(metric) == structs(type(metric)(jnp.zeros(()), jnp.zeros(()))), name
            assert np.isfinite(metric.sum), name
            assert metric.count > 0, name

    def test_act_gives_the_environments_actions(self, algorithm, env):
        c = case(algorithm, env)
        struct = action_struct(c.experiment.spec)
        carry = c.experiment.algorithm.carry(N)
        policy = c.experiment.algorithm.policy(c.state, True)
        action, after, extras = c.act(policy, carry, c.timesteps, jax.random.key(0))
        assert (action.shape, action.dtype) == ((N, *struct.shape), struct.dtype)
        assert not abstract(action).weak_type
        assert structs(after) == structs(carry)
        assert all(x.shape[0] == N for x in jax.tree.leaves((carry, extras)))


@pytest.mark.parametrize(("algorithm", "env"), DAILY)
def test_the_same_in_gives_the_same_out(algorithm, env):
    c = case(algorithm, env)
    before = bits((c.state, c.batch))
    assert bits(c.update(c.state, c.batch)) == bits(c.update(c.state, c.batch))
    policy, carry = c.experiment.algorithm.policy(c.state, True), c.experiment.algorithm.carry(N)
    arguments = (policy, carry, c.timesteps, jax.random.key(1))
    assert bits(c.act(*arguments)) == bits(c.act(*arguments))
    assert bits((c.state, c.batch)) == before


@pytest.mark.parametrize(("algorithm", "env"), DAILY)
def test_a_new_learning_rate_takes_effect_without_tracing_again(algorithm, env):
    c = case(algorithm, env)
    plain, _ = c.update(c.state, c.batch)
    traces = c.num_traces[0]
    faster = c.state._replace(hp=c.state.hp | {"lr": 2 * c.state.hp["lr"]})
    other, out = c.update(faster, c.batch)
    assert bits(other.params) != bits(plain.params)
    lr = out.metrics["loss/lr"]
    assert lr.sum / lr.count == pytest.approx(2 * c.experiment.hp["lr"])
    assert c.num_traces[0] == traces


@pytest.mark.parametrize(("algorithm", "env"), DAILY)
def test_hyperparameters_that_are_read_at_the_start_alone_are_told(algorithm, env):
    """A population changes hp while members train: what only init reads would change nothing. SAC's alpha is one."""
    c = case(algorithm, env)
    functions = c.experiment.algorithm

    def read(f: Callable[[dict], Any]) -> set[str]:
        """Of hp, what anything depends on that f gives."""
        traced = jax.make_jaxpr(f)(c.hp).jaxpr
        used = dce_jaxpr(traced, [True] * len(traced.outvars))[1]
        return {name for name, is_used in zip(sorted(c.hp), used, strict=True) if is_used}

    def learnt(hp: dict) -> Any:
        state, out = functions.update(c.state._replace(hp=hp), c.batch)
        return state._replace(hp=()), out

    at_start = read(lambda hp: functions.init(jax.random.key(0), hp)._replace(hp=()))
    later = read(learnt) | read(lambda hp: functions.policy(c.state._replace(hp=hp), True))
    told = getattr(c.experiment.part("algo"), "at_start", lambda config: {})(c.experiment.config.algo)
    assert at_start - later == told.keys()


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("algorithm", MASKED)
def test_a_masked_action_is_never_taken(algorithm, explore):
    """1,000 observations, at the beginning and in the middle of training."""
    c = case(algorithm, "masked")
    functions, seen = c.experiment.algorithm, c.timesteps
    middle = c.state._replace(step=jnp.asarray(c.experiment.total_updates // 2, jnp.int32))
    for state in (c.state, middle):
        action, _, _ = c.act(functions.policy(state, explore), functions.carry(N), seen, jax.random.key(2))
        assert np.take_along_axis(np.asarray(seen.obs["action_mask"]), np.asarray(action)[:, None], axis=1).all()
        assert len(np.unique(action)) == toys.NUM_ACTIONS


@pytest.mark.parametrize(("algorithm", "env"), DAILY)
def test_greedy_needs_no_luck_and_exploring_does(algorithm, env):
    c = case(algorithm, env)
    functions, seen = c.experiment.algorithm, c.timesteps

    def actions(explore: bool, seed: int) -> np.ndarray:
        carry = functions.carry(N)
        return np.asarray(c.act(functions.policy(c.state, explore), carry, seen, jax.random.key(seed))[0])

    np.testing.assert_array_equal(actions(False, 0), actions(False, 1))
    assert (actions(True, 0) != actions(True, 1)).any()


@pytest.mark.parametrize(("algorithm", "env"), DAILY)
def test_the_carry_is_forgotten_where_an_episode_begins(algorithm, env):
    c = case(algorithm, env)
    functions, seen = c.experiment.algorithm, c.timesteps
    assert seen.first.all()
    fresh, policy = functions.carry(N), functions.policy(c.state, False)
    stale = jax.tree.map(lambda x: jnp.ones_like(x) if x.dtype == bool else x + jnp.asarray(3, x.dtype), fresh)
    assert bits(c.act(policy, fresh, seen, jax.random.key(0))) == bits(c.act(policy, stale, seen, jax.random.key(0)))


@pytest.mark.parametrize(("algorithm", "env"), DAILY)
def test_what_is_no_transition_counts_nowhere(algorithm, env):
    """Row T supplies obs and first; of a row with valid 0, neither the action nor what act noted there is read."""
    c = case(algorithm, env)
    rows = c.batch.trajectory
    is_last = np.asarray(rows.valid[:-1]) == 0
    assert is_last.any()

    def scramble(x: jax.Array, *, padding: bool) -> jax.Array:
        where = np.concatenate([is_last & padding, np.ones_like(is_last[:1])])
        return jnp.where(where.reshape(where.shape + (1,) * (x.ndim - 2)), 1 - x, x)

    changed = rows._replace(
        action=scramble(rows.action, padding=True),
        extras=jax.tree.map(lambda x: scramble(x, padding=True), rows.extras),
        reward=scramble(rows.reward, padding=False),
        discount=scramble(rows.discount, padding=False),
        valid=scramble(rows.valid, padding=False),
    )
    assert bits(changed) != bits(rows)
    state, out = c.update(c.state, c.batch)
    other, other_out = c.update(c.state, c.batch._replace(trajectory=changed))
    assert bits((other, other_out)) == bits((state, out))


@pytest.mark.parametrize(("algorithm", "env"), EACH)
def test_members_of_a_pack_learn_what_they_would_alone(algorithm, env):
    """Three members with a key and a learning rate of their own."""
    c = case(algorithm, env)
    functions = c.experiment.algorithm
    keys, lr = jax.random.split(jax.random.key(7), 3), c.hp["lr"] * jnp.array([0.5, 1.0, 2.0])
    # Adam's first step is hardly more than the sign of a gradient, also of one that is nothing but rounding: a larger epsilon
    # leaves that out.
    hp = {name: jnp.float32(1e-3) if name in ("adam_eps", "rms_eps") else value for name, value in c.hp.items()}

    def learn(key: Any, lr: Any) -> Any:
        state, out = functions.update(functions.init(key, hp | {"lr": lr}), c.batch)
        acted = functions.act(functions.policy(state, True), functions.carry(N), c.timesteps, key)
        return state, out.metrics, acted[0]

    together = jax.jit(jax.vmap(learn))(keys, lr)
    init, carry = jax.jit(functions.init), functions.carry(N)
    for i in range(3):
        state, out = c.update(init(keys[i], hp | {"lr": lr[i]}), c.batch)
        acted, _, _ = c.act(functions.policy(state, True), carry, c.timesteps, keys[i])
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), (state, out.metrics, acted))
    kernels = [x for x in jax.tree.leaves(together[0].params) if x.ndim == 3]
    assert all((x[0] != x[1]).any() and (x[1] != x[2]).any() for x in kernels)


@pytest.mark.parametrize(
    ("algorithm", "env"), _cases(lambda a, env: a != "r2d2", [(a, FIRST[a]) for a in ("dqn", "ppo", "r2d2")])
)
def test_an_update_has_derivatives_in_forward_mode(algorithm, env):
    """By the parameters and the learning rate at once, through the gradients inside: as differences have them."""
    c = case(algorithm, env)
    batch = c.batch._replace(trajectory=toys.faint(c.batch.trajectory))  # on bytes differences are of other slopes
    # The root in Adam has no slope at a square of 0, with which it begins.
    opt_state = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, c.state.opt_state)
    rng = np.random.default_rng(0)
    along = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), c.state.params)

    def step(distance: Any) -> Any:
        params = jax.tree.map(lambda x, d: x + distance * d, c.state.params, along)
        state = c.state._replace(params=params, opt_state=opt_state, hp=c.hp | {"lr": 0.1 + distance})
        learnt = c.experiment.algorithm.update(state, batch)[0].params
        return jax.tree.map(jnp.subtract, learnt, params)

    zero, eps = jnp.zeros(()), jnp.float32(2e-3)
    slope = jax.jit(lambda d: jax.jvp(step, (d,), (jnp.ones(()),))[1])(zero)
    there, back = (jax.jit(step)(d) for d in (eps, -eps))
    a = np.concatenate([np.ravel(x) for x in jax.tree.leaves(slope)])
    b = np.concatenate([np.ravel(x - y) for x, y in zip(*map(jax.tree.leaves, (there, back)), strict=True)]) / 0.004
    assert np.linalg.norm(a) > 0
    assert a @ b > 0.95 * np.linalg.norm(a) * np.linalg.norm(b)


_CONTINUOUS, _SEVERAL = "has continuous actions; {} needs discrete ones", "has several choices an action; {} needs "
KINDS_OF_ACTIONS = {  # how they are refused, their shape and their type
    "env.continuous=false": (("has discrete actions; {} needs continuous ones",), (), jnp.int32),
    "env.continuous=true": ((_CONTINUOUS,), (1,), jnp.float32),
    "env.several=true": ((_SEVERAL + "one (algo=ppo takes both)", _SEVERAL + "continuous ones"), (2,), jnp.int32),
    "env=probe/several_numbers": ((_CONTINUOUS,), (2,), jnp.float32),
}


@pytest.mark.parametrize("actions", KINDS_OF_ACTIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_actions_are_learnt_or_refused_in_one_line(algorithm, actions):
    told, shape, dtype = KINDS_OF_ACTIONS[actions]
    refused = refusal(algorithm, "probe", actions)
    if refused:
        name = composed(algorithm)["algo"]["module"].rpartition(".")[2]  # c51 is dqn's
        assert refused in [f"env: probe/obs_action_reward {how.format(name)}" for how in told]
        return
    built = build(algorithm, "probe", actions)
    hp = {name: jnp.asarray(x, jnp.float32) for name, x in built.hp.items()}
    state = jax.eval_shape(built.algorithm.init, jax.random.key(0), hp)
    policy = jax.eval_shape(lambda s: built.algorithm.policy(s, True), state)
    timestep = jax.eval_shape(jax.vmap(built.env_of(built.settings).reset), jax.random.split(jax.random.key(0), N))[1]
    action = jax.eval_shape(built.algorithm.act, policy, built.algorithm.carry(N), timestep, jax.random.key(0))[0]
    assert (action.shape, action.dtype) == ((N, *shape), dtype)
