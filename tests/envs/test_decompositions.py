"""What adapters of bodies say of their decompositions is what their programs have: a pool of threads is made by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from suites import build_env, need, node_of
from support import inner

from rlexp.config import load_module, parse
from rlexp.machine import hardware

DECOMPOSE = {"cholesky", "eig", "eigh", "hessenberg", "lu", "qr", "geqrf", "geqp3", "schur", "svd", "tridiagonal"}


def side_by_side(jaxpr):
    """The most decompositions of a program of which none needs what another one makes; of a loop, in a turn of it."""
    nodes = []  # (how many there are in it, the nodes that it needs)
    _place(jaxpr, {}, nodes)

    def most(begin, chosen):
        free = [i for i in range(begin, len(nodes)) if not nodes[i][1] & chosen]
        return max((nodes[i][0] + most(i + 1, chosen | {i}) for i in free), default=0)

    return most(0, frozenset())


def _place(jaxpr, needs, nodes):
    for equation in jaxpr.eqns:
        given = [frozenset() if isinstance(v, core.Literal) else needs.get(v, frozenset()) for v in equation.invars]
        name, within = equation.primitive.name, inner(equation)
        if name == "jit" or (name == "scan" and equation.params["length"] == 1):  # XLA puts it where it is called
            (called,) = within
            own = dict(zip(called.invars, given, strict=True))
            _place(called, own, nodes)
            needs |= {
                v: own.get(w, frozenset())
                for v, w in zip(equation.outvars, called.outvars, strict=True)
                if isinstance(w, core.Var)
            }
            continue
        needed = frozenset().union(*given)
        if many := sum(map(side_by_side, within)) + (name in DECOMPOSE):
            nodes.append((many, needed if name in ("scan", "while", *DECOMPOSE) else frozenset()))
            needed |= {len(nodes) - 1}
        needs |= dict.fromkeys(equation.outvars, needed)


def test_they_are_counted_in_branches_and_loops():
    def of(f):
        return side_by_side(jax.make_jaxpr(f)(jnp.eye(3)).jaxpr)

    def q(x):
        return jnp.linalg.qr(x)[0]

    def seven(x):
        return jax.lax.scan(lambda x, _: (jnp.linalg.cholesky(x) + q(x), None), x, length=7)[0]

    assert of(lambda x: jnp.linalg.cholesky(q(x))) == 1
    assert of(lambda x: jnp.linalg.cholesky(x) + jax.jit(q)(x) + jnp.linalg.inv(x)) == 3
    assert of(lambda x: q(x) + jax.jit(lambda x, y: q(y))(x, q(x))) == 2  # the second needs the third
    assert of(seven) == 2 and of(lambda x: seven(q(x))) == 2 and of(lambda x: seven(x) + seven(x) + q(x)) == 5
    assert of(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.linalg.cholesky, q, x)) == 2  # of many environments both are done


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
    env, keys = build_env(option, **changes), jax.random.split(jax.random.key(0), 2)
    reset, step = jax.vmap(env.reset), jax.vmap(env.step)
    states, _ = jax.eval_shape(reset, keys)
    actions = jax.ShapeDtypeStruct((2, *env.spec.action.shape), np.float32)
    # A fresh state may be made beside a step, which needs none of it.
    programs = jax.make_jaxpr(reset)(keys), jax.make_jaxpr(step)(states, actions)
    assert sum(side_by_side(program.jaxpr) for program in programs) == hardware.decompositions(config)


@pytest.mark.parametrize("backend", [None, 7, "nothing", [1], {"a": [1]}])
def test_physics_that_is_none_has_none(backend):
    """They are asked for before the environment is made, which refuses it."""
    node = node_of("brax/ant") | {"kwargs": {"backend": backend}}
    module = load_module(node["module"], "env")
    assert hardware.decompositions(parse(node, module.Config, "env")[0]) == 0
