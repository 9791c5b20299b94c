"""Sweeps. The package is also the function `rlexp.sweep(…)`, which takes what `python -m rlexp -m …` takes."""

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """Python puts a package into its parent under its name, whatever function of that name is there."""

    def __call__(self, *overrides: Any, **keys: Any) -> Any:
        from rlexp.runs import sweep

        return sweep(*overrides, **keys)


sys.modules[__name__].__class__ = _Callable
