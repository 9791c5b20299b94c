"""Returns against hand-worked numbers, rlax, and slow oracles in float64 that cut the window into episodes first."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.ops.returns import gae, lambda_returns, n_step_return, n_step_returns, n_step_row

T = 24  # one length for all drawn windows, so that each function is compiled once
JIT = {f.__name__: jax.jit(f) for f in (gae, lambda_returns, n_step_return)}


def f32(*values):
    return jnp.asarray(values, jnp.float32)


def window(seed, length=T):
    """Rows of random episodes: {reward, discount, valid} [length] and values [length + 1], in float32 NumPy."""
    rng = np.random.default_rng(seed)
    reward, discount, valid = [], [], []
    while len(reward) < length:
        steps = int(rng.integers(1, 7))
        reward += [*rng.normal(size=steps), 0.0]
        discount += [*np.ones(steps - 1), float(rng.integers(2)), 1.0]  # ends by termination or truncation; padding row
        valid += [*np.ones(steps), 0.0]
    start = int(rng.integers(len(reward) - length + 1))
    rows = {"reward": reward, "discount": discount, "valid": valid}
    out = {k: np.asarray(v[start : start + length], np.float32) for k, v in rows.items()}
    return out, rng.normal(size=length + 1).astype(np.float32)


def last_row(valid, t):
    """The row that an episode's return from row t can reach: the first invalid one after t, or the window's end."""
    return next((k for k in range(t + 1, len(valid)) if valid[k] == 0), len(valid))


def n_step_oracle(rows, bootstrap, gamma, t, n):
    """Rewards of at most n transitions from row t, then the value of the row reached: forwards, in float64."""
    end = min(t + n, last_row(rows["valid"], t))
    total, weight = 0.0, 1.0
    for k in range(t, end):
        total += weight * float(rows["reward"][k])
        weight *= gamma * float(rows["discount"][k])
    return total + weight * float(bootstrap[end - 1])


def lambda_oracle(rows, bootstrap, gamma, lam, t):
    """The mixture of all n-step returns within the episode; the longest one takes the rest of the weight."""
    longest = last_row(rows["valid"], t) - t
    returns = [n_step_oracle(rows, bootstrap, gamma, t, n) for n in range(1, longest + 1)]
    return (
        sum((1 - lam) * lam ** (n - 1) * g for n, g in enumerate(returns[:-1], 1)) + lam ** (longest - 1) * returns[-1]
    )


def gae_oracle(rows, value, gamma, lam, t):
    """The double sum of the definition, over one episode."""
    if rows["valid"][t] == 0:
        return 0.0
    total, weight = 0.0, 1.0
    for k in range(t, last_row(rows["valid"], t)):
        discount = float(rows["discount"][k])
        total += weight * (float(rows["reward"][k]) + gamma * discount * float(value[k + 1]) - float(value[k]))
        weight *= gamma * lam * discount
    return total


# --- gae ------------------------------------------------------------------------------------------------------------


def test_gae_bootstraps_from_the_last_observation_of_a_truncated_episode():
    advantage, target = gae(
        f32(1, 2, 0, 4),
        discount=f32(1, 1, 1, 1),
        valid=f32(1, 1, 0, 1),
        value=f32(3, 4, 6, 8, 10),
        gamma=0.5,
        lam=0.5,
    )
    # deltas: 1 + 4/2 - 3 = 0; 2 + 6/2 - 4 = 1; padding; 4 + 10/2 - 8 = 1
    np.testing.assert_array_equal(advantage, [0.25, 1, 0, 1])
    np.testing.assert_array_equal(target, [3.25, 5, 6, 9])


def test_gae_does_not_bootstrap_from_a_terminated_episode():
    advantage, target = gae(
        f32(1, 2, 0, 4),
        discount=f32(1, 0, 1, 1),
        valid=f32(1, 1, 0, 1),
        value=f32(3, 4, 6, 8, 10),
        gamma=0.5,
        lam=0.5,
    )
    # deltas: 0; 2 - 4 = -2; padding; 1
    np.testing.assert_array_equal(advantage, [-0.5, -2, 0, 1])
    np.testing.assert_array_equal(target, [2.5, 2, 6, 9])


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), gamma=st.floats(0, 1, width=32), lam=st.floats(0, 1, width=32))
def test_gae_is_the_double_sum_over_each_episode(seed, gamma, lam):
    rows, value = window(seed)
    advantage, target = JIT["gae"](**rows, value=value, gamma=f32(gamma)[0], lam=f32(lam)[0])
    expected = np.array([gae_oracle(rows, value, gamma, lam, t) for t in range(T)])
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(target, expected + value[:-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_gae_agrees_with_rlax_where_no_episode_is_cut(seed):
    rows, value = window(seed)
    discount = rows["discount"] * 0.97
    with jax.numpy_dtype_promotion("standard"):
        expected = rlax.truncated_generalized_advantage_estimation(rows["reward"], discount, 0.9, value)
    rows["valid"] = np.ones_like(rows["valid"])
    advantage, _ = JIT["gae"](**rows, value=value, gamma=0.97, lam=0.9)
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), end=st.integers(2, T - 2))
def test_nothing_leaks_from_the_next_episode(seed, end):
    """Row `end` is the last observation of an episode: only its value may matter to the rows before."""
    rows, value = window(seed)
    rows["valid"][end] = 0
    rng = np.random.default_rng(seed + 1)
    other = {k: np.concatenate([v[:end], rng.random(T - end, np.float32)]) for k, v in rows.items()}
    other["valid"][end] = 0
    other_value = np.concatenate([value[: end + 1], rng.random(T - end, np.float32)])
    advantage, _ = JIT["gae"](**rows, value=value, gamma=0.9, lam=0.8)
    other_advantage, _ = JIT["gae"](**other, value=other_value, gamma=0.9, lam=0.8)
    np.testing.assert_array_equal(advantage[:end], other_advantage[:end])
    target = JIT["lambda_returns"](**rows, bootstrap=value[1:], gamma=0.9, lam=0.8)
    other_target = JIT["lambda_returns"](**other, bootstrap=other_value[1:], gamma=0.9, lam=0.8)
    np.testing.assert_array_equal(target[:end], other_target[:end])


def test_gae_vmaps_over_environments_and_hyperparameters():
    rows = [window(seed) for seed in range(3)]
    reward, discount, valid = (jnp.stack([r[k] for r, _ in rows], 1) for k in ("reward", "discount", "valid"))
    value = jnp.stack([v for _, v in rows], 1)
    gammas, lams = f32(0.9, 0.99), f32(0.5, 1)

    def batched(gamma, lam):
        one = lambda r, d, ok, v: gae(r, discount=d, valid=ok, value=v, gamma=gamma, lam=lam)  # noqa: E731
        return jax.vmap(one, in_axes=1, out_axes=1)(reward, discount, valid, value)

    advantage, target = jax.jit(jax.vmap(batched))(gammas, lams)
    assert advantage.shape == target.shape == (2, T, 3)
    for m in range(2):
        for b in range(3):
            alone, _ = JIT["gae"](**rows[b][0], value=rows[b][1], gamma=gammas[m], lam=lams[m])
            np.testing.assert_allclose(advantage[m, :, b], alone, rtol=1e-6, atol=1e-6)


# --- lambda-returns -------------------------------------------------------------------------------------------------


def test_lambda_returns_by_hand():
    target = lambda_returns(
        f32(1, 2, 0, 4, 8),
        discount=f32(1, 1, 1, 1, 0),
        valid=f32(1, 1, 0, 1, 1),
        bootstrap=f32(4, 6, 100, 10, 100),
        gamma=0.5,
        lam=0.5,
    )
    # row 4 terminates: 8; row 3: 4 + (10/2 + 8/2)/2; row 1 is truncated: 2 + 6/2; row 0: 1 + (4/2 + 5/2)/2
    np.testing.assert_array_equal(np.delete(target, 2), [3.25, 5, 8.5, 8])
    assert np.isfinite(target[2])


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), gamma=st.floats(0, 1, width=32), lam=st.floats(0, 1, width=32))
def test_lambda_returns_mix_the_n_step_returns_of_each_episode(seed, gamma, lam):
    rows, value = window(seed)
    bootstrap = value[1:]
    target = JIT["lambda_returns"](**rows, bootstrap=bootstrap, gamma=f32(gamma)[0], lam=f32(lam)[0])
    for t in np.flatnonzero(rows["valid"]):
        expected = lambda_oracle(rows, bootstrap, gamma, lam, t)
        np.testing.assert_allclose(target[t], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_lambda_returns_agree_with_rlax_where_no_episode_is_cut(seed):
    rows, value = window(seed)
    with jax.numpy_dtype_promotion("standard"):
        expected = rlax.lambda_returns(rows["reward"], rows["discount"] * 0.97, value[1:], 0.9)
    rows["valid"] = np.ones_like(rows["valid"])
    target = JIT["lambda_returns"](**rows, bootstrap=value[1:], gamma=0.97, lam=0.9)
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), lam=st.floats(0, 1, width=32))
def test_lambda_returns_over_state_values_are_the_targets_of_gae(seed, lam):
    rows, value = window(seed)
    hp = {"gamma": f32(0.95)[0], "lam": f32(lam)[0]}
    _, target = JIT["gae"](**rows, value=value, **hp)
    returns = JIT["lambda_returns"](**rows, bootstrap=value[1:], **hp)
    keep = rows["valid"] > 0
    np.testing.assert_allclose(returns[keep], target[keep], rtol=1e-5, atol=1e-5)


# --- n-step return --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("discount", "valid", "expected"),
    [
        ((1, 1, 1, 1), (1, 1, 1, 1), 1 + 2 / 2 + 4 / 4 + 8 / 8 + 64 / 16),  # the whole window
        ((1, 1, 1, 1), (1, 1, 0, 1), 1 + 2 / 2 + 32 / 4),  # row 2 is the last observation of a truncated episode
        ((1, 0, 1, 1), (1, 1, 0, 1), 1 + 2 / 2),  # … of a terminated one
        ((1, 1, 1, 0), (1, 1, 1, 1), 1 + 2 / 2 + 4 / 4 + 8 / 8),  # the window's last step terminates
        ((1, 1, 1, 1), (1, 0, 1, 1), 1 + 16 / 2),  # only one step is left
    ],
)
def test_n_step_return_by_hand(discount, valid, expected):
    target = n_step_return(
        f32(1, 2, 4, 8), discount=f32(*discount), valid=f32(*valid), bootstrap=f32(16, 32, 48, 64), gamma=0.5
    )
    assert target.shape == ()
    assert float(target) == expected


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), gamma=st.floats(0, 1, width=32))
def test_n_step_return_sums_forwards_until_the_episode_or_the_window_ends(seed, gamma):
    rows, value = window(seed)
    rows["valid"][0] = 1
    target = JIT["n_step_return"](**rows, bootstrap=value[1:], gamma=f32(gamma)[0])
    np.testing.assert_allclose(target, n_step_oracle(rows, value[1:], gamma, 0, T), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("valid", "row"), [((1, 1, 1, 1), 4), ((1, 1, 0, 1), 2), ((1, 0, 1, 0), 1), ((0, 1, 1, 0), 3), ((1,), 1)]
)
def test_n_step_row_is_where_the_return_takes_a_value(valid, row):
    assert int(n_step_row(f32(*valid))) == row


# --- what is refused ------------------------------------------------------------------------------------------------


def test_batches_and_other_types_are_refused():
    rows, value = jax.tree.map(jnp.asarray, window(0))
    batched = {k: jnp.stack([v, v], 1) for k, v in rows.items()}
    refusals = (AssertionError, jaxtyping.TypeCheckError)
    with pytest.raises(refusals):
        gae(**batched, value=jnp.stack([value, value], 1), gamma=0.9, lam=0.9)
    with pytest.raises(refusals):
        gae(**rows, value=value[:-1], gamma=0.9, lam=0.9)
    with pytest.raises(refusals):
        lambda_returns(**rows, bootstrap=value, gamma=0.9, lam=0.9)
    half = {k: jnp.asarray(v, jnp.bfloat16) for k, v in rows.items()}
    with pytest.raises(AssertionError, match="expected float32, got bfloat16"):
        gae(**half, value=jnp.asarray(value, jnp.bfloat16), gamma=0.9, lam=0.9)


@pytest.mark.parametrize("n", [1, 3, 40])  # 40: longer than the window
def test_n_step_returns_are_of_every_row_and_end_with_the_window(n):
    rows, value = window(5)
    found = jax.jit(n_step_returns, static_argnames="n")(**rows, bootstrap=value[1:], gamma=0.9, n=n)
    for t in np.flatnonzero(rows["valid"]):
        np.testing.assert_allclose(found[t], n_step_oracle(rows, value[1:], 0.9, t, n), rtol=1e-5, atol=1e-6)
