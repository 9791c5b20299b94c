"""Training: the loop, the compiled program, and what lies between its chunks. The package is also the function `rlexp.train(…)`."""

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """Python puts a package into its parent under its name, whatever function of that name is there."""

    def __call__(self, *overrides: Any, **keys: Any) -> Any:
        return sys.modules["rlexp"]._train(*overrides, **keys)  # an import would point up


sys.modules[__name__].__class__ = _Callable
