"""Nothing that a user wrote is parsed as markup, wherever it is printed: not [brackets], not :emoji:, not <tags>, not $math$."""

import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

import rlexp
from rlexp import tables
from rlexp.loggers import RunInfo, curve, progress
from rlexp.modes import scaling
from rlexp.sweep import report
from rlexp.sweep.__main__ import main
from rlexp.sweep.manifest import Manifest

# Pieces that some language or other would act on, and any text that can be an argument.
PIECES = [
    "[bold]",
    "[/]",
    "[red",
    "[/foo]",
    "]",
    "[8,16]",
    "\\[",
    "\\",
    ":smile:",
    "<b>",
    "</script>",
    "&lt;",
    "$x_",
    "%{y}",
]
written = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=5), min_size=1
)
written = written.map("".join).filter(lambda x: x.strip() == x and x and not x.splitlines()[1:])
SETTINGS = hypothesis.settings(
    max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None
)


def letters(text: str) -> str:
    """Without the spaces, which tables add where a line is too long, and what tables spell out."""
    return re.sub(r"\s+", "", tables.plain(text))


@hypothesis.given(text=written, width=st.integers(60, 400))
@SETTINGS
def test_a_table_has_every_letter(text, width):
    drawn = tables.drawn([text, "b"], [[text, "1"], ["2", text]], title=text, right=(1,), width=width)
    if width == 400 and len(text) < 80:
        assert drawn.count(tables.plain(text)) == 4
    counts = {c: letters(drawn).count(c) for c in letters(text)}
    assert counts == {c: 4 * letters(text).count(c) + "b12".count(c) for c in counts}


def test_a_terminal_is_not_told_what_to_do():
    drawn = tables.drawn(["a"], [["\x1b[31mred\x07\nnext\udc80"]])
    assert "\x1b" not in drawn and "\x07" not in drawn and r"\x1b[31mred\x07" in drawn and r"\udc80" in drawn


@hypothesis.given(text=written, error=written)
@hypothesis.example(text="network.hidden=[8,16]", error="[/foo] closing tag")
@hypothesis.settings(SETTINGS, max_examples=8)
def test_what_a_sweep_prints(tmp_path_factory, capsys, text, error):
    directory = tmp_path_factory.mktemp("s") / "sweep"
    made_up(directory, text, error)
    assert main(["status", str(directory)]) == 0
    said = letters(capsys.readouterr().out)
    whole = letters(f"name={text}")
    if len(whole) < 40 and len(letters(error)) < 40 and not re.search(r"\s", text + error):
        assert whole in said and letters(error) in said
    assert set(whole + letters(error)) <= set(said)


def made_up(directory: Path, text: str, error: str, env: str = "CartPole-v1") -> None:
    """Of two jobs, one that finished and one that failed."""
    directory.mkdir(parents=True)
    manifest = Manifest(directory)
    for number, status in enumerate(("finished", "failed")):
        manifest.add(number, [f"name={text}", f"other={number}"])
        (directory / str(number)).mkdir()
        (directory / f"{number}/config.yaml").write_text(yaml.safe_dump({"env": {"name": env}}))
        (directory / f"{number}/metrics.jsonl").write_text('{"env_steps": 9, "wall_s": 1, "eval/return_mean": 2.0}\n')
        manifest.change([number], status=status, objective=2.0, error=error if status == "failed" else None)
    manifest.remember("command", ["-m", f"name={text}"])
    manifest.remember("cwd", str(directory))


class Page(HTMLParser):
    """The tags of a page, and its text apart from scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._inside = tag
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


def test_the_page_of_a_sweep(tmp_path):
    """All that stands in it, with a name of nothing but pieces: the tags are those of a page with a harmless one."""
    pages = []
    for name, text in {"harmless": "x", "pieces": "".join(PIECES)}.items():
        made_up(tmp_path / name, text, text, env=text)
        pages.append(Page(report.write(tmp_path / name).page.read_text()))
    harmless, evil = pages
    assert evil.tags == harmless.tags
    text = "".join(PIECES)
    assert evil.text.count(text) >= harmless.text.count("name=x") >= 2
    assert shlex.quote(f"name={text}") in evil.text


@pytest.mark.parametrize("kind", ["bar", "plain", "table"])
def test_displays(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = "".join(PIECES)
    infos = [RunInfo(Path(text), "id", {"seed": i, "name": text}, 1000, 0, 0.0) for i in range(1 + (kind == "table"))]
    display = progress.make("bar" if kind == "table" else kind, infos)
    display.begin(f"begin {text}")
    display.note(f"note {text}")
    display.warn(f"warn {text}")
    display.log([{"env_steps": 10, "wall_s": 1.0, "eval/return_mean": 1.0}] * len(infos))
    display.close()
    out, err = capsys.readouterr()
    for word in ("begin", "note", "warn"):
        assert f"{word} {text}" in (out + err).replace("warning: ", "")


def test_pictures(tmp_path):
    """matplotlib reads mathematics between two dollars, and raises where there is none."""
    rows = [{"settings": "_a=$\\foo$", "chips": n, "env_steps_per_second_bound": 1e6 * n} for n in (4, 8)]
    scaling.draw(rows, tmp_path / "scaling.png")
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 9, "wall_s": 1, "eval/return_mean": 2.0}\n')
    assert curve.draw(tmp_path, title="$\\foo$ [8]") is not None


def test_rich_is_used_in_these_places_only():
    """A table is drawn by rlexp.tables; a live display has a markup-free console. What else imports rich must be tried here."""
    sources = Path(rlexp.__file__).parents[1]
    found = [p for folder in ("rlexp", "launchers", "hydra_plugins") for p in (sources / folder).rglob("*.py")]
    users = {str(p.relative_to(sources)) for p in found if re.search(r"^\s*(from|import) rich", p.read_text(), re.M)}
    assert users == {
        "rlexp/tables.py",
        "rlexp/loggers/display.py",
        "rlexp/loggers/progress.py",
        "rlexp/loggers/table.py",
    }
