"""The observation normaliser, against NumPy over all rows at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp.networks.normaliser import Normaliser, init, normalise, update

SPEC = {
    "position": jax.ShapeDtypeStruct((3,), jnp.float32),
    "height": jax.ShapeDtypeStruct((), jnp.float32),
    "image": jax.ShapeDtypeStruct((2, 2, 1), jnp.uint8),
    "action_mask": jax.ShapeDtypeStruct((4,), jnp.bool_),
}
jit_update, jit_normalise = jax.jit(update), jax.jit(normalise, static_argnums=2)


def rollout(seed, num_steps=5, batch=4):
    rng = np.random.default_rng(seed)
    lead = (num_steps, batch)
    obs = {
        "position": rng.normal([3, -1, 0], [0.1, 5, 2], (*lead, 3)).astype(np.float32),
        "height": rng.normal(1000, 2, lead).astype(np.float32),
        "image": rng.integers(0, 255, (*lead, 2, 2, 1), np.uint8),
        "action_mask": np.ones((*lead, 4), bool),
    }
    return obs, (rng.random(lead) < 0.8).astype(np.float32)


def many_updates(num=6):
    norm, rows = init(SPEC), []
    for seed in range(num):
        obs, valid = rollout(seed)
        norm = jit_update(norm, obs, valid)
        rows.append({k: v[valid > 0] for k, v in obs.items()})
    return norm, {k: np.concatenate([r[k] for r in rows]).astype(np.float64) for k in SPEC}


def test_merged_statistics_are_those_of_all_valid_rows():
    norm, rows = many_updates()
    assert norm.count == len(rows["height"])
    for name in ("position", "height"):
        np.testing.assert_allclose(norm.mean[name], rows[name].mean(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(norm.m2[name] / norm.count, rows[name].var(0), rtol=1e-4)


def test_normalised_observations_have_mean_0_and_variance_1():
    norm, rows = many_updates()
    out = jit_normalise(norm, {k: jnp.asarray(v, SPEC[k].dtype) for k, v in rows.items()}, 100.0)
    for name in ("position", "height"):
        np.testing.assert_allclose(out[name].mean(0), np.zeros(SPEC[name].shape), atol=2e-4)
        np.testing.assert_allclose(out[name].std(0), np.ones(SPEC[name].shape), rtol=1e-3)
        assert out[name].dtype == jnp.float32


def test_what_stands_in_padding_rows_does_not_matter():
    obs, valid = rollout(0)
    valid[2] = 0
    expected = jit_update(init(SPEC), obs, valid)
    for garbage in (7.0, np.nan, np.inf):
        other = obs | {
            k: np.where(valid.reshape(valid.shape + (1,) * (obs[k].ndim - 2)) > 0, obs[k], np.float32(garbage))
            for k in ("position", "height")
        }
        jax.tree.map(np.testing.assert_array_equal, jit_update(init(SPEC), other, valid), expected)


def test_a_rollout_without_a_valid_row_changes_nothing():
    norm, _ = many_updates(2)
    obs, valid = rollout(9)
    jax.tree.map(np.testing.assert_array_equal, jit_update(norm, obs, np.zeros_like(valid)), norm)
    empty = jit_update(init(SPEC), obs, np.zeros_like(valid))
    jax.tree.map(np.testing.assert_array_equal, empty, init(SPEC))


def test_other_leaves_pass_through_untouched():
    norm, _ = many_updates(1)
    obs = jax.tree.map(jnp.asarray, rollout(0)[0])
    out = normalise(norm, obs)
    for name in ("image", "action_mask"):
        assert norm.mean[name] is None
        assert norm.m2[name] is None
        assert out[name] is obs[name]


def test_before_the_first_update_observations_are_only_clipped():
    obs = {k: jnp.full(s.shape, 3, s.dtype) for k, s in SPEC.items()} | {"height": jnp.asarray(-50.0)}
    out = jit_normalise(init(SPEC), obs)
    np.testing.assert_allclose(out["position"], [3, 3, 3], rtol=1e-6)
    assert out["height"] == -10
    assert jit_normalise(init(SPEC), obs, 2.0)["height"] == -2


def test_a_constant_entry_becomes_0_and_a_surprise_is_clipped():
    spec = jax.ShapeDtypeStruct((1,), jnp.float32)
    norm = update(init(spec), jnp.full((4, 2, 1), 5.0), jnp.ones((4, 2)))
    np.testing.assert_array_equal(normalise(norm, jnp.asarray([5.0])), [0])
    np.testing.assert_array_equal(normalise(norm, jnp.asarray([6.0])), [10])


def test_leading_axes_do_not_matter():
    norm, _ = many_updates(1)
    obs = jax.tree.map(jnp.asarray, rollout(3)[0])
    all_at_once = jit_normalise(norm, obs)
    one = jit_normalise(norm, jax.tree.map(lambda x: x[2, 1], obs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[2, 1], b, rtol=1e-6), all_at_once, one)


def test_it_can_be_carried_and_saved():
    """State holds strong-typed, non-empty float32 arrays, the same before and after an update; members vmap."""
    norm = init(SPEC)
    obs, valid = jax.tree.map(jnp.asarray, rollout(0))
    after = jit_update(norm, obs, valid)
    for state in (norm, after):
        assert all(x.dtype == jnp.float32 and not x.weak_type and x.size for x in jax.tree.leaves(state))
    assert jax.tree.structure(norm) == jax.tree.structure(after)
    members = jax.tree.map(lambda x: jnp.stack([x, x]), norm)
    together = jax.jit(jax.vmap(update, in_axes=(0, None, None)))(members, obs, valid)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-6), together, after)


def test_images_alone_leave_only_the_count():
    spec = jax.ShapeDtypeStruct((2, 2, 1), jnp.uint8)
    norm = update(init(spec), jnp.zeros((3, 2, 2, 2, 1), jnp.uint8), jnp.ones((3, 2)))
    assert norm.mean is None
    assert norm.m2 is None
    assert norm.count == 6


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_a_large_offset_costs_little_precision(offset):
    """Summing squares would lose all digits of the variance here; merging by deviations keeps them."""
    spec = jax.ShapeDtypeStruct((), jnp.float32)
    rng = np.random.default_rng(0)
    rows = (offset + rng.normal(size=(200, 8, 16))).astype(np.float32)
    norm, _ = jax.lax.scan(lambda norm, x: (update(norm, x, jnp.ones((8, 16))), None), init(spec), jnp.asarray(rows))
    assert isinstance(norm, Normaliser)
    np.testing.assert_allclose(norm.mean, rows.astype(np.float64).mean(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm.m2 / norm.count, rows.astype(np.float64).var(), rtol=1e-3)
