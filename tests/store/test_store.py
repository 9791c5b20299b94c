"""Working copies and their places in the store."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import environment

from rlexp import __main__ as entry
from rlexp import compose, session
from rlexp.__main__ import validate
from rlexp.config import ConfigError
from rlexp.loggers import mirror
from rlexp.storage import rundir, store


def attached(directory: Path, url: str) -> Path:
    directory.mkdir(parents=True)
    store.attach(directory, url)
    return directory


def test_what_is_a_url():
    assert store.is_url("gs://bucket/prefix") and store.is_url("gs://bucket")
    assert not store.is_url("outputs") and not store.is_url("/a/gs:/b")
    for text in ("s3://bucket/prefix", "http://host/x", "gs://", "gs:///x"):
        with pytest.raises(ConfigError, match=r"^resume: .* expected a directory, or gs://<bucket>/<prefix>$"):
            store.is_url(text, "resume")


def test_places(tmp_path, monkeypatch):
    """A directory below the current one has the same path in the store; another one has its name, and a hash of its path."""
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/2026-01-01/12-00-00-c0ffee00", "multirun/a/b/0"):
        url = f"gs://bucket/pre/{name}"
        assert store.place("gs://bucket/pre/", Path(name)) == store.place("gs://bucket/pre", tmp_path / name) == url
        assert store.working_copy(url, "gs://bucket/pre") == Path(name)
    outside = store.place("gs://bucket/pre", tmp_path.parent / "elsewhere")
    assert outside.startswith("gs://bucket/pre/elsewhere-")
    assert outside != store.place("gs://bucket/pre", tmp_path / "../../elsewhere")
    assert store.working_copy(outside, "gs://bucket/pre") == Path("outputs", outside.rsplit("/", 1)[1])
    assert store.working_copy("gs://other/x/run", "gs://bucket/pre").name.startswith("run-")


def test_a_marker_is_of_all_below_it(tmp_path):
    assert store.url_of(tmp_path / "no") is None
    assert store.checkpoints(tmp_path) == tmp_path / "checkpoints"
    sweep = attached(tmp_path / "sweep", "gs://bucket/sweep")
    assert store.url_of(sweep) == "gs://bucket/sweep"
    assert store.url_of(sweep / "0" / "x") == "gs://bucket/sweep/0/x"
    where = store.checkpoints(sweep / "1")
    assert str(where) == "gs://bucket/sweep/1/checkpoints" and store.is_remote(where)
    assert not store.is_remote(tmp_path)
    assert str(store.join(where, "../../packs/p/checkpoints")) == "gs://bucket/sweep/packs/p/checkpoints"
    assert store.join(tmp_path / "a", "../b") == tmp_path / "b"


def test_push_sends_what_has_changed(tmp_path, root, names, monkeypatch):
    run = attached(tmp_path / "outputs/run", f"{root}/outputs/run")
    store.push(tmp_path)  # not in a store: nothing happens
    for name in ("metrics.jsonl", "wandb/a/b.txt", ".lock", "x.part", "y.tmp", ".write-1", "checkpoints/1/x"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    (run / "latest").symlink_to(run / "metrics.jsonl")
    store.push(run)
    assert names() == ["outputs/run/metrics.jsonl", "outputs/run/wandb/a/b.txt"]
    sent = []
    monkeypatch.setattr(store._filesystem(), "put", lambda paths, urls: sent.append(urls))
    store.push(run, run)
    (run / "metrics.jsonl").write_text("longer than before")
    store.push(run)
    store.push_file(run / "metrics.jsonl")
    assert sent == [[f"{root}/outputs/run/metrics.jsonl"]]


def test_a_file_that_vanishes_is_left_out(tmp_path, root, names, monkeypatch):
    run = attached(tmp_path / "run", f"{root}/run")
    (run / "a").write_text("a")
    (run / "b").write_text("b")
    real = store._filesystem()

    class Slow:
        def put(self, paths, urls):
            (run / "a").unlink(missing_ok=True)
            real.put(paths, urls)

    monkeypatch.setattr(store, "_filesystem", Slow)
    store.push(run)
    assert names() == ["run/b"]


def test_pull_brings_the_small_files(tmp_path, root, change):
    directory = tmp_path / "again"
    assert not store.pull(f"{root}/run", directory)
    assert not directory.exists()
    for name in ("run/config.yaml", "run/.hydra/x.yaml", "run/checkpoints/1/run/d", "runner/other"):
        change(name, name.encode())
    assert store.pull(f"{root}/run", directory)
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert found == {"config.yaml", ".hydra/x.yaml", store.MARKER}
    assert store.url_of(directory) == f"{root}/run"
    assert (directory / ".hydra/x.yaml").read_text() == "run/.hydra/x.yaml"


def test_the_newer_file_stays(tmp_path, root, change):
    """What another machine has written since replaces a file; what was written here since does not go."""
    run = attached(tmp_path / "run", f"{root}/run")
    for name in ("old", "new"):
        change(f"run/{name}", b"of the store")
        (run / name).write_text("of this disk")
    os.utime(run / "old", (1, 1))
    os.utime(run / "new", (time.time() + 60, time.time() + 60))
    assert store.pull(f"{root}/run", run)
    assert ((run / "old").read_text(), (run / "new").read_text()) == ("of the store", "of this disk")


def test_what_is_pulled_has_the_time_of_the_store(tmp_path, root, change):
    """So that the next change there is newer, whatever the clock here says."""
    change("run/file", b"x")
    assert store.pull(f"{root}/run", tmp_path / "run")
    here = (tmp_path / "run/file").stat().st_mtime
    assert here == pytest.approx(store._list(f"{root}/run")["file"]["mtime"].timestamp(), abs=1e-6)


def test_pull_leaves_other_directories_alone(tmp_path, root, change):
    change("run/config.yaml", b"x")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    with pytest.raises(ConfigError, match=r"taken', the working copy of .* holds something else"):
        store.pull(f"{root}/run", tmp_path / "taken")
    assert os.listdir(tmp_path / "taken") == ["file"]


def test_no_listing_is_remembered(root, change):
    """Other hosts write too, and TensorStore, past gcsfs."""
    change("a/1", b"x")
    folder = store.join(store._path(root), "a")
    assert [path.name for path in folder.iterdir()] == ["1"]  # by epath's own gcsfs
    assert store.sizes(folder) == {"1": 1}
    change("a/2", b"xy")
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    assert store.sizes(folder) == {"1": 1, "2": 2}


def test_unlink_is_of_both(tmp_path, root, names):
    run = attached(tmp_path / "run", f"{root}/run")
    (run / "summary.json").write_text("{}")
    store.push(run)
    assert names() == ["run/summary.json"]
    store.unlink(run / "summary.json")
    store.unlink(run / "summary.json")
    assert names() == [] and not (run / "summary.json").exists()


def test_found_by_url_and_by_id(tmp_path, root, change):
    change("outputs/d/run/environment.json", b'{"run_id": "c0ffee00"}')
    change("outputs/d/run/config.yaml", f"run: train\noutput_root: {root}\n".encode())
    run = tmp_path / "outputs/d/run"
    assert rundir.find("c0ffee00", root) == run
    assert rundir.find(f"{root}/outputs/d/run/", "outputs") == run and rundir.is_run(run)
    change("outputs/d/run/config.yaml", b"run: eval\n")
    assert rundir.find("outputs/d/run", "outputs") == run  # brought up to date
    assert rundir.kind(run) == "eval"
    for name, words in [("c0ffee01", "no run with the id"), (f"{root}/x", "holds no run"), ("s3://a/b", "expected a")]:
        with pytest.raises(ConfigError, match=words):
            rundir.find(name, root)


# --- the logger -------------------------------------------------------------------------------------------------------


def test_metrics_go_before_a_checkpoint_and_now_and_then(tmp_path, root, names, monkeypatch):
    runs = [attached(tmp_path / name, f"{root}/{name}") for name in "ab"]
    warnings = []
    first, second = mirror.make(runs, warnings.append)
    for run in runs:
        (run / "metrics.jsonl").write_text("1")
    first.log({})
    assert names() == []  # not yet 30 s
    second.sync()
    assert names() == ["a/metrics.jsonl", "b/metrics.jsonl"]
    monkeypatch.setattr(mirror, "_EVERY_S", 0.0)
    (runs[0] / "later").write_text("2")
    first.log({})
    first.close({})  # waits
    assert "a/later" in names()
    assert warnings == []


def test_a_store_that_fails_is_a_warning_but_not_before_a_checkpoint(tmp_path, root, monkeypatch):
    run = attached(tmp_path / "run", "gs://no-such-bucket/run")
    (run / "metrics.jsonl").write_text("1")
    warnings = []
    monkeypatch.setattr(mirror, "_EVERY_S", 0.0)
    (logger,) = mirror.make([run], warnings.append)
    for _ in range(4):
        logger.log({})
        logger.close({})
    assert len(warnings) == 1 and "no-such-bucket" in warnings[0]
    with pytest.raises(OSError, match="no-such-bucket"):
        logger.sync()


# --- bad input --------------------------------------------------------------------------------------------------------


def test_another_store_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^output_root: 's3://bucket/x' is not allowed; expected .*gs://"):
        validate(["output_root=s3://bucket/x"])
    assert os.listdir(tmp_path) == []


def test_no_such_bucket(tmp_path, root):
    with pytest.raises(ConfigError, match=r"^output_root: 'gs://nosuch/x.*' cannot be used: there is no such bucket$"):
        validate(["output_root=gs://nosuch/x"])
    assert os.listdir(tmp_path) == []


def test_a_server_that_is_down(tmp_path, root, monkeypatch):
    monkeypatch.setattr(store, "_REACH_S", 1)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"^output_root: 'gs://.*' cannot be used: no answer within 1 s"):
        validate([f"output_root={root}"])
    assert os.listdir(tmp_path) == []


def test_gcsfs_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    store._filesystem.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'rlexp\[gcs\]'"):
        validate(["output_root=gs://bucket/x"])
    assert os.listdir(tmp_path) == []


def test_bad_input_that_is_found_late_leaves_nothing(tmp_path, root, names, monkeypatch):
    def run(experiment, run_dir, *_):
        (run_dir / "environment.json").write_text("{}")
        store.push(run_dir)
        assert "runs/a/environment.json" in names()
        raise ConfigError("only the checkpoint could tell")

    monkeypatch.setattr(session, "run", run)
    composed = compose.composed([])
    command = entry.Command([], tmp_path / "runs/a", None, f"{root}/runs/a", composed)
    with pytest.raises(ConfigError, match="only the checkpoint"):
        entry.run(command, None)
    assert os.listdir(tmp_path) == [] and names() == []


@pytest.mark.slow
def test_a_run_on_the_disk_imports_none_of_it():
    program = (
        "import sys; from rlexp import session; from rlexp.storage import checkpoint, store; from rlexp.__main__ import validate; "
        "validate(['compilation_cache=null']); print(sorted({'gcsfs', 'fsspec'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "[]\n", done.stderr
