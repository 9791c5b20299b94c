"""The parts of the loop that are pure functions: when something is due, and lines of what was counted."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from support import build

from rlexp.training import metrics, schedule
from rlexp.training.evaluate import Episodes
from rlexp.training.members import Ended, start_of
from rlexp.training.metrics import Chunk
from rlexp.types import Mean


@pytest.fixture(scope="module")
def built():
    """20 updates of 64 environment steps."""
    return build("algo.num_envs=4", "algo.num_steps=16", "total_env_steps=1280")


def with_rhythm(built, *, evaluate=None, log=None, save=None, prefill=0):
    config = built.config
    config = dataclasses.replace(
        config,
        eval=dataclasses.replace(config.eval, every_env_steps=evaluate),
        logger=dataclasses.replace(config.logger, every_env_steps=log),
        checkpoint=dataclasses.replace(config.checkpoint, every_updates=save),
    )
    return built._replace(config=config, prefill_env_steps=prefill)


def ends(made):
    """Where the chunks of a run end, and which of these have an evaluation."""
    found = [0]
    while found[-1] < 20:
        found.append(schedule.chunk_end(made, found[-1]))
    return found[1:], [update for update in found[1:] if schedule.evaluation_due(made, update)]


@pytest.mark.parametrize(
    ("rhythm", "chunks", "evaluations"),
    [
        ({}, [20], [20]),
        ({"evaluate": 320}, [5, 10, 15, 20], [5, 10, 15, 20]),
        ({"evaluate": 300}, [5, 10, 15, 19, 20], [5, 10, 15, 19, 20]),  # the first update at or after it
        ({"evaluate": 640, "log": 320, "save": 8}, [5, 8, 10, 15, 16, 20], [10, 20]),
        ({"evaluate": 10}, [*range(1, 21)], [*range(1, 21)]),  # more often than there are updates
        (
            {"evaluate": 640, "prefill": 100},
            [9, 19, 20],
            [9, 19, 20],
        ),  # by environment steps, those before the first included
    ],
)
def test_chunks_end_where_something_is_due(built, rhythm, chunks, evaluations):
    made = with_rhythm(built, **rhythm)
    assert ends(made) == (chunks, evaluations)
    for update in range(20):  # wherever a run is resumed
        assert schedule.chunk_end(made, update) == min(end for end in chunks if end > update)


@pytest.mark.parametrize(
    ("every_updates", "every_minutes", "update", "seconds", "due"),
    [
        (5, 10, 10, 0.0, True),
        (5, 10, 11, 6000.0, False),  # where updates are counted, no clock is read
        (None, 10, 11, 600.0, True),
        (None, 10, 11, 599.0, False),
        (None, None, 11, 6000.0, False),
    ],
)
def test_when_a_checkpoint_is_due(every_updates, every_minutes, update, seconds, due):
    config = SimpleNamespace(every_updates=every_updates, every_minutes=every_minutes)
    assert schedule.checkpoint_due(config, update, seconds) is due


def test_lines_of_a_chunk(built):
    """Two members: the second's loss is not finite, and nothing has ended in its environments."""
    counted = {
        "env/calls": Mean(np.array([3.0, 4.0]), np.array([2.0, 2.0])),
        "own/x": Mean(np.array([1.0, np.nan]), np.array([1.0, 1.0])),
        "loss/value": Mean(np.array([1.0, np.inf]), np.array([4.0, 4.0])),
        "train/return_mean": Mean(np.array([9.0, 0.0]), np.array([3.0, 0.0])),
    }
    episodes = Episodes(np.array([[1.0, 3.0], [5.0, 5.0]]), np.ones((2, 2)), {})
    chunk = Chunk(update=7, num_updates=4, metrics=counted, episodes=episodes)
    values = metrics.values(chunk) | metrics.speed(chunk, built, 2, seconds=2.0)
    first, second = metrics.rows(values, 2, env_steps=448, wall_s=9.0)
    expected = {
        "env_steps": 448, "wall_s": 9.0, "eval/return_mean": 2.0, "eval/return_std": 1.0, "eval/length_mean": 1.0,
        "train/return_mean": 3.0, "loss/value": 0.25, "env/calls": 1.5, "own/x": 1.0,
        "throughput/env_steps_per_second": 128.0, "time/chunk_s": 2.0,
    }  # fmt: skip
    assert first == expected and list(first) == list(second) == list(expected)
    assert [second[k] for k in ("loss/value", "own/x", "train/return_mean", "env/calls")] == [None, None, None, 2.0]
    assert metrics.not_finite(values) == {1: "loss/value"}  # the first of them; and an empty count is nothing bad
    assert metrics.speed(chunk._replace(num_updates=0), built, 2, seconds=2.0) == {}


def test_where_training_starts(built):
    """In a pack who is out stays out; a run alone is asked again."""
    fresh = start_of(None, [built] * 3)
    assert (fresh.update, fresh.env_steps, fresh.resumed, fresh.num_lines) == (0, 0, False, 0)
    assert (fresh.objectives, fresh.failed, fresh.ended, fresh.had_ended) == ([None] * 3, {}, {}, False)
    meta = {"update": 5, "wall_s": 9.0, "objectives": [1.0, None, 3.0], "failed": {"1": "its disk is full"}}
    pack = start_of(meta | {"ended": {"2": ["pruned", "others are better", 128]}}, [built] * 3)
    assert (pack.update, pack.env_steps, pack.wall_s, pack.resumed) == (5, 320, 9.0, True)
    assert pack.failed == {1: "its disk is full"} and pack.ended == {2: Ended("pruned", "others are better", 128)}
    assert not pack.had_ended and not start_of(meta, [built] * 3).had_ended  # before there was any `ended`
    alone = meta | {
        "objectives": [1.0],
        "failed": {"0": "it was in a pack"},
        "ended": {"0": ["finished", "it is there", 320]},
    }
    one = start_of(alone, [built])
    assert (one.failed, one.ended, one.had_ended, one.objectives) == ({}, {}, True, [1.0])
