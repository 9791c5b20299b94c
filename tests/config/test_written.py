"""YAML that anybody may have written: it is read quickly, or refused, whatever it is."""

from pathlib import Path

import pytest
import yaml

from rlexp import written
from rlexp.written import data_of

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.yaml"))


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"a: " + b"{b: " * 100_000,
        b"- " * 100_000,
        b"? " * 100_000,
        b"env:\n" + b"".join(b" " * i + b"a:\n" for i in range(1, 1000)),
        "a: " + "[" * 300 + "]" * 300,
        ("[" * 100_000).encode("utf-16"),
        b"a: &a [*a]",
        b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        b"a: !!int ''",
        b"a: !!bool x",
        b"a: !!timestamp x",
        b"a: 2026-99-99",
        b"{[1]: 2}",
        b"a: !!python/object:os.system x",
        b"\xff\x00",
        "a: \ud800",
    ],
    ids=range(17),
)
def test_what_is_no_plain_data_is_refused(content):
    """The first five killed the process: PyYAML's C loader recurs."""
    with pytest.raises(ValueError, match="this YAML cannot be read"):
        data_of(content)


@pytest.mark.parametrize(
    "text", ["a: '[[[' # {{{", "a: '" + "[" * 1000 + "'", "x: " + "word " * 99, "a: {b: [1, {c: 2}]}", "", "a: '*'"]
)
def test_what_is_plain_data_is_read(text):
    assert data_of(text) == data_of(text.encode()) == yaml.safe_load(text)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_configuration_is_read_once(path, monkeypatch):
    """To look at its nesting costs nothing: no second pass over it."""
    wanted = yaml.safe_load(path.read_text())
    monkeypatch.setattr(written.yaml, "parse", None)
    assert data_of(path.read_bytes()) == wanted
