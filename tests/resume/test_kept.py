"""What a user did by hand to a run directory is not lost without a word, and full disks are told with their path."""

import contextlib
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from support import SMALL, StopAfter, build, rows, train

from rlexp.config import ConfigError
from rlexp.loggers import curve, jsonl
from rlexp.storage import rundir
from rlexp.sweep.manifest import Manifest
from rlexp.training.loop import Resume


def describe(directory: Path, *overrides: str) -> None:
    directory.mkdir(exist_ok=True)
    rundir.describe(directory, run_id="abcdef01", node=build(*overrides).node, overrides=overrides, devices=[])


def test_an_edited_configuration_is_kept(tmp_path, capfd):
    run = tmp_path / "run"
    describe(run)
    describe(run, "total_env_steps=2e6")  # a run that goes on writes it anew
    assert sorted(os.listdir(run)) == ["config.yaml", "environment.json", "overrides.yaml"]
    assert capfd.readouterr().err == ""
    mine = (run / "config.yaml").read_text().replace("seed: 0", "seed: 7 # mine")
    (run / "config.yaml").write_text(mine)
    for _ in range(2):  # told once
        describe(run)
        (kept,) = run.glob("config.yaml.edited-*")
        assert kept.read_text() == mine and "mine" not in (run / "config.yaml").read_text()
    (line,) = capfd.readouterr().err.splitlines()
    assert str(run / "config.yaml") in line and kept.name in line


def test_an_id_of_two_runs(tmp_path):
    describe(tmp_path / "a")
    assert rundir.find("abcdef01", tmp_path) == tmp_path / "a"
    shutil.copytree(tmp_path / "a", tmp_path / "b/copy")
    with pytest.raises(ConfigError) as refused:
        rundir.find("abcdef01", tmp_path)
    assert f"{tmp_path / 'a'}, {tmp_path / 'b/copy'}" in str(refused.value) and "\n" not in str(refused.value)
    (tmp_path / "link").symlink_to("a")
    shutil.rmtree(tmp_path / "b")
    assert rundir.find("abcdef01", tmp_path) == tmp_path / "a"


def test_lines_that_are_gone_are_told_when_a_run_goes_on(tmp_path, capfd):
    train(tmp_path, *SMALL, stop=StopAfter(2))
    run, metrics = tmp_path / "0", tmp_path / "0/metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert [row["env_steps"] for row in rows(run)] == [0, 256, 512]
    metrics.write_text(lines[0] + lines[2])  # one from the middle
    train(tmp_path, *SMALL, resume=Resume(run, "all"))
    told = f"{metrics}: the lines up to 512 environment steps are not all there"
    assert f"{told} (of 3, 1 are gone)" in capfd.readouterr().err
    assert metrics.read_text().startswith(lines[0] + lines[2])
    assert [row["env_steps"] for row in rows(run)] == [0, 512, 640]
    metrics.unlink()
    assert f"{told} (it is gone)" in (jsonl.gap(metrics, 512, 3) or "")
    metrics.write_text(lines[0] + lines[1] + lines[2][:-9])
    assert "(it ends at 256)" in (jsonl.gap(metrics, 512, 3) or "")
    metrics.write_text("".join(lines))
    assert jsonl.gap(metrics, 512, 3) is None
    metrics.write_text("".join([*lines, lines[2].replace("512", "640")]))  # after the checkpoint
    assert jsonl.gap(metrics, 512, 3) is None
    metrics.write_text(lines[2])
    assert jsonl.gap(metrics, 512, None) is None  # a checkpoint that does not say how many there were


def test_a_full_disk_is_told_with_its_path(small_disk):
    """Whatever is written there; and no half of it is left."""
    run = small_disk / "run"
    describe(run)
    manifest = Manifest(small_disk)
    (run / "metrics.jsonl").write_text('{"env_steps": 1, "wall_s": 1, "eval/return_mean": 1.5}\n')
    before = sorted(path.name for path in run.iterdir())
    with contextlib.suppress(OSError):
        (small_disk / "rest").write_bytes(bytes(1 << 18))
    with pytest.raises(ConfigError, match=r"cannot write to '.*/new': No space left on device"):
        rundir.create(small_disk / "new")
    with pytest.raises(ConfigError, match=r"cannot write to '.*/run': No space left on device"):
        rundir.create(run)
    with pytest.raises(OSError, match=r"No space left on device: '.*summary\.json'"):
        rundir.write_json(run / "summary.json", {"status": "failed"})
    with pytest.raises(OSError, match="No space left"):
        curve.draw(run)
    with pytest.raises(OSError, match=r"sweep\.sqlite cannot be written: database or disk is full"):
        manifest.add(0, ["x" * (1 << 18)])
    assert sorted(path.name for path in run.iterdir()) == before
    assert not (small_disk / "new").exists()
    with contextlib.closing(sqlite3.connect(small_disk / "sweep.sqlite")) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
    assert json.loads((run / "environment.json").read_text())["run_id"] == "abcdef01"


def test_what_has_a_name_of_ours_where_no_run_has_begun_is_kept(tmp_path, capfd):
    """As in a folder of the user's own, `hydra.run.dir=.`; of a run that was killed while it wrote them nothing is."""

    def begin(node):
        rundir.describe(tmp_path, run_id="c0ffee00", node=node, overrides=["seed=1"], devices=[])

    names = rundir._OURS
    for name in names:
        (tmp_path / name).write_text(f"mine: {name}\n")
    begin({"seed": 1})
    told = capfd.readouterr().err
    for name in names:
        (kept,) = tmp_path.glob(f"{name}.before-*")
        assert kept.read_text() == f"mine: {name}\n" and kept.name in told
    (tmp_path / "environment.json").unlink()
    begin({"seed": 1})
    begin({"seed": 2})
    assert len(list(tmp_path.glob("*.before-*"))) == len(names) and not capfd.readouterr().err


def test_json_has_no_number_that_is_none(tmp_path):
    rundir.write_json(
        tmp_path / "x.json", {"a": float("nan"), "b": [1.5, (float("inf"), 2)], "c": {"d": -float("inf")}}
    )
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.5, [None, 2]],
        "c": {"d": None},
    }
