"""Environments of Gymnasium in processes of their own, against the same ones in this process; and what happens when one ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from support import environment, wait_until

from rlexp.envs import gymnasium as adapter

SEEDS = np.array([3, 15], np.uint32)
NUM_STEPS, LIMIT = 12, 5
NO_ANSWER = r"^env\.timeout_s: game_apart:Apart-v0: the process of an environment has not answered for 5 s; allow more"


@pytest.fixture
def apart(monkeypatch):
    """Opens so many of an environment; closed at the end."""
    monkeypatch.syspath_prepend(Path(__file__).parent)  # which their processes have too
    opened = []

    def of(mode: str, name: str, limit: int | None = LIMIT, timeout_s: int = 60, **kwargs):
        config = adapter.Config(
            module=adapter.__name__,
            id=name,
            max_episode_steps=limit,
            vectorization_mode=mode,
            timeout_s=timeout_s,
            kwargs=kwargs,
        )
        opened.append(adapter.make(config).open(len(SEEDS)))
        return opened[-1]

    yield of
    for one in opened:
        one.close()


def test_they_do_what_they_do_in_this_process(apart):
    """Rows, states, and what goes on from each state, also one in which an episode is over."""
    actions = np.random.default_rng(0).integers(0, 2, (NUM_STEPS, len(SEEDS))).astype(np.int32)
    here, there, later = apart("sync", "CartPole-v1"), apart("async", "CartPole-v1"), apart("async", "CartPole-v1")
    rows, states = [here.reset(SEEDS)], []
    equal(there.reset(SEEDS), rows[0])
    for action in actions:
        states.append(here.get_state())
        equal(there.get_state(), states[-1])
        rows.append(here.step(action))
        equal(there.step(action), rows[-1])
    assert any(row.last.any() for row in rows[:-1])  # there were episodes that ended
    for i in (0, LIMIT - 1, LIMIT, LIMIT + 1):
        later.set_state(states[i])
        for action, row in zip(actions[i:], rows[i + 1 :], strict=True):
            equal(later.step(action), row)


def equal(a, b) -> None:
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))


def test_an_error_is_told_as_its_own_and_no_process_is_left(apart, recwarn):
    env = apart("async", "game_apart:Apart-v0", what="raises")
    env.reset(SEEDS)
    for _ in range(2):
        seen = env.step(np.zeros(2, np.int32)).obs
        assert seen[:, 0].tolist() == [0, 0]  # no JAX
    with pytest.raises(RuntimeError, match="Apart-v0: step raises KeyError: 'the third step'"):
        env.step(np.zeros(2, np.int32))
    assert not recwarn.list
    env.close()
    no_process_is_left()


def test_a_process_that_ends_is_told(apart):
    env = apart("async", "game_apart:Apart-v0", what="dies")
    env.reset(SEEDS)
    for _ in range(2):
        env.step(np.zeros(2, np.int32))
    with pytest.raises(RuntimeError, match="Apart-v0: the process of an environment ended, with exit code 7"):
        env.step(np.zeros(2, np.int32))
    env.close()
    no_process_is_left()


def test_one_that_hangs_is_told(apart, tmp_path):
    env = apart("async", "game_apart:Apart-v0", timeout_s=5, what="hangs", leaves=str(tmp_path))
    env.reset(SEEDS)
    for _ in range(2):
        env.step(np.zeros(2, np.int32))
    with pytest.raises(TimeoutError, match=NO_ANSWER):
        env.step(np.zeros(2, np.int32))
    env.close()
    no_process_is_left()


def test_one_that_is_never_made_is_told(apart, tmp_path):
    with pytest.raises(TimeoutError, match=NO_ANSWER):
        apart("async", "game_apart:Apart-v0", timeout_s=5, what="is never made", leaves=str(tmp_path))
    no_process_is_left()


def test_a_process_that_is_stopped_is_told(apart):
    """It neither ends nor answers, as a machine that is out of reach."""
    env = apart("async", "CartPole-v1", timeout_s=5)
    env.reset(SEEDS)
    state = env.get_state()
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"env\.timeout_s: CartPole-v1: .* has not answered for 5 s; allow more"):
        env.set_state(state)
    env.close()
    no_process_is_left()


def test_one_that_never_closes_is_not_waited_for(apart, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter, "_CLOSE_S", 0.5)
    env = apart("async", "game_apart:Apart-v0", what="never closes", leaves=str(tmp_path))
    env.reset(SEEDS)
    env.step(np.zeros(2, np.int32))
    env.close()
    assert len([*tmp_path.iterdir()]) == len(SEEDS)
    no_process_is_left()


def test_one_that_hangs_ends_with_the_process_that_was_to_close_it(tmp_path):
    command = [sys.executable, "-c", "import game_apart; game_apart.play_on()", str(tmp_path)]
    parent = subprocess.Popen(command, env=environment(Path(__file__).parent))
    try:
        wait_until(lambda: len([*tmp_path.iterdir()]) == len(SEEDS))
    finally:
        parent.kill()
        parent.wait(20)
    wait_until(lambda: not any(Path("/proc", one.name).exists() for one in tmp_path.iterdir()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP])
def test_signals_are_for_the_run(apart, number):
    """Ctrl-C goes to all processes of a terminal, a scheduler's to all of a job: the run steps on until it has saved."""
    env = apart("async", "game_apart:Apart-v0")
    env.reset(SEEDS)
    for process in multiprocessing.active_children():
        os.kill(process.pid, number)
    for _ in range(4):
        env.step(np.zeros(2, np.int32))
    env.close()
    no_process_is_left()


def no_process_is_left() -> None:
    """Nor the thread that looks for those that do not answer."""
    for _ in range(100):
        if not (left := [*multiprocessing.active_children(), *watchers()]):
            return
        time.sleep(0.1)
    raise AssertionError(left)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "environments"]


def test_a_run_that_is_a_child_of_a_script_keeps_its_signals(monkeypatch):
    """Gymnasium makes one of the environments in the run's own process, to see its spaces."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: pytest.fail("this is no environment's process"))
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    assert adapter._alone(lambda: "made", os.getpid()) == "made"
    assert signal.getsignal(signal.SIGTERM) == before and threading.active_count() == threads
