"""Outputs on a torso, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from rlexp.networks.heads import DuellingHead


class Torso(nn.Module):
    """Observations as features."""

    def __call__(self, obs):
        return obs


def test_duelling_streams_are_a_value_and_advantages_of_mean_0():
    head, obs = DuellingHead(Torso(), 3, 2, jnp.float32), jax.random.normal(jax.random.key(0), (7, 5))
    params = head.init(jax.random.key(1), obs)
    params = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    layers = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    assert {name: layer["kernel"].shape for name, layer in layers.items()} == {
        "Dense_0": (5, 5),  # as wide as the features
        "Dense_1": (5, 2),
        "Dense_2": (5, 5),
        "Dense_3": (5, 6),
    }

    def dense(name, x):
        return x @ layers[name]["kernel"] + layers[name]["bias"]

    def stream(hidden, out):
        return dense(out, np.maximum(dense(hidden, np.asarray(obs, np.float64)), 0))

    value, advantage = stream("Dense_0", "Dense_1"), stream("Dense_2", "Dense_3").reshape(7, 3, 2)
    expected = value[:, None] + advantage - advantage.mean(axis=1, keepdims=True)
    out = np.asarray(head.apply(params, obs)).reshape(7, 3, 2)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.mean(axis=1), value, rtol=1e-5, atol=1e-5)  # of all actions: the state's value


def test_duelling_outputs_are_float32_under_bfloat16():
    head, obs = DuellingHead(Torso(), 3, 1, jnp.bfloat16), jnp.ones((4, 2, 5), jnp.bfloat16)
    params = head.init(jax.random.key(1), obs)
    out = jax.eval_shape(head.apply, params, obs)
    assert (out.shape, out.dtype) == ((4, 2, 3), jnp.float32)
