"""Real worker processes that are killed, stopped, or whose environments are at fault; and a learner that is."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from sources import lives
from sources.remote import acting, counter, policy, shown
from support import QUIET, environment, processes, rlexp_command, wait_until

from rlexp.config import ConfigError
from rlexp.envs.base import Opened
from rlexp.sources import door, inference
from rlexp.workers import __main__ as worker
from rlexp.workers import keeper, meeting, wire

NUM_STEPS = 8


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith(("inference", "workers"))] == []
    assert processes("rlexp.workers", f"--parent\0{os.getpid()}") == []
    assert simulators(os.getpid()) == []


def simulators(started_for: int) -> list[int]:
    return processes("\0".join(lives.simulator(started_for)) + "\0")


def source(place: Path, *, silence_s: int = 60, **env: Any) -> tuple[Any, Any, Any]:
    """(the source, its data, a policy) of two workers with two environments each."""
    config = inference.Config(
        module=inference.__name__,
        num_workers=2,
        max_lag=1,
        inference_batch=None,
        inference_wait_ms=2.0,
        start="processes",
        slurm={},
        address="127.0.0.1:0",
        tls_certificate=None,
        tls_key=None,
        tls_authority=None,
        max_message_bytes=2**20,
        silence_s=silence_s,
        timeout_s=60,
    )
    game = lives.make(lives.Config(module=lives.__name__, **env))._replace(node={"module": lives.__name__, **env})
    made = inference.make(config, env=game, algorithm=counter(), num_envs=4, num_steps=NUM_STEPS, num_shards=1)
    made.check()
    made.at(place)
    return made, made.init(jax.random.key(1), policy(0)), policy(0)


def lanes(batch: Any) -> set[tuple[int, int]]:
    """(process, step) of each environment's first row. Rows of a lane are one life's, in order."""
    obs, valid = np.asarray(batch.trajectory.obs)[0], np.asarray(batch.trajectory.valid)[0]
    found = set()
    for lane in range(obs.shape[1]):
        pids, steps = obs[:, lane, 0], obs[:, lane, 1]
        assert (pids == pids[0]).all()
        num = int((np.diff(steps) == 1).sum())
        np.testing.assert_array_equal(steps[: num + 1], steps[0] + np.arange(num + 1))
        assert valid[num:, lane].sum() == 0  # one that ended early
        found.add((int(pids[0]), int(steps[0])))
    return found


def kill_some(place: Path, num_kills: int) -> None:
    """At random, one after the other; then all of them have to step again."""
    made, data, newest = source(place, seconds=0.002)
    dice, killed, lost = random.Random(0), set(), 0
    try:
        deadline = time.monotonic() + 100 + 10 * num_kills
        since: dict[int, int] = {}
        while len(killed) < num_kills or len(since) < 2:
            assert time.monotonic() < deadline
            data, batch, metrics = made.next(data, newest)
            lost += int(metrics["train/workers_lost"].sum)
            shown = {pid for pid, _ in lanes(batch)}
            if len(killed) < num_kills and (alive := sorted(shown - killed)) and dice.random() < 0.5:
                time.sleep(dice.random() * 0.02)  # wherever in its unroll it is
                victim = dice.choice(alive)
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
            if len(killed) == num_kills:
                since |= dict.fromkeys(shown - killed, 1)
        assert lost <= num_kills
    finally:
        made.close()


def test_a_worker_that_is_killed_comes_again(tmp_path):
    kill_some(tmp_path, 2)


@pytest.mark.slow
def test_twenty_kills_at_random(tmp_path):
    kill_some(tmp_path, 20)


def test_a_worker_that_falls_silent_is_replaced_and_nobody_waits_for_it(tmp_path):
    made, data, newest = source(tmp_path, silence_s=1, seconds=0.002)
    try:
        data, batch, _ = made.next(data, newest)
        victim = sorted(pid for pid, _ in lanes(batch))[0]
        os.kill(victim, signal.SIGSTOP)
        deadline, lost = time.monotonic() + 60, 0
        while time.monotonic() < deadline:
            data, batch, metrics = made.next(data, newest)
            lost += int(metrics["train/workers_lost"].sum)
            others = {pid for pid, _ in lanes(batch)} - {victim}
            if lost and len(others) == 2:
                break
        assert lost == 1 and len(others) == 2
    finally:
        made.close()
    assert not Path(f"/proc/{victim}").exists()


def test_a_worker_that_is_stopped_is_replaced_where_its_connection_was_cut_before(tmp_path, monkeypatch):
    """Then it has not the word, and nobody evicts it."""
    monkeypatch.setattr(door.Door, "evict", lambda *_: [])
    made, data, newest = source(tmp_path, silence_s=2, seconds=0.002)
    too_late = threading.Timer(60, made.close)
    too_late.start()
    try:
        data, batch, _ = made.next(data, newest)
        victim = sorted(pid for pid, _ in lanes(batch))[0]
        os.kill(victim, signal.SIGSTOP)
        others: set[int] = set()
        while len(others) < 2:
            data, batch, _ = made.next(data, newest)
            others |= {pid for pid, _ in lanes(batch)} - {victim}
    finally:
        too_late.cancel()
        made.close()
    assert not Path(f"/proc/{victim}").exists()


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        pytest.param(
            "raise",
            r"worker \d: RuntimeError: the game crashed\nTraceback (.|\n)*the game crashed$",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "shape",
            r"worker \d: (.|\n)*Unreadable: reward: expected float32\[2\], got float32\[3\]$",
            marks=pytest.mark.slow,
        ),
        pytest.param("open", r"worker \d: (.|\n)*RuntimeError: the game cannot be found$", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_the_environment_ends_the_run(tmp_path, breaks, said):
    made, data, newest = source(tmp_path, breaks=breaks)
    with pytest.raises(RuntimeError, match=said):
        made.next(data, newest)
    made.close()
    made.close()


@pytest.mark.parametrize(
    ("breaks", "at", "said"),
    [("exit", 1, "exit code 3; it"), ("exit", 5, "exit code 3; it"), ("hang", 5, "no answer within algo")],
)
def test_workers_that_make_no_unroll_are_an_error(tmp_path, monkeypatch, breaks, at, said):
    """However many steps they take before they die or hang: an unroll is of eight."""
    monkeypatch.setattr(keeper, "TRIES", 2)
    breaks = breaks if breaks == "exit" else str(tmp_path / breaks)
    made, data, newest = source(tmp_path, silence_s=2, breaks=breaks, at=at)
    too_late = threading.Timer(45, made.close)
    too_late.start()
    with pytest.raises(
        RuntimeError,
        match=rf"worker \d ended 2 times in a row before it had made an unroll.*, the last time with {said}",
    ):
        made.next(data, newest)
    too_late.cancel()
    made.close()


@pytest.mark.slow
def test_workers_are_jobs_of_submitit_too(tmp_path, monkeypatch):
    """Its own local executor in the place of Slurm's."""
    local = keeper.jobs(tmp_path / meeting.FOLDER, cluster="local", patience_s=60, parameters={"timeout_min": 5})
    monkeypatch.setattr(inference, "_start", lambda config: lambda folder: local)
    monkeypatch.setenv("PYTHONPATH", environment(Path(__file__).parents[1])["PYTHONPATH"])
    made, data, newest = source(tmp_path)
    _, batch, _ = made.next(data, newest)
    pids = {pid for pid, _ in lanes(batch)}
    made.close()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    for one in (
        gc.get_objects()
    ):  # submitit does not await what it has started, which Python would complain of in another test
        if isinstance(one, subprocess.Popen) and one.returncode is None and "submitit" in str(one.args):
            one.wait(timeout=60)


def test_a_job_that_is_not_in_slurms_queue_has_ended(tmp_path, monkeypatch):
    """What squeue does not answer is no reason to start a worker anew, nor is an answer from before there was the job."""
    said, squeue = tmp_path / "said", tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\ncat {said}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(keeper, "SQUEUE_S", 0.0)
    said.write_text("7 R\n8 PD\n")
    queue, early = keeper.Queue(), time.monotonic() - 1
    assert queue.has("8", early) and not queue.has("9", early) and queue.has("9", time.monotonic() + 60)
    assert queue.waits("8") and not queue.waits("7") and not queue.waits("9")
    said.unlink()
    assert queue.has("9", early) and not queue.waits("8")
    said.write_text("")
    assert not queue.has("8", early)


def test_options_that_submitit_does_not_have_are_told(tmp_path, monkeypatch):
    """In one line, before anything starts; it looks for srun first."""
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    keeper.check_jobs({"slurm_partition": "cpu", "timeout_min": 5})
    for given in ({"partition": "cpu"}, {"timeout_min": "long"}):
        with pytest.raises(ConfigError, match=r"^algo\.source\.slurm: .*" + next(iter(given))) as told:
            keeper.check_jobs(given)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["cpus_per_task", "slurm_cpus_per_task"])
def test_cores_reach_the_process_of_a_slurm_job(name):
    """srun does not take them over from sbatch; what it is told by hand counts."""
    assert keeper.with_cpus({"timeout_min": 5}) == {"timeout_min": 5}
    assert keeper.with_cpus({name: 2}) == {name: 2, "slurm_srun_args": ["--cpus-per-task=2"]}
    own = {name: 2, "slurm_srun_args": ["--cpus-per-task=1"]}
    assert keeper.with_cpus(own) == own


def test_one_that_hangs_ends_with_the_process_that_started_it(tmp_path):
    """That is killed, so that it can end nobody."""
    folder, hung = tmp_path / meeting.FOLDER, tmp_path / "hung"
    env = {"module": lives.__name__, "breaks": str(hung), "at": 0}
    note = meeting.Note("127.0.0.1:1", None, env, [], 1, 1, [("float32", [2])], ("int32", []), 1000, 60.0, sys.path)
    meeting.post(folder, note, "0" * 64)
    script = "import sys; from pathlib import Path; from rlexp.workers.keeper import processes, time; "
    script += "worker = processes(Path(sys.argv[1]))(0); time.sleep(600)"
    learner = subprocess.Popen([sys.executable, "-c", script, str(folder)], env=environment())
    try:
        wait_until(hung.exists)
    finally:
        learner.kill()
        learner.wait(20)
    wait_until(lambda: not processes("rlexp.workers", f"--parent\0{learner.pid}"))
    wait_until(lambda: not simulators(learner.pid))


@pytest.mark.parametrize("note", ["", "{", "[]", '{"address": "a:1"}'])
def test_what_is_no_note_is_told_in_a_line(tmp_path, note, capsys):
    (tmp_path / meeting.NOTE).write_text(note)
    (tmp_path / meeting.TOKEN).write_text("0" * 64)
    assert worker.main([str(tmp_path), "0", "--patience", "1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"worker 0: {tmp_path / meeting.NOTE}: this is no note of a server of this version")
    assert said.count("\n") == 1


def test_who_ends_as_the_run_does_is_not_started_anew():
    started = []

    def start(index: int) -> keeper.Started:
        started.append(index)
        return keeper.Started(lambda: "exit code 0", lambda: None)

    workers = keeper.Keeper(start, 1, lambda error: None, look_s=0.01)
    deadline = time.monotonic() + 30
    while not started and time.monotonic() < deadline:
        time.sleep(0.01)
    workers.stop()
    workers._thread.join(10)
    number = len(started)
    workers.close(0.1)
    assert number and len(started) == number and not workers._thread.is_alive()


def test_pauses_between_tries_grow(tmp_path, monkeypatch):
    """Of a worker that looks for a server, and of who starts anew what has ended."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(worker, "BACK_OFF_S", (0.01, 0.04))
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert worker.main([str(tmp_path), "0", "--patience", "1"]) == 1
    assert pauses[:5] == [0.01, 0.02, 0.04, 0.04, 0.04]

    starts: list[float] = []
    told: list[BaseException] = []

    def start(index: int) -> keeper.Started:
        starts.append(time.monotonic())
        return keeper.Started(lambda: "exit code 1", lambda: None)

    monkeypatch.setattr(keeper, "BACK_OFF_S", (0.1, 0.3))
    workers = keeper.Keeper(start, 1, told.append, look_s=0.01)
    wait_until(lambda: bool(told))
    workers.close(1.0)
    assert (np.diff(starts) >= [0.1, 0.2, 0.3, 0.3]).all()


def test_any_silence_and_size_that_is_allowed_suits_grpc():
    assert max(value for _, value in wire.options(wire.MOST, 1e7, answer_s=1e7)) == 2**31 - 1


def test_a_worker_with_the_note_of_a_learner_that_was_killed_looks_again(tmp_path, monkeypatch):
    """The one that goes on listens at the same place, and has another token."""
    played = Opened(lambda seeds: shown(0, 0, 0), lambda action: shown(0, 0, 1), lambda: None)
    monkeypatch.setattr(worker.Envs, "open", lambda self, note: played)
    with acting(tmp_path, timeout_s=10.0) as server:
        folder = tmp_path / meeting.FOLDER
        note, token = meeting.read(folder)  # type: ignore[misc]
        found = iter([(note, "0" * 64)])
        monkeypatch.setattr(worker.meeting, "read", lambda place: next(found, (note, token)))
        thread = threading.Thread(
            target=worker.live, args=(folder, 0), kwargs={"parent": None, "patience_s": 5.0}, name="workers"
        )
        thread.start()
        server.learn_from((policy(0),))
    thread.join(20)
    assert not thread.is_alive()
    monkeypatch.undo()
    monkeypatch.setattr(worker.Envs, "open", lambda self, note: played)
    with acting(tmp_path):
        meeting._put(folder / meeting.TOKEN, "0" * 64)  # nobody has another one
        with pytest.raises(worker.Refused, match="UNAUTHENTICATED"):
            worker.live(folder, 0, parent=None, patience_s=5.0)


@pytest.mark.slow
def test_a_learner_that_is_killed_goes_on_with_new_workers(tmp_path):
    """The old ones end by themselves."""
    command = rlexp_command(
        "env=gymnasium/cartpole", "source=inference", "algo.num_envs=4", "hydra.run.dir=run", "total_env_steps=100_000",
        "eval.num_episodes=2", "eval.every_env_steps=512", "checkpoint.every_updates=4", "algo.num_steps=32", *QUIET,
    )  # fmt: skip
    saved = tmp_path / "run" / "checkpoints"
    learner = subprocess.Popen(command, cwd=tmp_path, env=environment())
    try:
        deadline = time.monotonic() + 200
        while not (saved.exists() and any(p.name.isdecimal() for p in saved.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.1)
        before = processes("rlexp.workers", f"--parent\0{learner.pid}")
        assert len(before) == 2
    finally:
        learner.kill()
        learner.wait(20)
    again = subprocess.run(
        rlexp_command("resume=run", "total_env_steps=8_192", *QUIET), cwd=tmp_path, env=environment(), timeout=280
    )
    assert again.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] == 8_192
    assert [pid for pid in before if Path(f"/proc/{pid}").exists()] == []
    assert processes("rlexp.workers", str(tmp_path)) == []
    assert meeting.read(tmp_path / "run" / meeting.FOLDER) is None
