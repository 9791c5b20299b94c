"""Real runs of `source=inference`, learner and workers, that are killed, stopped and told to end."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sources import watched
from sources.test_inference_server import signed
from support import QUIET, environment, processes, rlexp_command, rows, saved

from rlexp.workers import meeting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

TESTS = Path(__file__).parents[1]
NUM_STEPS, NUM_ENVS, NUM_WORKERS = 16, 4, 2
RUN = (
    "env=gymnasium", "env.id=sources.marked:Marked-v0", "source=inference", "algo.source.module=sources.watched",
    f"algo.num_envs={NUM_ENVS}", f"algo.source.num_workers={NUM_WORKERS}", f"algo.num_steps={NUM_STEPS}",
    "network.hidden=[16]", "total_env_steps=100_000_000", "logger.every_env_steps=640", "checkpoint.every_updates=20",
    "eval.at_start=false", "eval.every_env_steps=null", "eval.num_episodes=2", "hydra.run.dir=run", *QUIET,
)  # fmt: skip


class Run:
    """A learner in `tmp_path`, and what it learnt from."""

    def __init__(self, place: Path):
        self.place, self.dir, self._lines = place, place / "run", place / "unrolls"
        self.processes: list[subprocess.Popen] = []
        self._said: dict[int, Path] = {}

    def start(self, command: list[str]) -> subprocess.Popen:
        path = self.place / f"said.{len(self._said)}"
        with path.open("wb") as said:
            variables = environment(TESTS, **{watched.FILE: str(self._lines)})
            process = subprocess.Popen(command, cwd=self.place, env=variables, stdout=said, stderr=said)
        self.processes.append(process)
        self._said[process.pid] = path
        return process

    def worker(self, index: int, folder: Path | None = None, patience_s: int = 200) -> subprocess.Popen:
        """Started by hand."""
        place = str(folder or self.dir / meeting.FOLDER)
        return self.start([sys.executable, "-m", "rlexp.workers", place, str(index), "--patience", str(patience_s)])

    def said(self, process: subprocess.Popen) -> str:
        return self._said[process.pid].read_text()

    def batches(self, since: int = 0) -> list[list[watched.Lane]]:
        """All but the first ones."""
        lines = self._lines.read_text().split("\n")[:-1] if self._lines.exists() else []
        return [[watched.Lane(*lane) for lane in json.loads(line)] for line in lines[since:]]

    def next(self, since: int) -> list[list[watched.Lane]]:
        """As soon as there are some."""
        self.until(lambda: len(self.batches(since)) > 0)
        return self.batches(since)

    def until(self, so: Callable[[], bool], seconds: float = 120) -> None:
        """Whatever ends before is told."""
        deadline = time.monotonic() + seconds
        while not so():
            assert time.monotonic() < deadline, [self.said(one)[-2000:] for one in self.processes]
            assert self.processes[0].poll() is None, self.said(self.processes[0])
            time.sleep(0.05)


@pytest.fixture
def run(tmp_path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait(20)


def check(batches: list[list[watched.Lane]]) -> None:
    """No unroll has rows of two lives, or with a gap, and the environments of a worker are together."""
    for lanes in batches:
        assert len(lanes) == NUM_ENVS
        for lane in lanes:
            assert len({*zip(lane.pids, lane.lives, strict=True)}) == 1
            num = int((np.diff(lane.steps) == 1).sum())
            assert lane.steps[: num + 1] == [*range(lane.steps[0], lane.steps[0] + num + 1)]
            assert num > 0 and not any(lane.valid[num:])  # one that ended early
        size = NUM_ENVS // NUM_WORKERS
        for i in range(0, NUM_ENVS, size):
            assert len({(lane.pids[0], lane.lives[0], lane.steps[0]) for lane in lanes[i : i + size]}) == 1


def seen(batches: list[list[watched.Lane]]) -> set[tuple[int, int]]:
    """(process, its life) of all of them."""
    return {(lane.pids[0], lane.lives[0]) for lanes in batches for lane in lanes}


def can_be_listened_on(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return one.connect_ex(("127.0.0.1", port)) != 0 and one.bind(("127.0.0.1", port)) is None


def test_workers_are_killed_at_random_and_the_run_is_told_to_end(run):
    learner = run.start(rlexp_command(*RUN))
    run.until(lambda: len(run.batches()) > 0)
    dice, killed, read, at = random.Random(0), [], 0, []
    alive: set[int] = set()
    while len(killed) < 20:
        fresh = run.next(read)
        read += len(fresh)
        alive |= {pid for pid, _ in seen(fresh)} - {*killed}
        time.sleep(dice.random() * 0.2)  # wherever in its unroll it is
        if alive and dice.random() < 0.5:
            victim = dice.choice(sorted(alive))
            os.kill(victim, signal.SIGKILL)
            alive.discard(victim)
            killed.append(victim)
            at.append(read)
    run.until(lambda: len({pid for pid, _ in seen(run.batches(read))} - {*killed}) == NUM_WORKERS)
    last = rows(run.dir)[-1]["env_steps"]
    run.until(lambda: rows(run.dir)[-1]["env_steps"] > last)
    check(run.batches())
    lines = rows(run.dir)
    assert len({pid for pid, _ in seen(run.batches())}) == len(killed) + NUM_WORKERS
    updates = np.diff([0, *(line["env_steps"] for line in lines)]) / (NUM_ENVS * NUM_STEPS)
    lost = sum(line["train/workers_lost"] * num for line, num in zip(lines, updates, strict=True))
    assert round(lost) == len(killed)

    workers = processes("rlexp.workers", str(run.dir))
    assert len(workers) == NUM_WORKERS
    port = int(meeting.read(run.dir / meeting.FOLDER)[0].address.rpartition(":")[2])  # type: ignore[index]
    assert not can_be_listened_on(port)
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(90) == 0, run.said(learner)
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []
    assert can_be_listened_on(port) and meeting.read(run.dir / meeting.FOLDER) is None
    summary = json.loads((run.dir / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert saved(run.dir)[0] * NUM_ENVS * NUM_STEPS == summary["env_steps"] >= lines[-1]["env_steps"]


def test_a_learner_is_killed_and_workers_by_hand_live_on(run):
    """With TLS, at a place of its own; before, it is stopped for longer than they wait for it, as a network that is parted."""
    certificate, key = signed(run.place, "ours")
    other, _ = signed(run.place, "other")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    learner = run.start(
        rlexp_command(
            *RUN, "algo.source.start=none", f"algo.source.address=127.0.0.1:{port}", "algo.source.silence_s=4",
            f"algo.source.tls_certificate={certificate}", f"algo.source.tls_key={key}",
        )
    )  # fmt: skip
    workers = [run.worker(i) for i in range(NUM_WORKERS)]
    pids = {worker.pid for worker in workers}
    run.until(lambda: {pid for pid, _ in seen(run.batches())} == pids)
    assert seen(run.batches()) == {(pid, 1) for pid in pids}

    found = meeting.read(run.dir / meeting.FOLDER)
    assert found is not None and found[0].authority == certificate
    trusts_another, has_none = (other, "CERTIFICATE_VERIFY_FAILED"), (None, "UNAVAILABLE: ")
    for authority, why in (trusts_another, has_none):
        meeting.post(run.place / "stranger", found[0]._replace(authority=authority), found[1])
        stranger = run.worker(0, run.place / "stranger", patience_s=2)
        assert stranger.wait(60) == 1
        said = run.said(stranger)
        assert said.startswith("worker 0: no server has answered for 2 s (") and said.count("\n") == 1, said
        assert "server.json); the last try: UNAVAILABLE: " in said and why in said, said

    learner.send_signal(signal.SIGSTOP)
    time.sleep(7)
    learner.send_signal(signal.SIGCONT)
    run.until(lambda: {(pid, 2) for pid in pids} <= seen(run.batches()))

    run.until(lambda: any(path.name.isdecimal() for path in (run.dir / "checkpoints").iterdir()))
    learner.kill()
    learner.wait(20)
    before, lives = len(run.batches()), max(life for _, life in seen(run.batches()))
    run.processes.remove(learner)
    time.sleep(1)
    assert [worker.poll() for worker in workers] == [None] * NUM_WORKERS
    again = run.start(rlexp_command("resume=run", *QUIET))
    run.processes.insert(0, run.processes.pop())
    run.until(lambda: {pid for pid, life in seen(run.batches(before)) if life > lives} == pids)
    check(run.batches())
    again.send_signal(signal.SIGINT)
    assert again.wait(90) == 0
    assert [worker.wait(30) for worker in workers] == [0] * NUM_WORKERS
    assert can_be_listened_on(port)
