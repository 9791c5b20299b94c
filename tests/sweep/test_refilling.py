"""New trials in the slots of those that were pruned: which train together, that each is what it would be, and kills."""

import contextlib
import dataclasses
import itertools
import json
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import StopAfter, assert_same, rows, saved, without_clock

from rlexp import experiment
from rlexp.config import ConfigError
from rlexp.machine.stop import Stop
from rlexp.storage import rundir
from rlexp.sweep import packs, worker
from rlexp.sweep.halving import make, window
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job, at_once, slots
from rlexp.sweep.packing import name as name_of
from rlexp.sweep.refilling import Search, Stretch, _as_given, try_again
from rlexp.sweep.supervise import Why
from rlexp.training import between
from rlexp.training.between import Moment
from rlexp.training.loop import Member, Resume, train_pack
from rlexp.training.members import Pack
from rlexp.training.saves import Saves
from rlexp_launchers import local

from .halvings import Killed, go_on, killed_at, pack_of

pytestmark = pytest.mark.usefixtures("paying")

# Two trials at once: of each pair that begins one trains on, and these two go on together.
PAYS = (2.0, 5.0, 3.0, 6.0)
REFILLED: dict[str, Any] = {"pays": PAYS, "rungs": [64], "slots": 2}


# --- which train together ----------------------------------------------------------------------------------------------


def played(pack: list[Job], folder: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All stretches, with returns from nowhere; the search is opened anew before each, as after a kill. What has failed is tried
    again at the end."""
    config, returns, stretches = pack[0].config.between, dict[tuple[int, int], float](), []
    failures = Counter[int]()
    earlier = [float(rng.randint(0, 9)) for _ in range(rng.randint(0, 20))]  # of the first bracket, in the batch before
    seen = [[_as_given(window(earlier, len(pack), config.reduction))] * 2, [[0.0, 0.0]] * 2]
    for n, job in enumerate(pack):
        own = dataclasses.replace(job.config.between, seen=seen)
        pack[n] = job._replace(config=dataclasses.replace(job.config, between=own))
    monkeypatch.setattr(Search, "_at_rung", lambda self, rung, number: returns.get((rung, number)))
    again = Counter[int]()
    while (stretch := Search(pack, folder).next()) or not again:
        if stretch is None:
            stretches.append(None)
            again = failures + Counter([-1])
            rundir.write_json(folder / "again.json", failures)
            continue
        assert stretch == Search(pack, folder).next()
        jobs, rung = Search(pack, folder).of(stretch), stretch.passed
        failed = {number for number in stretch.jobs if rng.random() < (0.1 if again else 0.3)}
        failures.update(failed)
        if rung == len(config.rungs):
            outcomes = {n: {"status": "failed" if n in failed else "finished"} for n in stretch.jobs}
        else:
            here = {n: float(rng.randint(0, 9)) for n in stretch.jobs if n not in failed}
            at = config.rungs[rung]
            given = [here.get(n, float("nan")) for n in stretch.jobs]
            moment = Moment(at - 1, at, given, [{"halving/bracket": job.config.between.bracket} for job in jobs])  # type: ignore[arg-type]
            hook = make(jobs[0].config.between)
            pruned = {stretch.jobs[i] for i in hook.prune(moment)}
            assert hook.pause is not None and {stretch.jobs[i] for i in hook.pause(moment)} == set(here)
            # As one that knows all would decide.
            for n in here:
                bracket = pack[n].config.between.bracket
                peers = earlier * (bracket == 0)
                peers += [x for (r, m), x in returns.items() if r == rung and pack[m].config.between.bracket == bracket]
                there = [m for m in here if pack[m].config.between.bracket == bracket]
                better = sum(x >= here[n] for x in peers) + sum((here[m], -m) > (here[n], -n) for m in there)
                keep = max(1, (len(peers) + len(there)) // config.reduction)
                assert (n in pruned) == (bracket <= rung and better >= keep)
            returns |= {(rung, n): x for n, x in here.items()}
            outcomes = {n: {"status": "pruned" if n in pruned else "waiting"} for n in here}
            outcomes |= {n: {"status": "failed"} for n in failed}
        Search(pack, folder).over(stretch, outcomes)
        stretches.append(stretch)
    return stretches


@pytest.mark.parametrize("seed", range(6))
def test_slots_are_full_while_there_are_new_trials(seed, tmp_path, monkeypatch):
    rng = random.Random(seed)
    number, width, reduction = rng.randint(5, 40), rng.randint(1, 4), rng.choice([2, 3])
    (lead,) = pack_of(tmp_path, [1.0], rungs=[64, 128], reduction=reduction, slots=width, seen=[[], []])
    config = lead.config.between

    def job(n: int) -> Job:
        own = dataclasses.replace(config, bracket=rng.choice([0, 0, 1]))
        return lead._replace(number=n, config=dataclasses.replace(lead.config, between=own))

    pack = [job(n) for n in range(number)]
    stretches = played(pack, tmp_path / "packs/all", rng, monkeypatch)
    once, again = stretches[: stretches.index(None)], stretches[stretches.index(None) + 1 :]
    begun = [n for one in once if one.passed == 0 for n in one.jobs]
    assert begun == list(range(number)) and Search(pack, tmp_path / "packs/all").left() == []
    assert len({(one.passed, n) for one in once for n in one.jobs}) == sum(len(one.jobs) for one in once)
    for part in (once, again):  # those that are tried again take the slots too
        last = max((i for i, one in enumerate(part) if one.passed == 0), default=0)
        assert all(len(one.jobs) == width for one in part[:last])


def test_one_that_is_tried_again_is_not_over_and_is_no_peer_of_its_own(tmp_path, monkeypatch):
    pack = pack_of(tmp_path, [1.0, 2.0, 3.0, 4.0], rungs=[64], slots=4)
    monkeypatch.setattr(Search, "_at_rung", lambda self, rung, number: float(number))
    ended = {0: {"status": "failed"}, 1: {"status": "failed"}, 2: {"status": "pruned"}, 3: {"status": "finished"}}
    Search(pack, tmp_path).over(Stretch(0, (0, 1, 2, 3)), ended)
    assert (Search(pack, tmp_path).left(), set(Search(pack, tmp_path).settled())) == ([], {0, 1, 2, 3})
    rundir.write_json(tmp_path / "again.json", {"0": 1, "1": 1})
    search = Search(pack, tmp_path)
    first = search.next()
    assert first is not None and first == Stretch(0, (0, 1)) and not search.waits(first)
    assert (search.left(), set(search.settled()), search.is_tried_again(first)) == ([0, 1], {2, 3}, True)
    assert search.of(first)[0].config.between.seen == [[[2.0, 0.0, 3.0, 2.0]]]  # type: ignore[union-attr]
    search.over(first, {0: {"status": "waiting"}, 1: {"status": "failed"}})
    assert search.waits(Stretch(1, (0,))) and search.next() == Stretch(1, (0,)) and search.left() == [0]
    search.over(Stretch(1, (0,)), {0: {"status": "finished"}})
    assert search.next() is None
    rundir.write_json(tmp_path / "again.json", {"0": 1, "1": 2})
    search = Search(pack, tmp_path)
    assert search.next() == Stretch(0, (1,)) and search.left() == [1]
    assert search.of(Stretch(0, (1,)))[0].config.between.seen == [[[3.0, 0.0, 3.0, 2.0, 0.0]]]  # type: ignore[union-attr]


def test_who_has_what_it_was_to_have_waits_for_nobody(tmp_path):
    (job,) = pack_of(tmp_path, [1.0], slots=2, more=["stop_at.return=7"])
    left, returns = dict[int, str](), np.array([9.0, 6.0, 4.0, 1.0])
    for hook in between.of(job.config, job.modules):
        found = between.leaving(hook, Moment(63, 64, returns, [{}] * 4))
        returns = np.where([i in found for i in range(4)], np.nan, returns)
        left |= {i: one.status for i, one in found.items()}
    assert left == {0: "finished", 1: "waiting", 2: "pruned", 3: "pruned"}


def test_what_cannot_be_read_is_told_and_not_begun_anew(tmp_path):
    pack = pack_of(tmp_path, [1.0, 2.0], slots=1)
    for text in ("[[0, [[0", "[[0, 1]]", '[[0, [[7, {"status": "pruned"}, 1.0]]]]', "[[0, [[0, {}, 1.0]]]]"):
        (tmp_path / "stretches.json").write_text(text)
        with pytest.raises(ConfigError, match=r"^[^:]*stretches\.json: [^/]*$"):
            Search(pack, tmp_path)
    (tmp_path / "stretches.json").unlink()
    for text in ("[[0", "[1]", '{"a": 1}'):
        (tmp_path / "again.json").write_text(text)
        with pytest.raises(ConfigError, match=r"again\.json: [^/]*$"):
            Search(pack, tmp_path)


def test_the_other_searches_are_trained_all_the_same(tmp_path, monkeypatch):
    begun = list[Any]()

    def train(pack: Any, *_: Any, **how: Any) -> None:
        begun.append(pack[0].number)
        if begun == [0]:
            raise ConfigError("stretches.json: this cannot be read")

    monkeypatch.setattr(packs, "train", train)
    pack = pack_of(tmp_path, [1.0, 2.0])
    with pytest.raises(ConfigError, match=r"stretches\.json"):
        local._train_here([pack[:1], pack[1:]], tmp_path, Manifest(tmp_path), packs.Programs())
    assert begun == [0, 1]


def test_a_worker_that_cannot_read_it_says_so_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(worker, "run", lambda *_: Search(pack_of(tmp_path, [1.0], slots=1), tmp_path))
    (tmp_path / "stretches.json").write_text("[[0")
    assert worker.main(tmp_path, "a") == worker.REFUSED
    assert len(capfd.readouterr().err.splitlines()) == 1
    workers, task = local._Workers(1, []), worker.Task(tmp_path, "a", [0])
    for code, why in ((worker.REFUSED, Why.HOPELESS), (1, Why.DIED)):
        process = subprocess.Popen(["sh", "-c", f"exit {code}"])
        process.wait()
        workers._running["a"] = process, 0
        assert workers.ended([task])["a"].why is why


def test_a_smaller_max_pack_counts(tmp_path):
    pack = pack_of(tmp_path, [1.0] * 5, slots=4, more=["launcher.max_pack=2"])
    assert (slots(pack[0]), at_once(pack), at_once(pack[:1])) == (4, 2, 1)
    stretch = Search(pack, tmp_path).next()
    assert stretch is not None and stretch.jobs == (0, 1)


# --- that each is what it would be -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(programs, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    pack_of(directory, **REFILLED)
    assert [status for status, _ in go_on(directory, programs, **REFILLED)] == ["pruned", "finished"] * 2
    assert list(programs._traced) == [2]
    return directory


def test_new_trials_take_the_slots_in_the_same_program(undisturbed, programs, tmp_path):
    """Each is, to the bit, what it is in a pack of the same width that nobody has left."""
    whole = pack_of(tmp_path, PAYS, plain=True)
    for first in (0, 2):
        packs.train(whole[first : first + 2], tmp_path, Manifest(tmp_path), stop=Stop(), programs=programs)
    for i, entry in enumerate(Manifest(undisturbed).jobs()):
        ours, alone = without_clock(rows(undisturbed / str(i))), without_clock(rows(tmp_path / str(i)))
        assert ours == alone[: len(ours)] and ours[-1]["env_steps"] == (320 if entry.status == "finished" else 64)
        summary = json.loads((undisturbed / f"{i}/summary.json").read_text())
        assert summary["status"] == entry.status
        if entry.status == "finished":
            assert summary["resumed_from"] == 64
            assert_same(undisturbed / str(i), tmp_path / str(i))
    assert [entry.attempt for entry in Manifest(undisturbed).jobs()] == [1] * 4
    assert not (undisturbed / "packs").exists()


def ends(directory: Path) -> list[tuple[str, float | None]]:
    return [(entry.status, entry.objective) for entry in Manifest(directory).jobs()]


def assert_ended_alike(directory: Path, undisturbed: Path) -> None:
    assert ends(directory) == ends(undisturbed)
    for i in range(len(ends(directory))):
        assert_same(directory / str(i), undisturbed / str(i))
    assert not (directory / "packs").exists()


OFTEN: dict[str, Any] = {**REFILLED, "more": ["hardware.pack_devices=1", "checkpoint.every_updates=1"]}


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def failed_and_retried(directory: Path, programs: packs.Programs) -> None:
    """All trials: just before they would have been compared."""
    directory.mkdir(exist_ok=True)
    pack_of(directory, **OFTEN)
    with pytest.MonkeyPatch.context() as disaster:
        disaster.setattr(Pack, "moment", full)
        assert [status for status, _ in go_on(directory, programs, **OFTEN)] == ["failed"] * 4
    retried(directory, [1, 2])
    retried(directory, [0, 3])


def assert_learnt_the_same(directory: Path, undisturbed: Path) -> None:
    """Though their lines are more, since chunks are shorter."""
    assert ends(directory) == ends(undisturbed)
    for i in range(4):
        (update, got), (wanted_update, wanted) = saved(directory / str(i)), saved(undisturbed / str(i))
        assert update == wanted_update and [k for k in wanted if wanted[k].tobytes() != got[k].tobytes()] == []


def test_those_that_are_tried_again_are_packs_from_where_they_failed(undisturbed, programs, tmp_path, capsys):
    """Whoever they were with."""
    failed_and_retried(tmp_path, programs)
    go_on(tmp_path, programs, **OFTEN)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("go on at")]
    assert said == ["go on at 32 steps: 1, 2", "go on at 32 steps: 0, 3", "go on at 64 steps: 1, 3"]
    assert_learnt_the_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_wherever_those_that_are_tried_again_are_killed(undisturbed, programs, tmp_path):
    for event in itertools.count(1, 5):
        failed_and_retried(directory := tmp_path / str(event), programs)
        with killed_at(event), contextlib.suppress(Killed):
            go_on(directory, programs, **OFTEN)
            break
        go_on(directory, programs, **OFTEN)
        assert_learnt_the_same(directory, undisturbed)


def retried(directory: Path, numbers: list[int]) -> None:
    """As `python -m rlexp.sweep retry` does."""
    manifest = Manifest(directory)
    pack = name_of(pack_of(directory, PAYS))
    try_again(directory, [one._replace(pack=pack) for one in manifest.jobs() if one.number in numbers])
    manifest.change(numbers, status="pending", error=None)


def test_who_has_left_a_pack_that_fails_then_has_not_failed(undisturbed, programs, tmp_path, monkeypatch):
    pack_of(tmp_path, **REFILLED)
    save = Saves.save

    def full(self: Saves, update: int, *others: Any) -> None:
        if update == 2:  # at the rung
            raise OSError(28, "No space left on device")
        save(self, update, *others)

    monkeypatch.setattr(Saves, "save", full)
    assert go_on(tmp_path, programs, **REFILLED) == ends(undisturbed)


def test_one_that_comes_by_a_rung_again_stands_by_the_first_decision(programs, tmp_path):
    """Though by those it is compared with now it would be another one."""
    high = {**REFILLED, "seen": [[[8.0, 0.0, 90.0, 80.0, 70.0, 60.0, 50.0, 40.0]]]}
    pack_of(tmp_path, **high)
    with killed_at(3), contextlib.suppress(Killed):
        go_on(tmp_path, programs, **high)
    assert [json.loads((tmp_path / f"{i}/summary.json").read_text())["status"] for i in (0, 1)] == ["pruned"] * 2
    for folder in tmp_path.glob("packs/*-0"):
        shutil.rmtree(folder)
    go_on(tmp_path, programs, **REFILLED)
    assert [status for status, _ in ends(tmp_path)] == ["pruned", "pruned", "pruned", "finished"]


def test_a_stretch_that_cannot_be_written_down_has_failed_and_comes_again(programs, tmp_path):
    """Its trials are not left as if they trained."""
    pack_of(tmp_path, **REFILLED)
    folder = tmp_path / "packs" / name_of(pack_of(tmp_path, PAYS))
    folder.mkdir(parents=True)
    (folder / "stretches.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"stretches\.json.*No space left|No space left.*stretches\.json"):
        go_on(tmp_path, programs, **REFILLED)
    entries = Manifest(tmp_path).jobs()
    assert [entry.status for entry in entries] == ["failed"] * 2 + ["pending"] * 2
    assert all("No space left" in str(entry.error) for entry in entries[:2])
    assert [status for status, _ in go_on(tmp_path, programs, **REFILLED)] == ["pruned", "finished"] * 2


@pytest.mark.slow
def test_wherever_it_is_killed(undisturbed, programs, tmp_path):
    found = set[str]()
    for event in itertools.count(2, 3):
        directory = tmp_path / str(event)
        directory.mkdir()
        pack_of(directory, **REFILLED)
        with killed_at(event) as events, contextlib.suppress(Killed):
            go_on(directory, programs, **REFILLED)
            break
        go_on(directory, programs, **REFILLED)
        assert_ended_alike(directory, undisturbed)
        found.add(events[-1])
    assert found == {"_put_part", "settle", "write_json", "_put"}


@pytest.mark.slow
def test_one_that_is_stopped_again_and_again_goes_on(undisturbed, programs, tmp_path):
    pack_of(tmp_path, **REFILLED)
    for looks in (2, 4, 7, 5):
        go_on(tmp_path, programs, StopAfter(looks), **REFILLED)
        assert {status for status, _ in ends(tmp_path)} <= {"stopped", "finished", "pruned"}
    go_on(tmp_path, programs, **REFILLED)
    assert_ended_alike(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_failure_is_that_trials_alone_and_can_be_tried_again(undisturbed, programs, tmp_path, monkeypatch):
    """It takes its place among those that wait, or trains on alone."""
    pack_of(tmp_path, **REFILLED)
    for i in (2, 3):
        (tmp_path / str(i)).write_text("")  # no directory can be made
    go_on(tmp_path, programs, StopAfter(7), **REFILLED)
    assert [status for status, _ in ends(tmp_path)] == ["pruned", "stopped", "failed", "failed"]
    for _ in range(2):
        go_on(tmp_path, programs, **REFILLED)
        assert [status for status, _ in ends(tmp_path)] == ["pruned", "finished", "failed", "failed"]
    assert Manifest(tmp_path).jobs()[1].attempt == 2
    for i in (2, 3):
        (tmp_path / str(i)).unlink()
    manifest = Manifest(tmp_path)
    try_again(tmp_path, [one._replace(pack=manifest.jobs()[0].pack) for one in manifest.jobs()[2:]])
    manifest.change([2, 3], status="pending", error=None)
    go_on(tmp_path, programs, StopAfter(1), **REFILLED)
    assert [status for status, _ in ends(tmp_path)] == ["pruned", "finished", "stopped", "stopped"]
    go_on(tmp_path, programs, **REFILLED)
    assert [status for status, _ in ends(tmp_path)] == ["pruned", "finished", "pruned", "finished"]


@pytest.mark.slow
@pytest.mark.parametrize(("until", "its_rungs"), [(320, [64]), (192, [64, 128, 256])])
def test_who_has_gone_on_alone_keeps_that_and_waits_for_nobody(until, its_rungs, programs, tmp_path):
    given = {**REFILLED, "rungs": its_rungs}
    jobs = pack_of(tmp_path, **given)
    go_on(tmp_path, programs, StopAfter(5), **given)
    waits = json.loads((tmp_path / "1/summary.json").read_text())
    assert (waits["status"], waits["env_steps"]) == ("waiting", 64)
    node = {**jobs[1].node, "resume": str(jobs[1].dir), "total_env_steps": until}
    member = Member(experiment.build(node), jobs[1].dir, rundir.id_of(jobs[1].dir))
    train_pack([member], stop=Stop(), resume=Resume(jobs[1].dir, "all"))
    go_on(tmp_path, programs, **given)
    assert [status for status, _ in ends(tmp_path)] == ["pruned", "finished"] * 2
    assert [row["env_steps"] for row in rows(tmp_path / "1")] == [row["env_steps"] for row in rows(tmp_path / "3")]


@pytest.mark.slow
@pytest.mark.parametrize(("whose", "left"), [([1], ["pruned", "failed", "pruned", "finished"]), ([1, 3], None)])
def test_a_checkpoint_that_is_gone_while_it_waits_fails_that_one(whose, left, programs, tmp_path):
    pack_of(tmp_path, **REFILLED)
    for looks in range(3, 20):
        go_on(tmp_path, programs, StopAfter(looks), **REFILLED)
        if all((tmp_path / f"{i}/summary.json").exists() for i in (1, 3)):
            break
    for i in whose:
        shutil.rmtree(tmp_path / f"{i}/checkpoints")
    for folder in tmp_path.glob("packs/*-1"):
        shutil.rmtree(folder)
    go_on(tmp_path, programs, **REFILLED)
    assert [status for status, _ in ends(tmp_path)] == (left or ["pruned", "failed"] * 2)
    assert "from which it was to go on is gone" in str(Manifest(tmp_path).jobs()[1].error)


@pytest.mark.slow
def test_four_devices_decide_the_same(tmp_path):
    given = {"pays": (*PAYS, 1.0, 7.0, 8.0, 9.0), "rungs": [64], "slots": 4, "more": ["hardware.pack_devices=4"]}
    pack_of(tmp_path, **given)
    go_on(tmp_path, packs.Programs(), **given)
    assert [i for i, (status, _) in enumerate(ends(tmp_path)) if status == "finished"] == [1, 3, 5, 6, 7]


@pytest.mark.slow
def test_whoever_waits_keeps_its_memory_though_checkpoints_leave_it_out(tmp_path):
    """Else what it learns from then on would be learnt from other steps."""
    work = (
        *("env=probe/action_reward", "algo=dqn", "algo.num_envs=8", "algo.num_steps=4", "algo.num_updates=2"),
        *("algo.source.batch_size=16", "algo.source.capacity=512", "algo.source.prefill_env_steps=64"),
        *("network.hidden=[4]", "eval.num_episodes=2", "eval.every_env_steps=64", "total_env_steps=320"),
        *("checkpoint.replay=false", "checkpoint.every_updates=100"),
    )
    given, programs = {"work": work, "pays": PAYS}, packs.Programs()
    for name in ("refilled", "plain"):
        (tmp_path / name).mkdir()
    for name, pack in (
        ("refilled", pack_of(tmp_path / "refilled", **given, rungs=[128], slots=2)),
        ("plain", pack_of(tmp_path / "plain", **given, plain=True)[2:]),
    ):
        packs.train(pack, tmp_path / name, Manifest(tmp_path / name), stop=Stop(), programs=programs)
    assert ends(tmp_path / "refilled")[3][0] == "finished"
    assert_same(tmp_path / "refilled/3", tmp_path / "plain/3")
