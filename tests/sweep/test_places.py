"""A sweep overwrites nothing: what jobs would write to is looked at before any of them starts."""

import functools
import json
import sys
from pathlib import Path

import pytest
from support import SMALL, build

from rlexp import __main__ as cli
from rlexp import compose
from rlexp.config import ConfigError
from rlexp.storage import rundir
from rlexp.sweep import hydra_jobs, places
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job

some = functools.cache(build)  # what is in it makes no difference here


def job(number: int, directory: Path, *overrides: str) -> Job:
    built = some()
    own = overrides or (f"seed={number}",)
    return Job(number, own, built.node, built.config, built.modules, directory)


def leave_run(directory: Path, run_id: str, *overrides: str) -> None:
    directory.mkdir(parents=True)
    rundir.describe(directory, run_id=run_id, node=some().node, overrides=overrides, devices=[])


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_where_something_else_has_run(tmp_path):
    leave_run(tmp_path / "sweep/0", "abcdef01", "algo=pqn")
    leave_run(tmp_path / "run", "abcdef02")
    (tmp_path / "file").touch()
    for sweep_dir, where, words in (
        ("sweep", "sweep/0", "sweep/0' holds a run already"),
        ("sweep", "run", "run' holds a run already"),
        ("run", "run/0", "run' holds a run already"),
        ("sweep", "file", "file' is a file"),
        ("sweep", "file/1", "file' is a file"),
        ("sweep", "sweep/packs", "where the sweep has files of its own"),
        ("sweep", "sweep/workers/0", "where the sweep has files of its own"),
        ("sweep", "sweep/a\\b", "cannot hold a run"),
    ):
        with pytest.raises(ConfigError, match=r"hydra\.sweep") as refused:
            places.check([job(0, tmp_path / where), job(1, tmp_path / "free")], tmp_path / sweep_dir)
        assert words in str(refused.value)
    places.check([job(0, tmp_path / "new"), job(1, tmp_path / "free/1")], tmp_path / "sweep")


@pytest.mark.parametrize("second", ["here", "here/../here", "link", "here/inner"])
def test_two_jobs_in_one_place(tmp_path, second):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    with pytest.raises(ConfigError, match="expected a directory for each"):
        places.check([job(0, tmp_path / "here"), job(1, tmp_path / second)], tmp_path / "sweep")
    (tmp_path / "sweep").mkdir()
    Manifest(tmp_path / "sweep").add(0, ["seed=0"], "../here")  # of a batch before this one
    with pytest.raises(ConfigError, match="expected a directory for each"):
        places.check([job(1, tmp_path / second)], tmp_path / "sweep")


def test_a_sweep_that_goes_on_finds_its_own_runs(tmp_path):
    jobs = [job(number, tmp_path / str(number)) for number in range(4)]
    manifest = Manifest(tmp_path)
    for one in jobs[:3]:
        manifest.add(one.number, one.overrides)
    manifest.change([0, 2], run_id="abcdef01")
    leave_run(tmp_path / "0", "abcdef01", "seed=0", "total_env_steps=9")  # somebody went on with it alone
    leave_run(tmp_path / "1", "abcdef02", "seed=1", "launcher.max_pack=1")  # killed before its id was noted
    places.check(jobs, tmp_path)
    leave_run(tmp_path / "2", "abcdef03", "seed=2")
    with pytest.raises(ConfigError, match="2' holds a run already, which is no job of this sweep"):
        places.check(jobs, tmp_path)
    places.check(jobs[:2], tmp_path)
    leave_run(tmp_path / "3", "abcdef04", "seed=3")  # of a number that this sweep had not
    with pytest.raises(ConfigError, match="3' holds a run already"):
        places.check([*jobs[:2], jobs[3]], tmp_path)


def test_another_sweep_that_is_there_is_told_as_what_it_is(tmp_path):
    """And not by the run that a job of it has left."""
    manifest = Manifest(tmp_path)
    manifest.add(0, ["seed=0"])
    manifest.change([0], run_id="abcdef01")
    leave_run(tmp_path / "0", "abcdef02", "seed=0")
    other = job(0, tmp_path / "0", "seed=5")
    places.check([other], tmp_path)
    with pytest.raises(ConfigError, match="holds another sweep: its job 0 is"):
        manifest.add(0, other.overrides)


@pytest.mark.slow
def test_a_refused_line_changes_nothing(tmp_path, monkeypatch, capfd):
    """By the whole command: one line, exit code 2, and every file as it was, also those of a sweep that is there."""
    leave_run(tmp_path / "run", "abcdef01")
    leave_run(tmp_path / "D/0", "abcdef02")
    leave_run(tmp_path / "E/1", "abcdef04")
    leave_run(tmp_path / "sweep/0", "abcdef03", "seed=1")
    manifest = Manifest(tmp_path / "sweep")
    manifest.add(0, ["seed=1"], fingerprint="of another time")
    manifest.remember("command", ["as it was"])
    (tmp_path / "sweep/multirun.yaml").write_text("as it was")
    before = everything(tmp_path)
    monkeypatch.chdir(tmp_path)
    for module in (compose, hydra_jobs):  # Hydra's log would keep the streams of this test
        monkeypatch.setattr(module, "configure_log", lambda *_: None)
    for arguments, words in (
        (["hydra.sweep.dir=D"], "D/0' holds a run already"),
        (["hydra.sweep.dir=run", "hydra.launcher.pack=off", "hydra.sweep.subdir=same"], "would both run in"),
        (["hydra.sweep.dir=sweep"], "holds another sweep"),
        (["hydra.sweep.dir=new", "hydra.sweeper.max_batch_size=1", "hydra.sweep.subdir=same"], "would both run in"),
        (["hydra.sweep.dir=E", "hydra.sweeper.max_batch_size=1"], "E/1' holds a run already"),  # of the second batch
        (["hydra/sweeper=basic", "hydra.sweep.dir=E", "hydra.sweeper.max_batch_size=1"], "E/1' holds a run already"),
        (["hydra/sweeper=basic", "hydra/launcher=basic", "hydra.sweep.dir=E"], "E/1' holds a run already"),
        (["hydra/sweeper=basic", "hydra.sweep.dir=new", "hydra.sweeper.max_batch_size=0"], "max_batch_size: 0 is not"),
        (["hydra/sweeper=basic", "hydra.sweep.dir=new", "algo.hp.lr=interval(0.1,1)"], "knows no intervals"),
        (["hydra/launcher=basic", "hydra.sweep.dir=D"], "D/0' holds a run already"),
        (["hydra/launcher=basic", "hydra.sweep.dir=new", "hydra.sweep.subdir=../run"], "would both run in"),
        (["hydra.sweep.dir=new", "hydra.output_subdir=../../run"], "hydra.output_subdir"),
    ):
        line = ["rlexp", "-m", "seed=0,1", *SMALL, "compilation_cache=null", "logger=quiet", *arguments]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capfd.readouterr().err
        assert end.value.code == 2 and said.count("\n") == 1
        assert words in said
        after = everything(tmp_path)
        changed = {name for name in before if before[name] != after.get(name)}
        assert changed <= {"sweep/sweep.sqlite"}, arguments  # which notes who looked at it
        assert {name for name in after if name not in before} <= {"sweep/sweep.lock"}, arguments
    assert Manifest(tmp_path / "sweep").recall("command") == ["as it was"]
    assert [(entry.number, entry.status) for entry in manifest.jobs()] == [(0, "pending")]
    assert json.loads((tmp_path / "D/0/environment.json").read_text())["run_id"] == "abcdef02"


def test_a_run_among_the_files_of_a_sweep_or_a_run(tmp_path):
    leave_run(tmp_path / "run", "abcdef01")
    (tmp_path / "sweep").mkdir()
    Manifest(tmp_path / "sweep").add(0, ["seed=0"], "0")
    for inside in ("run/checkpoints", "run/wandb/x", "sweep/packs/x", "sweep/workers"):
        with pytest.raises(ConfigError, match=r"hydra\.run\.dir: .* is within"):
            rundir.check_place(tmp_path / inside)
    for free in ("run/eval", "sweep/0", "checkpoints/1", "packs"):
        rundir.check_place(tmp_path / free)
    (tmp_path / "sweep/multirun.yaml").touch()
    with pytest.raises(ConfigError, match="holds a sweep"):
        rundir.check_place(tmp_path / "sweep")


@pytest.mark.parametrize("name", [".", "checkpoints", "../other", "/tmp", "a/.hydra", "''"])
def test_hydras_files_stay_apart(name):
    with pytest.raises(ConfigError, match=r"hydra\.output_subdir"):
        compose.composed([f"hydra.output_subdir={name}"])


@pytest.mark.parametrize("name", [".hydra", ".hydra-mine", "null"])
def test_hydras_files_may_have_another_name(name):
    compose.composed([f"hydra.output_subdir={name}"])
