"""Every network of conf/network/ has derivatives in forward mode: for natural gradients, Hessian-vector products, meta-learning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlexp import compose
from rlexp.config import Config, load_module, parse
from rlexp.networks.base import net
from rlexp.networks.heads import head_on

SIZES = ("mlp_1m", "mlp_5m", "mlp_25m", "nature_cnn")  # of mlp and cnn: small, they are all one
NETWORKS = sorted({path.stem for path in (compose.CONF_DIR / "network").glob("*.yaml")} - {*SIZES})
OBSERVATION = {"image": jax.ShapeDtypeStruct((5, 5, 2), jnp.float32), "speed": jax.ShapeDtypeStruct((3,), jnp.float32)}
SMALL = {"hidden": [6], "features": [3], "units": 8, "heads": 2, "context": 3, "layers": 1}


def small(node):
    sizes = SMALL | ({"hidden": 6} if isinstance(node.get("hidden"), int) else {})
    smaller = {name: sizes.get(name, value) for name, value in node.items()}
    # A kink, as relu has it, is no place for finite differences.
    smaller |= {name: "silu" for name in ("activation",) if name in node}
    return smaller | ({"torso": small(node["torso"])} if "torso" in node else {})


def loss_of(network, dtype, *, remat=False):
    """A loss over a window of a small one of its kind, and parameters with random numbers in all of them."""
    node, _ = compose.compose_node([f"network={network}", "logger=quiet"])
    node["network"] = small(node["network"]) | ({"remat": True} if remat else {})
    config = parse(node, Config)[0].network
    torso = load_module(config.module, "network").make(config, observation=OBSERVATION, dtype=dtype)
    functions = net(head_on(torso, 2, scale=1.0, dtype=dtype))
    rng = np.random.default_rng(3)

    def draw(struct, *lead):
        return jnp.asarray(rng.normal(size=(*lead, *struct.shape)) * 0.5, struct.dtype)

    obs = jax.tree.map(lambda struct: draw(struct, 4, 3), OBSERVATION)
    one = jax.tree.map(lambda x: x[0, :1], obs)
    structs = jax.eval_shape(functions.init, jax.random.key(0), one)
    first = jnp.zeros((4, 3), bool).at[0].set(True).at[2, 1].set(True)

    def loss(params):
        return jnp.mean(jnp.sin(functions.window(params, functions.carry(3), obs, first)[0]))

    return loss, [jax.tree.map(draw, structs) for _ in range(3)]


def dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def both_ways(loss):
    def derivatives(at, u, v):
        gradient = jax.grad(loss)
        of_u, of_v = (jax.jvp(gradient, (at,), (along,))[1] for along in (u, v))
        return {
            "slope": jax.jvp(loss, (at,), (u,))[1],
            "slope by the gradient": dot(gradient(at), u),
            "linearized": jax.linearize(loss, at)[1](u),
            "hvp": of_u,
            "hvp by reverse over reverse": jax.grad(lambda at: dot(gradient(at), u))(at),
            "u H v": dot(u, of_v),
            "v H u": dot(v, of_u),
        }

    return derivatives


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def each(networks, slow):
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in networks]


@pytest.mark.parametrize("network", each(NETWORKS, slow=("gru", "lq", "lstm", "transformer")))
def test_derivatives_agree_with_each_other_and_with_differences(network):
    loss, (at, u, v) = loss_of(network, jnp.float32)
    found = jax.jit(both_ways(loss))(at, u, v)
    np.testing.assert_allclose(found["slope"], found["slope by the gradient"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["slope"], found["linearized"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["u H v"], found["v H u"], rtol=1e-3, atol=1e-5)
    hvp, again = flat(found["hvp"]), flat(found["hvp by reverse over reverse"])
    np.testing.assert_allclose(hvp, again, rtol=1e-3, atol=1e-5 * np.abs(hvp).max())

    @jax.jit
    def differences(step):
        there, back = (jax.tree.map(lambda x, d, s=s: x + s * d, at, u) for s in (step, -step))
        slope = (loss(there) - loss(back)) / (2 * step)
        return slope, jax.tree.map(lambda a, b: (a - b) / (2 * step), jax.grad(loss)(there), jax.grad(loss)(back))

    slope, of_gradient = differences(jnp.float32(3e-3))
    np.testing.assert_allclose(found["slope"], slope, rtol=1e-2, atol=3e-4)
    assert np.linalg.norm(hvp - flat(of_gradient)) < 2e-2 * np.linalg.norm(hvp)


@pytest.mark.parametrize("network", each(("cnn", "gru", "mlp", "transformer"), slow=("gru", "transformer")))
def test_in_bfloat16_and_for_members_with_remat_they_are_near(network):
    remat = network != "gru"  # which has none
    exact, (at, u, v) = loss_of(network, jnp.float32)
    short, _ = loss_of(network, jnp.bfloat16, remat=remat)
    members = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), u)
    found = jax.jit(jax.vmap(both_ways(short), (None, 0, None)))(at, members, v)
    expected = jax.jit(jax.vmap(both_ways(exact), (None, 0, None)))(at, members, v)
    for name in expected:
        a, b = flat(found[name]), flat(expected[name])
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b) + 0.01, name
        assert {x.dtype for x in jax.tree.leaves(found[name])} == {jnp.dtype(jnp.float32)}
