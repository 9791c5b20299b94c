"""Functions that are linear in each of their arguments, with transposes of one's own.

`jax.custom_vjp` lets a gradient be computed in one's own way, and then refuses forward mode: jvp, linearize, hessian. A linear
function does not need it. It is its own derivative, to any order, so only its transposes are left to say, and JAX differentiates
those as any other code. `jax.custom_derivatives.linear_call` is made for this, but knows neither vmap nor derivatives in what it
is not linear in; so here is a primitive of our own, made of the rules that `jax.extend.core` is for.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

Axes = tuple[int | None, ...]  # of the arguments, as vmap has them


def multilinear(
    call: Callable[..., Array],
    transposes: Sequence[Callable[..., Array]],
    *,
    mapped: Callable[[Callable, Axes], Callable] = jax.vmap,
) -> Callable[..., Array]:
    """`call(*args, **static)`, which is linear in each of args while the others stay, with a transpose for each.

    `transposes[i](dy, *others, struct, **static)` is what argument i gets of dy. `others` are the other arguments, in their order;
    `struct` is the shape and type of its own. Under vmap each transpose is mapped as it
    is, and `call` is what `mapped` makes of it.
    """
    return _function(call, transposes, jointly=False, mapped=mapped)


def linear(call: Callable[..., Array], transposes: Sequence[Callable[..., Array]]) -> Callable[..., Array]:
    """`call(*args, **static)`, which is linear in all args together, as a sum is: `transposes[i](dy, struct, **static)`."""
    return _function(call, transposes, jointly=True, mapped=jax.vmap)


def _function(
    call: Callable[..., Array],
    transposes: Sequence[Callable],
    *,
    jointly: bool,
    mapped: Callable[[Callable, Axes], Callable],
) -> Callable[..., Array]:
    # `levels` are the axes of each vmap around the call, the innermost first; `structs` the arguments without those axes.
    primitive = Primitive(call.__name__.strip("_"))

    def evaluate(*args: Any, levels: tuple[Axes, ...], structs: Any, **static: Any) -> Any:
        function: Callable = functools.partial(call, **static)
        for axes in levels:
            function = mapped(function, axes)
        return function(*args)

    def abstract(*args: Any, **params: Any) -> Any:
        return jax.make_jaxpr(functools.partial(evaluate, **params))(*args).out_avals[0]

    def jvp(args: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        y = primitive.bind(*args, **params)
        if jointly:
            return y, primitive.bind(*map(ad.instantiate_zeros, tangents), **params)
        terms = [
            primitive.bind(*args[:i], tangent, *args[i + 1 :], **params)
            for i, tangent in enumerate(tangents)
            if not isinstance(tangent, ad.Zero)
        ]
        return y, functools.reduce(ad.add_tangents, terms)

    def transpose(dy: Any, *args: Any, levels: tuple[Axes, ...], structs: Any, **static: Any) -> list[Any]:
        def of_argument(i: int) -> Any:
            if isinstance(dy, ad.Zero):
                return ad.Zero(args[i].aval)
            others = [] if jointly else [j for j in range(len(args)) if j != i]

            def plain(dy: Any, *values: Any) -> Any:
                return transposes[i](dy, *values, structs[i], **static)

            function: Callable = plain
            for axes in levels:
                of_each = jax.vmap(function, (0, *(axes[j] for j in others)), axes[i] or 0)
                function = functools.partial(_summed, of_each) if axes[i] is None else of_each
            return function(dy, *(args[j] for j in others))

        return [of_argument(i) if ad.is_undefined_primal(arg) else None for i, arg in enumerate(args)]

    def batch(args: Sequence[Any], axes: Axes, *, levels: tuple[Axes, ...], **params: Any) -> tuple[Any, int]:
        return primitive.bind(*args, levels=(*levels, tuple(axes)), **params), 0

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=False))

    @functools.wraps(call)
    def function(*args: Array, **static: Any) -> Array:
        structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args)
        return primitive.bind(*_vary_alike(args), levels=(), structs=structs, **static)

    return function


def _summed(function: Callable, *args: Any) -> Any:
    """What an argument gets that is one for all that is mapped."""
    return function(*args).sum(0)


def _vary_alike(args: Sequence[Array]) -> Sequence[Array]:
    """Inside `jax.shard_map`: an argument that all devices have alike is made each one's own, so that its gradient is the sum."""
    varying = [jax.typeof(x).mat.varying for x in args]
    axes = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(axes - own), to="varying") if axes - own else x
        for x, own in zip(args, varying, strict=True)
    ]
