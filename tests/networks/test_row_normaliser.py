"""The normaliser of rows, against NumPy over all observations at once in which a row is there."""

import math

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
    """[N, R, F]."""
    shape = SPEC[name].shape or (1,)
    return np.asarray(x, np.float64).reshape(-1, math.prod(shape[:-1]), shape[-1])


@pytest.fixture(scope="module")
def after_three():
    norms, seen = row_normaliser.init(SPEC), {name: [] for name in FLOATS}
    for seed in range(3):
        obs, valid = rollout(seed)
        norms = jax.jit(row_normaliser.update)(norms, obs, valid)
        for name in FLOATS:
            seen[name].append(rows_of(name, obs[name][valid > 0]))
    return dict(zip(sorted(SPEC), norms, strict=True)), {name: there(np.concatenate(x)) for name, x in seen.items()}


def there(rows):
    """Of each place the rows that are there, [N of its own, F]."""
    return [x[np.any(x != 0, axis=-1)] for x in rows.swapaxes(0, 1)]


@pytest.mark.parametrize("name", FLOATS)
def test_statistics_are_of_each_place_over_the_rows_that_are_there(name, after_three):
    norms, seen = after_three
    norm = norms[name]
    np.testing.assert_array_equal(norm.count, [len(x) for x in seen[name]])
    assert min(norm.count) > 0
    np.testing.assert_allclose(norm.mean, [x.mean(axis=0) for x in seen[name]], rtol=1e-5)
    np.testing.assert_allclose(norm.m2 / norm.count[:, None], [x.var(axis=0) for x in seen[name]], rtol=1e-4)


@pytest.mark.parametrize("name", FLOATS)
def test_rows_are_scaled_by_the_statistics_of_their_place_and_rows_of_zeros_stay(name, after_three):
    norms, seen = after_three
    obs = jax.tree.map(jnp.asarray, rollout(7)[0])
    out = row_normaliser.normalise(tuple(norms[n] for n in sorted(SPEC)), obs)[name]
    x = rows_of(name, obs[name])
    mean, deviation = (np.stack([f(rows, axis=0) for rows in seen[name]]) for f in (np.mean, np.std))
    is_there = np.any(x != 0, axis=-1, keepdims=True)
    assert 0 < is_there.mean() < 1
    expected = np.where(is_there, np.clip((x - mean) / deviation, -10, 10), 0.0)
    np.testing.assert_allclose(rows_of(name, out), expected, rtol=1e-4, atol=1e-5)
    assert (out.dtype, out.shape) == (jnp.float32, obs[name].shape)


def test_half_a_metre_is_seen_near_by_as_far_off():
    """A near row that varies by a thousandth of what a far one does: with one deviation for both it would be 0."""
    rng = np.random.default_rng(0)
    near, far = rng.normal(5, 0.01, (*LEAD, 3)), rng.normal(50, 10, (*LEAD, 3))
    obs = {"route": jnp.asarray(np.stack([near, far], axis=2), jnp.float32)}
    norms = row_normaliser.init({"route": jax.ShapeDtypeStruct((2, 3), jnp.float32)})
    seen = row_normaliser.normalise(row_normaliser.update(norms, obs, jnp.ones(LEAD)), obs)["route"]
    np.testing.assert_allclose(seen.std(axis=(0, 1)), 1.0, rtol=1e-2)


def test_a_row_that_never_changes_is_there_all_the_same():
    present = np.random.default_rng(0).random(LEAD) < 0.5
    obs = {"item": jnp.where(present[..., None, None], jnp.asarray([[1.0, 0.0, 0.5]]), 0.0)}
    norms = row_normaliser.init({"item": jax.ShapeDtypeStruct((1, 3), jnp.float32)})
    seen = row_normaliser.normalise(row_normaliser.update(norms, obs, jnp.ones(LEAD)), obs)["item"]
    np.testing.assert_array_equal(np.any(seen != 0, axis=-1)[..., 0], present)
    assert np.abs(seen).max() < 1e-2


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
