"""What is said of a suite's package that cannot be imported. No JAX: environments of the host are opened without it."""

import importlib.metadata
import re
import sys
from collections.abc import Iterable

from rlexp.config import ConfigError


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
    """In one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no reason given'}"


def at_fault(error: BaseException, kwargs: Iterable[str]) -> str:
    """The key that an environment cannot be made with: that of the argument which the error names, or its id."""
    named = [name for name in kwargs if re.search(rf"\b{re.escape(name)}\b", str(error))]
    return f"env.kwargs.{named[0]}" if named else "env.id"
