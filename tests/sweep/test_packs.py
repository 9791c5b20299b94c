"""One pack of a sweep, in this process: what its members share, and which of them fail alone."""

import functools
import json
import os
import shutil
from pathlib import Path

import jax
import pytest
from support import SMALL, StopAfter, assert_same, build, rows, saved, train, without_clock

from rlexp.loggers import progress
from rlexp.machine.stop import Stop
from rlexp.storage import checkpoint, rundir, store
from rlexp.sweep import packs, worker
from rlexp.sweep.journal import Journal
from rlexp.sweep.manifest import Entry, Manifest
from rlexp.sweep.packing import Job
from rlexp.training.loop import Member, Resume, train_pack
from rlexp_launchers import local


def four(directory: Path, manifest: Manifest, *overrides: str) -> list[Job]:
    """Jobs that are one pack."""
    found = []
    for number in range(4):
        built = build(*overrides, f"seed={number}")
        manifest.add(number, [f"seed={number}"])
        run_dir = directory / str(number)
        found.append(Job(number, (f"seed={number}",), built.node, built.config, built.modules, run_dir))
    return found


def test_a_pack_that_has_trained_goes_on_over_as_many_devices_and_is_not_halved(tmp_path, monkeypatch):
    """Its checkpoint is of all: it stays when memory is short, and a machine with other cores rounds as the first one."""
    devices = []

    def small_memory(members, *, directory, traced, **how):
        devices.append(jax.tree.leaves(traced.abstract_run)[0].sharding.num_devices)
        if len(devices) == 1:
            run = {"x": jax.numpy.ones(1)}
            config = members[0].experiment.config.checkpoint
            checkpoint.put(config, store.checkpoints(directory), 3, run, {"pack_devices": 4}, None)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(packs, "train_pack", small_memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    manifest = Manifest(tmp_path)
    found = four(tmp_path, manifest)
    for _ in range(2):
        packs.train(found, tmp_path, manifest, stop=Stop(), programs=packs.Programs())
        assert [e.status for e in manifest.jobs()] == ["failed"] * 4
        assert list(tmp_path.glob("packs/*/checkpoints/3/checksums.json"))
    assert devices == [2, 4]


def test_a_pack_that_is_too_large_is_halved(tmp_path, monkeypatch, capsys):
    sizes = []

    def small_memory(members, **how):
        sizes.append(len(members))
        store.checkpoints(how["directory"]).mkdir(parents=True)
        if len(members) > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        return [{"status": "finished", "objective": 1.0} for _ in members]

    monkeypatch.setattr(packs, "train_pack", small_memory)
    manifest = Manifest(tmp_path)
    found = four(tmp_path, manifest)
    packs.train(found, tmp_path, manifest, stop=Stop(), programs=packs.Programs())
    assert sizes == [4, 2, 2]
    assert "trained in two halves" in capsys.readouterr().out
    assert [e.status for e in manifest.jobs()] == ["finished"] * 4


@functools.cache
def programs() -> packs.Programs:
    """Compiled once for all packs of four that differ in what happens to them."""
    return packs.Programs()


def train_four(directory: Path, stop: Stop) -> list[Entry]:
    """A pack of them, in a new directory or one that is there."""
    directory.mkdir(exist_ok=True)
    manifest = Manifest(directory)
    jobs = four(directory, manifest, *SMALL, "logger.progress=off")
    packs.train(jobs, directory, manifest, stop=stop, programs=programs())
    return manifest.jobs()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    assert [e.status for e in train_four(directory, Stop())] == ["finished"] * 4
    return directory


@pytest.mark.parametrize(
    ("name", "obstacle", "said"),
    [
        pytest.param(
            "start", lambda member: (member / "metrics.jsonl").mkdir(), "Is a directory", marks=pytest.mark.slow
        ),
        pytest.param("start", lambda member: (member / "checkpoints").touch(), "checkpoints", marks=pytest.mark.slow),
        pytest.param(
            "later",
            lambda member: (member / "metrics.jsonl").write_text("nonsense\n"),
            "line 1: not a JSON object",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "later, unseen",
            lambda member: (member / "summary.json").mkdir(),
            "Is a directory",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_member_whose_directory_cannot_be_used_fails_alone(name, obstacle, said, undisturbed, tmp_path, monkeypatch):
    """One is a file, one is locked by a process that goes on with it alone, one has no place for metrics or checkpoints, from
    the start or when a pack goes on: the others end as if they had been undisturbed."""
    red = []

    def display(kind, infos):
        return make(kind, infos)._replace(fail=lambda i: red.append(infos[i].dir.name))

    make = progress.make
    monkeypatch.setattr(progress, "make", display)
    directory = tmp_path / "sweep"
    if name.startswith("later"):
        stopped = train_four(directory, StopAfter(2))
        assert [(e.status, e.attempt) for e in stopped] == [("stopped", 1)] * 4
        shutil.rmtree(directory / "0")
        (directory / "2/summary.json").unlink()
    directory.mkdir(exist_ok=True)
    (directory / "0").touch()
    for member in (directory / "2", directory / "3"):
        member.mkdir(exist_ok=True)
    obstacle(directory / "2")
    before = sorted(path.name for path in (directory / "3").iterdir())
    red.clear()
    with rundir.lock(directory / "3"):
        ended = train_four(directory, Stop())
    assert [e.status for e in ended] == ["failed", "finished", "failed", "failed"]
    errors = [e.error or "" for e in ended]
    assert "cannot write to" in errors[0] and "another process is running" in errors[3]
    assert said in errors[2]
    assert red == ["2"] * (name != "later, unseen")  # the display does not know of it
    assert sorted({*before, ".lock"}) == sorted(path.name for path in (directory / "3").iterdir())
    assert_same(directory / "1", undisturbed / "1")
    assert not (directory / "packs").exists()
    if name.startswith("later"):
        assert json.loads((directory / "1/summary.json").read_text())["resumed_from"] == 512


def test_where_no_directory_can_be_used_each_job_has_its_own_reason(tmp_path):
    manifest = Manifest(tmp_path)
    found = four(tmp_path, manifest)
    for job in found[1:]:
        job.dir.touch()
    found[0].dir.mkdir()
    with rundir.lock(found[0].dir):
        packs.train(found, tmp_path, manifest, stop=Stop(), programs=packs.Programs())
    assert [(e.status, f"{tmp_path / str(e.number)}'" in (e.error or "")) for e in manifest.jobs()] == [
        ("failed", True)
    ] * 4


def test_what_workers_of_an_earlier_parent_wrote_is_known(tmp_path, monkeypatch):
    """The parent was killed before it read that a job had finished: the same line, without workers, does not train it again."""
    manifest, trained = Manifest(tmp_path), []
    found = four(tmp_path, manifest)
    task = worker.write(found, tmp_path, manifest)
    record = Journal(task.journal)
    record.settle({0: {"status": "finished", "objective": 7.0}, 1: {"status": "stopped", "objective": 1.0}})
    record.close()
    monkeypatch.setattr(packs, "train", lambda pack, *_, **__: trained.extend(job.number for job in pack))
    local.make(found[0].config.launcher)([found], set(), tmp_path, manifest)
    assert trained == [1, 2, 3]
    manifest.change([1], status="finished", objective=9.0)
    worker.fold_all(tmp_path, manifest)  # nothing of it is told twice
    assert [(e.status, e.objective) for e in manifest.jobs()][:2] == [("finished", 7.0), ("finished", 9.0)]


@pytest.mark.slow
def test_packs_with_the_same_program_are_compiled_once(tmp_path, monkeypatch):
    """launcher.pack=off, in one process: other seeds and hyperparameters are data. Another static field is not."""
    traced, manifest = [], Manifest(tmp_path)

    def counted(experiments, layout):
        traced.append(len(experiments))
        return trace(experiments, layout)

    trace = packs.trace
    monkeypatch.setattr(packs, "trace", counted)
    programs, sizes = packs.Programs(), [f"{x}" for x in SMALL]
    for number, own in enumerate(["algo.hp.lr=1e-3 seed=1", "algo.hp.lr=3e-3 seed=2", "algo.num_epochs=1 seed=1"]):
        experiment = build(*sizes, *own.split(), "logger=quiet", "logger.progress=off")
        run_dir = tmp_path / str(number)
        manifest.add(number, own.split())
        job = Job(number, tuple(own.split()), experiment.node, experiment.config, experiment.modules, run_dir)
        packs.train([job], tmp_path, manifest, stop=Stop(), programs=programs)
    assert traced == [1, 1]
    assert [e.status for e in manifest.jobs()] == ["finished"] * 3
    alone = train(tmp_path / "alone", *sizes, "algo.hp.lr=3e-3", "logger.progress=off", seeds=[2])
    assert alone[0]["objective"] == manifest.jobs()[1].objective
    assert without_clock(rows(tmp_path / "1")) == without_clock(rows(tmp_path / "alone/2"))


@pytest.mark.slow
def test_a_member_that_went_on_alone_keeps_what_it_has(tmp_path, capsys):
    """Of a pack that was stopped one goes on alone to the same total, one further, one not as far, and one stays: none of them
    is trained by two, and no line or checkpoint is lost."""
    small, manifest, programs = [*SMALL, "logger.progress=off"], Manifest(tmp_path), packs.Programs()
    jobs = four(tmp_path, manifest, *small)
    for job in jobs:
        job.dir.mkdir()
    packs.train(jobs, tmp_path, manifest, stop=StopAfter(2), programs=programs)
    assert [e.status for e in manifest.jobs()] == ["stopped"] * 4

    def alone(number: int, total: int, stop: Stop) -> None:
        (before,) = [e for e in manifest.jobs() if e.number == number]
        experiment = build(*small, f"seed={number}", f"total_env_steps={total}")
        member = Member(experiment, jobs[number].dir, before.run_id or "")
        train_pack([member], stop=stop, resume=Resume(member.dir, "all"))

    alone(0, 640, Stop())
    alone(1, 1280, Stop())
    alone(2, 1280, StopAfter(1))
    ours = [rows(job.dir) for job in jobs]
    assert [lines[-1]["env_steps"] for lines in ours] == [640, 1280, 768, 512]
    kept = [saved(job.dir) for job in jobs[:2]]
    summaries = [(job.dir / "summary.json").read_text() for job in jobs[:2]]
    for attempt in range(2):  # the pack is stopped before it trains, and it is over
        told = StopAfter(0) if attempt == 0 else Stop()
        packs.train(jobs, tmp_path, manifest, stop=told, programs=programs)
        said = capsys.readouterr()
        assert f"job 0 ({jobs[0].dir}): it has 640 environment steps of its own, which are kept" in said.out
        assert f"job 1 ({jobs[1].dir}): it has 1,280 environment steps of its own, which are kept" in said.out
        assert [rows(job.dir) for job in jobs[:2]] == ours[:2]
        for job, (update, leaves), summary in zip(jobs, kept, summaries, strict=False):
            assert saved(job.dir)[0] == update and (job.dir / "summary.json").read_text() == summary
            assert all(leaves[name].tobytes() == leaf.tobytes() for name, leaf in saved(job.dir)[1].items())
        assert rows(jobs[2].dir)[: len(ours[2])] == ours[2]
    assert [e.status for e in manifest.jobs()] == ["finished"] * 4
    assert manifest.jobs()[1].objective == ours[1][-1]["eval/return_mean"]
    assert [rows(job.dir)[-1]["env_steps"] for job in jobs] == [640, 1280, 768, 640]
    assert saved(jobs[3].dir)[0] == 10


def test_what_nobody_foresaw_fails_one_job_and_no_other(tmp_path, monkeypatch):
    """Whatever a user's module raises. The traceback is in the job's directory, and the job can be tried again."""
    manifest, jobs = Manifest(tmp_path), []
    for number, broken in enumerate([KeyError("no such thing\nat all"), SystemExit(3), None, AssertionError()]):
        manifest.add(number, [f"seed={number}"])
        built = build(f"seed={number}")
        jobs.append(
            (Job(number, (f"seed={number}",), built.node, built.config, built.modules, tmp_path / str(number)), broken)
        )

    def train_or_break(members, **how):
        (error,) = [broken for job, broken in jobs if job.dir == members[0].dir]
        if error is not None:
            raise error
        return [{"status": "finished", "objective": 1.0}]

    monkeypatch.setattr(packs, "train_pack", train_or_break)
    local.make(jobs[0][0].config.launcher)([[job] for job, _ in jobs], set(), tmp_path, manifest)
    ended = manifest.jobs()
    assert [e.status for e in ended] == ["failed", "failed", "finished", "failed"]
    assert (ended[0].error or "").startswith("KeyError: 'no such thing") and "SystemExit: 3" in (ended[1].error or "")
    for number in (0, 1, 3):
        kept = tmp_path / f"{number}/traceback.txt"
        assert str(kept) in (ended[number].error or "") and "in train_or_break" in kept.read_text()
    monkeypatch.setattr(packs, "train_pack", lambda members, **how: [{"status": "finished", "objective": 2.0}])
    manifest.change([0, 1, 3], status="pending", error=None)
    local.make(jobs[0][0].config.launcher)([[job] for job, _ in jobs], {2}, tmp_path, manifest)
    assert [(e.status, e.objective, e.error) for e in manifest.jobs()] == [
        ("finished", 2.0, None),
        ("finished", 2.0, None),
        ("finished", 1.0, None),
        ("finished", 2.0, None),
    ]
