"""`rlexp.api` is an interface: what it has is listed in api.txt. A line that changes or goes is told in the changelog."""

import inspect
import os
from pathlib import Path

import flax.linen

from rlexp import api

LISTED = Path(__file__).with_name("api.txt")


def line(name: str) -> str:
    """A name, and what it takes or holds, without types: these may become wider."""
    value = getattr(api, name)
    if isinstance(value, dict):
        return f"{name}: {', '.join(sorted(value))}"
    is_class = inspect.isclass(value) and not issubclass(value, Exception)
    if not is_class and not inspect.isfunction(value):
        return name
    of_flax = ("parent", "name") if is_class and issubclass(value, flax.linen.Module) else ()
    shown = [
        "*" * (p.kind is p.KEYWORD_ONLY) + p.name + "=" * (p.default is not p.empty)
        for p in inspect.signature(inspect.unwrap(value)).parameters.values()
        if p.name not in of_flax
    ]
    return f"{name}({', '.join(shown)})"


def test_the_interface_is_what_is_listed():
    """`UPDATE_GOLDEN=1` writes the list anew."""
    now = "".join(f"{line(name)}\n" for name in sorted(api.__all__))
    if os.environ.get("UPDATE_GOLDEN"):
        LISTED.write_text(now)
    assert now == LISTED.read_text(), "rlexp.api has changed: say so in CHANGELOG.md"


def test_the_page_and_the_template_need_nothing_else():
    """What they import of rlexp is its interface."""
    root = Path(__file__).resolve().parents[2]
    texts = [
        (root / "docs/how-to/extend.md").read_text(),
        *(p.read_text() for p in (root / "rlexp/template").rglob("*.py")),
    ]
    lines = [x.strip() for text in texts for x in text.splitlines()]
    found = {x.split()[1] for x in lines if x.startswith(("from rlexp", "import rlexp"))}
    assert found == {"rlexp", "rlexp.api"}
