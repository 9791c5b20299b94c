"""Words of a command line that Hydra would take for something else, or refuse in words of its grammar, told in a user's words."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString, Sweep
from hydra.errors import OverrideParseException

from rlexp.config import Config, ConfigError, nearest
from rlexp.overrides import override_group, override_key

Options = Callable[[str], list[str]]  # group -> its choices

_WHOLE = {field.name for field in dataclasses.fields(Config) if field.default is dataclasses.MISSING} | {"source"}
_KEY = re.compile(r"(\+\+?|~)?[A-Za-z_][\w-]*([./]\w[\w-]*)*(@[A-Za-z_][\w-]*(\.[\w-]+)*)?", re.ASCII)


def check(words: Sequence[str], groups: Sequence[str], options: Options, *, sweeps: bool) -> None:
    """Raises ConfigError, with the word, for one that cannot be read, or that chooses in a way that no file can be.

    Args:
      sweeps: several values of a key are several jobs.
    """
    for word in words:
        key, sign = override_group(word), word[: len(word) - len(word.lstrip("+~"))]
        if not key:
            raise ConfigError(f"{word}: there is no key in it; expected key=value")
        (parsed,) = OverridesParser.create().parse_overrides([word])
        if parsed.is_sweep_override() and not sweeps:
            raise ConfigError(
                f"{word}: several values are a sweep, which -m makes; one that is a list has brackets, {key}=[…], and text with "
                f"a comma in it quotes of its own, within the shell's: \"{key}='…'\""
            )
        if key in groups or "/" in key or "@" in word.split("=")[0] or key == "hydra":
            _check_choice(word, key, sign, parsed.value(), groups, options)


def _check_choice(word: str, key: str, sign: str, value: object, groups: Sequence[str], options: Options) -> None:
    """What Hydra says of these does not tell of which group."""
    place = word.split("=")[0].partition("@")[2] or key
    if sign == "~":
        if key in _WHOLE & {*groups} and place == key:
            raise ConfigError(
                f"{word.removesuffix('=null')}: a run has one; expected {key}=NAME for another: {', '.join(options(key))}"
            )
        return
    plain = word.lstrip("+")
    if "@" in word.split("=")[0] and place == key:
        raise ConfigError(f"{word}: that is where it is; expected {plain.replace(plain.split('=')[0], key, 1)}")
    if sign == "++" or (sign and key in groups and place == key):
        raise ConfigError(f"{word}: one is chosen already, and this takes its place; expected {plain}")
    names = value if isinstance(value, list) else [] if isinstance(value, dict | Sweep) else [value]
    if len(names) > 1 and key in groups and key != "experiment":  # Hydra would merge the files
        several = ",".join(str(getattr(name, "text", name)) for name in names)
        raise ConfigError(f"{word}: one choice is allowed; to try several: -m {key}={several}")
    for name in names:
        text = str(getattr(name, "text", name)).strip()
        if not isinstance(name, str | QuotedString) or text in ("", "???"):
            allowed = f": {', '.join(known)}" if (known := options(key)) else ""
            raise ConfigError(
                f"{key}: {word.split('=', 1)[1] or repr('')} is not allowed; expected the name of a choice{allowed}"
            )


def unreadable(error: OverrideParseException) -> str:
    """The line for a word that has not the form of key=value."""
    word, told = str(error.override), [line for line in str(error).splitlines() if "while evaluating" in line]
    key, sign, value = word.partition("=")
    if not sign:
        why = "there is no = in it"
    elif not _KEY.fullmatch(key):
        why = f"{key!r} is no name of a key"
    elif told:  # of a function: which argument
        why = told[0]
    elif value.startswith("="):
        why = f"one = stands between them; expected {key}={value.lstrip('=')}"
    elif "" in (values := [part.strip() for part in value.split(",")]) and len(values) > 1:
        why = f"beside a comma a value is missing; expected {key}={','.join(filter(None, values)) or '…,…'}"
    else:
        why = (
            "brackets and quotes come in pairs, and text with other signs in it stands in quotes of its own, within the "
            f"shell's: \"{key}='…'\""
        )
    return f"{word}: this cannot be read as key=value ({why})"


def refused(told: str, words: Sequence[str], groups: Sequence[str], keys: Callable[[], Iterable[str]]) -> str | None:
    """The line for what Hydra, in its own, says of a choice or of something to leave out; None: it is about something else.

    Args:
      keys: all that there are, asked where one is misspelt.
    """
    if found := re.search(r"Could not override '([^']+)'", told):
        name, meant = found[1], re.search(r"Did you mean to override (?:one of )?([^?]+)\?", told)
        word = next((w for w in words if w.lstrip("+~").split("=")[0] == name), name)
        group, _, place = name.partition("@")
        if place:
            near = f"; did you mean {meant[1].replace(', ', ' or ')}?" if meant else f"; expected {group}=…"
            return f"{word}: no {group} is chosen at {place}{near}"
        if group.startswith("hydra."):
            return f"{word}: Hydra has no such key{nearest(group, keys())}"
        return f"{word}: there is no such group{nearest(group, groups)}" if "/" in group else None
    if found := re.search(r"Could not delete from config\. '(.+?)' does not exist", told):
        return f"~{found[1]}: there is no such key{nearest(found[1], keys())}"
    if found := re.search(r"Could not delete '(.+?)'\. No match", told):
        return f"~{found[1]}: there is no such choice to leave out"
    if found := re.search(r"Multiple values for (\S+)\. To override", told):
        return f"{found[1]}: one is chosen already; leave out the + before it"
    return None


def misplaced(word: str, node: Any) -> str | None:
    """The line for a word that Hydra cannot put into a configuration; None: it can.

    Args:
      node: the configuration before it, as plain data.
    """
    names, there = override_key(word).split("."), node
    word = word.lstrip("+")
    for i, name in enumerate(names):
        if isinstance(there, list):
            if not name.isdecimal() or int(name) >= len(there):
                entries = f"a list, of entries 0 to {len(there) - 1}" if there else "an empty list"
                return f"{word}: {name!r} is not allowed; {'.'.join(names[:i])} is {entries}"
            there = there[int(name)]
        elif isinstance(there, dict) and name in there:
            there = there[name]
        else:
            return None
    value = OverridesParser.create().parse_overrides([word])[0].value()
    if isinstance(there, dict) and isinstance(value, list):
        return f"{word}: a list is not allowed; expected a node, {{{next(iter(there), 'key')}: …}}"
    if isinstance(there, list) and isinstance(value, dict):
        return f"{word}: a node is not allowed; expected a list"
    return None


def no_value(path: str, choices: Mapping[str, str | None], conf: Path) -> str:
    """The line for a key that is `???`: the files that give it one may lie in a folder that bears the name of the file chosen."""
    places = {override_key(key): (override_group(key), choice) for key, choice in choices.items()}
    place = path.rpartition(".")[0]
    group, choice = places.get(place, ("", None))
    others = ", ".join(sorted(f"{choice}/{file.stem}" for file in (conf / group / str(choice)).glob("*.yaml")))
    name = group if group == place else f"{group}@{place}"
    return f"{path}: it has no value; expected {path}=…{f', or {name}= one of {others}' if others else ''}"
