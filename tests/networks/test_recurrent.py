"""Memories: against plain loops in NumPy, forward and by the slope of the loss, and what they forget where an episode begins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp import compose
from rlexp.config import ConfigError, parse
from rlexp.networks import recurrent
from rlexp.networks.base import net

CELLS = ("gru", "lstm")
STEPS, ENVS, UNITS, SIZE = 7, 3, 4, 5
OBSERVATION = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
FIRST = np.zeros((STEPS, ENVS), bool)
FIRST[0, 1] = FIRST[3, 0] = FIRST[3, 1] = FIRST[4, 0] = True
rng = np.random.default_rng(0)
OBS, WEIGHT = rng.normal(size=(STEPS, ENVS, SIZE)), rng.normal(size=(STEPS, ENVS, UNITS))


def torso_of(cell, dtype=jnp.float32):
    node, _ = compose.compose_node([f"network={cell}", f"network.units={UNITS}", "network.torso.hidden=[]"])
    return recurrent.make(recurrent_config(node), observation=OBSERVATION, dtype=dtype)


def recurrent_config(node):
    return parse(dict(node["network"]), recurrent.Config, "network")[0]


def any_params(cell):
    shapes = jax.eval_shape(net(torso_of(cell)).init, jax.random.key(0), jnp.zeros((1, SIZE)))
    draw = np.random.default_rng(1)
    return jax.tree.map(lambda s: draw.normal(size=s.shape) * 0.5, shapes)


def any_memory(cell):
    draw = np.random.default_rng(2)
    return tuple(draw.normal(size=(ENVS, UNITS)) for _ in range(1 if cell == "gru" else 2))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(cell, params, memory, obs, first):
    """(features [T, B, F], memory), one environment and one step after the other, in float64."""
    p = params["params"]
    read, bias, kernel = (np.split(p[name], 3 if cell == "gru" else 4, axis=-1) for name in ("read", "bias", "kernel"))
    features, memories = np.zeros((*first.shape, UNITS)), []
    for b in range(first.shape[1]):
        now = [m[b] for m in memory]
        for t in range(first.shape[0]):
            now = [np.zeros(UNITS) for _ in now] if first[t, b] else now
            x = [obs[t, b] @ w + c for w, c in zip(read, bias, strict=True)]
            h = [now[0] @ w for w in kernel]
            if cell == "gru":
                reset, keep = sigmoid(x[0] + h[0]), sigmoid(x[1] + h[1])
                new = np.tanh(x[2] + reset * (h[2] + p["inner_bias"]))
                now = [keep * now[0] + (1 - keep) * new]
            else:
                write, forget, show = sigmoid(x[0] + h[0]), sigmoid(x[1] + h[1] + 1), sigmoid(x[3] + h[3])
                c = forget * now[1] + write * np.tanh(x[2] + h[2])
                now = [show * np.tanh(c), c]
            features[t, b] = now[0]
        memories.append(now)
    return features, tuple(np.stack(m) for m in zip(*memories, strict=True))


def single(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


@pytest.mark.parametrize("cell", CELLS)
def test_a_window_is_what_a_plain_loop_gives(cell):
    params, memory = any_params(cell), any_memory(cell)
    features, after = net(torso_of(cell)).window(*single((params, memory, OBS)), jnp.asarray(FIRST))
    wanted, wanted_after = by_hand(cell, params, memory, OBS, FIRST)
    np.testing.assert_allclose(features, wanted, atol=1e-6)
    for got, want in zip(after, wanted_after, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_its_gradient_is_the_slope_of_the_plain_loop(cell):
    """Along random directions of parameters, memory and observations at once, by central differences."""
    point = (any_params(cell), any_memory(cell), OBS)
    window = net(torso_of(cell)).window

    def loss(params, memory, obs):
        features, after = window(params, memory, obs, jnp.asarray(FIRST))
        return jnp.sum(features * jnp.asarray(WEIGHT, jnp.float32)) + sum(jnp.sum(jnp.square(m)) for m in after)

    def loss_by_hand(where):
        features, after = by_hand(cell, *where, FIRST)
        return np.sum(features * WEIGHT) + sum(np.sum(np.square(m)) for m in after)

    gradient = jax.grad(loss, argnums=(0, 1, 2))(*single(point))
    for seed in range(3):
        draw = np.random.default_rng(seed)
        along = jax.tree.map(lambda x, draw=draw: draw.normal(size=x.shape), point)
        ends = [loss_by_hand(jax.tree.map(lambda x, d, e=e: x + e * d, point, along)) for e in (-1e-5, 1e-5)]
        slope = sum(np.sum(np.asarray(g) * d) for g, d in zip(*map(jax.tree.leaves, (gradient, along)), strict=True))
        assert slope == pytest.approx((ends[1] - ends[0]) / 2e-5, rel=1e-4)


@pytest.mark.parametrize("cell", CELLS)
def test_step_by_step_is_the_window(cell):
    params, memory = single((any_params(cell), any_memory(cell)))
    made = net(torso_of(cell))
    obs, first = jnp.asarray(OBS, jnp.float32), jnp.asarray(FIRST)
    features, after = made.window(params, memory, obs, first)
    step = jax.jit(made.step)
    for t in range(STEPS):
        out, memory = step(params, memory, obs[t], first[t])
        np.testing.assert_allclose(out, features[t], atol=1e-6)
    assert [m.shape for m in memory] == [m.shape for m in made.carry(ENVS)]
    for got, want in zip(memory, after, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_nothing_crosses_the_beginning_of_an_episode(cell):
    """Environment 0 begins anew at row 3: what was before does not change a bit of what comes after, nor the gradient."""
    params, memory, obs = single((any_params(cell), any_memory(cell), OBS))
    window, first = net(torso_of(cell)).window, jnp.asarray(FIRST)

    def after_the_reset(memory, obs):
        return window(params, memory, obs, first)[0][3:, 0]

    other = after_the_reset(jax.tree.map(lambda m: m + 1, memory), obs.at[:3, 0].add(1.0))
    np.testing.assert_array_equal(other, after_the_reset(memory, obs))
    of_memory, of_obs = jax.grad(lambda *x: jnp.sum(after_the_reset(*x)), argnums=(0, 1))(memory, obs)
    assert not any(np.any(g) for g in of_memory) and not np.any(of_obs[:3]) and np.any(of_obs[3:, 0])


@pytest.mark.parametrize("cell", CELLS)
def test_it_starts_orthogonal_gate_by_gate(cell):
    params = net(torso_of(cell)).init(jax.random.key(0), jnp.zeros((1, SIZE)))["params"]
    gates = np.split(np.asarray(params["kernel"]), 3 if cell == "gru" else 4, axis=1)
    for gate in gates:
        np.testing.assert_allclose(gate @ gate.T, np.eye(UNITS), atol=1e-5)
    assert not np.allclose(gates[0], gates[1])
    assert not np.any(params["bias"])


@pytest.mark.parametrize("cell", CELLS)
def test_memory_stays_float32(cell):
    made = net(torso_of(cell, jnp.bfloat16))
    params = made.init(jax.random.key(0), jnp.zeros((1, SIZE)))
    features, memory = made.window(params, made.carry(ENVS), jnp.asarray(OBS, jnp.float32), jnp.asarray(FIRST))
    assert features.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves((params, memory))} == {jnp.dtype("float32")}


def test_no_memory_behind_a_memory():
    node, _ = compose.compose_node(["network=gru", "network@network.torso=lstm"])
    with pytest.raises(ConfigError, match=r"network\.torso: rlexp\.networks\.recurrent has a memory itself"):
        recurrent.make(recurrent_config(node), observation=OBSERVATION, dtype=jnp.float32)


def test_convolutions_may_stand_before_it():
    node, _ = compose.compose_node(["network=gru", "network@network.torso=cnn", "network.torso.hidden=[4]"])
    image = jax.ShapeDtypeStruct((6, 6, 2), jnp.uint8)
    made = net(recurrent.make(recurrent_config(node), observation=image, dtype=jnp.float32))
    obs = jnp.ones((STEPS, ENVS, 6, 6, 2), jnp.uint8)
    params = made.init(jax.random.key(0), obs[0, :1])
    assert made.window(params, made.carry(ENVS), obs, jnp.asarray(FIRST))[0].shape == (STEPS, ENVS, 128)
