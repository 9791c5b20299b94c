"""V-trace against the sum of the paper's definition, in float64 and over one episode at a time, and against rlax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.ops.returns import gae
from rlexp.ops.vtrace import vtrace

LENGTHS = (1, 2, 7, 24)  # each is compiled once
JIT = jax.jit(vtrace)
ON_POLICY = {"gamma": 0.97, "lam": 1.0, "rho_bar": 1.0, "c_bar": 1.0, "rho_bar_pg": 1.0}


def window(seed: int, length: int, ends: float = 0.25) -> dict[str, np.ndarray]:
    """Rows of episodes that end at random, also twice in a row, at the first and at the last row; with `ends` 1 all are over."""
    rng = np.random.default_rng(seed)
    over = rng.random(length) < ends  # the row of a last observation
    before = np.append(over[1:], rng.random() < ends)
    terminated = before & ~over & (rng.random(length) < 0.5)
    rows = {
        "reward": np.where(over, 0, rng.normal(size=length)),
        "discount": np.where(terminated, 0, 1),
        "valid": np.where(over, 0, 1),
        "value": rng.normal(size=length + 1),
        "log_ratio": rng.normal(scale=rng.choice([0, 0.1, 2]), size=length),
    }
    return {name: x.astype(np.float32) for name, x in rows.items()}


def oracle(rows: dict[str, np.ndarray], hp: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Equation 1 as it stands: V(x_s) + sum_t gamma^(t-s) (prod_i c_i) delta_t, to the end of the episode; O(T^2)."""
    r, d, valid, v, log_ratio = (
        rows[k].astype(np.float64) for k in ("reward", "discount", "valid", "value", "log_ratio")
    )
    ratio, length = np.exp(log_ratio), len(r)
    vs, advantage = v.copy(), np.zeros(length)
    for s in range(length):
        weight = 1.0
        for t in range(s, length):
            if valid[t] == 0:
                break
            delta = min(hp["rho_bar"], ratio[t]) * (r[t] + hp["gamma"] * d[t] * v[t + 1] - v[t])
            vs[s] += weight * delta
            weight *= hp["gamma"] * d[t] * hp["lam"] * min(hp["c_bar"], ratio[t])
    for s in np.flatnonzero(valid):
        advantage[s] = min(hp["rho_bar_pg"], ratio[s]) * (r[s] + hp["gamma"] * d[s] * vs[s + 1] - v[s])
    return vs[:-1], advantage


def traced(hp: dict[str, float]) -> dict[str, jax.Array]:
    return {name: jnp.float32(x) for name, x in hp.items()}


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**31),
    length=st.sampled_from(LENGTHS),
    gamma=st.floats(0, 1, width=32),
    lam=st.floats(0, 1, width=32),
    bars=st.tuples(
        *(st.floats(0.5, 4, width=32) | st.sampled_from(edges) for edges in ((1e-6, 1e6), (1e-6,), (1e-6, 1e6)))
    ),
    ends=st.sampled_from((0.25, 0.0, 1.0)),
)
def test_the_sum_over_each_episode(seed, length, gamma, lam, bars, ends):
    hp = {"gamma": gamma, "lam": lam} | dict(zip(("rho_bar", "c_bar", "rho_bar_pg"), bars, strict=True))
    rows = window(seed, length, ends)
    got, (target, advantage) = JIT(**rows, **traced(hp)), oracle(rows, hp)
    size = max(1.0, np.abs(target).max())  # ratios above 1 multiply along an episode
    np.testing.assert_allclose(got.target, target, rtol=1e-5, atol=1e-5 * size)
    np.testing.assert_allclose(got.advantage, advantage, rtol=1e-5, atol=1e-5 * size * 4)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_rlax(seed, length):
    """It clips c at 1; its advantage mixes in lambda, as the paper's does not, so that it is compared at 1."""
    rows = window(seed, length)
    for lam in (0.8, 1.0):
        with jax.numpy_dtype_promotion("standard"):
            expected = rlax.vtrace_td_error_and_advantage(
                rows["value"][:-1],
                rows["value"][1:],
                rows["reward"],
                rows["discount"] * np.float32(0.97),
                np.exp(rows["log_ratio"]),
                lambda_=lam,
                clip_rho_threshold=1.5,
                clip_pg_rho_threshold=1.2,
            )
        hp = {"gamma": 0.97, "lam": lam, "rho_bar": 1.5, "c_bar": 1.0, "rho_bar_pg": 1.2}
        got = JIT(**rows | {"valid": np.ones(length, np.float32)}, **traced(hp))
        np.testing.assert_allclose(got.target - rows["value"][:-1], expected.errors, rtol=1e-5, atol=1e-5)
        if lam == 1.0:
            np.testing.assert_allclose(got.advantage, expected.pg_advantage, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_on_policy_it_is_the_lambda_return(seed):
    rows = window(seed, 24)
    log_ratio = np.zeros_like(rows.pop("log_ratio"))
    hp = ON_POLICY | {"lam": 0.9}
    got = JIT(**rows, log_ratio=log_ratio, **traced(hp))
    _, target = gae(**{k: jnp.asarray(x) for k, x in rows.items()}, gamma=0.97, lam=0.9)
    np.testing.assert_allclose(got.target, target, rtol=1e-5, atol=1e-5)


def test_rows_that_are_no_transition_are_not_read():
    rows = window(5, 24)
    over = rows["valid"] == 0
    assert over.any()
    odd = rows | {"log_ratio": np.where(over, np.float32(200), rows["log_ratio"])}  # its exponential is infinite
    plain, other = JIT(**rows, **traced(ON_POLICY)), JIT(**odd, **traced(ON_POLICY))
    np.testing.assert_array_equal(plain.target, other.target)
    np.testing.assert_array_equal(plain.advantage, other.advantage)
    np.testing.assert_array_equal(plain.target[over], rows["value"][:-1][over])


def test_no_gradient_goes_through():
    rows = window(2, 7)
    value, log_ratio = jnp.asarray(rows.pop("value")), jnp.asarray(rows.pop("log_ratio"))
    rows = {name: jnp.asarray(x) for name, x in rows.items()}

    def total(value, log_ratio):
        return sum(jnp.sum(x) for x in vtrace(**rows, value=value, log_ratio=log_ratio, **traced(ON_POLICY)))

    for grad in jax.grad(total, argnums=(0, 1))(value, log_ratio):
        np.testing.assert_array_equal(grad, 0)


def test_shapes_and_types_are_checked():
    rows = {name: jnp.asarray(x) for name, x in window(0, 7).items()}
    with pytest.raises(Exception, match=r"value|shape"):
        vtrace(**rows | {"value": rows["value"][:-1]}, **ON_POLICY)
