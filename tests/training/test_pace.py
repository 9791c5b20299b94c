"""Chunks in parts: wherever a stop cuts one, the run that goes on is the undisturbed one, its lines too."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import StopAfter, assert_same, build, rows, saved, train, without_clock

from rlexp.machine.stop import Stop
from rlexp.storage.checkpoint.steps import Found
from rlexp.training import metrics, pace, program
from rlexp.training.layout import layout_of
from rlexp.training.loop import Diverged, Resume
from rlexp.training.parts import Run
from rlexp.types import Mean

# 12 updates in two chunks of 6, of 128 steps; environments that wait for their resets, so that transitions are not the steps.
SLOW = (
    "env=gymnax/memory_chain", "env.params.memory_length=3", "env.resets=1", "algo.num_envs=32", "algo.num_steps=4", "shards=4",
    "network.hidden=[4]", "algo.num_epochs=1", "algo.num_minibatches=1", "eval.num_episodes=2", "eval.every_env_steps=768",
    "total_env_steps=1536",
)  # fmt: skip


@pytest.fixture
def each_update(monkeypatch):
    """Every update takes a second, as the clock has it: parts are one update, and a stop is looked for after each."""
    monkeypatch.setattr(pace, "PART_S", 0.0)


def stopped_by(stop, num_updates):
    """A change of the program: after so many updates a signal comes."""

    def change(compiled):
        made = itertools.count(1)

        def updates(*args):
            if next(made) == num_updates:
                stop.reason = "SIGTERM"
            return compiled.updates(*args)

        return compiled._replace(updates=updates)

    return change


@pytest.mark.parametrize(
    ("seeds", "num_devices", "minutes"),
    [
        ((5,), 1, 1e-9),
        pytest.param((5,), 4, 10, marks=pytest.mark.slow),
        pytest.param((5, 7), 1, 10, marks=pytest.mark.slow),
    ],
    ids=["saved all the time", "4", "pack"],
)
def test_cut_within_chunks_and_resumed_it_is_the_undisturbed_run(
    seeds, num_devices, minutes, each_update, tmp_path, capsys
):
    run = (*SLOW, f"hardware.mesh.data={num_devices}", f"checkpoint.every_minutes={minutes}")
    whole = train(tmp_path / "whole", *run, seeds=seeds)
    for before, update in (0, 3), (3, 5), (5, 9), (9, 12):
        resume, stop = Resume(tmp_path / "5", "all") if before else None, Stop()
        cut = train(tmp_path, *run, seeds=seeds, stop=stop, resume=resume, change=stopped_by(stop, update - before))
        assert saved(tmp_path / "5")[0] == update  # the last chunk ends at 6
        assert {one["env_steps"] for one in cut} == {update * 128}
        assert {one["status"] for one in cut} == {"finished" if update == 12 else "stopped"}
        if update == 9:
            assert (tmp_path / "5/checkpoints/8").exists() == (minutes < 1)
            metas = [Found(tmp_path / "5/checkpoints/9", member).meta()["counted"] for member in (None, len(seeds) - 1)]
            assert metas[1] == metas[0][-1:]
    assert "not all there" not in capsys.readouterr().err
    assert_same(tmp_path / "5", tmp_path / "whole/5")
    for seed, one, theirs in zip(seeds, cut, whole, strict=True):
        assert without_clock(rows(tmp_path / f"{seed}")) == without_clock(rows(tmp_path / f"whole/{seed}"))
        assert one["agent_steps"] == theirs["agent_steps"] < 1536


def test_stopped_before_it_could_go_on_nothing_is_forgotten(each_update, tmp_path):
    """By a second signal while it compiles; and with no more to train than there was."""
    stop = Stop()
    (cut,) = train(tmp_path, *SLOW, stop=stop, change=stopped_by(stop, 3))
    resume, stop.reason = Resume(tmp_path / "0", "all"), "SIGTERM"
    (again,) = train(tmp_path, *SLOW, stop=stop, resume=resume)
    assert (again["status"], again["env_steps"], again["agent_steps"]) == ("stopped", 384, cut["agent_steps"])
    (less,) = train(tmp_path, *SLOW, "total_env_steps=384", resume=resume)
    (whole,) = train(tmp_path / "whole", *SLOW, "total_env_steps=384")
    assert (less["status"], less["agent_steps"]) == ("finished", cut["agent_steps"])
    assert [row["env_steps"] for row in rows(tmp_path / "0")] == [0, 384]
    assert less["objective"] == whole["objective"]


def test_what_is_not_sound_when_it_is_cut_is_told_and_not_saved(each_update, tmp_path):
    def change(compiled):
        def updates(run, num_updates, counted):
            run, counted = compiled.updates(run, num_updates, counted)
            spoilt = Mean(counted["loss/value"].sum * np.inf, counted["loss/value"].count)
            return run, counted | {"loss/value": spoilt}

        return compiled._replace(updates=updates)

    with pytest.raises(Diverged, match="loss/value is not finite at 384"):
        train(tmp_path, *SLOW, stop=StopAfter(3), change=change)
    assert [row["env_steps"] for row in rows(tmp_path / "0")] == [0]
    assert not list((tmp_path / "0/checkpoints").glob("[0-9]*"))


def test_a_part_is_about_a_second_and_the_last_is_not_waited_for(monkeypatch):
    """Of updates of 10 ms, 30 ms at first: one, then 33, then 100 each. It is asked once a second."""
    clock, made, asked = [0.0], [], []
    monkeypatch.setattr(pace.time, "perf_counter", lambda: clock[0])

    def updates(run, num_updates, counted):
        made.append(num_updates)
        clock[0] += num_updates * (0.01 if made[1:] else 0.03)
        return run, counted

    def is_interrupted():
        asked.append(round(clock[0], 2))
        return False

    run = Run((), (), {})
    reported = []
    compiled = program.Program(*(None,) * 6)._replace(updates=updates)
    paced = pace.Pace(compiled, is_interrupted, lambda: reported.append(sum(made)))  # type: ignore[arg-type]
    assert paced.updates(run, {}, 250)[2] == 250
    assert made == [1, 33, 100, 100, 16] and asked == [1.36, 2.36]
    assert paced.updates(run, {}, 90)[2] == 90
    assert made[5:] == [90] and len(asked) == 2
    assert reported == [234]  # once it has taken a second, while a part is under way that is waited for
    clock[0] += 10.0  # it took longer than was thought
    assert paced.updates(run, {}, 90)[2] == 90
    assert made[6:] == [1, 89]


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=50, deadline=None)
@given(
    sums=st.lists(numbers, min_size=3, max_size=3), counts=st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3)
)
def test_what_was_counted_is_the_same_after_json(sums, counts):
    counted = {
        "a": Mean(np.array(sums, np.float32), np.array(counts, np.uint32)),
        "b": Mean(np.array(counts), np.array(sums)),
    }
    nothing = {name: Mean(*(np.zeros_like(x) for x in mean)) for name, mean in counted.items()}
    again = metrics.from_json(json.loads(json.dumps(metrics.as_json(counted))), nothing)
    for name, mean in counted.items():
        assert [x.tobytes() for x in mean] == [x.tobytes() for x in again[name]]
        assert [x.dtype for x in mean] == [x.dtype for x in again[name]]
    assert metrics.from_json(None, nothing) == nothing
    assert metrics.from_json([{"other": [0, 0]}] * 3, nothing) == nothing
    assert (
        metrics.from_json([one | {"c": [0, 0]} for one in metrics.as_json({"a": counted["a"]})], nothing)["b"]
        is nothing["b"]
    )


def test_the_program_is_traced_once(monkeypatch):
    """Its shapes come from the same trace as its loop."""
    traced = []
    real = program.update_once
    monkeypatch.setattr(program, "update_once", lambda *args: traced.append(None) or real(*args))
    lead = build(*SLOW)
    program.trace([lead], layout_of([lead])).lower_chunk()
    assert len(traced) == 1
