"""What a program computes in, seen in the program: bfloat16 products, and float32 wherever something is summed or learnt."""

import jax
import pytest
from jax.extend import core
from support import build, command_line, equations

from rlexp.modes import hlo
from rlexp.training import program
from rlexp.training.layout import layout_of

NETWORKS = {
    "mlp": ("env=gymnax/cartpole", "network.hidden=[24,40]"),
    "transformer": ("env=gymnax/cartpole", "network=transformer", "network.torso.hidden=[24]", "network.units=40"),
    "cnn": ("env=gymnax/breakout", "network=cnn", "network.features=[24]", "network.hidden=[40]"),
    "lq": ("env=gymnax/cartpole", "network=lq", "network.units=24", "network.latents=8", "network.hidden=[40]"),
}
SMALL = ("algo.num_envs=32", "algo.num_steps=16", "algo.num_epochs=1", "total_env_steps=1e6")

# In bfloat16 values may be computed by a layer, moved, and turned into something better; not summed or exponentiated.
LAYERS = {"dot_general", "conv_general_dilated", "tanh", "max", "add", "add_any", "sub", "mul", "neg", "select_n"}
LAYERS |= {"convert_element_type", "integer_pow", "gt", "div"}
LAYERS |= {"one_minus_square"}  # since jax 0.11, in the derivative of tanh
MOVES = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "rev", "copy", "pad"}
MOVES |= {
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "optimization_barrier",
    "layout_constraint",
    "split",
    "stack",
}
MOVES |= {"bitcast_convert_type"}  # where what is remembered is shuffled with its rows


def update(*overrides: str) -> list[core.JaxprEqn]:
    experiment = build("algo=ppo", *SMALL, *overrides)
    layout = layout_of([experiment])
    shapes = program.trace([experiment], layout).abstract_run
    one = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), shapes)
    return list(equations(jax.make_jaxpr(lambda run: program.update_once(experiment, layout, run))(one).jaxpr))


def dtypes(variables) -> set[str]:
    return {str(v.aval.dtype) for v in variables if hasattr(v.aval, "dtype")}


@pytest.mark.parametrize("network", NETWORKS)
def test_only_layers_are_in_bfloat16(network):
    found = update("precision=bf16", *NETWORKS[network])
    products = [e for e in found if e.primitive.name in ("dot_general", "conv_general_dilated")]
    assert all(dtypes(e.invars) == {"bfloat16"} for e in products)
    # The outputs of the two heads, acting and learning, and the gradients of all kernels.
    assert {"float32", "bfloat16"} == {str(e.outvars[0].aval.dtype) for e in products}
    others = {e.primitive.name for e in found if "bfloat16" in dtypes([*e.invars, *e.outvars])}
    # A bias's gradient is a sum of bfloat16 values, in float32.
    assert others - LAYERS - MOVES == set()
    sums = [e for e in found if e.primitive.name == "reduce_sum"]
    assert sums and all("bfloat16" not in dtypes(e.invars) for e in sums)


def test_the_state_is_float32_whatever_networks_compute_in():
    experiment = build("algo=ppo", *SMALL, "precision=bf16", "algo.normalize_observations=true")
    run = program.trace([experiment], layout_of([experiment])).abstract_run
    floats = {str(s.dtype) for s in jax.tree.leaves(run) if jax.numpy.issubdtype(s.dtype, jax.numpy.floating)}
    assert floats == {"float32"}


def test_precision_f32_has_no_bfloat16():
    found = update("precision=f32", *NETWORKS["mlp"])
    assert "bfloat16" not in set().union(*(dtypes([*e.invars, *e.outvars]) for e in found))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_the_program_for_a_tpu(network, tmp_path):
    """Compiled for four chips: bfloat16 factors, gradients of kernels that come out in float32, and are summed in it."""
    module = compiled(tmp_path, "precision=bf16", *NETWORKS[network])
    results = set()
    for body in module.computations.values():
        for x in body.instructions.values():
            if x.op in ("dot", "convolution"):
                assert {body.instructions[o].shapes[0].dtype for o in x.operands} == {"bf16"}, x
                results.add(x.shapes[0].dtype)
            if x.op.startswith("all-reduce"):
                assert {s.dtype for s in x.shapes} <= {"f32", "s32", "u32"}, x
    assert results == {"bf16", "f32"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_program_for_a_tpu_in_f32(tmp_path):
    """A TPU multiplies in bfloat16 unless it is told not to."""
    module = compiled(tmp_path, "precision=f32", *NETWORKS["mlp"])
    products = [
        x for body in module.computations.values() for x in body.instructions.values() if x.op in ("dot", "convolution")
    ]
    assert products and all("operand_precision={highest,highest}" in x.attributes for x in products)


def compiled(tmp_path, *overrides: str) -> hlo.Module:
    run = ("algo=ppo", *SMALL, *overrides, "hydra.run.dir=run")
    done = command_line(tmp_path, "hardware=v4-8", "run=plan", *run, tpu_compiler=True)
    assert done.returncode == 0, done.stderr
    return hlo.parse((tmp_path / "run/program.hlo").read_text())
