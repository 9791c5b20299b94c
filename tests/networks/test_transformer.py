"""The transformer: against a plain loop in NumPy, step by step and in windows of any cut, and what it sees of an episode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from support import build

from rlexp import compose
from rlexp.config import ConfigError, parse
from rlexp.networks import transformer
from rlexp.networks.base import net
from rlexp.networks.transformer import Memory

STEPS, ENVS, UNITS, SIZE, LAYERS, HEADS, CONTEXT = 20, 3, 8, 5, 2, 2, 4
OBSERVATION = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
rng = np.random.default_rng(0)
OBS = rng.normal(size=(STEPS, ENVS, SIZE))
FIRST = rng.random((STEPS, ENVS)) < 0.15  # episodes longer than the context are among them
FIRST[:, 2] = False
FIRST[-2:, 0] = (True, False)


def torso_of(*overrides, dtype=jnp.float32):
    sizes = dict(units=UNITS, layers=LAYERS, heads=HEADS, hidden=6, context=CONTEXT)
    node, _ = compose.compose_node(
        ["network=transformer", *(f"network.{k}={v}" for k, v in sizes.items()), "network.torso.hidden=[]", *overrides]
    )
    config = parse(dict(node["network"]), transformer.Config, "network")[0]
    return transformer.make(config, observation=OBSERVATION, dtype=dtype)


MADE = net(torso_of())
SHAPES = jax.eval_shape(MADE.init, jax.random.key(0), jnp.zeros((1, SIZE)))
PARAMS = jax.tree.map(lambda s: np.random.default_rng(s.size).normal(size=s.shape) * 0.5, SHAPES)


def any_memory() -> Any:
    """Of episodes that have gone on for none, two and more rows than are remembered."""
    draw: Any = np.random.default_rng(2)
    key, value = (draw.normal(size=(ENVS, CONTEXT, LAYERS, UNITS)) for _ in range(2))
    length: Any = np.array([0, 2, CONTEXT])
    return Memory(key, value, length)


def single(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32), tree)


window, step = jax.jit(MADE.window), jax.jit(MADE.step)


def norm(p, x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-6) * p["scale"] + p["bias"]


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def by_hand(params, memory, obs, first):
    """(features [T, B, F], what each layer remembers of each environment), row by row with lists, in float64."""
    p, features, kept = params["params"], np.zeros((*first.shape, UNITS)), []
    for b in range(first.shape[1]):
        length = int(memory.length[b])
        history = [
            [(memory.key[b, c, i], memory.value[b, c, i]) for c in range(CONTEXT - length, CONTEXT)]
            for i in range(LAYERS)
        ]
        for t in range(first.shape[0]):
            history = [[] for _ in history] if first[t, b] else history
            x = dense(p["read"], obs[t, b])
            for i in range(LAYERS):
                layer = p[f"layer_{i}"]
                y = norm(layer["LayerNorm_0"], x)
                query, key, value = (dense(layer[name], y) for name in ("query", "key", "value"))
                rows = [*history[i], (key, value)][-CONTEXT - 1 :]
                out = []
                for h in range(HEADS):
                    of = slice(h * UNITS // HEADS, (h + 1) * UNITS // HEADS)
                    content, place = query[of] + layer["content_bias"][of], query[of] + layer["place_bias"][of]
                    logits = [
                        content @ k[of] + place @ layer["distance"][h, :, d] for d, (k, _) in enumerate(reversed(rows))
                    ]
                    weights = softmax(np.array(logits) / np.sqrt(UNITS // HEADS))
                    out.append(sum(w * v[of] for w, (_, v) in zip(weights, reversed(rows), strict=True)))
                history[i] = rows[-CONTEXT:]
                x = x + dense(layer["attended"], np.concatenate(out))
                up = dense(layer["up"], norm(layer["LayerNorm_1"], x))
                x = x + dense(layer["down"], up * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3))))
            features[t, b] = norm(p["LayerNorm_0"], x)
        kept.append(history)
    return features, kept


def test_a_window_is_what_a_plain_loop_gives():
    memory = any_memory()
    features, after = window(*single((PARAMS, memory, OBS)), jnp.asarray(FIRST))
    wanted, kept = by_hand(PARAMS, memory, OBS, FIRST)
    np.testing.assert_allclose(features, wanted, atol=2e-5)
    for b, history in enumerate(kept):
        length = int(after.length[b])
        assert length == len(history[0]) <= CONTEXT
        for i, rows in enumerate(history):
            for place, pair in enumerate(rows):
                at = (b, CONTEXT - length + place, i)
                np.testing.assert_allclose((after.key[at], after.value[at]), pair, atol=2e-5)
    assert {len(history[0]) for history in kept} > {CONTEXT}


@pytest.mark.parametrize("seed", range(3))
def test_acting_step_by_step_is_learning_from_windows_wherever_they_are_cut(seed):
    """Over random beginnings of episodes and random cuts, from any memory."""
    draw = np.random.default_rng(seed)
    params, memory, obs = single((PARAMS, any_memory(), OBS))
    first = jnp.asarray(draw.random((STEPS, ENVS)) < draw.choice([0.0, 0.1, 0.5]))
    acted, now = [], memory
    for t in range(STEPS):
        out, now = step(params, now, obs[t], first[t])
        acted.append(out)
    at, learnt, then = 0, [], memory
    while at < STEPS:
        end = min(STEPS, at + int(draw.choice([1, 3, 7])))  # 7 is longer than the context
        out, then = window(params, then, obs[at:end], first[at:end])
        learnt.extend(out)
        at = end
    np.testing.assert_allclose(np.stack(acted), np.stack(learnt), atol=2e-5)
    np.testing.assert_array_equal(now.length, then.length)
    remembered = np.arange(CONTEXT) >= CONTEXT - np.asarray(now.length)[:, None]
    for ours, theirs in ((now.key, then.key), (now.value, then.value)):
        np.testing.assert_allclose(ours[remembered], theirs[remembered], atol=2e-5)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), now) == jax.tree.map(
        lambda x: (x.shape, x.dtype), MADE.carry(ENVS)
    )


def test_an_episode_may_be_longer_than_the_context():
    """Only the last rows count, two layers deep, and not when they were."""
    params, obs = single((PARAMS, OBS[:, :1]))
    reach = LAYERS * CONTEXT + 1
    begins = jnp.zeros((STEPS, 1), bool).at[0].set(True)

    def last(obs, row=-1):
        return np.asarray(window(params, MADE.carry(1), obs, begins)[0][row])

    assert reach + 3 < STEPS
    np.testing.assert_allclose(last(obs.at[: STEPS - reach].add(1.0)), last(obs), atol=1e-5)
    assert np.abs(last(obs.at[STEPS - reach].add(1.0)) - last(obs)).max() > 1e-4
    np.testing.assert_allclose(last(jnp.roll(obs, 3, axis=0)), last(obs, -4), atol=1e-5)


def test_nothing_crosses_the_beginning_of_an_episode():
    """What was before does not change a bit of what comes after, nor the gradient."""
    params, memory, obs = single((PARAMS, any_memory(), OBS))
    first = jnp.asarray(FIRST).at[5, 0].set(True)

    def after_the_reset(memory, obs):
        return window(params, memory, obs, first)[0][5:, 0]

    other = after_the_reset(memory._replace(key=memory.key + 1, length=memory.length + 3), obs.at[:5, 0].add(1.0))
    np.testing.assert_array_equal(other, after_the_reset(memory, obs))
    slope = jax.grad(lambda key, obs: jnp.sum(after_the_reset(memory._replace(key=key), obs)[:, 0]), argnums=(0, 1))
    of_memory, of_obs = jax.jit(slope)(memory.key, obs)
    assert not np.any(of_memory) and not np.any(of_obs[:5]) and np.any(of_obs[5:, 0])


def test_computing_activations_again_changes_no_gradient():
    arguments = (*single((PARAMS, any_memory(), OBS)), jnp.asarray(FIRST))

    def gradient(made):
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(made.window(p, *arguments[1:])[0][..., 0]))))(arguments[0])

    ours, theirs = gradient(net(torso_of("network.remat=true"))), gradient(MADE)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.any(a)  # each parameter counts


def test_bfloat16_is_near_and_remembers_in_its_type():
    made = net(torso_of(dtype=jnp.bfloat16))
    params, obs = single((PARAMS, OBS))
    wanted, _ = window(params, MADE.carry(ENVS), obs, jnp.asarray(FIRST))
    features, memory = jax.jit(made.window)(params, made.carry(ENVS), obs, jnp.asarray(FIRST))
    assert features.dtype == memory.key.dtype == jnp.bfloat16 and memory.length.dtype == jnp.int32
    assert np.mean(np.abs(features.astype(jnp.float32) - wanted)) < 0.05


def test_what_does_not_fit_is_told_in_one_line():
    with pytest.raises(
        ConfigError, match=r"^network.heads: 3 does not divide network.units 8; the nearest that fits is 2"
    ):
        torso_of("network.heads=3")
    with pytest.raises(ConfigError, match=r"^network.torso: rlexp.networks.recurrent has a memory itself"):
        build("network=transformer", "network@network.torso=gru")
