"""The torsos: what they accept, what they give, and how they start."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from rlexp import compose
from rlexp.config import Config, ConfigError, load_module, parse
from rlexp.networks import cnn, lq, mlp
from rlexp.networks.base import flatten_obs, net, split_image
from rlexp.networks.initializers import kernels, orthogonal

CONF = Path(__file__).resolve().parents[2] / "conf" / "network"


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


VECTOR = struct(4)
MASKED = {
    "vector": struct(3),
    "action_mask": struct(5, dtype=bool),
    "flag": struct(dtype=bool),
    "n": struct(2, dtype="int32"),
}
IMAGE = struct(6, 7, 2, dtype=jnp.uint8)
IMAGE_AND_MORE = {"image": IMAGE, "speed": struct(2), "action_mask": struct(5, dtype=bool)}

MLP = mlp.Config(module="rlexp.networks.mlp", hidden=[16, 8], activation="tanh", layer_norm=False, remat=False)
CNN = cnn.Config(
    module="rlexp.networks.cnn",
    features=[4, 3],
    kernel_sizes=[3, 2],
    strides=[1, 2],
    hidden=[8],
    activation="relu",
    layer_norm=False,
    remat=False,
)
LQ = lq.Config(
    module="rlexp.networks.lq",
    units=8,
    heads=2,
    latents=3,
    layers=1,
    hidden=[8],
    activation="tanh",
    layer_norm=False,
    remat=False,
)
SETS = {"cars": struct(5, 3), "ego": struct(4), "action_mask": struct(5, dtype=bool)}
KINDS = {
    "mlp": (mlp, MLP, VECTOR),
    "mlp, dict": (mlp, MLP, MASKED),
    "mlp, layer norm": (mlp, dataclasses.replace(MLP, layer_norm=True), VECTOR),
    "cnn": (cnn, CNN, IMAGE),
    "lq": (lq, LQ, VECTOR),
    "lq, sets": (lq, LQ, SETS),
    "cnn, dict, layer norm": (cnn, dataclasses.replace(CNN, layer_norm=True), IMAGE_AND_MORE),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind, dtype=jnp.float32, **changes):
    module, config, observation = KINDS[kind]
    return module.make(dataclasses.replace(config, **changes), observation=observation, dtype=dtype)


def draw(observation, *leading, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(
            rng.integers(0, 200, (*leading, *s.shape))
            if s.dtype != jnp.float32
            else rng.normal(size=(*leading, *s.shape))
        ).astype(s.dtype),
        observation,
    )


def any_params(kind, seed=2):
    """Parameters with random numbers in all of them, biases too."""
    rng = np.random.default_rng(seed)
    structs = jax.eval_shape(build(kind).init, jax.random.key(0), draw(KINDS[kind][2]))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.4, s.dtype), structs)


# --- observations ----------------------------------------------------------------------------------------------------


def test_flatten_obs_puts_all_leaves_but_the_mask_side_by_side():
    obs = {
        "vector": jnp.asarray([[1.5, 2, 3]]),
        "action_mask": jnp.ones((1, 5), bool),
        "flag": jnp.asarray([True]),
        "n": jnp.asarray([[7, 8]], jnp.int32),
    }
    flat = flatten_obs(obs, MASKED)
    np.testing.assert_array_equal(flat, [[1, 7, 8, 1.5, 2, 3]])  # by name: flag, n, vector
    assert flat.dtype == jnp.float32
    assert flatten_obs(obs, MASKED, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_flatten_obs_keeps_leading_axes():
    nested = (struct(2, 3), {"x": struct()})
    for leading in [(), (5,), (5, 2)]:
        assert flatten_obs(draw(nested, *leading), nested).shape == (*leading, 7)


def test_split_image_scales_bytes_only():
    obs = {
        "image": jnp.full((6, 7, 2), 255, jnp.uint8),
        "speed": jnp.asarray([5.0, 6.0]),
        "action_mask": jnp.ones(5, bool),
    }
    image, others = split_image(obs, IMAGE_AND_MORE)
    np.testing.assert_array_equal(image, np.ones((6, 7, 2)))
    np.testing.assert_array_equal(others, [5, 6])
    for dtype in (bool, jnp.float32):
        image, others = split_image(jnp.ones((3, 6, 7, 2), dtype), struct(6, 7, 2, dtype=dtype))
        np.testing.assert_array_equal(image, np.ones((3, 6, 7, 2)))
        assert others is None


# --- the contract of all torsos --------------------------------------------------------------------------------------


@every_kind
def test_any_leading_axes_give_the_same_features(kind):
    torso, observation = build(kind), KINDS[kind][2]
    obs, params = draw(observation, 3, 2), any_params(kind)

    @jax.jit
    def apply(params, obs):
        return torso.apply(params, obs), torso.apply(params, jax.tree.map(lambda x: x[1, 0], obs))

    features, alone = apply(params, obs)
    assert features.shape == (3, 2, 8)
    np.testing.assert_allclose(alone, features[1, 0], rtol=1e-5, atol=1e-6)
    assert np.abs(features).max() > 0


@every_kind
def test_compute_is_in_dtype_and_parameters_are_float32(kind):
    obs, params = draw(KINDS[kind][2], 3), any_params(kind)
    exact, short = (jax.jit(build(kind, dtype).apply)(params, obs) for dtype in (jnp.float32, jnp.bfloat16))
    assert exact.dtype == jnp.float32
    assert short.dtype == jnp.bfloat16
    np.testing.assert_allclose(short.astype(jnp.float32), exact, rtol=0.1, atol=0.1)
    created = jax.eval_shape(build(kind, jnp.bfloat16).init, jax.random.key(0), obs)
    assert {x.dtype for x in jax.tree.leaves(created)} == {jnp.dtype(jnp.float32)}


@every_kind
def test_every_leaf_but_the_mask_matters(kind):
    observation = KINDS[kind][2]
    obs, params, apply = draw(observation, 2), any_params(kind), jax.jit(build(kind, activation="gelu").apply)
    other = draw(observation, 2, seed=1)
    features = np.asarray(apply(params, obs))
    for name in observation if isinstance(observation, dict) else [None]:
        changed = other if name is None else obs | {name: ~obs[name] if obs[name].dtype == bool else other[name]}
        assert np.array_equal(apply(params, changed), features) == (name == "action_mask"), name


@pytest.mark.parametrize("kind", ["mlp, layer norm", "cnn"])
def test_remat_computes_again_and_changes_nothing(kind):
    obs, params = draw(KINDS[kind][2], 4), any_params(kind)
    plain, again = build(kind), build(kind, remat=True)
    created = jax.eval_shape(again.init, jax.random.key(0), obs)
    assert jax.tree.structure(created) == jax.tree.structure(params)

    def loss(torso):
        return lambda params: jnp.sum(jnp.square(torso.apply(params, obs)))

    value, gradient = jax.jit(jax.value_and_grad(loss(plain)))(params)
    value_again, gradient_again = jax.jit(jax.value_and_grad(loss(again)))(params)
    np.testing.assert_allclose(value_again, value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradient_again, gradient)
    names = [{e.primitive.name for e in jax.make_jaxpr(loss(torso))(params).eqns} for torso in (plain, again)]
    remat = {"remat2", "checkpoint"}  # its name in one version of JAX or another
    assert not remat & names[0]
    assert remat & names[1]


@every_kind
def test_torsos_can_be_hashed_and_compared(kind):
    assert hash(build(kind)) == hash(build(kind))
    assert build(kind) == build(kind)
    assert build(kind) != build(kind, activation="silu")


def test_layer_norm_makes_the_features_blind_to_the_scale_of_the_layer():
    apply, params = jax.jit(build("mlp, layer norm").apply), any_params("mlp, layer norm")
    obs = draw(VECTOR, 5)
    louder = {"params": params["params"] | {"Dense_0": jax.tree.map(lambda x: 10 * x, params["params"]["Dense_0"])}}
    np.testing.assert_allclose(apply(louder, obs), apply(params, obs), rtol=1e-3, atol=1e-3)


# --- initialisers ----------------------------------------------------------------------------------------------------


def test_kernels_start_orthogonal_with_gain_sqrt_2_and_biases_at_zero():
    torso = build("cnn, dict, layer norm")
    params = jax.jit(torso.init)(jax.random.key(0), draw(IMAGE_AND_MORE))["params"]
    assert sorted(params) == ["Conv_0", "Conv_1", "Dense_0", "LayerNorm_0", "LayerNorm_1", "LayerNorm_2"]
    assert params["Dense_0"]["kernel"].shape == (2 * 2 * 3 + 2, 8)  # 6x7 -> 4x5 -> 2x2, 3 channels, and the speed
    for name in ("Conv_0", "Conv_1", "Dense_0"):
        kernel = np.asarray(params[name]["kernel"]).reshape(-1, params[name]["kernel"].shape[-1])
        np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(kernel.shape[1]), atol=1e-5)
        np.testing.assert_array_equal(params[name]["bias"], 0)


def test_orthogonal_decomposes_one_matrix_after_the_other_under_vmap():
    init = orthogonal(math.sqrt(2))
    keys = jax.random.split(jax.random.key(0), (2, 3))
    lowered = jax.jit(jax.vmap(jax.vmap(lambda key: init(key, (5, 4), jnp.float32)))).lower(keys)
    decompositions = [line for line in lowered.as_text().splitlines() if "geqrf" in line]
    assert decompositions
    assert all("(tensor<5x4xf32>)" in line for line in decompositions)

    together, alone = lowered.compile()(keys), jax.jit(lambda key: init(key, (5, 4), jnp.float32))
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(together[i, j], alone(keys[i, j]), atol=1e-6)


# --- lq ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lq_sees_which_row_is_where_and_no_row_of_zeros():
    module, params = build("lq, sets"), any_params("lq, sets")
    obs = draw(SETS, 2)
    features = module.apply(params, obs)
    turned = obs | {"cars": obs["cars"][:, ::-1]}
    assert np.abs(module.apply(params, turned) - features).max() > 1e-3
    turned_too = {"params": params["params"] | {"leaf_0_places": params["params"]["leaf_0_places"][::-1]}}
    np.testing.assert_allclose(module.apply(turned_too, turned), features, atol=1e-5)
    fewer = obs | {"cars": obs["cars"].at[:, 2].set(0.0)}
    assert np.abs(module.apply(params, fewer) - features).max() > 1e-3
    bias = {"params": params["params"] | {"leaf_0": jax.tree.map(lambda x: x + 1.0, params["params"]["leaf_0"])}}
    nobody = obs | {"cars": jnp.zeros((2, 5, 3))}
    np.testing.assert_allclose(module.apply(bias, nobody), module.apply(params, nobody), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"), [({"units": 9}, "network.units: 9 is not allowed"), ({"hidden": []}, "network.hidden")]
)
def test_lq_refuses_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ConfigError, match=message):
        build("lq", **changes)


# --- configuration ---------------------------------------------------------------------------------------------------


# Those that are composed of others have tests of their own.
@pytest.mark.parametrize("name", [p.stem for p in sorted(CONF.glob("*.yaml")) if "defaults:" not in p.read_text()])
def test_every_yaml_builds_a_torso(name):
    node = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    module = load_module(node["module"], "network")
    config, _ = parse(node, module.Config, "network")
    images = {
        "cnn": struct(10, 10, 4, dtype=bool),  # MinAtar
        "nature_cnn": struct(84, 84, 4, dtype=np.uint8),  # Atari
    }
    observation = images.get(name, struct(4))
    torso = module.make(config, observation=observation, dtype=jnp.float32)
    features, _ = jax.eval_shape(torso.init_with_output, jax.random.key(0), draw(observation, 2))
    assert features.shape == (2, config.hidden[-1])


@pytest.mark.parametrize(
    ("observation", "shown"),
    [(struct(4), "(4,)"), ({"a": struct(8, 8, 3), "b": struct(8, 8, 1)}, "{'a': (8, 8, 3), 'b': (8, 8, 1)}")],
    ids=["none", "two"],
)
def test_cnn_needs_exactly_one_image(observation, shown):
    with pytest.raises(ConfigError) as error:
        cnn.make(CNN, observation=observation, dtype=jnp.float32)
    assert str(error.value) == (
        f"network: cnn needs exactly one image [H, W, C] in the observation; got {shown}; use network=mlp"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strides": [1]}, "one entry for each convolution; got {'features': 2, 'kernel_sizes': 2, 'strides': 1}"),
        ({"kernel_sizes": [3, 5]}, "network.kernel_sizes: [3, 5] do not fit into an image of (6, 7, 2)"),
    ],
)
def test_cnn_refuses_convolutions_that_do_not_fit(changes, message):
    with pytest.raises(ConfigError) as error:
        cnn.make(dataclasses.replace(CNN, **changes), observation=IMAGE, dtype=jnp.float32)
    assert message in str(error.value)


def test_mlp_needs_something_to_see():
    with pytest.raises(ConfigError, match="mlp needs an observation"):
        mlp.make(MLP, observation={"action_mask": struct(3, dtype=bool)}, dtype=jnp.float32)


def test_an_unknown_activation_names_the_nearest():
    node = yaml.safe_load((CONF / "mlp.yaml").read_text()) | {"activation": "rely"}
    with pytest.raises(ConfigError, match=r'network\.activation: .*did you mean "relu"'):
        parse(node, mlp.Config, "network")


VARIANCES = {"lecun": lambda i, o: 1 / i, "he": lambda i, o: 2 / i, "glorot": lambda i, o: 2 / (i + o)}


@pytest.mark.parametrize("law", ["normal", "uniform"])
@pytest.mark.parametrize("name", VARIANCES)
def test_other_initialisers_have_the_variance_of_their_name(name, law):
    """In a dense layer and in a convolution, whose inputs are all that a window sees; without the gain of orthogonal ones."""
    torso = build("cnn", features=[32, 64], hidden=[256], initialiser=f"{name}_{law}")
    params = jax.jit(torso.init)(jax.random.key(0), draw(IMAGE))["params"]
    for layer, inputs, outputs in (("Conv_1", 2 * 2 * 32, 2 * 2 * 64), ("Dense_0", 2 * 2 * 64, 256)):
        kernel = np.asarray(params[layer]["kernel"])
        expected = VARIANCES[name](inputs, outputs)
        np.testing.assert_allclose([kernel.var() / expected, kernel.mean() / math.sqrt(expected)], [1, 0], atol=0.1)
        assert (np.abs(kernel).max() <= math.sqrt(3 * expected)) == (law == "uniform")
        np.testing.assert_array_equal(params[layer]["bias"], 0)


def test_a_scale_multiplies_every_initialiser():
    keys = [jax.random.key(3)] * 2
    for name in ("orthogonal", "lecun_normal", "glorot_uniform"):
        one, ten = (
            kernels(name, scale)(key, (6, 4), jnp.float32) for key, scale in zip(keys, (1.0, 10.0), strict=True)
        )
        np.testing.assert_allclose(10 * one, ten, rtol=1e-6)


@pytest.mark.parametrize("network", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_every_network_has_the_choice_for_all_its_kernels_and_is_orthogonal_by_default(network):
    observation = {"cnn": struct(5, 5, 2), "nature_cnn": struct(36, 36, 1)}.get(network, VECTOR)
    before = ["network.torso.initialiser=lecun_normal"] * (network in ("gru", "lstm", "transformer"))

    def decompositions(*overrides):
        node, _ = compose.compose_node([f"network={network}", "logger=quiet", *overrides])
        if not overrides:
            del node["network"]["initialiser"]  # as in a config.yaml of before
        config = parse(node, Config)[0].network
        functions = net(load_module(config.module, "network").make(config, observation=observation, dtype=jnp.float32))
        return str(jax.make_jaxpr(functions.init)(jax.random.key(0), draw(observation, 1))).count("= qr[")

    assert decompositions() > 0
    assert decompositions("network.initialiser=lecun_normal", *before) == 0
