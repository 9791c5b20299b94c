"""What people call a run's environment and its algorithm: in W&B, on pictures, in lists. Of any configuration, a broken one too.

And text of what need not be plain: names of files, errors.
"""

import contextlib
import os
from typing import Any

_SAYS_WHICH = ("name", "id", "kind", "scenarios")  # of a module's environments


def environment(config: Any) -> str:
    """CartPole-v1, brax/ant, driving/merge, wrapped/CartPole-v1; empty where nothing is known."""
    return _environment(_part(config, "env"))


def algorithm(config: Any) -> str:
    """The last part of its module's name: ppo."""
    return _last(_part(config, "algo").get("module"))


def _environment(env: dict[str, Any]) -> str:
    """gymnax's have names of their own; the others need their suite's beside it."""
    if isinstance(env.get("name"), str) and env["name"]:
        return env["name"]
    inner = env.get("inner")
    which = _environment(inner) if isinstance(inner, dict) else _which(env)
    return "/".join(filter(None, (_last(env.get("module")), which)))


def _which(env: dict[str, Any]) -> str:
    found = next((env[key] for key in _SAYS_WHICH if env.get(key)), "")
    many = found if isinstance(found, list) else [found]
    return "+".join(one for one in many if isinstance(one, str))


def _last(module: Any) -> str:
    """The module's own name; of a package's `world` the package's."""
    return module.removesuffix(".world").rpartition(".")[2] if isinstance(module, str) else ""


def _part(config: Any, name: str) -> dict[str, Any]:
    found = config.get(name) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def plain(value: object) -> str:
    """Text that can be encoded, whatever bytes a name has, or escapes a file; empty of None."""
    text = "" if value is None else str(value)
    with contextlib.suppress(UnicodeEncodeError):
        return os.fsencode(text).decode(errors="backslashreplace")
    return text.encode(errors="backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """The first line of an exception's text, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
