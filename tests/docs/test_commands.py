"""The command lines of the README and of all pages are ones that can be: they compose, and every key and value in them is taken.

Nothing is run: runs, data and devices that they name need not be here.
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from support import QUIET, REPOSITORY

from rlexp import compose
from rlexp.config import Config, ConfigError, parse
from rlexp.hydra_internals import grid
from rlexp.overrides import override_group, override_key

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES.remove(REPOSITORY / "docs/how-to/extend.md")  # test_extend.py runs that one
BLOCK = re.compile(r"^(?: {4,}|\$ )(?:.*&& |srun )?python -m rlexp(?: (.*?))?(?: +#.*)?$", re.MULTILINE)
INLINE = re.compile(r"`python -m rlexp ([^`]*)`")
# Files that the reader makes, as the page says.
OWN = {"experiment=my_space", "rewards=gentle", "hardware=v5e-16"}


def commands(page: Path) -> list[str]:
    """What follows `python -m rlexp`, in blocks and within a line."""
    text = re.sub(r" *\\\n *", " ", page.read_text())
    found = [*BLOCK.findall(text), *INLINE.findall(text)]
    return [line for line in dict.fromkeys(" ".join(line.split()) for line in found) if "GROUP=OPTION" not in line]


def overrides(line: str) -> list[str]:
    """Without options of the command line, and what stands for something else: `…`, `$A`, `resume=outputs/<date>`."""
    line = re.sub(r"--(cfg|config-dir) \S+", "", line)
    words = shlex.split(line if line.count("'") % 2 == 0 else line.removesuffix("'"))  # which ends ssh '…'
    return [w for w in words if not re.search(r"^-|^\$|<.*>|^(\S+=)?(…|\.\.\.)$", w) and w not in OWN]


def jobs(words: list[str]) -> Iterator[list[str]]:
    """The first job, and the last one where it chooses something else; of an interval its lower end."""
    parsed = OverridesParser.create().parse_overrides(words)
    ends = [f"{o.key_or_group}={o.value().start}" for o in parsed if o.is_interval_sweep()]
    made = grid([o for o in parsed if not o.is_interval_sweep()])
    yield [*made[0], *ends]
    if any(override_group(o) in compose._groups() for o in set(made[-1]) - set(made[0])):
        yield [*made[-1], *ends]


FOUND = {page: lines for page in PAGES if (lines := commands(page))}
# What other settings a command may have depends on the parts that it chooses, but for these.
ASIDE = {"hardware", "logger", "precision"}


class Together(NamedTuple):
    """Jobs that choose the same parts and give no setting two values: composed as one they take a third less time."""

    parts: set[str]
    others: dict[str, str]  # key -> override
    of: list[tuple[str, list[str]]]  # what stands on a page, and its job


def together() -> list[Together]:
    found: list[Together] = []
    groups = set(compose._groups()) - ASIDE
    for page, lines in FOUND.items():
        for line, job in ((each, job) for each in lines for job in jobs(overrides(each))):
            parts = {o for o in job if override_group(o) in groups}
            others = {override_key(o): o for o in job if o not in parts}
            for one in found:
                if one.parts == parts and all(one.others.get(key, o) == o for key, o in others.items()):
                    break
            else:
                found.append(one := Together(parts, {}, []))
            one.others.update(others)
            one.of.append((f"{page.relative_to(REPOSITORY)}: python -m rlexp {line}", job))
    return found


def check(job: Iterable[str]) -> None:
    parse(compose.compose_node([*sorted(job), *QUIET])[0], Config)


def test_every_command_composes():
    for one in together():
        try:
            check([*one.parts, *one.others.values()])
        except ConfigError:
            for line, job in one.of:
                try:
                    check(job)
                except ConfigError as error:
                    pytest.fail(f"{line}\n  {error}")


def test_commands_are_found():
    assert len(FOUND) >= 30 and sum(map(len, FOUND.values())) >= 130
