"""PPO against a plain loop over the same numbers. That it learns is tested in tests/learning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from algos import toys

from rlexp import compose, experiment
from rlexp.algos import ppo
from rlexp.config import ConfigError
from rlexp.networks.dense import Dense
from rlexp.networks.heads import Head
from rlexp.types import Batch, TimeStep, Trajectory

T, B = 12, 8
ONE_STEP = ("algo=ppo", f"algo.num_envs={B}", f"algo.num_steps={T}", "algo.num_epochs=1", "algo.num_minibatches=1")
HP = dict(gamma=0.9, gae_lambda=0.7, clip_eps=0.1, entropy_coef=0.3, value_coef=0.7, reward_scale=0.5)


def slow_advantages(rows: Trajectory, value: np.ndarray) -> np.ndarray:
    """Equation 16 of the paper on the estimator, [T, B], with `value` [T+1, B]."""
    out = np.zeros((T, B))
    for b in range(B):
        later = 0.0
        for t in reversed(range(T)):
            delta = HP["reward_scale"] * rows.reward[t, b] + HP["gamma"] * rows.discount[t, b] * value[t + 1, b]
            later = delta - value[t, b] + HP["gamma"] * HP["gae_lambda"] * rows.discount[t, b] * later
            later = out[t, b] = later if rows.valid[t, b] == 1 else 0.0
    return out


@pytest.mark.parametrize(("normalised", "shared"), [(True, False), (False, False), (True, True)])
def test_the_loss_and_its_gradient_are_of_the_papers(normalised, shared):
    """Also where actor and critic have one torso, whose gradient then is of both."""
    made = toys.build(
        *ONE_STEP, f"algo.normalize_advantages={str(normalised).lower()}", f"network.shared_trunk={str(shared).lower()}"
    )
    state = made.begin(**HP)
    state = state._replace(params=toys.shaken(state.params))
    network = made.experiment.part("network").make(
        made.experiment.config.network, observation=made.experiment.spec.observation, dtype=jnp.float32
    )
    critic = Dense(1, 1.0, jnp.float32) if shared else Head(network, 1, scale=1.0, dtype=jnp.float32)
    actor = Dense(toys.NUM_ACTIONS, 0.01, jnp.float32)
    assert set(state.params) == ({"trunk", "actor", "critic"} if shared else {"actor", "critic"})
    rows = toys.trajectory(0, T + 1, B)
    mask = rows.obs["action_mask"]

    def seen(params):
        return network.apply(params["trunk"], rows.obs) if shared else rows.obs

    def log_probs(params):
        logits = actor.apply(params["actor"], seen(params)) if shared else made.q(params["actor"], rows.obs)
        return jax.nn.log_softmax(jnp.where(mask, logits, -1e9))[:-1]

    def taken(params):
        return jnp.take_along_axis(log_probs(params), rows.action[:-1, :, None], axis=-1)[..., 0]

    def value_of(params):
        return critic.apply(params["critic"], seen(params))[..., 0]

    # as if the policy that acted had been another one, so that ratios are on all sides of the clip range
    old = taken(state.params) + 0.3 * jnp.sin(jnp.arange(T * B, dtype=jnp.float32)).reshape(T, B)
    # and in rows that count nowhere by so much that they are infinite
    recorded = jnp.where(rows.valid[:-1] == 1, old, -200.0)
    acted = rows._replace(extras={"log_prob": jnp.concatenate([recorded, jnp.zeros((1, B))])})
    metrics = made.update(state, Batch(acted, jnp.ones((B,), jnp.float32)))[1].metrics

    counts = np.asarray(rows.valid[:-1]) == 1
    value = np.asarray(value_of(state.params), np.float64)
    plain = slow_advantages(jax.device_get(rows), value)
    target = plain + value[:-1]
    kept = plain[counts]
    advantage = (plain - kept.mean()) / kept.std() if normalised else plain

    def terms(params):
        ratio = jnp.exp(taken(params) - old)
        a = jnp.asarray(advantage, jnp.float32)
        clipped = jnp.clip(ratio, 1 - HP["clip_eps"], 1 + HP["clip_eps"])
        each = log_probs(params)
        return {
            "loss/policy": -jnp.minimum(ratio * a, clipped * a),
            "loss/value": 0.5 * (value_of(params)[:-1] - jnp.asarray(target, jnp.float32)) ** 2,
            "loss/entropy": -(jnp.exp(each) * each).sum(axis=-1),
            "loss/approx_kl": ratio - 1 - jnp.log(ratio),
            "loss/clip_fraction": (jnp.abs(ratio - 1) > HP["clip_eps"]).astype(jnp.float32),
        }

    def loss(params):
        mean = {name: jnp.sum(jnp.where(counts, x, 0.0)) / float(counts.sum()) for name, x in terms(params).items()}
        return mean["loss/policy"] + HP["value_coef"] * mean["loss/value"] - HP["entropy_coef"] * mean["loss/entropy"]

    assert 0 < counts.sum() < T * B
    assert (np.asarray(rows.discount) == 0).any()
    expected = {name: np.asarray(x, np.float64)[counts] for name, x in terms(state.params).items()}
    assert 0 < expected["loss/clip_fraction"].mean() < 1
    for name, values in expected.items():
        assert int(metrics[name].count) == counts.sum()
        np.testing.assert_allclose(metrics[name].sum, values.sum(), rtol=1e-4, atol=1e-4, err_msg=name)
    unexplained = 1 - (target - value[:-1])[counts].var() / target[counts].var()
    np.testing.assert_allclose(metrics["loss/explained_variance"].sum, unexplained, rtol=1e-4)
    gradient = jnp.concatenate([x.ravel() for x in jax.tree.leaves(jax.grad(loss)(state.params))])
    np.testing.assert_allclose(metrics["loss/grad_norm"].sum, jnp.linalg.norm(gradient), rtol=1e-4)


@pytest.mark.parametrize("clips", [True, False])
def test_the_value_is_clipped_around_what_it_was_before_the_first_step(clips):
    """In the second of two steps, in the first of which the two are one; the first is that of an update that has no second."""
    lines = (*ONE_STEP, f"algo.clip_value={str(clips).lower()}")
    once, twice = toys.build(*lines), toys.build(*lines, "algo.num_epochs=2")
    hp = HP | {"lr": 0.1, "clip_eps": 0.05, "max_grad_norm": 1e6}
    state = once.begin(**hp)
    state = state._replace(params=toys.shaken(state.params))
    rows = toys.trajectory(0, T + 1, B)
    batch = Batch(rows._replace(extras={"log_prob": jnp.zeros((T + 1, B))}), jnp.ones((B,), jnp.float32))
    after, first = once.update(state, batch)
    both = twice.update(state, batch)[1].metrics["loss/value"].sum

    network = once.experiment.part("network").make(
        once.experiment.config.network, observation=once.experiment.spec.observation, dtype=jnp.float32
    )
    critic = Head(network, 1, scale=1.0, dtype=jnp.float32)
    before, later = (np.asarray(critic.apply(x.params["critic"], rows.obs)[..., 0]) for x in (state, after))
    target = slow_advantages(jax.device_get(rows), before.astype(np.float64)) + before[:-1]
    loss = (later[:-1] - target) ** 2
    moved = np.clip(later - before, -hp["clip_eps"], hp["clip_eps"])[:-1]
    clipped = np.maximum(loss, (before[:-1] + moved - target) ** 2)
    counts = np.asarray(rows.valid[:-1]) == 1
    assert (clipped > loss)[counts].mean() > 0.1
    second = 0.5 * np.sum((clipped if clips else loss)[counts])
    np.testing.assert_allclose(both - first.metrics["loss/value"].sum, second, rtol=1e-3)


def test_squashed_actions_lie_within_their_bounds_and_have_the_ratio_of_their_densities():
    """What is recorded is u; of the action atanh gives it back, and the density by the change of variables."""
    made = toys.build(*ONE_STEP, "algo.action_bounds=squash", continuous=True)
    functions, spec = made.experiment.algorithm, made.experiment.spec
    state = made.begin(**HP)
    state = state._replace(params=toys.shaken(state.params) | {"log_std": jnp.asarray([0.5, -1.0])})
    seen = toys.numbers(toys.trajectory(0, T + 1, B)).obs
    timestep = TimeStep(jax.tree.map(lambda x: x[0], seen), *[jnp.zeros((B,))] * 2, *[jnp.zeros((B,), bool)] * 2)

    def acted(state, explore):
        policy = functions.policy(state, explore)
        return jax.jit(functions.act)(policy, functions.carry(B), timestep, jax.random.key(0))

    action, _, extras = acted(state, True)
    assert action.shape == (B, *spec.action.shape) and extras["drawn"].shape == (B, 2)
    unit = (np.asarray(action, np.float64).reshape(B, 2) - 1.0) / 2.0  # of toys.LOW and toys.HIGH
    assert (np.abs(unit) < 1).all() and np.abs(unit).max() > 0.8
    np.testing.assert_allclose(np.arctanh(unit), extras["drawn"], atol=1e-3)

    def density(state, log_prob):  # of the action
        return np.asarray(log_prob) - np.log(2 * (1 - unit**2)).sum(-1)

    greedy = np.asarray(acted(state, False)[2]["drawn"])
    oracle = scipy.stats.norm(greedy, np.exp(np.asarray(state.params["log_std"])))
    np.testing.assert_allclose(
        density(state, extras["log_prob"]),
        oracle.logpdf(np.arctanh(unit)).sum(-1) - np.log(2 * (1 - unit**2)).sum(-1),
        rtol=1e-3,
        atol=1e-2,
    )


def test_squashed_actions_are_learnt_from_as_they_were_drawn():
    """The first gradient step is of the policy that acted: a ratio of 1 in all rows. Its deviation stays that of the draws."""
    made = toys.build(*ONE_STEP, "algo.action_bounds=squash", "algo.normalize_advantages=false", continuous=True)
    functions, source = made.experiment.algorithm, made.experiment.source_of(made.experiment.settings)
    state = made.begin()

    @jax.jit
    def collected(state):
        policy = functions.policy(state, True)
        return jax.tree.map(lambda x: x[0], source.next(source.init(jax.random.key(1), policy), policy)[1])

    batch = collected(state)
    low, high = toys.LOW, toys.HIGH
    rows = np.asarray(batch.trajectory.action)[:-1]
    assert (rows > low).all() and (rows < high).all()
    learnt, out = made.update(state, batch)
    assert float(out.metrics["loss/approx_kl"].sum) == pytest.approx(0.0, abs=1e-4)
    assert float(out.metrics["loss/clip_fraction"].sum) == 0
    assert (np.asarray(learnt.params["log_std"]) != 0).any()
    entropy = out.metrics["loss/entropy"]
    assert 0 < float(entropy.sum / entropy.count) < 2 * np.log(2)


@pytest.mark.parametrize(("action_bounds", "expected"), [("clip", 0.05), ("squash", 0.1)])  # the bounds' half is 2
def test_continuous_actions_are_drawn_as_widely_as_is_asked_for_at_first(action_bounds, expected):
    """By the actions themselves: in halves of the bounds where a tanh squashes, which is 1 to 1 near its middle."""
    made = toys.build(*ONE_STEP, f"algo.action_bounds={action_bounds}", "algo.initial_std=0.05", continuous=True)
    functions, spec, state, num_envs = made.experiment.algorithm, made.experiment.spec, made.begin(), 4096
    seen = jax.tree.map(lambda x: jnp.zeros((num_envs, *x.shape), x.dtype), spec.observation)
    timestep = TimeStep(seen, *[jnp.zeros((num_envs,))] * 2, *[jnp.zeros((num_envs,), bool)] * 2)
    policy = functions.policy(state, True)
    action, _, _ = jax.jit(functions.act)(policy, functions.carry(num_envs), timestep, jax.random.key(0))
    np.testing.assert_allclose(np.asarray(action, np.float64).reshape(num_envs, 2).std(axis=0), expected, rtol=0.05)


def test_bounds_that_are_infinite_cannot_be_squashed_to(monkeypatch):
    monkeypatch.setattr(toys, "HIGH", np.inf)
    node, _ = compose.compose_node(["logger=quiet", "env=probe/action_reward", "algo.action_bounds=squash"])
    node["env"] = {"module": toys.__name__, "continuous": True}
    with pytest.raises(ConfigError, match=r"env: masked .* algo.action_bounds=squash needs finite bounds"):
        experiment.build(node)


def test_the_learning_rate_follows_the_divergence(tmp_path):
    """Of a rate that is far too high, and one that is far too low; by the rule, minibatch by minibatch."""
    kl = jnp.asarray([0.0, 1e-4, 0.004, 0.0051, 0.01, 0.0199, 0.0201, 1.0])
    for lr in (1.0, 1e-4):  # only the product is bounded
        ours = lr * ppo.followed(jnp.full((8,), 3e-3 / lr), kl, 0.01, jnp.float32(lr))
        np.testing.assert_allclose(ours, [3e-3, 4.5e-3, 4.5e-3, 3e-3, 3e-3, 3e-3, 2e-3, 2e-3], rtol=1e-6)
        near = jnp.asarray([1.2e-5, 9e-3]) / lr
        ends = lr * ppo.followed(near, jnp.asarray([1.0, 1e-5]), 0.01, jnp.float32(lr))
        np.testing.assert_allclose(ends, [1e-5, 1e-2], rtol=1e-6)
    overrides = ["algo=ppo", "algo.anneal_lr=false", "algo.desired_kl=0.01", "algo.num_envs=8", "algo.num_steps=12"]
    made = toys.build(*overrides, "algo.num_epochs=3", "algo.num_minibatches=2")
    for lr, moves in ((0.2, -1), (1e-5, 1)):
        state = made.begin(lr=lr)
        algorithm, rows = made.experiment.algorithm, toys.trajectory(0, T + 1, B)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
        seen = TimeStep(flat.obs, flat.reward, flat.discount, flat.first, flat.first)
        acted = algorithm.act(algorithm.policy(state, True), (), seen, jax.random.key(1))
        action, extras = jax.tree.map(lambda x: x.reshape(T + 1, B), (acted[0], acted[2]))
        batch = Batch(rows._replace(action=action, extras=extras), jnp.ones((B,)))
        after, told = jax.jit(made.update)(state, batch)
        rate = lr * float(after.opt_state.factor)
        assert moves * (rate - lr) > 0
        assert min(lr, rate) <= told.metrics["loss/lr"].sum / 6 <= max(lr, rate)
        again, seen_next = jax.jit(made.update)(after, batch)
        assert again.opt_state.factor != after.opt_state.factor  # it goes on from where it was
        halved = after._replace(
            hp=after.hp | {"lr": after.hp["lr"] / 2}
        )  # as a population does in the middle of a training
        _, told = jax.jit(made.update)(halved, batch)
        assert 0.3 < told.metrics["loss/lr"].sum / seen_next.metrics["loss/lr"].sum < 0.7
        assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize(
    ("desired", "moves"),  # of two rollouts with two minibatches each: powers of 1.5
    [(1e12, [(0, 1), (1, 2)]), (1e-3, [(-1, -2), (-3, -4)])],
)
def test_a_rollouts_first_minibatch_raises_no_learning_rate(desired, moves):
    """Its divergence is 0 but for rounding; here it is not, as where an older policy acted, and may lower it."""
    made = toys.build(*ONE_STEP, "algo.num_epochs=2", "algo.anneal_lr=false", f"algo.desired_kl={desired}")
    state, rows = made.begin(lr=1e-4), toys.trajectory(0, T + 1, B)
    batch = Batch(rows._replace(extras={"log_prob": jnp.full((T + 1, B), -1.0)}), jnp.ones((B,)))
    for first, second in moves:
        state, told = made.update(state, batch)
        assert told.metrics["loss/approx_kl"].sum > 0
        assert float(state.opt_state.factor) == pytest.approx(1.5**second)
        rates = told.metrics["loss/lr"]  # the sum of both
        assert (float(rates.sum) / 1e-4, int(rates.count)) == (pytest.approx(1.5**first + 1.5**second), 2)


def test_a_rate_that_could_only_fall_is_refused():
    """By the numbers that batch_scaling makes: one gradient step with 2 environments is four with 8."""
    asked = (*ONE_STEP, "algo.anneal_lr=false", "algo.desired_kl=0.01")
    with pytest.raises(ConfigError, match=r"^algo\.desired_kl: 0\.01 needs two gradient steps a rollout or more, "):
        toys.build(*asked)
    toys.build(*asked, "algo.batch_scaling=keep_minibatch", "algo.base_num_envs=2")


def test_two_schedules_are_refused():
    with pytest.raises(ConfigError, match=r"^algo\.desired_kl: 0\.01 is not allowed with algo\.anneal_lr true"):
        toys.build("algo=ppo", "algo.desired_kl=0.01")
