"""What becomes of a pack whose process is gone: it goes on, unless a person ended it or its budget is spent."""

import pytest

from rlexp.machine.stop import Stop
from rlexp.sweep import supervise as module
from rlexp.sweep.journal import Journal
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.supervise import Ended, Why, supervise
from rlexp.sweep.worker import FOLDER, Task, _Told


class Script:
    """A backend: what each start of the one pack tells of its two jobs, and how its process ends then."""

    def __init__(self, *starts: tuple[str, Why]):
        self.starts, self.number = starts, 0

    def start(self, waiting):
        self.task = waiting[0]
        self.journal = Journal(self.task.journal)
        self.journal.settle({key: {"status": "running"} for key in self.task.numbers}, again=True)
        return waiting

    def ended(self, running):
        said, why = self.starts[self.number]
        self.number += 1
        if said:
            self.journal.settle({key: {"status": said} for key in self.task.numbers})
        self.journal.close()
        return {self.task.name: Ended("is gone", why)}

    def stop(self):
        return True


OVER = ("finished", Why.DIED)


@pytest.mark.parametrize(
    ("starts", "status", "attempts"),
    [
        ([("stopped", Why.LOST), ("stopped", Why.LOST), OVER], "finished", 3),
        ([("", Why.LOST), ("", Why.LOST), OVER], "finished", 3),
        ([("", Why.LOST)] * 4, "failed", 4),
        ([("stopped", Why.LOST)] * 4, "failed", 4),
        ([("", Why.DIED), OVER], "finished", 2),
        ([("", Why.DIED)] * 2, "failed", 2),
        ([("", Why.DIED), ("", Why.LOST), OVER], "finished", 3),  # of two budgets
        ([("", Why.ASKED)], "stopped", 1),  # it could not even save
        ([("stopped", Why.ASKED)], "stopped", 1),
        ([("stopped", Why.DIED)], "stopped", 1),  # only a worker that was asked says so
        ([("", Why.HOPELESS)], "failed", 1),
        ([("finished", Why.ASKED)], "finished", 1),
        ([("finished", Why.LOST)], "finished", 1),
    ],
)
def test_what_becomes_of_a_pack(tmp_path, monkeypatch, starts, status, attempts):
    monkeypatch.setattr(module, "_POLL_S", 0)
    (tmp_path / FOLDER).mkdir()
    manifest = Manifest(tmp_path)
    for number in (0, 1):
        manifest.add(number, [f"seed={number}"])
    backend = Script(*starts)
    supervise(
        [Task(tmp_path, "pack", [0, 1])],
        manifest,
        backend,
        retries=1,
        preemptions=3,
        stop=Stop(),
        show=lambda entry: None,
    )
    assert [(entry.status, entry.attempt) for entry in manifest.jobs()] == [(status, attempts)] * 2
    assert backend.number == attempts


def test_a_worker_tells_whether_somebody_asked(tmp_path):
    said: list[dict] = []

    class Record:
        def settle(self, outcomes, *, again=False):
            said.append({n: values["status"] for n, values in outcomes.items()})

    outcomes = {0: {"status": "stopped"}, 1: {"status": "finished"}, 2: {"status": "failed"}}
    _Told(Record(), lambda: True).settle(outcomes)
    _Told(Record(), lambda: False).settle(outcomes)
    assert said == [
        {0: "stopped", 1: "finished", 2: "failed"},
        {0: "pending", 1: "finished", 2: "failed"},
    ]
