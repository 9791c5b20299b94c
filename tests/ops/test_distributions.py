"""Distributions of actions against SciPy and plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from rlexp.ops.distributions import BeforeTanh, Categorical, DiagonalNormal, SquashedNormal, masked, multi_categorical

LOGITS = jnp.log(jnp.asarray([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]], jnp.float32)) + 3.0  # need not be normalised
MASK = jnp.asarray([[True, False, True, False], [False, False, True, False], [True, True, True, True]])


def test_categorical_by_hand():
    dist = Categorical(LOGITS)
    np.testing.assert_allclose(dist.log_prob(jnp.asarray([2, 0])), np.log([0.7, 0.5]), rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(), scipy.stats.entropy(np.exp(LOGITS), axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(dist.mode(), [2, 0])
    assert dist.mode().dtype == dist.sample(jax.random.key(0)).dtype == jnp.int32


def test_categorical_has_the_gradient_of_the_softmax():
    gradient = jax.grad(lambda x: Categorical(x).log_prob(jnp.asarray([2, 0])).sum())(LOGITS)
    np.testing.assert_allclose(gradient, [[-0.1, -0.2, 0.3], [0.5, -0.25, -0.25]], rtol=1e-5, atol=1e-7)


def test_categorical_samples_by_its_probabilities():
    draws = jax.jit(jax.vmap(Categorical(LOGITS).sample))(jax.random.split(jax.random.key(0), 4000))
    for row, probabilities in enumerate(np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])):
        counts = np.bincount(draws[:, row], minlength=3)
        assert scipy.stats.chisquare(counts, 4000 * probabilities).pvalue > 1e-3


def test_masked_actions_have_probability_zero_and_the_rest_their_own_softmax():
    logits = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32) * 4

    @jax.jit
    def read(logits):
        dist = masked(logits, MASK)
        actions = jnp.broadcast_to(jnp.arange(4)[:, None], (4, 3))
        return dist.logits, jnp.exp(jax.vmap(dist.log_prob)(actions)).T, dist.entropy()

    finite, probabilities, entropy = read(logits)
    assert np.isfinite(finite).all()
    np.testing.assert_array_equal(probabilities[~MASK], 0)
    weights = np.where(MASK, np.exp(logits, dtype=np.float64), 0)
    np.testing.assert_allclose(probabilities, weights / weights.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(entropy, scipy.stats.entropy(weights, axis=-1), rtol=1e-5)


def test_masked_actions_are_never_taken():
    dist = masked(jnp.where(MASK, 0.0, 50.0), MASK)  # as if the policy wanted nothing else
    draws = jax.jit(jax.vmap(dist.sample))(jax.random.split(jax.random.key(0), 500))
    assert np.take_along_axis(np.asarray(MASK), np.asarray(draws).T, axis=1).all()
    np.testing.assert_array_equal(dist.mode(), [0, 2, 0])


def test_masked_actions_get_no_gradient_and_make_no_nan():
    logits = jax.random.normal(jax.random.key(0), (3, 4))

    def score(logits, of):
        dist = masked(logits, MASK)
        return (dist.log_prob(jnp.asarray([0, 2, 1])) if of == "log_prob" else dist.entropy()).sum()

    for of in ("log_prob", "entropy"):
        gradient = jax.jit(jax.grad(score), static_argnums=1)(logits, of)
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[~MASK], 0)
        assert np.abs(gradient[2]).min() > 0


def test_a_row_without_any_allowed_action_is_uniform():
    dist = masked(LOGITS, jnp.zeros((2, 3), bool))
    np.testing.assert_allclose(dist.entropy(), np.log([3, 3]), rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: masked(x, jnp.zeros((2, 3), bool)).entropy().sum())(LOGITS)).all()


def test_several_choices_are_independent_heads():
    """Against one categorical over all pairs, of which every head's mask forbids some."""
    logits = jax.random.normal(jax.random.key(0), (3, 5))
    mask = jnp.asarray([[True, False, True, True, True], [True, True, False, True, False], [False] * 2 + [True] * 3])
    dist = multi_categorical(logits, (2, 3), mask)
    pairs = np.stack(np.meshgrid(range(2), range(3), indexing="ij"), axis=-1).reshape(-1, 1, 2)
    pairs = jnp.asarray(np.broadcast_to(pairs, (6, 3, 2)), jnp.int32)
    joint = np.exp(jax.vmap(dist.log_prob)(pairs), dtype=np.float64).T

    def softmax(x, allowed):
        weights = np.where(allowed | ~allowed.any(-1, keepdims=True), np.exp(x, dtype=np.float64), 0)
        return weights / weights.sum(-1, keepdims=True)

    left, right = softmax(logits[:, :2], np.asarray(mask[:, :2])), softmax(logits[:, 2:], np.asarray(mask[:, 2:]))
    left[2] = 0.5  # nothing is allowed: for lack of anything better
    np.testing.assert_allclose(joint, (left[:, :, None] * right[:, None]).reshape(3, 6), rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(), scipy.stats.entropy(joint, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(dist.mode()[:2], [[left[i].argmax(), right[i].argmax()] for i in range(2)])
    draws = np.asarray(jax.jit(jax.vmap(dist.sample))(jax.random.split(jax.random.key(1), 4000)))
    assert draws.shape == (4000, 3, 2) and draws.dtype == np.int32
    for row in range(3):
        counts = np.bincount(draws[:, row] @ [3, 1], minlength=6)
        possible = joint[row] > 0
        assert counts[~possible].sum() == 0
        wanted = joint[row][possible] / joint[row].sum()  # SciPy looks at the eighth digit
        assert scipy.stats.chisquare(counts[possible], 4000 * wanted).pvalue > 1e-3


@pytest.mark.parametrize("shared", [False, True])
def test_diagonal_normal_agrees_with_scipy(shared):
    mean, log_std, action = jax.random.normal(jax.random.key(0), (3, 5, 2))
    log_std = log_std[0] if shared else log_std
    dist = DiagonalNormal(mean, log_std)
    oracle = scipy.stats.norm(np.asarray(mean, np.float64), np.broadcast_to(np.exp(log_std), (5, 2)))
    np.testing.assert_allclose(dist.log_prob(action), oracle.logpdf(action).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(), oracle.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(dist.mode(), mean)


def test_diagonal_normal_samples_with_its_mean_and_deviation():
    dist = DiagonalNormal(jnp.asarray([1.0, -2.0]), jnp.log(jnp.asarray([0.5, 3.0])))
    draws = np.asarray(jax.jit(jax.vmap(dist.sample))(jax.random.split(jax.random.key(0), 4000)))
    for i, (mean, std) in enumerate([(1, 0.5), (-2, 3)]):
        assert scipy.stats.kstest(draws[:, i], scipy.stats.norm(mean, std).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.06  # four standard errors


def test_other_types_are_refused():
    half = jnp.zeros((2, 3), jnp.bfloat16)
    with pytest.raises(AssertionError, match="expected float32, got bfloat16"):
        Categorical(half).entropy()
    with pytest.raises(AssertionError, match="expected float32, got bfloat16"):
        DiagonalNormal(half, half).log_prob(half)


def test_a_squashed_normal_has_the_density_of_what_it_draws():
    """Also where tanh is 1 to the last bit, and where the deviation is next to nothing."""
    mean = jnp.asarray([[0.3, -1.2], [9.0, -40.0], [0.0, 2.0]])
    log_std = jnp.asarray([[-0.5, 0.2], [1.0, 2.0], [-20.0, -3.0]])
    dist, key = SquashedNormal(mean, log_std), jax.random.key(3)
    action, log_prob = dist.sample_and_log_prob(key)
    noise, std = np.asarray(jax.random.normal(key, mean.shape), np.float64), np.exp(np.asarray(log_std, np.float64))
    before = np.asarray(mean, np.float64) + std * noise
    cosh = np.logaddexp(before, -before) - np.log(2)  # log cosh; the derivative of tanh is 1 / cosh^2
    density = scipy.stats.norm.logpdf(noise) - np.log(std) + 2 * cosh
    np.testing.assert_allclose(action, np.tanh(before), rtol=1e-6)
    np.testing.assert_allclose(log_prob, density.sum(-1), rtol=1e-5)
    np.testing.assert_allclose(dist.mode(), np.tanh(mean), rtol=1e-6)
    gradient = jax.grad(lambda d: d.sample_and_log_prob(key)[1].sum())(dist)
    assert all(np.isfinite(x).all() for x in gradient)


def test_the_density_of_a_squashed_normal_sums_to_one():
    """Over a grid of (-1, 1): the mean of 1 / density over its draws is the length of the interval."""
    dist = SquashedNormal(jnp.full((20_000, 1), 0.4), jnp.full((20_000, 1), -0.2))
    action, log_prob = dist.sample_and_log_prob(jax.random.key(0))
    inside = np.abs(np.asarray(action)[:, 0]) < 0.9
    assert np.mean(np.where(inside, np.exp(-log_prob), 0.0)) == pytest.approx(1.8, rel=0.02)


@pytest.mark.parametrize("log_std", [-3.0, -1.0, 0.0, 0.7])
@pytest.mark.parametrize("mean", [0.0, 1.0, -3.0])
def test_the_entropy_of_a_tanh_is_that_of_its_draws(mean, log_std):
    """By a fine sum over u; and its gradient, which ends the growth of a deviation that fills the bounds."""

    def exact(log_std):
        std, z = np.exp(log_std), np.linspace(-9, 9, 20_001)
        slope = 2 * (np.log(2) - np.logaddexp(mean + std * z, -mean - std * z))
        return log_std + 0.5 * np.log(2 * np.pi * np.e) + np.sum(slope * scipy.stats.norm.pdf(z)) * (z[1] - z[0])

    def entropy(log_std):
        return BeforeTanh(DiagonalNormal(jnp.full((2, 3), mean), jnp.full((2, 3), log_std))).entropy()[1]

    found, slope = jax.jit(jax.value_and_grad(entropy))(jnp.float32(log_std))
    assert found == pytest.approx(3 * exact(log_std), abs=0.03)
    assert slope == pytest.approx(3 * (exact(log_std + 1e-3) - exact(log_std - 1e-3)) / 2e-3, abs=0.06)
    if mean == 0:
        assert found <= 3 * np.log(2)  # of the uniform one
        assert (slope > 0) == (log_std < -0.1)
