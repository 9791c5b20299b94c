"""Overrides as they are typed: `a.b=1`, `+a.b=1`, `~a`, `env@eval.env=x`. Only their text; what they mean, Hydra says."""

import re
from collections.abc import Iterator, Sequence

from rlexp.config import ConfigError

# Groups of lists of terms, for env=managed. A file of theirs is one list, under the group's name: several lie at one place.
LISTS = ("observations", "critic", "rewards", "terminations", "commands", "events", "randomisation", "curriculum")


def override_key(override: str) -> str:
    """The place in the configuration that an override is about.

    `+a.b=1` -> `a.b`, `env@env.inner=x` -> `env.inner`, `rewards@env.inner=x` -> `env.inner.rewards`.
    """
    group, _, place = override.lstrip("+~").split("=", 1)[0].partition("@")
    if place in ("", "_global_"):
        return group
    return f"{place}.{group}" if group in LISTS else place


def override_group(override: str) -> str:
    """`env@env.inner=x` -> `env`: where its choices lie, if it is one of a group."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def check_text(arguments: Sequence[str]) -> None:
    """Raises ConfigError for what could not be written into a YAML file."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{argument!a}: this is no text in UTF-8") from error


def went_on(overrides: Sequence[str]) -> bool:
    """Whether `resume` is of the run itself, with which it went on, and not of one that it began from, evaluates or records."""
    begins = [
        o
        for o in overrides
        if re.split(r"[./]", override_key(o))[0] == "checkpoint" and re.search(r"learner|params", o)
    ]
    modes = [o.partition("=")[2] for o in overrides if override_key(o) == "run"]
    return not begins and modes[-1:] in ([], ["train"])


def doubled(overrides: Sequence[str]) -> Iterator[str]:
    """A line for each key that is given several values: Hydra takes the last."""
    last: dict[str, str] = {}
    for override in overrides:
        key = override_key(override)
        before = last.get(key, override)
        if before != override and not (_adds(before) and _adds(override)):
            yield f"{key} is given twice, {before} and {override}: the last counts"
        last[key] = override


def merge_overrides(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Those of a resumed run, then the command line's, which win."""
    said = {override_key(o) for o in later}
    anew = tuple(f"{key}." for key in said)  # another choice has no parts, such as env@env.inner, of the one before
    kept = [o for o in earlier if not ("@" in o.split("=", 1)[0] and override_key(o).startswith(anew))]
    adds = {key for key in said if all(_adds(o) for o in later if override_key(o) == key)}
    return [o for o in kept if override_key(o) not in said or (override_key(o) in adds and _adds(o))] + list(later)


def _adds(override: str) -> bool:
    """Whether it is `KEY={name: value}`, whose names are beside those that are there; `KEY={}` empties what can be emptied."""
    value = override.partition("=")[2].strip()
    return value.startswith("{") and value[1:].strip() != "}"


def quoted(key: str, value: str) -> str:
    """`key='value'`, whatever the value holds."""
    return f"{key}={in_quotes(value)}"


def in_quotes(value: str) -> str:
    """Backslashes are themselves, but before a quote or at the end."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), value)
    return f"'{escaped}'"
