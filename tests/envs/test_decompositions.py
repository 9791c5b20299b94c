"""What adapters of bodies say of their decompositions is what their programs have: a pool of threads is made by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import build_env, need, node_of
from support import equations

from rlexp import session
from rlexp.config import load_module, parse

DECOMPOSE = {"cholesky", "eig", "eigh", "hessenberg", "lu", "qr", "geqrf", "geqp3", "schur", "svd", "tridiagonal"}


def test_they_are_counted_in_branches_and_loops():
    def four(x: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (jnp.linalg.cholesky(x), None), x, length=7)[0]
        x = jax.lax.cond(x[0, 0] > 0, jnp.linalg.cholesky, lambda x: x, x)
        return jnp.linalg.solve(x, x) + jax.jit(lambda x: jnp.linalg.qr(x)[0])(x)

    found = [e.primitive.name for e in equations(jax.make_jaxpr(four)(jnp.eye(3)).jaxpr)]
    assert sorted(DECOMPOSE.intersection(found)) == ["cholesky", "lu", "qr"] and found.count("cholesky") == 2


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("brax/ant", {}),
        pytest.param("brax/ant", {"kwargs": {"backend": "mjx"}}, marks=pytest.mark.slow),
        ("brax/ant", {"kwargs": {"backend": "spring"}}),
        ("brax/ant", {"kwargs": {"backend": "positional"}}),
        pytest.param("brax/humanoid", {}, marks=pytest.mark.slow),
        ("playground/cartpole_balance", {}),
        pytest.param("playground/cheetah_run", {}, marks=pytest.mark.slow),
    ],
)
def test_bodies_have_as_many_as_they_say(option, changes):
    need(option.partition("/")[0])
    node = node_of(option) | changes
    config = parse(node, load_module(node["module"], "env").Config, "env")[0]
    env, key = build_env(option, **changes), jax.random.key(0)
    state, _ = jax.eval_shape(env.reset, key)
    action = jax.ShapeDtypeStruct(env.spec.action.shape, np.float32)
    program = jax.make_jaxpr(lambda key, state, action: (env.reset(key), env.step(state, action)))(key, state, action)
    found = sum(equation.primitive.name in DECOMPOSE for equation in equations(program.jaxpr))
    said = session.decompositions(config)
    assert found <= said and (found == said or option == "playground/cartpole_balance")


@pytest.mark.parametrize("backend", [None, 7, "nothing", [1], {"a": [1]}])
def test_physics_that_is_none_has_none(backend):
    """They are asked for before the environment is made, which refuses it."""
    node = node_of("brax/ant") | {"kwargs": {"backend": backend}}
    module = load_module(node["module"], "env")
    assert session.decompositions(parse(node, module.Config, "env")[0]) == 0
