"""beartype, which makes a check of each signature once: jaxtyping asks anew whenever a function inside another is defined, which is
in each trace, and making the same checks again was up to a tenth of what a short run costs."""

from collections.abc import Callable, Hashable
from types import FunctionType

from beartype import beartype

_made: dict[Hashable, Callable] = {}


def checked(function: FunctionType) -> Callable:
    """The check of this signature. jaxtyping passes a function of its own that does nothing: only names and annotations matter."""
    code = function.__code__
    names = code.co_varnames, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    optional = len(function.__defaults__ or ()), tuple(function.__kwdefaults__ or ())
    key = (function.__module__, function.__qualname__, names, optional, tuple(function.__annotations__.items()))
    try:
        known = _made.get(key)
    except TypeError:  # an annotation that cannot be hashed
        return beartype(function)
    if known is None:
        known = _made[key] = beartype(function)
    return known
