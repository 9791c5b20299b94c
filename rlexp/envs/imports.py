"""What is said of a suite's package that cannot be imported. No JAX: environments of the host are opened without it."""

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from typing import Any

from rlexp.config import ConfigError

_LONGEST = 200  # of what is told of an error
_OF_ARGUMENTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def unimported(name: str, error: BaseException, *, extra: str) -> ConfigError:
    """Of a module whose import raised the error: what is not installed, and the extra that brings it; or why it fails."""
    lacks = error.name if isinstance(error, ModuleNotFoundError) else None
    # Of a package that is there a module may be missing, since it is of another version: no extra brings that.
    if lacks and sys.modules.get(lacks.partition(".")[0]) is None:
        return ConfigError(f"env.module: {lacks} is not installed; pip install 'rlexp[{extra}]' brings it")
    package = name.partition(".")[0]
    found = importlib.metadata.packages_distributions().get(package)
    called = f"{package} {importlib.metadata.version(found[0])}" if found else package
    return ConfigError(f"env.module: {called} cannot be imported here ({reason(error)})")


def reason(error: BaseException) -> str:
    """In one line, which some suites fill with all that they have."""
    text = next(iter(str(error).strip().splitlines()), "no reason given")
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}"


def at_fault(error: BaseException, kwargs: Mapping[str, Any]) -> str:
    """The key that an environment of a known id cannot be made with.

    That of the argument which the error names, itself or by its value; else of the only one, or of all, where it is an error that
    a bad argument leads to; else of the id.
    """
    text = str(error)
    named = [name for name in kwargs if re.search(rf"\b{re.escape(name)}\b", text)]
    named += [name for name, value in kwargs.items() if isinstance(value, str) and repr(value) in text]
    if named or (len(kwargs) == 1 and isinstance(error, _OF_ARGUMENTS)):
        return f"env.kwargs.{[*named, *kwargs][0]}"
    return "env.kwargs" if kwargs and isinstance(error, _OF_ARGUMENTS) else "env.id"
