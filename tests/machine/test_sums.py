"""Sums on a processor are those of their rows: `import rlexp` keeps XLA from a library that gets some of them wrong."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlexp  # noqa: F401 - sets the flag that this is about

FLAG = "--xla_cpu_experimental_ynn_fusion_type"


def of_products(x):
    return jnp.sum((jnp.eye(3) @ x) ** 2)


def of_corners(angles):
    """Noise as worlds are made of: gradients of a grid's corners, each row of cells between two of them."""
    corners = jnp.dstack((jnp.cos(angles), jnp.sin(angles))).repeat(16, 0).repeat(16, 1)
    at = jnp.mgrid[0:4:0.0625, 0:4:0.0625].transpose(1, 2, 0) % 1
    above = jnp.sum(jnp.dstack((at[:, :, 0], at[:, :, 1])) * corners[:-16, :-16], 2)
    below = jnp.sum(jnp.dstack((at[:, :, 0] - 1, at[:, :, 1])) * corners[16:, :-16], 2)
    return above * (1 - at[:, :, 0]) + at[:, :, 0] * below


@pytest.mark.parametrize(
    ("function", "shape", "number"),
    [(of_products, (3,), 40_000), (of_corners, (5, 5), 20)],
    ids=["of products", "of a grid's corners"],
)
def test_a_batch_has_what_each_of_its_rows_has_alone(function, shape, number):
    rows = jax.random.uniform(jax.random.key(0), (number, *shape))
    batch = np.asarray(jax.jit(jax.vmap(function))(rows))
    alone = jax.jit(function)
    for i in (0, 1, 7, 8, 9, 16, number - 1):
        np.testing.assert_allclose(batch[i], alone(rows[i]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, f"{FLAG}=-reduce"),
        ("--xla_backend_optimization_level=0", f"--xla_backend_optimization_level=0 {FLAG}=-reduce"),
        (f"{FLAG}=dot", f"{FLAG}=dot"),
    ],
    ids=["none", "another", "the same"],
)
def test_flags_that_a_user_has_set_are_kept(given, kept):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"XLA_FLAGS": given} if given else {}
    told = "import os, rlexp; print(os.environ['XLA_FLAGS'])"
    assert subprocess.check_output([sys.executable, "-c", told], env=env, text=True, timeout=60).strip() == kept


@pytest.mark.parametrize("before", ["import jax", "import jax; jax.devices()"], ids=["in time", "too late"])
def test_who_imports_rlexp_too_late_is_warned(before):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", f"{before}\nimport rlexp"]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stderr
    assert ("UserWarning: some sums" in told) == ("devices" in before and jax.__version__ == "0.10.2")
