"""What is counted in HLO: against programs whose cost is known, and against texts as the TPU and GPU compilers write them."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from rlexp.modes import hlo
from rlexp.modes.cost import Collective, Cost, Traffic, cost


def cost_of(f, *args) -> tuple[Cost, dict]:
    compiled = jax.jit(f).lower(*args).compile()
    return cost(hlo.parse(compiled.as_text())), compiled.cost_analysis()


def text(body: str, more: str = "") -> Cost:
    return cost(hlo.parse(f"HloModule m\n{more}\nENTRY %main (x: f32[8,4]) -> f32[8,4] {{\n{body}\n}}\n"))


X, W = jnp.ones((32, 16)), jnp.ones((16, 16))


def test_a_product():
    found, xla = cost_of(lambda x, w: x @ w, X, W)
    assert found.flops.total() == 2 * 32 * 16 * 16 == xla["flops"]
    assert found.bytes == 4 * (32 * 16 + 16 * 16 + 32 * 16) == xla["bytes accessed"]


def test_loops_count_by_their_trips():
    def f(x, w):
        outer = lambda x, _: (jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0], None)  # noqa: E731
        return jax.lax.scan(outer, x, None, length=7)[0]

    found, _ = cost_of(f, X, W)
    assert found.flops.total() == 35 * 2 * 32 * 16 * 16
    assert found.dynamic_loops == 0


def test_a_loop_without_a_count_is_one_trip():
    found, _ = cost_of(lambda x, w, n: jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x), X, W, jnp.int32(3))
    assert found.flops.total() == 2 * 32 * 16 * 16
    assert found.dynamic_loops == 1


def test_of_a_stack_each_trip_reads_and_writes_its_own_row():
    """Of [T, n] a scan moves T·n numbers in and out, not T times as many."""
    found, _ = cost_of(
        lambda x: jax.lax.scan(lambda c, row: (c, jnp.sin(row)), jnp.float32(0), x)[1], jnp.ones((100, 1000))
    )
    assert 2 * 4e5 <= found.bytes <= 4 * 4e5


def test_a_convolution_counts_no_padding():
    f = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    found, xla = cost_of(f, jnp.ones((2, 10, 10, 4)), jnp.ones((3, 3, 4, 16)))
    assert found.flops.total() == 2 * 2 * 28 * 28 * 4 * 16 == xla["flops"]


def test_of_two_branches_the_dearer():
    found, _ = cost_of(lambda p, x, w: jax.lax.cond(p, lambda: x @ w @ w, lambda: x @ w), jnp.bool_(True), X, W)
    assert found.flops.total() == 2 * 2 * 32 * 16 * 16


# --- texts of other compilers ------------------------------------------------------------------------------------------

TPU_LOOP = """
%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)S(3)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0:T(8,128)S(3)} get-tuple-element(%p), index=1
  %all-reduce.1 = f32[8,4]{1,0:T(8,128)} all-reduce(%x), channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  ROOT %t = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)S(3)}) tuple(%i, %all-reduce.1)
}

%cond (p.1: (s32[], /*index=1*/f32[8,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12), metadata={op_name="a(b)"}
  %p.1 = (s32[]{:T(128)}, /*index=1*/f32[8,4]{1,0:T(8,128)S(3)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}
"""
TPU = """
  %x = f32[8,4]{1,0:T(8,128)} parameter(0)
  %w = f32[4,4]{1,0:T(4,128)S(1)} constant({...})
  %convolution.1 = f32[8,4]{1,0:T(8,128)} convolution(%x, %w), dim_labels=bf_io->bf, operand_precision={highest,highest}
  %convolution.2 = f32[8,4]{1,0:T(8,128)} convolution(%convolution.1, %w), dim_labels=bf_io->bf
  %while.1 = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) while(%tuple), condition=%cond, body=%body
  ROOT %y = f32[8,4]{1,0:T(8,128)} get-tuple-element(%while.1), index=1"""


def test_reads_what_the_tpu_compiler_writes():
    found = text(TPU, TPU_LOOP)
    assert found.flops == Counter({"f32": 2 * 8 * 4 * 4, "f32 default": 2 * 8 * 4 * 4})
    assert found.collectives == {Collective("all-reduce", 4): Traffic(12, 12 * 128)}
    assert found.bytes == 4 * 128 + 12 * 128  # what lies in S(1) or S(3) is on the chip
    assert (found.operations, found.dynamic_loops) == (2 + 12, 0)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[2,8]<=[16]", 8),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 8),
    ],
)
def test_group_sizes(groups, size):
    body = (
        f"  %x = f32[8,4]{{1,0}} parameter(0)\n  ROOT %g = f32[8,4]{{1,0}} all-gather(%x), {groups}, dimensions={{0}}"
    )
    assert text(body).collectives == {Collective("all-gather", size): Traffic(1, size * 128)}


GPU = """
  %x = f32[8,4]{1,0} parameter(0)
  %gemm = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm", backend_config={CONFIG}
  %start = f32[8,4]{1,0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %done = f32[8,4]{1,0} all-reduce-done(%start)"""

CONFIG = (
    '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_batch_dimensions":[]}}'
)


def test_reads_what_the_gpu_compiler_writes():
    """As its documentation shows it; not compiled on a GPU."""
    found = text(GPU.replace("CONFIG", CONFIG))
    assert found.flops == Counter({"f32": 2 * 8 * 8 * 4})
    assert found.collectives == {Collective("all-reduce", 2): Traffic(1, 128)}
    assert found.bytes == (2 * 128 + 8 * 8 * 4 + 64) + 2 * 128  # what is sent is read, and written where it arrives


def test_a_scatter_reads_and_writes_what_it_changes():
    body = """
  %x = f32[8,4]{1,0} parameter(0)
  %i = s32[2,1]{1,0} iota(), iota_dimension=0
  %u = f32[2,4]{1,0} slice(%x), slice={[0:2], [0:4]}
  ROOT %s = f32[8,4]{1,0} scatter(%x, %i, %u), update_window_dims={1}, to_apply=%add"""
    scattered = text(body).bytes - text(body.replace("scatter(%x, %i, %u)", "copy(%x)")).bytes
    assert scattered == (3 * 32 + 8) - 2 * 128
