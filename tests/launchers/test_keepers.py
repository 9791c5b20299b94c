"""What a keeper makes of anything that gcloud may say, by a clock that nobody waits for."""

import errno
import queue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.sweep.manifest import Manifest
from rlexp.sweep.supervise import DEATHS, PREEMPTIONS, Ended, Why
from rlexp.sweep.worker import FOLDER, Task
from rlexp_launchers import keepers, slices
from rlexp_launchers.gcloud import GcloudError
from rlexp_launchers.keepers import Keeper
from rlexp_launchers.setting import Kind
from rlexp_launchers.slices import FACT, Faulty

from .cloud import HOUR, Cloud, Said, setting


class Result:
    """Of a keeper with one pack, when it has ended."""

    def __init__(self, cloud: Cloud, folder: Path, monkeypatch: Any, stops_at: float | None = None, **values: Any):
        (folder / FOLDER).mkdir(exist_ok=True)
        self.manifest, self.said = Manifest(folder), list[str]()
        out: Any = queue.SimpleQueue()
        keeper = Keeper(
            "x", Kind("v4-8", cloud.workers), setting(cloud, folder, monkeypatch, say=self.said.append, **values), out
        )
        if stops_at is not None:
            cloud.at.append((stops_at, keeper.stop))
        keeper.give(Task(folder, "a", [0]))
        keeper.retire()
        keeper.run()
        _, self.task, self.how = out.get_nowait()
        assert out.empty()

    def deaths(self) -> int:
        return self.manifest.recall(DEATHS + "a") or 0

    def preemptions(self) -> int:
        return self.manifest.recall(PREEMPTIONS + "a") or 0


def runs_already(cloud: Cloud, folder: Path) -> None:
    """The pack, since an earlier process of the sweep."""
    cloud.there = cloud.set_up = True
    cloud.jobs["a-1"] = {"code": None, "began": 0.0, "ends": cloud.runs_s}
    fact = {"task": "a", "job": "a-1", "kind": ["v4-8", cloud.workers], "queued": False, "save_s": 300}
    Manifest(folder).remember(FACT + "x", fact)


_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # SQLite waits for a disk at each change


@pytest.fixture
def run(monkeypatch):
    with TemporaryDirectory(dir=_MEMORY) as folder:
        yield lambda cloud, **values: Result(cloud, Path(folder), monkeypatch, **values)


REAL = [
    "ERROR: (gcloud.compute.tpus.tpu-vm.create) ALREADY_EXISTS: Resource 'x' already exists.",
    "ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource 'x' was not found",
    "There is no more capacity in the zone",
    "RESOURCE_EXHAUSTED: Quota limit 'TPUV4sPerProjectPerZone' has been exceeded.",
    "ERROR: (gcloud) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied",
    "ERROR: gcloud crashed (ConnectionError): HTTPSConnectionPool: Max retries exceeded",
    "ERROR: (gcloud) You do not currently have an active account selected.",
    "ERROR: (gcloud) [/usr/bin/ssh] exited with return code [255].",
    "ERROR: (gcloud) INVALID_ARGUMENT: Runtime version r is not valid",
    "Traceback (most recent call last):",
    '{"error": {"code": 503, "message": "The service is currently unavailable."}}',
]
PRINTED = [
    b'{"state": "REA',
    b'{"state": 7}',
    b'{"networkEndpoints": "none"}',
    b"[]",
    b"[" * 9999,
    b"null",
    b"\xff\xfe",
    b"",
    b"WARNING: update available\n",
    *(
        f'{{"state": "{word}"}}'.encode()
        for word in ("REPAIRING", "RESTARTING", "REIMAGING", "CREATING", "UNKNOWN", "NEW")
    ),
]
SAID = st.one_of(
    st.builds(
        Said,
        st.sampled_from([1, 2, 255, 137, -9]),
        st.just(b""),
        st.one_of(st.sampled_from(REAL), st.text(max_size=60)).map(str.encode),
        st.booleans(),
    ),
    st.builds(Said, st.just(0), st.one_of(st.sampled_from(PRINTED), st.binary(max_size=30)), st.just(b"")),
)
CALLS = ["describe", "create", "delete", "scp", "hello", "set up", "start", "look", "TERM", "KILL", "last lines"]
STATES = ["READY", "REPAIRING", "RESTARTING", "REIMAGING", "PREEMPTED", "STOPPED", "UNKNOWN", "CREATING"]


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    some=st.dictionaries(st.integers(0, 80), SAID, max_size=12),
    always=st.dictionaries(st.sampled_from(CALLS), st.tuples(st.integers(0, 60), SAID), max_size=2),
    states=st.lists(st.tuples(st.floats(0, 2 * HOUR), st.sampled_from(STATES)), max_size=5),
    stops_at=st.none() | st.floats(0, 2 * HOUR),
    runs=st.booleans(),
)
def test_whatever_gcloud_says_it_ends_and_no_pack_pays_for_it(some, always, states, stops_at, runs):
    """In bounded time and calls; what runs is never ended before it was told to save; no failure is the pack's."""
    cloud = Cloud()

    def fault(number: int, kind: str) -> Said | None:
        since, said = always.get(kind, (10**9, None))
        return said if number >= since else some.get(number)

    cloud.faults, cloud.states = fault, sorted([(0.0, "READY"), *states])
    with TemporaryDirectory(dir=_MEMORY) as folder, pytest.MonkeyPatch.context() as monkeypatch:
        if runs:
            runs_already(cloud, Path(folder))
        result = Result(cloud, Path(folder), monkeypatch, stops_at)
        assert result.deaths() == 0
        assert not cloud.unsaved
        if isinstance(result.how, Ended):
            assert result.how.why is Why.HOPELESS
            assert result.how.how.startswith("was preempted")
        else:
            assert result.how is None or isinstance(result.how, GcloudError | Faulty)
        silent = {"delete", "describe"}.isdisjoint(always)
        if cloud.there and silent and not some:
            assert any("could not be deleted" in line for line in result.said)


ONCE = Said(1, b"", b"ERROR: gcloud crashed (ConnectionError): Max retries exceeded")


def at(kind: str, *said: Said):
    """The first calls of a kind have other answers."""
    left = list(said)

    def fault(number: int, seen: str) -> Said | None:
        del number
        return left.pop(0) if seen == kind and left else None

    return fault


def test_a_calm_day(run):
    cloud = Cloud()
    result = run(cloud)
    assert result.how is None
    assert cloud.calls.count("create") == 1
    assert not cloud.there
    assert result.manifest.recall_all(FACT) == {}


@pytest.mark.parametrize(
    "output", [b'{"state": "REA', b"", b"[]", b'{"state": {}}', b"\xff", b'{"networkEndpoints": [3]}']
)
def test_an_answer_that_is_cut_off_is_asked_for_again(run, output):
    cloud = Cloud()
    cloud.faults = at("describe", *[Said(0, output, b"")] * 4)
    assert run(cloud).how is None
    assert cloud.calls.count("create") == 1


TAKEN = Said(
    1, b"", b"ERROR: (gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: Resource 'x' already exists."
)


@pytest.mark.parametrize("said", [[ONCE._replace(first=True)], [TAKEN._replace(first=True)], [TAKEN, TAKEN]])
def test_our_own_name_that_is_there_already_is_ours(run, said):
    """By a call that seemed to fail; by gcloud's own second try; by a deletion that is not over."""
    cloud = Cloud()
    cloud.faults = at("create", *said)
    assert run(cloud).how is None
    assert not cloud.there


def test_so_is_one_of_a_name_that_was_given_and_of_our_label(run):
    cloud = Cloud()
    cloud.labels = {"rlexp-sweep": "abc"}
    cloud.faults = at("create", TAKEN._replace(first=True))
    assert run(cloud, own_names=False).how is None
    assert not cloud.there


@pytest.mark.parametrize("labels", [{}, {"rlexp-sweep": "other"}])
def test_a_name_of_somebody_elses_is_left_alone(run, labels):
    cloud = Cloud()
    cloud.there, cloud.labels = True, labels
    result = run(cloud, own_names=False)
    assert isinstance(result.how, GcloudError)
    assert "is in use, by a slice that is not of this sweep" in str(result.how)
    assert cloud.there
    assert set(cloud.calls) == {"describe"}


def test_so_it_is_where_they_were_quicker(run):
    cloud = Cloud()
    cloud.there = True
    cloud.faults = at("describe", Said(1, b"", b"ERROR: NOT_FOUND: Resource x was not found"))
    result = run(cloud, own_names=False)
    assert "is in use" in str(result.how)
    assert cloud.there
    assert "delete" not in cloud.calls


@pytest.mark.parametrize("state", ["REPAIRING", "RESTARTING", "REIMAGING", "STARTING", "UNKNOWN", "SOMETHING_NEW"])
def test_a_slice_that_moves_is_waited_for(run, state):
    """What ran on it goes on, and nobody counts that as a loss."""
    cloud = Cloud()
    cloud.states = [(0, "READY"), (600, state), (1000, "READY")]
    result = run(cloud)
    assert result.how is None
    assert (cloud.calls.count("create"), cloud.calls.count("start")) == (1, 2)  # the second finds the first
    assert result.preemptions() == 0
    assert HOUR < cloud.now < 1.2 * HOUR


def test_one_that_moves_for_ever_is_made_anew(run):
    cloud = Cloud()
    cloud.states = [(0, "READY"), (600, "REPAIRING"), (1.5 * HOUR, "READY")]
    result = run(cloud)
    assert result.how is None
    assert cloud.calls.count("create") < 8
    assert not cloud.there


def test_slices_that_are_lost_at_once_are_made_ever_more_slowly(run):
    """It was 22 creations and deletions in a minute."""
    cloud = Cloud()
    cloud.states = [(0, "PREEMPTED")]
    result = run(cloud)
    assert isinstance(result.how, GcloudError)
    assert cloud.calls.count("create") <= 12
    assert cloud.now > 1000


def test_what_keeps_a_slice_from_being_set_up_is_the_slices_fault(run):
    cloud = Cloud()
    cloud.faults = lambda number, kind: Said(1, b"", b"no space left on device") if kind == "set up" else None
    result = run(cloud)
    assert isinstance(result.how, Faulty)
    assert "no space left on device" in str(result.how)
    assert cloud.calls.count("set up") == 3
    assert (result.deaths(), result.preemptions()) == (0, 0)
    assert not cloud.there


def test_a_slice_that_is_set_up_at_last_is_good(run):
    cloud = Cloud()
    cloud.faults = at("start", ONCE, ONCE)
    assert run(cloud).how is None
    assert cloud.calls.count("create") == 1


@pytest.mark.parametrize(
    ("code", "expected"), [("rc 1", Faulty), ("rc 134", Faulty), ("rc 137", Ended), ("dead", Ended)]
)
def test_a_process_without_a_first_word_is_the_slices_fault_and_one_that_is_killed_is_not(run, code, expected):
    cloud = Cloud()
    cloud.faults = lambda number, kind: Said(0, f"{code}\n".encode(), b"") if kind == "look" else None
    result = run(cloud)
    assert isinstance(result.how, expected)
    if expected is Ended:
        assert result.how.why is Why.DIED


def test_without_a_network_here_what_trains_is_left_alone(run):
    """For half a day neither ssh nor Google answers."""
    cloud = Cloud()
    cloud.runs_s = 14 * HOUR
    cloud.faults = lambda number, kind: ONCE if HOUR < cloud.now < 13 * HOUR else None
    result = run(cloud)
    assert result.how is None
    assert cloud.calls.count("create") == 1
    assert cloud.jobs["a-1"]["code"] == "rc 0"


def test_a_slice_that_no_worker_answers_on_is_given_back(run):
    cloud = Cloud()
    cloud.faults = lambda number, kind: ONCE if kind == "look" and 600 < cloud.now < 900 else None
    result = run(cloud)
    assert result.how is None
    assert cloud.calls.count("create") == 2
    assert not cloud.unsaved


@pytest.mark.parametrize("output", [None, b"{", b"null"])
def test_told_to_stop_it_saves_whatever_the_slice_says(run, output):
    cloud = Cloud()
    if output is not None:
        cloud.faults = lambda number, kind: Said(0, output, b"") if kind == "describe" and cloud.now > 600 else None
    result = run(cloud, stops_at=1200)
    assert result.how is None
    assert cloud.jobs["a-1"]["code"] == "rc 75"
    assert not cloud.there


def test_told_to_stop_while_a_slice_is_repaired_what_runs_there_is_told_too(run):
    cloud = Cloud()
    cloud.states = [(0, "READY"), (600, "REPAIRING"), (900, "READY")]
    result = run(cloud, stops_at=905)
    assert result.how is None
    assert not cloud.unsaved
    assert not cloud.there


def test_whoever_waits_for_a_pack_hears_of_a_full_disk(run, monkeypatch):
    """The log of what trains cannot be written, nor what the slice has cost. It is deleted all the same."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    cloud = Cloud()
    monkeypatch.setattr(keepers._Log, "add", full)
    monkeypatch.setattr(slices, "forget", full)
    result = run(cloud)
    assert isinstance(result.how, OSError) and result.task.name == "a"
    assert not cloud.there


def test_hours_are_added_up_over_slices(run):
    cloud = Cloud()
    cloud.states = [(0, "READY"), (1800, "PREEMPTED"), (1900, "READY")]
    result = run(cloud)
    used = sum(result.manifest.recall_all("tpu used ").values())
    assert used == pytest.approx(1.5, abs=0.1)


def test_a_slice_that_ended_by_itself_has_cost_no_more_than_until_then(tmp_path, monkeypatch):
    cloud = Cloud()
    cloud.now = 100 * HOUR
    manifest = Manifest(tmp_path)
    fact = {"task": "a", "job": "a-1", "kind": ["v4-8", 1], "since": 10 * HOUR, "seen": 12 * HOUR, "queued": False}
    manifest.remember(FACT + "x", fact | {"orphan_s": HOUR})
    assert slices.hours(manifest, cloud.clock()) == 3
    manifest.remember(FACT + "x", fact | {"orphan_s": None})
    assert slices.hours(manifest, cloud.clock()) == 90
    slices.forget(manifest, "x", cloud.clock())
    assert slices.hours(manifest, cloud.clock()) == 90
