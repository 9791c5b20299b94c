"""A sweep that hands over its jobs batch by batch, and one that another process runs, with the training left out."""

import fcntl
import sys

import pytest
from support import QUIET, SMALL

import rlexp
from rlexp import __main__ as cli
from rlexp import compose
from rlexp.overrides import quoted
from rlexp.sweep import __main__ as sweep_command
from rlexp.sweep import hydra_jobs, packs
from rlexp.sweep.manifest import Manifest

from .searches import LR


@pytest.fixture(autouse=True)
def no_log_of_hydras(monkeypatch):
    """It would keep the streams of a test."""
    for module in (compose, hydra_jobs):
        monkeypatch.setattr(module, "configure_log", lambda *_: None)


@pytest.mark.slow
def test_a_batch_has_the_program_of_the_one_before(tmp_path, monkeypatch):
    """Whatever the sweeper asks for, if only data of the program differ."""
    traced, trained, trace = [], [], packs.trace

    def train_pack(members, *, traced, **how):
        trained.append(traced)
        return [{"status": "finished", "objective": float(i)} for i in range(len(members))]

    monkeypatch.setattr(packs, "trace", lambda *given: (traced.append(given), trace(*given))[1])
    monkeypatch.setattr(packs, "train_pack", train_pack)
    search = ["sweeper=optuna", LR, "sweeper.num_trials=4", "sweeper.batch=2"]
    line = ["-m", *search, *SMALL, *QUIET, quoted("hydra.sweep.dir", str(tmp_path / "sweep"))]
    monkeypatch.setattr(sys, "argv", ["rlexp", *line])
    cli.main()
    jobs = Manifest(tmp_path / "sweep").jobs()
    assert [job.status for job in jobs] == ["finished"] * 4 and len({job.pack for job in jobs}) == 2
    assert len(trained) == 2 and len(traced) == 1


@pytest.fixture
def rlexp_here(monkeypatch, tmp_path):
    """Runs a sweep in tmp_path/sweep, and gives its exit code."""

    def run(*words):
        line = ["-m", *SMALL, *QUIET, *words, quoted("hydra.sweep.dir", str(tmp_path / "sweep"))]
        monkeypatch.setattr(sys, "argv", ["rlexp", *line])
        try:
            cli.main()
        except SystemExit as error:
            return error.code
        return 0

    return run


@pytest.mark.parametrize("sweeper", ["rlexp", "basic"])
def test_a_stop_ends_the_sweep_and_not_the_batch_alone(rlexp_here, monkeypatch, tmp_path, sweeper):
    """The same line goes on with what was not begun."""
    begun = []

    def train(pack, sweep_dir, manifest, *, stop, **_):
        begun.append([job.number for job in pack])
        stopped = len(begun) == 2
        stop.reason = "SIGTERM" if stopped else None
        manifest.settle(
            {job.number: {"status": "stopped" if stopped else "finished", "objective": 1.0} for job in pack}
        )

    monkeypatch.setattr(packs, "train", train)
    line = ("seed=range(0,8)", "hydra.sweeper.max_batch_size=2", f"hydra/sweeper={sweeper}")
    assert rlexp_here(*line) == 0
    assert begun == [[0, 1], [2, 3]]
    assert [job.status for job in Manifest(tmp_path / "sweep").jobs()] == ["finished"] * 2 + ["stopped"] * 2
    assert rlexp_here(*line) == 0
    assert begun[2:] == [[2, 3], [4, 5], [6, 7]]
    assert [job.status for job in Manifest(tmp_path / "sweep").jobs()] == ["finished"] * 8


@pytest.mark.parametrize("words", [["launcher.workers=2", "seed=0,1"], ["sweeper=random", LR, "sweeper.num_trials=2"]])
def test_who_comes_second_takes_nothing_away(rlexp_here, monkeypatch, capsys, tmp_path, words):
    """Both look at a directory that is not there yet, and the other one is quicker."""
    own, there = Manifest.own, tmp_path / "sweep"

    def late(manifest):
        for name in ("workers/a.json", "multirun.yaml", "0/config.yaml"):
            (there / name).parent.mkdir(exist_ok=True)
            (there / name).write_text("the other's")
        manifest.put(0, ["seed=0"], "0", "f")
        lock = (there / "sweep.lock").open("a+")
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(Manifest, "own", own)
        held.append(lock)
        own(manifest)

    held = []
    monkeypatch.setattr(Manifest, "own", late)
    assert rlexp_here(*words) == 2
    assert "another process runs the sweep in" in capsys.readouterr().err
    assert (there / "workers/a.json").read_text() == (there / "0/config.yaml").read_text() == "the other's"
    assert [job.overrides for job in Manifest(there).jobs()] == [["seed=0"]]
    held[0].close()


def test_a_retry_changes_nothing_of_a_sweep_that_another_process_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("os.execv", lambda *_: None)
    manifest = Manifest(tmp_path)
    manifest.put(0, ["seed=0"], "0", "f")
    manifest.settle({0: {"status": "failed", "error": "why"}})
    manifest.remember("command", ["-m", "seed=0"])
    manifest.remember("cwd", str(tmp_path))
    before = {path.name for path in tmp_path.iterdir()}
    with (tmp_path / "sweep.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep_command.main(["retry", str(tmp_path)]) == 2
    assert "another process runs the sweep" in capsys.readouterr().err
    assert [(job.status, job.error) for job in manifest.jobs()] == [("failed", "why")]
    assert {path.name for path in tmp_path.iterdir()} == before | {"sweep.lock"}


def test_from_python_too_the_place_of_a_sweep_may_stand_in_a_file(monkeypatch, tmp_path):
    def train(pack, sweep_dir, manifest, **_):
        manifest.settle({job.number: {"status": "finished", "objective": 1.0} for job in pack})

    monkeypatch.setattr(packs, "train", train)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own/experiment").mkdir(parents=True)
    (tmp_path / "own/experiment/mine.yaml").write_text("# @package _global_\nhydra: {sweep: {dir: sweeps/mine}}\n")
    given = [*SMALL, *QUIET]
    found = rlexp.sweep("experiment=mine", given, seed=range(2), config_dir="own")
    assert found.dir == tmp_path / "sweeps/mine" and [run.objective for run in found.runs] == [1.0, 1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "sweeps"]
