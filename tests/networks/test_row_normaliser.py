"""The normaliser of rows, against NumPy over all rows that are there at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.networks import row_normaliser

LEAD = (5, 4)
SPEC = {
    "cars": jax.ShapeDtypeStruct((6, 3), jnp.float32),
    "lanes": jax.ShapeDtypeStruct((2, 4, 2), jnp.float32),
    "ego": jax.ShapeDtypeStruct((3,), jnp.float32),
    "speed": jax.ShapeDtypeStruct((), jnp.float32),
    "image": jax.ShapeDtypeStruct((2, 2, 1), jnp.uint8),
    "action_mask": jax.ShapeDtypeStruct((4,), jnp.bool_),
}
FLOATS = ("cars", "lanes", "ego", "speed")


def rollout(seed):
    """Rows of which a third are of zeros, and valid ones among them."""
    rng = np.random.default_rng(seed)
    obs = {}
    for name, spec in SPEC.items():
        if name not in FLOATS:
            obs[name] = rng.integers(0, 2, (*LEAD, *spec.shape)).astype(spec.dtype)
            continue
        x = rng.normal(3, 2, (*LEAD, *spec.shape))
        x[rng.random(x.shape) < 0.2] = 0.0  # a number may be 0 in a row that is there
        x[rng.random(x.shape[:-1] if spec.shape else x.shape) < 0.3] = 0.0
        obs[name] = x.astype(np.float32)
    return obs, (rng.random(LEAD) < 0.8).astype(np.float32)


update = jax.jit(lambda obs, valid: row_normaliser.update(row_normaliser.init(SPEC), obs, valid))


def rows_of(name, x):
    """Those that are there, [N, F]."""
    rows = np.asarray(x, np.float64).reshape(-1, *SPEC[name].shape[-1:])
    return rows[np.any(rows.reshape(len(rows), -1) != 0, axis=1)]


@pytest.fixture(scope="module")
def after_three():
    norms, seen = row_normaliser.init(SPEC), {name: [] for name in FLOATS}
    for seed in range(3):
        obs, valid = rollout(seed)
        norms = jax.jit(row_normaliser.update)(norms, obs, valid)
        for name in FLOATS:
            seen[name].append(rows_of(name, obs[name][valid > 0]))
    return dict(zip(sorted(SPEC), norms, strict=True)), {name: np.concatenate(x) for name, x in seen.items()}


@pytest.mark.parametrize("name", FLOATS)
def test_statistics_are_of_the_rows_that_are_there(name, after_three):
    norms, seen = after_three
    norm, rows = norms[name], seen[name]
    assert norm.count == len(rows) > 0
    np.testing.assert_allclose(norm.mean, rows.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(norm.m2 / norm.count, rows.var(axis=0), rtol=1e-4)


@pytest.mark.parametrize("name", FLOATS)
def test_rows_are_scaled_alike_wherever_they_stand_and_rows_of_zeros_stay(name, after_three):
    norms, seen = after_three
    obs = jax.tree.map(jnp.asarray, rollout(7)[0])
    out = row_normaliser.normalise(tuple(norms[n] for n in sorted(SPEC)), obs)[name]
    x = np.asarray(obs[name], np.float64)
    expected = np.clip((x - seen[name].mean(axis=0)) / seen[name].std(axis=0), -10, 10)
    there = np.any(x != 0, axis=-1, keepdims=True) if SPEC[name].shape else x != 0
    assert 0 < there.mean() < 1
    np.testing.assert_allclose(out, np.where(there, expected, 0.0), rtol=1e-4, atol=1e-5)
    assert out.dtype == jnp.float32


def test_what_is_no_floating_number_stays_and_has_no_statistics(after_three):
    norms, _ = after_three
    obs = jax.tree.map(jnp.asarray, rollout(7)[0])
    out = row_normaliser.normalise(tuple(norms[n] for n in sorted(SPEC)), obs)
    for name in ("image", "action_mask"):
        assert (norms[name].mean, norms[name].count) == (None, 0)
        np.testing.assert_array_equal(out[name], obs[name], strict=True)


def test_what_stands_in_padding_rows_does_not_matter():
    obs, valid = rollout(0)
    valid[2] = 0
    expected = update(obs, valid)
    for name in FLOATS:
        obs[name][2] = np.nan
    jax.tree.map(np.testing.assert_array_equal, update(obs, valid), expected)
