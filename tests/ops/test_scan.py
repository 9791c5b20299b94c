"""rlexp.ops.scan: to the bit what jax.lax.scan gives, in fewer pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.ops.scan import scan

KINDS = {
    "number": lambda x, b: x[0],
    "count": lambda x, b: (x[0] * 1000).astype(jnp.uint32),
    "sign": lambda x, b: x[0] > 0,
    "half": lambda x, b: x[0].astype(jnp.bfloat16),
    "key": lambda x, b: jax.random.fold_in(jax.random.key(0), (x[0] * 1000).astype(jnp.int32)),
    "row": lambda x, b: x[:b],
    "integers": lambda x, b: (x[:b] * 1000).astype(jnp.int32),
    "signs": lambda x, b: x[:b] > 0,
    "small rows": lambda x, b: jnp.outer(x[:b], jnp.arange(1.0, 5.0)),
    "large rows": lambda x, b: jnp.outer(x[:b], jnp.arange(1.0, 30.0)),
    "empty rows": lambda x, b: jnp.zeros((b, 0)),
    "images": lambda x, b: jnp.ones((b, 3, 3)) * x[0],
    "other row": lambda x, b: x[: b + 1],
    "nan": lambda x, b: x[0] * jnp.nan,
    "zero": lambda x, b: -0.0 * jnp.abs(x[:b]),
    "python": lambda x, b: 1.0,
}


def numbers(x):
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x).tobytes(), x.shape, x.dtype, x.weak_type


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=8), st.integers(0, 3), st.integers(1, 4), st.booleans())
def test_it_is_jaxs_scan_to_the_bit(kinds, b, length, members):
    def step(carry, x):
        carry = jnp.sin(carry + x)
        return carry, {f"{i}": KINDS[kind](carry, b) for i, kind in enumerate(kinds)}

    def run(function):
        whole = lambda init: function(step, init, jnp.linspace(0.1, 1.0, length))  # noqa: E731
        init = jnp.linspace(-1.0, 1.0, 6)
        return jax.jit(jax.vmap(whole) if members else whole)(jnp.stack([init, 2 * init]) if members else init)

    ours, theirs = run(scan), run(jax.lax.scan)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert list(map(numbers, jax.tree.leaves(ours))) == list(map(numbers, jax.tree.leaves(theirs)))


@pytest.mark.parametrize(
    ("kinds", "pieces"),
    [(["number", "nan"], 1), (["number", "count", "sign", "nan"], 2), (["row", "signs", "small rows", "integers"], 2)],
)
def test_small_outputs_are_written_together(kinds, pieces):
    def step(carry, x):
        return carry + x, [KINDS[kind](carry, 2) for kind in kinds]

    jaxpr = jax.make_jaxpr(lambda: scan(step, jnp.arange(6.0), jnp.arange(3.0)))()
    (equation,) = [x for x in jaxpr.eqns if x.primitive is jax.lax.scan_p]
    assert len(equation.outvars) - 1 == pieces  # the first is what is carried


def test_a_length_in_place_of_rows():
    assert scan(lambda c, _: (c + 1, (c, 2 * c)), 0, length=3)[1][1].tolist() == [0, 2, 4]


def test_it_has_the_derivatives_of_jaxs():
    """In both modes, also of what is written with others."""

    def of(function):
        def whole(c):
            step = lambda c, x: (jnp.sin(c + x), (c[0] * x, c[1], c, c > 0, jnp.outer(c, c)))  # noqa: E731
            carry, (number, other, row, _, small) = function(step, c, jnp.linspace(0.1, 1.0, 3))
            return (carry * row * small.sum(-1)).sum() + (number * other).sum()

        c = jnp.linspace(-1.0, 1.0, 4)
        return jax.grad(whole)(c), jax.jvp(whole, (c,), (jnp.cos(c),))[1]

    for ours, theirs in zip(of(scan), of(jax.lax.scan), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert np.any(np.abs(ours) > 0.01)
