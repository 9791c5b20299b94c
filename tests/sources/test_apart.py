"""Inserts and samples that run apart: who is ahead is held, all that was made comes in, and a run keeps by how much."""

import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from sources.test_actors import policy, source_of, step_counter
from sources.test_replay_on_host import DQN, toy, train
from support import build, rows, saved

from rlexp.config import ConfigError
from rlexp.replay.rate_limiter import limits
from rlexp.sources import apart
from rlexp.sources.base import Apart, HostSource, no_feedback
from rlexp.training import program
from rlexp.training.loop import layout_of
from rlexp.types import AGENT_STEPS, Mean

# Batches of 4 items, and 2 samples for each: an update draws what a batch is worth, and three of them may be missing or too many.
LIMITS = limits(samples_per_insert=2.0, min_size=8, error_buffer=24.0, path="replay", num_inserts=4, num_samples=8)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert [t.name for t in threading.enumerate() if t.name == "inserts" or t.name.startswith("actor-")] == []


class Numbers:
    """Its batches are 0, 1, 2, …; each waits until it is let go."""

    def __init__(self, let_go: int = 0, fails_at: int | None = None):
        self.made, self.closed, self.fails_at = 0, threading.Event(), fails_at
        self.permits = threading.Semaphore(let_go)

    def next(self, data: Any, told: Any) -> Any:
        while not self.permits.acquire(timeout=0.01):
            if self.closed.is_set():
                raise RuntimeError("closed")
        if self.made == self.fails_at:
            raise RuntimeError("the game crashed")
        self.made += 1
        one: Any = np.ones((), np.float32)
        lag = {"train/lag_mean": Mean(0 * one, one), "train/lag_at_most_share": Mean(one, one)}
        four: Any = np.uint32(4)
        return data + 1, data, lag | {AGENT_STEPS: Mean(four, four), "time/learner_waited_s": Mean(9 * one, one)}

    def feed(self, *, ahead: float = 0.0, timeout_s: float = 20.0) -> apart.Feed:
        nothing: Any = None
        source = HostSource(nothing, self.next, no_feedback, self.closed.set, nothing)
        structs = Numbers(let_go=1).next(0, None)[2]
        limited = Apart(LIMITS, num_inserts=4, num_samples=8, timeout_s=timeout_s)
        return apart.Feed(source, limited, data=0, ahead=ahead, collected=structs)


def until(true: Any) -> bool:
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.002)
    return true()


# --- who is ahead is held ----------------------------------------------------------------------------------------------


def test_the_learner_goes_ahead_until_the_buffer_is_used_up():
    """Nothing is stepped. In turns the first update would wait already."""
    source = Numbers()
    feed = source.feed(timeout_s=0.3)
    assert [feed.exchange(None).ahead for _ in range(3)] == [-8, -16, -24]
    said = (
        r"algo\.source\.limiter_timeout_s: no batch came: waited 0\.3 s for .*: 8 samples after 8 inserts, 24 samples"
    )
    with pytest.raises(TimeoutError, match=said):
        feed.exchange(None)
    source.permits.release()
    arrived = feed.exchange(None)
    assert (arrived.batches, arrived.ahead, arrived.data) == ([0], -24, 1)
    feed.close()


def test_inserts_go_ahead_until_the_buffer_is_used_up():
    """One more is made, and held. Nothing that was made is lost, and the order stays."""
    source = Numbers(let_go=1000)
    feed = source.feed()
    first = feed.exchange(None)
    assert until(lambda: source.made >= 5)
    time.sleep(0.05)
    assert source.made == 5  # 4 of them from 8 behind to 24 ahead
    second = feed.exchange(None)
    assert first.batches + second.batches == [0, 1, 2, 3] and second.ahead == 16
    assert until(lambda: source.made >= 6)
    assert feed.exchange(None).batches == [4]
    feed.close()
    feed.close()


def test_at_any_speed_both_stay_within_the_buffer():
    source = Numbers(let_go=10_000)
    feed, came, samples, inserts = source.feed(), list[int](), 0.0, 0.0
    pauses = np.random.default_rng(0).choice([0.0, 0.0, 0.001, 0.004], 150)
    for update, pause in enumerate(pauses):
        time.sleep(pause)
        arrived = feed.exchange(None)
        came += arrived.batches
        assert -24 <= arrived.ahead == 2 * 4 * len(came) - 8 * (update + 1) <= 24
        told = arrived.metrics
        assert told[AGENT_STEPS].sum == 4 * len(arrived.batches)
        assert told["replay/inserts_ahead_mean"].sum == arrived.ahead
        assert 0 <= told["train/lag_mean"].sum <= 7 * max(1, len(arrived.batches))  # updates
        assert told["time/learner_waited_s"].sum < 9 and "train/lag_at_most_share" not in told
        samples += float(told["replay/samples_per_insert"].sum)
        inserts += float(told["replay/samples_per_insert"].count)
    feed.close()
    assert came == [*range(len(came))]
    assert (samples, inserts) == (8 * len(pauses), 4 * len(came))


def test_where_it_was_ahead_it_goes_on():
    feed = Numbers().feed(ahead=-16.0, timeout_s=0.1)
    assert feed.exchange(None).ahead == -24
    with pytest.raises(TimeoutError):
        feed.exchange(None)
    feed.close()


# --- ends --------------------------------------------------------------------------------------------------------------


def test_an_error_of_the_source_is_told_at_once():
    source = Numbers(fails_at=0)
    feed = source.feed()
    feed.exchange(None)
    source.permits.release()
    assert until(lambda: feed._error is not None)
    with pytest.raises(RuntimeError, match="the game crashed"):
        feed.exchange(None)  # for which there are samples
    feed.close()


def test_actors_end_while_a_batch_is_waited_for():
    source = source_of(step_counter(lambda: time.sleep(0.05)), max_lag=1)
    data = source.init(jax.random.key(0), policy(0))
    collected = source.next(data, policy(0))[2]
    source.close()
    limited = Apart(LIMITS, num_inserts=4, num_samples=8, timeout_s=20.0)
    feed = apart.Feed(source, limited, data=data, ahead=0.0, collected=collected)
    feed.exchange(policy(0))
    assert until(lambda: any(t.name == "actor-0" for t in threading.enumerate()))
    began = time.monotonic()
    feed.close()
    assert time.monotonic() - began < 15  # the source's own time-out is 60


# --- runs --------------------------------------------------------------------------------------------------------------

# 32 transitions a batch, 16 samples an update.
APART = ("algo.source.error_buffer=48", "env=gymnasium/cartpole", "source=actors")


def test_a_run_keeps_to_the_ratio():
    lead = build(*DQN, *APART)
    assert lead.env_steps_per_update == 32 and lead.prefill_env_steps == 64
    compiled = program.trace([lead], layout_of([lead])).compile()
    run, counted = compiled.begin()
    assert int(counted[AGENT_STEPS].sum[0]) > 0
    updates = 0
    for num_updates in (1, 5, 4):
        run, metrics = compiled.chunk(run, num_updates)
        updates += num_updates
        inserted = int(run.data.memory.ring.table.inserted[0, 0])
        ahead = float(np.asarray(run.data.ahead)[0])
        assert ahead == (inserted - 64) * 0.5 - 16 * updates and abs(ahead) <= 48
        assert metrics["replay/samples_per_insert"].sum == 16 * num_updates
    assert int(np.asarray(run.data.memory.ring.table.sampled).clip(0).sum()) > 0
    compiled.close()


def test_more_steps_for_each_sample():
    """A quarter as many samples as in turns: four times the steps in each update."""
    lead = build(*DQN, *APART, "algo.source.samples_per_insert=0.125", "algo.source.min_size=100")
    assert lead.env_steps_per_update == 128 and lead.prefill_env_steps == 128
    compiled = program.trace([lead], layout_of([lead])).compile()
    run, _ = compiled.begin()
    assert float(np.asarray(run.data.ahead)[0]) == 28 * 0.125
    run, metrics = compiled.chunk(run, 12)
    compiled.close()
    inserts = float(metrics["replay/samples_per_insert"].count[0])
    assert abs(inserts - 12 * 128) <= (48 + 28) / 0.125


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_it_was_ahead(tmp_path: Path):
    given = ("algo.source.error_buffer=48", "source=actors", "algo.source.max_lag=2")
    half, whole = (toy(*given, line) for line in ("total_env_steps=384", "total_env_steps=768"))
    train(tmp_path, half)
    train(tmp_path, whole, resume=tmp_path)
    update, leaves = saved(tmp_path)
    (inserted,) = (leaf for name, leaf in leaves.items() if "inserted" in name)
    (ahead,) = (leaf for name, leaf in leaves.items() if "ahead" in name)
    assert update == (768 - 64) // 32
    assert ahead.item() == (inserted.item() - 64) * 0.5 - 16 * update and abs(ahead.item()) <= 48
    assert {"replay/samples_per_insert", "replay/inserts_ahead_mean"} <= rows(tmp_path)[-1].keys()


@pytest.mark.slow
def test_workers_in_processes_run_apart_too():
    lead = build(*DQN, *APART[:-1], "source=inference")
    compiled = program.trace([lead], layout_of([lead])).compile()
    run, _ = compiled.begin()
    run, metrics = compiled.chunk(run, 8)
    compiled.close()
    inserted = int(run.data.memory.ring.table.inserted[0, 0])
    assert float(np.asarray(run.data.ahead)[0]) == (inserted - 64) * 0.5 - 16 * 8
    assert metrics["train/workers_lost"].sum == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("error_buffer=15", r"error_buffer: 15 is not allowed; with samples_per_insert 0\.5 less than 16 can block"),
        ("error_buffer=-1", r"error_buffer: "),
        (
            "samples_per_insert=1",
            r"error_buffer: null is not allowed; with samples_per_insert 1 less than 32 can block",
        ),
        ("min_size=100", r"min_size: 100 means nothing without algo\.source\.error_buffer"),
        (
            "error_buffer=64 algo.source.min_size=257",
            r"min_size: 257 is more than the 256 items of algo\.source\.capacity",
        ),
        (
            "error_buffer=64 algo.source.samples_per_insert=0.3",
            r"samples_per_insert: 0\.3 makes 53\.3333 .* is 0\.3018",
        ),
        ("error_buffer=16 algo.source.prefill_env_steps=0", r"prefill_env_steps: 0 is too little .* needs 32"),
        (
            "error_buffer=16 algo.source.min_size=31 algo.n_step=9",
            r"min_size: 31 is too little for a first sequence of 9 transitions; it needs 64$",
        ),
        ("error_buffer=16 source=host", r"error_buffer: 16 is not allowed where inserts and samples take turns"),
        (
            "samples_per_insert=1 env=gymnax/cartpole source=replay",
            r"samples_per_insert: 1 is not allowed where inserts",
        ),
    ],
)
def test_what_cannot_be_is_told_in_one_line(line, said):
    with pytest.raises(ConfigError, match=rf"^algo\.source\.{said}") as told:
        build(*DQN, *APART[1:], *f"algo.source.{line}".split())
    assert "\n" not in str(told.value)


def test_a_least_size_that_is_too_little_is_told_in_items():
    """Of a network that remembers, rollouts' beginnings: 16 environments make 16 of them in 8 steps."""
    given = ("algo=r2d2", "env=gymnasium/cartpole", "source=actors", "algo.source.error_buffer=192")
    with pytest.raises(ConfigError) as told:
        build(*given, "algo.source.min_size=1")
    assert str(told.value) == (
        "algo.source.min_size: 1 is too little for a first sequence of 24 transitions; it needs 64"
    )
    assert build(*given, "algo.source.min_size=64").prefill_env_steps == 4 * 16 * 8
