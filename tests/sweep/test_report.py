"""`python -m rlexp.sweep report`: its numbers, what it does with half a sweep, and that it draws."""

import csv
import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from made_up_sweep import COMMAND, made_up
from support import QUIET, command_line, environment

from rlexp.sweep import figures, report
from rlexp.sweep.__main__ import main
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.results import gather


def two_rates(more: Mapping[int, Any] | None = None) -> list[tuple[str, Any]]:
    """Two learning rates, four seeds each; the second is better. `more` changes how jobs ended."""
    ends: list[Any] = [10.0, 20.0, 30.0, 400.0, 50.0, 60.0, 70.0, 80.0]
    for number, end in (more or {}).items():
        ends[number] = end
    lines = [f"algo.hp.lr={lr} seed={seed} total_env_steps=300" for lr in ("0.0001", "0.001") for seed in range(4)]
    return list(zip(lines, ends, strict=True))


def table(directory: Path, name: str) -> list[dict[str, str]]:
    with (directory / "report" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def page(directory: Path) -> str:
    """The page without Plotly's own script."""
    text = (directory / "report.html").read_text()
    return re.sub(r"<script>/\*\*\n\* plotly.*?</script>", "", text, count=1, flags=re.DOTALL)


def test_the_tables_hold_the_numbers(tmp_path, capsys):
    directory = made_up(tmp_path / "s", two_rates())
    assert main(["report", str(directory)]) == 0
    best, other = table(directory, "configurations")
    assert (best["rank"], best["algo.hp.lr"], best["jobs"], best["counted"], best["failed"]) == (
        "1",
        "0.001",
        "4",
        "4",
        "0",
    )
    # The middle two of four. The mean would put the other one first, for its one lucky seed.
    assert float(best["objective_iqm"]) == 65 and float(other["objective_iqm"]) == 25
    assert float(best["objective_mean"]) == 65 and float(other["objective_mean"]) == 115
    assert float(best["objective_min"]) == 50 and float(best["objective_max"]) == 80
    assert float(best["objective_std"]) == pytest.approx(np.std([50, 60, 70, 80], ddof=1))
    assert 50 <= float(best["objective_low"]) < 65 < float(best["objective_high"]) <= 80

    curves = table(directory, "curves")
    assert [(row["rank"], row["env_steps"]) for row in curves] == [(r, s) for r in "12" for s in ("100", "200", "300")]
    assert [float(row["iqm"]) for row in curves] == pytest.approx([32.5, 58.5, 65, 12.5, 22.5, 25])
    assert all(float(row["low"]) < float(row["iqm"]) < float(row["high"]) and row["runs"] == "4" for row in curves)
    assert float(curves[2]["low"]) == float(best["objective_low"])

    jobs = table(directory, "jobs")
    assert [row["job"] for row in jobs] == [str(i) for i in range(8)]
    assert (jobs[5]["seed"], jobs[5]["rank"], jobs[5]["status"], jobs[5]["objective"]) == ("1", "1", "finished", "60.0")
    assert (jobs[5]["run_id"], jobs[5]["attempts"], jobs[5]["error"]) == ("a0000005", "1", "")
    assert table(directory, "failures") == []
    assert [(row["parameter"], float(row["importance"])) for row in table(directory, "importance")] == [
        ("algo.hp.lr", 1)
    ]

    said = capsys.readouterr().out
    assert "CartPole-v1: best is lr=0.001, return 65 (interquartile mean of 4 runs, " in said
    assert f"    {best['command']}\n" in said
    assert str(directory / "report.html") in said and str(directory / "report") in said


def test_a_report_is_made_again_to_the_letter(tmp_path):
    directory = made_up(tmp_path / "s", two_rates())
    tables = [{path.name: path.read_bytes() for path in report.write(directory).tables} for _ in range(2)]
    assert len(tables[0]) == 5 and tables[0] == tables[1]


@pytest.mark.parametrize(
    ("overrides", "command", "wanted"),
    [
        (["algo.hp.lr=0.001 seed=7"], COMMAND, "python -m rlexp algo.hp.lr=0.001 seed=7"),
        (["algo=pqn", "algo=pqn"], COMMAND, "python -m rlexp algo=pqn"),
        (["seed=3 a=1", "a=1 seed=5"], COMMAND, "python -m rlexp -m a=1 seed=3,5"),
        ([f"a=1 seed={i}" for i in range(2, 6)], COMMAND, "python -m rlexp -m a=1 'seed=range(2,6)'"),
        ([f"a=1 seed={i}" for i in (2, 4, 6)], COMMAND, "python -m rlexp -m a=1 seed=2,4,6"),
        # How it was searched, and where it ran, is no part of what was found.
        (
            ["sweeper=optuna sweeper.num_trials=9 launcher=slurm launcher.max_pack=2 a=1 seed=1"],
            COMMAND,
            "python -m rlexp a=1 seed=1",
        ),
        (["a=1"], ["-m", "-cd", "mine", "hydra.sweep.dir=x", "a=1"], "python -m rlexp --config-dir {place}/mine a=1"),
        (["a=1"], ["-m", "a=1", "hydra.searchpath=[/b c]"], "python -m rlexp 'hydra.searchpath=[/b c]' a=1"),
    ],
)
def test_the_command_that_reproduces(tmp_path, overrides, command, wanted):
    directory = made_up(tmp_path / "s", [(line, 1.0) for line in overrides], command=command)
    report.write(directory)
    assert table(directory, "configurations")[0]["command"] == wanted.format(place=directory)


def test_the_command_composes_to_what_was_run(tmp_path):
    own = ["network.hidden=[8,16]", "logger.wandb.group='a $(b) \"c\"'", "env.params.gravity=5.0", "algo.hp.lr=0.002"]
    directory = made_up(tmp_path / "s", [(shlex.join([*own, "seed=9"]), 3.0)])
    command = report.write(directory).best[1].strip()
    assert html.escape(command) in page(directory)
    program, m, name, *words = shlex.split(command)
    assert (program, m, name) == ("python", "-m", "rlexp")
    done = command_line(tmp_path, "--cfg", "job", *words)
    assert done.returncode == 0, done.stderr
    node = yaml.safe_load(done.stdout)
    assert node["network"]["hidden"] == [8, 16] and node["logger"]["wandb"]["group"] == 'a $(b) "c"'
    assert (node["env"]["params"]["gravity"], node["algo"]["hp"]["lr"], node["seed"]) == (5.0, 0.002, 9)


@pytest.mark.parametrize(
    ("jobs", "title"),
    [
        (["algo.hp.lr=1 seed=0", "algo.hp.lr=2 seed=0"], "lr of ppo on CartPole-v1"),
        (["a.x=1 b.x=2", "a.x=2 b.x=3"], "a.x and b.x of ppo on CartPole-v1"),
        (["a=1 b=1 c=1 d=1", "a=2 b=2 c=2 d=2"], "a, b and 2 more of ppo on CartPole-v1"),
        (["algo=ppo", "algo=pqn"], "algo on CartPole-v1"),
        (["seed=1", "seed=2"], "2 seeds of ppo on CartPole-v1"),
        (["x=1"], "1 run of ppo on CartPole-v1"),
    ],
)
def test_the_title_is_the_question(tmp_path, jobs, title):
    directory = made_up(tmp_path / "s", [(line, 1.0) for line in jobs])
    report.write(directory)
    assert f"<h1>{title}</h1>" in page(directory) and f"<title>{title} – s</title>" in page(directory)


def test_each_seed_has_a_dot(tmp_path):
    """To the scale that the intervals have."""
    directory = made_up(tmp_path / "s", two_rates({6: "Error"}))
    report.write(directory)
    dots = re.findall(r'class="seed" cx="([0-9.]+)"[^>]*><title>([0-9.]+)</title>', page(directory))
    assert [float(x) for _, x in dots] == [10, 20, 30, 400, 50, 60, 80]  # whole configurations come first
    places = {float(x): float(at) for at, x in dots}
    assert places[10] == 6 and places[400] == 154  # the ends of the scale
    assert places[50] == pytest.approx(6 + 148 * 40 / 390, abs=0.1)


def test_a_configuration_that_lost_a_seed_is_not_the_best(tmp_path):
    error = "Traceback (most recent call last):\n  File\nDiverged: update 3\n\n"
    directory = made_up(tmp_path / "s", two_rates({6: error}))
    report.write(directory)
    best, lost = table(directory, "configurations")
    assert (best["algo.hp.lr"], lost["algo.hp.lr"]) == ("0.0001", "0.001")
    assert (lost["counted"], lost["failed"], float(lost["objective_iqm"])) == ("3", "1", pytest.approx(190 / 3))
    assert {row["runs"] for row in table(directory, "curves") if row["rank"] == "2"} == {"3"}
    (failure,) = table(directory, "failures")
    assert (failure["job"], failure["error"]) == ("6", "Diverged: update 3")
    assert failure["directory"] == str(directory / "6")
    text = page(directory)
    assert '<td class="error">Diverged: update 3</td>' in text and "Traceback" not in text
    assert "1 failed" in text and "7 finished" in text
    assert f"python -m rlexp.sweep retry {directory}" in text


def test_a_sweep_that_still_runs(tmp_path):
    """Finished, stopped with its last evaluation, not begun, running with half a line, running and broken, just begun."""
    directory = made_up(tmp_path / "s", two_rates({3: None, 7: None}))
    Manifest(directory).change([2], status="stopped")  # its objective is not that of the end
    Manifest(directory).change([4, 5, 6], status="running", objective=None)
    with (directory / "4/metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 400, "wall_s": 1.0, "eval/return_m')
    lines = (directory / "5/metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "5/metrics.jsonl").write_text(lines[0])
    (directory / "6/metrics.jsonl").write_text("")
    report.write(directory)
    done, going = table(directory, "configurations")
    assert (done["algo.hp.lr"], done["counted"], float(done["objective_iqm"])) == ("0.0001", "2", 15)
    assert (going["counted"], going["objective_iqm"], going["jobs"]) == ("0", "", "4")
    curve = [(r["env_steps"], r["runs"], float(r["iqm"])) for r in table(directory, "curves") if r["rank"] == "2"]
    assert curve == [("100", "2", 27.5), ("200", "1", 45), ("300", "1", 50)]
    assert [r["low"] for r in table(directory, "curves") if r["rank"] == "2"][1:] == ["", ""]
    text = page(directory)
    assert "2 finished" in text and "1 stopped" in text and "3 running" in text and "2 pending" in text


def test_nothing_has_an_objective_yet(tmp_path, capsys):
    directory = made_up(tmp_path / "s", two_rates())
    Manifest(directory).change(range(8), status="running", objective=None)
    assert main(["report", str(directory)]) == 0
    assert "CartPole-v1: no job has an objective yet" in capsys.readouterr().out
    # Those that have come furthest are first all the same.
    assert [row["algo.hp.lr"] for row in table(directory, "configurations")] == ["0.001", "0.0001"]
    text = page(directory)
    assert 'id="curves-0"' in text and 'id="parallel-0"' not in text and 'id="importance-0"' not in text


def test_a_file_that_cannot_be_read_is_told_and_left_out(tmp_path, capsys):
    directory = made_up(tmp_path / "s", two_rates())
    (directory / "5/metrics.jsonl").write_text('{"env_steps": 100}\nno json\n{"env_steps": 300}\n')
    assert main(["report", str(directory)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{directory / '5/metrics.jsonl'}, line 2" in line
    assert {row["runs"] for row in table(directory, "curves") if row["rank"] == "1"} == {"3"}


def test_all_have_failed(tmp_path, capsys):
    directory = made_up(tmp_path / "s", two_rates(dict.fromkeys(range(8), "OSError: no space left")))
    assert main(["report", str(directory)]) == 0
    assert "no job has an objective yet" in capsys.readouterr().out
    assert [row["error"] for row in table(directory, "failures")] == ["OSError: no space left"] * 8
    assert table(directory, "curves") == table(directory, "importance") == []
    text = page(directory)
    for why in ("No job has an objective yet.", "Nothing has been evaluated yet.", "Not told: it takes two jobs"):
        assert why in text
    assert "plotly-graph-div" not in text


def test_one_job(tmp_path):
    directory = made_up(tmp_path / "s", [("seed=1", 5.0)])
    report.write(directory)
    (only,) = table(directory, "configurations")
    assert (only["objective_iqm"], only["objective_low"], only["objective_std"]) == ("5.0", "", "")
    text = page(directory)
    assert "Not told: no parameter differs between the jobs." in text and 'id="curves-0"' in text
    assert "of two configurations" in text and 'id="parallel-0"' not in text


def test_each_environment_has_its_own_best(tmp_path, capsys):
    """Returns of two environments cannot be compared."""
    lines = [(f"env={env} algo.hp.lr={lr}", x) for env, x in (("a", 1.0), ("b", 500.0)) for lr in ("0.1", "0.2")]
    directory = made_up(tmp_path / "s", [(line, x + ("0.2" in line)) for line, x in lines])
    for number, name in enumerate(("Acrobot <v1>", "Acrobot <v1>", "CartPole-v1", "CartPole-v1")):
        (directory / str(number) / "config.yaml").write_text(yaml.safe_dump({"env": {"name": name}}))
    assert main(["report", str(directory)]) == 0
    said = capsys.readouterr().out
    assert "Acrobot <v1>: best is env=a, lr=0.2, return 2 (" in said
    assert "CartPole-v1: best is env=b, lr=0.2, return 501 (" in said
    rows = [(row["environment"], row["rank"], row["algo.hp.lr"]) for row in table(directory, "configurations")]
    assert rows == [
        (env, rank, lr) for env in ("Acrobot <v1>", "CartPole-v1") for rank, lr in (("1", "0.2"), ("2", "0.1"))
    ]
    assert "<h3>Acrobot &lt;v1&gt;</h3>" in page(directory) and 'id="curves-1"' in page(directory)


def test_a_sweep_without_jobs(tmp_path, capsys):
    assert main(["report", str(made_up(tmp_path / "s", []))]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "there is no job yet"
    assert '<span class="chip">0 jobs</span>' in page(tmp_path / "s")


def test_of_many_configurations_the_best_are_drawn(tmp_path):
    directory = made_up(tmp_path / "s", [(f"a={i}", float(i)) for i in range(25)])
    report.write(directory)
    assert len(table(directory, "configurations")) == 25
    assert "Drawn are the best 20 of 25 configurations." in page(directory)
    results = gather(directory)
    figure = figures.curves(results.of("CartPole-v1"), results.swept)
    lines = [trace for trace in figure.data if trace.name]
    assert [line.name for line in lines] == [f"{rank}. a={25 - rank}" for rank in range(20, 0, -1)]
    assert [line.visible for line in lines] == ["legendonly"] * 14 + [True] * 6


def axes(tmp_path: Path, *values: str) -> list[Any]:
    """Of the parallel coordinates of jobs with these overrides, the last of them the best."""
    results = gather(made_up(tmp_path / "s", [(line, float(i)) for i, line in enumerate(values)]))
    return list(figures.parallel(results.of("CartPole-v1"), results.swept).data[0].dimensions)


def test_an_axis_is_logarithmic_where_values_span_decades(tmp_path):
    rate, small, objective = axes(tmp_path, "algo.hp.lr=1e-4 n=2", "algo.hp.lr=0.01 n=3", "algo.hp.lr=0.001 n=4")
    assert (rate.label, small.label, objective.label) == ("lr", "n", "return")
    assert rate["values"] == pytest.approx((-4, -2, -3)) and rate.tickvals == pytest.approx((-4, -3, -2))
    assert rate.ticktext == ("0.0001", "0.001", "0.01")
    assert small["values"] == (2, 3, 4) and small.ticktext == ("2", "3", "4")
    assert objective["values"] == (0, 1, 2) and objective.range[0] < 0 and objective.range[1] > 2


def test_an_axis_of_many_values_has_round_ticks(tmp_path):
    rate, many, _ = axes(tmp_path, *(f"algo.hp.lr={1.1e-4 * 1.5**i} n={i}" for i in range(20)))
    assert rate.ticktext == ("0.0003", "0.001", "0.003", "0.01", "0.03", "0.1")
    assert many.tickvals is None  # Plotly's own


def test_an_axis_of_names(tmp_path):
    axis, other, _ = axes(tmp_path, "algo=pqn", "algo=dqn algo.eps=1", "algo=ppo algo.eps=2")
    assert axis["values"] == (2, 0, 1) and axis.ticktext == ("dqn", "ppo", "pqn") and axis.tickvals == (0, 1, 2)
    assert other.label == "eps" and other["values"] == (2, 0, 1) and other.ticktext == ("1", "2", "–")


def test_many_digits_are_for_machines(tmp_path):
    """Of a search's values people see four digits; the command and the tables have all."""
    exact = "0.0009037152345385376"
    directory = made_up(tmp_path / "s", [(f"a={exact} b=123456789", 2.0), ("a=0.25 b=123456780", 1.0)])
    assert "best is a=0.0009037, b=123456789, return 2" in report.write(directory).best[0]
    assert "<td>0.0009037</td><td>123456789</td>" in page(directory) and "<td>0.25</td>" in page(directory)
    assert f"python -m rlexp a={exact} b=123456789" in page(directory)
    assert table(directory, "configurations")[0]["a"] == exact


def test_a_report_that_cannot_be_written_is_told_in_one_line(tmp_path, capsys):
    directory = made_up(tmp_path / "s", two_rates())
    shutil.rmtree(report.write(directory).tables[0].parent)
    (directory / "report").write_text("in the way")
    assert main(["report", str(directory)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlexp.sweep: cannot write the report: ") and str(directory / "report") in line


# --- of a real sweep ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_a_real_sweep(tmp_path):
    """One learning rate diverges; the command that the report gives makes the same numbers again."""
    small = ("algo.num_steps=16", "network.hidden=[8]", "eval.num_episodes=2")
    line = ("algo.hp.lr=1e-3,1e-2,1e38", "seed=1,2,3", "total_env_steps=640", "eval.every_env_steps=256")
    done = command_line(tmp_path, "-m", "hydra.sweep.dir=sweep", *small, *line)
    assert done.returncode == 1, done.stdout + done.stderr
    directory = tmp_path / "sweep"
    command = [sys.executable, "-m", "rlexp.sweep", "report", "sweep"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100, check=True
    )
    rows = table(directory, "configurations")
    assert [(row["counted"], row["failed"]) for row in rows] == [("3", "0"), ("3", "0"), ("0", "3")]
    assert rows[2]["algo.hp.lr"] == "1e+38"
    assert len(table(directory, "failures")) == 3 and "is not finite" in table(directory, "failures")[0]["error"]
    ends = [
        json.loads((directory / row["job"] / "summary.json").read_text())["objective"] for row in best_jobs(directory)
    ]
    assert len(set(ends)) > 1 and float(rows[0]["objective_iqm"]) == pytest.approx(sum(ends) / 3)
    curve = [row for row in table(directory, "curves") if row["rank"] == "1"]
    assert [int(row["env_steps"]) for row in curve] == [0, 256, 512, 640]
    assert float(curve[-1]["iqm"]) == pytest.approx(float(rows[0]["objective_iqm"]))

    told = done.stdout.splitlines()[1].strip()
    assert told == rows[0]["command"]
    program, *words = shlex.split(told)
    assert program == "python"
    command = [sys.executable, *words, "hydra.sweep.dir=again", *QUIET]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    again = sorted(Manifest(tmp_path / "again").jobs(), key=lambda job: job.number)
    assert [job.objective for job in again] == pytest.approx(ends, rel=1e-4)


def best_jobs(directory: Path) -> list[dict[str, str]]:
    return [row for row in table(directory, "jobs") if row["rank"] == "1"]
