"""`python -m rlexp.report`: the runs below some folders, whatever they are; its page and its tables."""

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import hypothesis
import numpy as np
import pytest
from browser import in_chromium
from hypothesis import strategies as st
from made_up_sweep import made_up
from many_runs import a_picture, alone, some

from rlexp.report import details, explorer
from rlexp.report.__main__ import main
from rlexp.report.found import Finder
from rlexp.sweep import __main__ as sweep
from rlexp.sweep import report, results
from rlexp.sweep.statistics import estimate


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    found = some(tmp_path_factory.mktemp("r") / "all")
    assert main([str(found)]) == 0
    return found


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


def test_all_of_them_are_in_the_page(root):
    data = data_of(root / "report.html")
    rows = {row["name"]: row for row in data["runs"]}
    assert set(rows) == {f"sweep/{i}" for i in range(8)} | {f"outputs/{name}" for name in ("one", "two", "eval")}
    assert rows["sweep/7"]["status"] == "failed" and rows["sweep/7"]["sweep"] == "sweep"
    assert rows["outputs/two"]["status"] == "unfinished" and rows["outputs/two"]["objective"] == 1.0
    assert rows["outputs/one"]["settings"] == {"algo": "dqn", "algo.hp.lr": "0.1", "seed": "7"}
    # The analysis: trainings by what they were given. The evaluation is no repetition of one.
    with (root / "report/configurations.csv").open(newline="") as file:
        found = [(row["rank"], row["algo"], row["algo.hp.lr"], row["jobs"]) for row in csv.DictReader(file)]
    assert found == [
        ("1", "dqn", "0.1", "1"),
        ("2", "", "0.0001", "4"),
        ("3", "", "0.001", "4"),
        ("4", "dqn", "0.2", "1"),
    ]


def test_what_differs_and_what_was_measured(root):
    data = data_of(root / "report.html")
    of = {row["name"]: row["id"] for row in data["runs"]}
    one, two = (data["details"][of[f"outputs/{name}"]]["settings"] for name in ("one", "two"))
    differ = {key for key in one if one[key] != two[key]}
    assert differ == {"algo.hp.lr", "environment.git.commit"}
    assert data["metrics"] == ["eval/return_mean", "loss/value"]
    assert data["curves"]["loss/value"][of["outputs/one"]] == [[100, 200], [0.01, 0.005]]
    assert len(data["curves"]["eval/return_mean"]) == 11


def test_the_commands_of_a_run(root, tmp_path):
    runs = {run.line.directory.removeprefix(f"{root}/"): run for run in Finder([str(root)]).runs()}
    words = {name: details.words(run) for name, run in runs.items()}
    assert words["sweep/7"].repeat == "python -m rlexp algo.hp.lr=0.001 seed=3"
    assert words["sweep/7"].resume == f"python -m rlexp.sweep retry {root}/sweep"
    assert words["sweep/7"].error == "Diverged: update 3"
    assert words["outputs/two"].repeat == "python -m rlexp algo=dqn algo.hp.lr=0.2 seed=7 output_root=x"
    assert words["outputs/two"].resume == f"python -m rlexp resume={root}/outputs/two"
    assert words["outputs/one"].resume == f"python -m rlexp resume={root}/outputs/one total_env_steps=MORE"
    assert words["outputs/eval"] == (f"python -m rlexp run=eval resume={root}/outputs/one", "", "")
    pruned = runs["sweep/7"]._replace(line=runs["sweep/7"].line._replace(status="pruned"))
    assert details.words(pruned).resume == f"python -m rlexp resume={root}/sweep/7"
    (odd,) = Finder([str(alone(tmp_path / "a, b", ["seed=1"], None))]).runs()
    assert details.words(odd).resume == f"""python -m rlexp 'resume='"'"'{odd.directory}'"'"''"""


def test_a_run_that_went_on_is_what_it_was(tmp_path):
    """However often it was resumed, and wherever it lies. One that began from another's parameters is one of its own."""
    for seed in range(3):
        alone(tmp_path / f"s{seed}", ["algo=ppo", f"seed={seed}"], 1.0 + seed)
    alone(tmp_path / "s3", ["algo=ppo", "seed=3", "resume=a0000003", "output_root=elsewhere"], 4.0)
    began = ["algo=ppo", "seed=0", f"resume={tmp_path}/s0", "checkpoint.restore=params"]
    alone(tmp_path / "from", began, 9.0)
    assert main([str(tmp_path)]) == 0
    with (tmp_path / "report/configurations.csv").open(newline="") as file:
        assert [(row["rank"], row["jobs"]) for row in csv.DictReader(file)] == [("1", "1"), ("2", "4")]
    words = {
        run.line.directory.removeprefix(f"{tmp_path}/"): details.words(run) for run in Finder([str(tmp_path)]).runs()
    }
    assert words["s3"].repeat == "python -m rlexp algo=ppo seed=3 output_root=elsewhere"
    assert words["from"].repeat == f"python -m rlexp algo=ppo seed=0 resume={tmp_path}/s0 checkpoint.restore=params"


def test_of_a_sweep_it_is_the_sweeps_own_page(tmp_path):
    """One code: apart from the clock to the letter."""
    directory = made_up(tmp_path / "s", [(f"a={i}", float(i)) for i in range(3)])
    pages = []
    for write in (lambda: report.write(directory), lambda: main([str(directory)])):
        write()
        pages.append(re.sub("as of [0-9: -]+", "", (directory / "report.html").read_text()))
    assert pages[0] == pages[1]


@pytest.mark.parametrize("given", ["../s", "link", "../here/link/"])
def test_a_sweep_has_its_runs_by_whatever_name(given, tmp_path, monkeypatch):
    directory = made_up(tmp_path / "s", [(f"a={i}", float(i)) for i in range(3)])
    (tmp_path / "here").mkdir()
    (tmp_path / "here/link").symlink_to(directory)
    monkeypatch.chdir(tmp_path / "here")
    for write in (lambda: report.write(Path(given)), lambda: main([given]), lambda: sweep.main(["report", given])):
        write()
        assert [row["name"] for row in data_of(directory / "report.html")["runs"]] == ["0", "1", "2"]
        (directory / "report.html").unlink()


def test_populations_and_sweeps_keep_apart(tmp_path):
    """Two sweeps number their jobs alike; their commands, and places of YAML files, are their own."""
    for name in ("one", "two"):
        made_up(tmp_path / name, [(f"x={name} seed={s}", 1.0) for s in range(2)], command=["-m", "-cd", name])
    written = report.write_all([str(tmp_path)], tmp_path)
    with (tmp_path / "report/jobs.csv").open(newline="") as file:
        assert [row["job"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]
    with (tmp_path / "report/configurations.csv").open(newline="") as file:
        commands = {row["x"]: row["command"] for row in csv.DictReader(file)}
    for name in ("one", "two"):
        assert f"--config-dir {tmp_path}/{name}/{name}" in commands[name] and f"x={name}" in commands[name]
    assert written.page == tmp_path / "report.html"


@pytest.mark.parametrize("given", ["s s", "s link", "s/ ./s", ". s", "s .", "link .", "s/0 . s"])
def test_what_lies_below_several_roots_is_there_once(given, tmp_path, monkeypatch):
    directory = made_up(tmp_path / "s", [(f"a={i % 2} seed={i}", float(i)) for i in range(4)])
    alone(directory / "0/alone", ["a=9", "seed=9"], 9.0)
    (tmp_path / "link").symlink_to(directory)
    monkeypatch.chdir(tmp_path)
    assert main([*given.split(), "--out", "out"]) == 0
    with (tmp_path / "out/report/configurations.csv").open(newline="") as file:
        assert sorted((row["a"], row["jobs"], row["counted"]) for row in csv.DictReader(file)) == [
            ("0", "2", "2"),
            ("1", "2", "2"),
            ("9", "1", "1"),
        ]
    assert len(data_of(tmp_path / "out/report.html")["runs"]) == 5


@pytest.mark.parametrize("theirs", ["report.html", "report/curves.csv"])
@pytest.mark.parametrize("line", ["report s", "report --out s s", "report --out s s .", "sweep report s"])
def test_what_somebody_else_made_stays(theirs, line, tmp_path, monkeypatch, capsys):
    directory = made_up(tmp_path / "s", [("a=1", 1.0)])
    (directory / theirs).parent.mkdir(exist_ok=True)
    (directory / theirs).write_text("mine")
    monkeypatch.chdir(tmp_path)
    before = sorted(directory.rglob("*"))
    program, *arguments = line.split()
    assert {"report": main, "sweep": sweep.main}[program](arguments) == 2
    assert "has a report.html or report/ that is no report" in capsys.readouterr().err
    assert (directory / theirs).read_text() == "mine" and sorted(directory.rglob("*")) == before


@pytest.mark.parametrize("dies_in", ["_configurations_table", "_importance_table"])
def test_a_report_that_was_cut_off_is_made_anew(dies_in, tmp_path, monkeypatch):
    """So is one whose page or tables somebody has removed."""
    directory = made_up(tmp_path / "s", [("a=1", 1.0)])
    again = [str(directory), "--out", str(directory)]
    with monkeypatch.context() as patch:
        patch.setattr(results, dies_in, None)
        with pytest.raises(TypeError):
            report.write_all([str(directory)], directory)
    assert main(again) == 0
    (directory / "report.html").unlink()
    assert main(again) == 0
    shutil.rmtree(directory / "report")
    assert main(again) == 0


@pytest.mark.parametrize("name", ["nu\udcff\udcfe", "\udce9", "a\n<b>"])
def test_a_name_may_be_of_any_bytes(name, tmp_path, capsys):
    directory = made_up(tmp_path / name, [("a=1", 1.0), ("a=2", "Diverged")])
    (directory / "0/environment.json").write_text("{}")
    (directory / f"0/x{name}.png").write_bytes(a_picture())
    for given in ([str(directory)], [str(directory), "--out", str(tmp_path / f"out{name}")], [str(tmp_path)]):
        assert main(given) == 0
    assert sweep.main(["report", str(directory)]) == 0
    rows = {row["status"]: row["sweep"] for row in data_of(tmp_path / "report.html")["runs"]}
    assert rows == dict.fromkeys(("finished", "failed"), explorer.plain(name))
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["nowhere"], "report: 'nowhere' is no folder"),
        (["gs://b/x"], "report: 'gs://b/x' is in an object store"),
        (["here", "here/run"], "report: 'here/run' cannot be read: permission denied"),
        (["here"], "has a report.html or report/ that is no report"),
        ([], "required: ROOT"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, given, told):
    """A page that somebody else made stays."""
    monkeypatch.chdir(tmp_path)
    alone(tmp_path / "here/run", [], 1.0)
    (tmp_path / "here/report.html").write_text("mine")
    monkeypatch.setattr(os, "access", lambda path, *_, **__: path != "here/run")  # root may read all
    try:
        code = main(given)
    except SystemExit as end:
        code = end.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert (tmp_path / "here/report.html").read_text() == "mine" and os.listdir(tmp_path) == ["here"]


def test_what_lies_about_breaks_nothing(tmp_path, capsys):
    run = alone(tmp_path / "r/odd", ["seed=1"], 1.0)
    for name in ("config.yaml", "overrides.yaml", "metrics.jsonl", "summary.json"):
        (run / name).write_bytes(b"\xff{[: ")
    (tmp_path / "r/no sweep").mkdir()
    (tmp_path / "r/no sweep/sweep.sqlite").write_text("no database")
    assert main([str(tmp_path / "r")]) == 0
    assert [row["name"] for row in data_of(tmp_path / "r/report.html")["runs"]] == ["odd"]
    assert "not the manifest of a sweep" in capsys.readouterr().err


written = st.text(st.characters(exclude_categories=["Cs"]), min_size=1) | st.sampled_from(
    ["</script><img src=x>", "<!--", "&lt;", "\u2028", "]]>", "<b>"]
)


@hypothesis.given(texts=st.lists(written, min_size=3, max_size=3))
@hypothesis.settings(max_examples=60, deadline=None)
def test_text_comes_through_and_is_no_markup(texts):
    """Whatever stands in names, settings and errors: no character of it that HTML acts on is in the page, and all come back."""
    data = {"runs": [{"name": texts[0], "settings": {texts[1]: texts[2]}}], texts[0]: texts[1]}
    section, empty = explorer.section(data), explorer.section({})
    start = section.index('id="data">') + len('id="data">')
    inside = section[start : section.index("</script>", start)]
    assert json.loads(inside) == data
    assert not set(inside) & set("<>&") and inside.isascii()
    assert section.replace(inside, "{}") == empty


# --- in a browser ------------------------------------------------------------------------------------------------------

# Works with the page as a reader does, and writes what it saw into it.
READER = """<script>
window.addEventListener("load", async () => {
  const wait = () => new Promise((done) => setTimeout(done, 600));
  const all = (what) => [...document.querySelectorAll(what)];
  const rows = () => all("#table tbody tr").map((row) => row.querySelector(".name").textContent);
  const seen = {};
  await wait();
  seen.rows = rows();
  seen.legend = all("#by-keys .legendtext").map((x) => x.textContent);
  seen.lines = all("#by-keys path.js-line").length;
  seen.points = all("#against .point").length;
  seen.groups = document.getElementById("by-keys").data.map((x) => [x.name ?? "", x.y]);
  const click = (what) => document.querySelector(what).click();
  const filter = (text) => {
    const box = document.getElementById("filter");
    box.value = text;
    box.dispatchEvent(new Event("input"));
  };
  click('th[data-key="objective"]');
  seen.best = rows()[0];
  filter("lr>=0.001 finished algo.hp.lr<1 seed!=7");
  seen.filtered = rows().sort();
  filter("sweep/");
  click('#groups input[value="seed"]'); click('#groups input[value="algo.hp.lr"]');
  await wait();
  seen.bySeed = document.getElementById("by-keys").data.filter((x) => x.name).map((x) => [x.name, x.x, x.y]);
  filter("algo=dqn");
  for (const i of [0, 1]) all("#table tbody input")[i].click();
  await wait();
  seen.differ = all("#differences tbody tr td:first-child").map((x) => x.textContent);
  filter("eval:");
  click("#table .name");
  await wait();
  seen.run = document.getElementById("run").innerText;
  seen.media = all("#run img, #run video").map((x) => [x.tagName, x.naturalWidth ?? null]);
  seen.injected = all("main b, main script[src], main img:not(#run img)").length;
  document.body.append(Object.assign(document.createElement("script"),
    { type: "application/json", id: "seen", textContent: encodeURIComponent(JSON.stringify(seen)) }));
});
</script>
</body>"""


def test_in_a_browser_one_works_with_it(root, tmp_path):
    evil = "</script><b>&lt;x"
    made_up(root / "more", [(f"'note={evil}' algo.hp.lr=9 seed=1", 7.0)])
    report.write_all([str(root)], root)
    page = root / "probed.html"
    page.write_text((root / "report.html").read_text().replace("</body>", READER))
    dom, console = in_chromium(page, "--dump-dom", profile=tmp_path)
    found = re.search(r'<script type="application/json" id="seen">(.*?)</script>', dom)
    assert found, console or dom[-2000:]
    seen = json.loads(unquote(found[1]))
    assert [line for line in console if "video.mp4" not in line] == [] and seen["injected"] == 0
    assert len(seen["rows"]) == 12 and seen["lines"] >= 4 and seen["points"] >= 9
    assert any(evil in name for name in seen["legend"])
    # Of 10, 11, 12 and 1 the mean of the middle half, within its interval; the report's own has the same.
    ((band, middle),) = [
        (seen["groups"][i - 1][1], y) for i, (name, y) in enumerate(seen["groups"]) if "lr=0.001" in name
    ]
    assert middle[-1] == pytest.approx(estimate(np.array([10.0, 11, 12, 1])).iqm) == pytest.approx(10.5)
    assert len(band) == 2 * len(middle) and band[len(middle)] < 10.5 < band[len(middle) - 1] <= 12
    assert seen["best"] == "outputs/one"
    assert seen["filtered"] == ["sweep/4", "sweep/5", "sweep/6"]
    ((steps, middle),) = [(x, y) for name, x, y in seen["bySeed"] if "seed=0" in name]
    assert steps == [100, 200, 300] and middle[-1] == pytest.approx((1 + 10) / 2)
    assert seen["differ"] == ["algo.hp.lr", "environment.git.commit"]
    assert f"python -m rlexp run=eval resume={root}/outputs/one" in seen["run"]
    assert seen["media"] == [["VIDEO", None], ["IMG", 1]]
