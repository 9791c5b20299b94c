"""The training loop: chunks, lines, evaluation, NaN, stopping, checkpoints, compilation."""

import json
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import StopAfter, assert_same, build, rows, saved, train

from rlexp import hints
from rlexp.algos import common
from rlexp.storage import checkpoint
from rlexp.training import loop, program
from rlexp.training.loop import Diverged, Resume, layout_of
from rlexp.types import Mean

TINY = ("env=gymnax/cartpole", "algo.num_envs=4", "algo.num_steps=16", "network.hidden=[8]", "eval.num_episodes=2")


def test_a_run_leaves_what_it_should(tmp_path, capsys):
    told = ("logger.curve=true", "logger.progress=plain")
    (summary,) = train(tmp_path, *TINY, "total_env_steps=1000", "eval.every_env_steps=500", *told)
    run_dir = tmp_path / "0"
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"the run is in {run_dir}"
    assert sum(line.startswith("compiling ") for line in said if "so far" not in line) == 1
    assert [line.split()[1] for line in said if line.startswith("env_steps")] == ["0/1,024", "512/1,024", "1,024/1,024"]
    assert said[-3:] == hints.after_run(run_dir, total_env_steps=1024, saved=True)
    assert summary == json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["env_steps"] == 1024  # rounded up to whole updates of 64
    lines = rows(run_dir)
    assert [r["env_steps"] for r in lines] == [0, 512, 1024]  # the first updates at or after 500 and 1000
    assert summary["objective"] == lines[-1]["eval/return_mean"]
    expected = {"env_steps", "wall_s", "eval/return_mean", "eval/return_std", "eval/length_mean", "train/return_mean"}
    expected |= {
        "agent_steps",
        "train/agent_step_share",
        "train/length_mean",
        "throughput/env_steps_per_second",
        "time/chunk_s",
    }
    names = "policy value entropy approx_kl clip_fraction explained_variance grad_norm lr"
    expected |= {f"loss/{name}" for name in names.split()}
    assert set(lines[1]) == expected
    assert set(lines[0]) == {
        name for name in expected if name.startswith(("env_steps", "agent_steps", "wall_s", "eval/"))
    }
    assert (run_dir / "curve.png").stat().st_size > 1000
    assert list((run_dir / "checkpoints").glob("16/run"))


def test_a_line_tells_when_its_chunk_was_ready(tmp_path, monkeypatch):
    """Also where a dispatch returns only when the chunk is done, as on a GPU: then the one before was ready long ago."""
    clock, looked, ready_at = [0.0], threading.Semaphore(), loop._ready_at

    def look(chunk):
        try:
            return ready_at(chunk)
        finally:
            looked.release()

    def blocking(f):
        def dispatch(*args):
            assert looked.acquire(timeout=60)  # the chunk before was seen to be ready
            clock[0] += 100.0
            return jax.block_until_ready(f(*args))

        return dispatch

    def traced(experiments, layout):
        made = trace(experiments, layout)
        return made._replace(compile=lambda: (p := made.compile())._replace(updates=blocking(p.updates)))

    trace = program.trace
    monkeypatch.setattr(loop, "_ready_at", look)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(program, "trace", traced)
    more = ("eval.at_start=false", "total_env_steps=192", "eval.every_env_steps=64")
    train(tmp_path, *TINY, *more)
    assert [(r["wall_s"], r["time/chunk_s"]) for r in rows(tmp_path / "0")] == [(100, 100), (200, 100), (300, 100)]


def test_each_member_of_a_pack_leaves_its_own(tmp_path):
    """Lines and summary of a member are those of a run alone."""
    summaries = train(tmp_path / "pack", *TINY, "total_env_steps=640", seeds=(3, 4))
    (alone,) = train(tmp_path / "alone", *TINY, "total_env_steps=640", seeds=(4,))
    (_, third), (_, fourth), (_, single) = (rows(tmp_path / name) for name in ("pack/3", "pack/4", "alone/4"))
    for seed, summary, line in zip((3, 4), summaries, (third, fourth), strict=True):
        assert summary == json.loads((tmp_path / f"pack/{seed}/summary.json").read_text())
        assert summary["objective"] == line["eval/return_mean"]
    assert summaries[1]["objective"] == alone["objective"]
    assert fourth["train/return_mean"] == pytest.approx(single["train/return_mean"])
    assert fourth["loss/value"] == pytest.approx(single["loss/value"], rel=1e-3)
    assert third["loss/value"] != pytest.approx(fourth["loss/value"], rel=1e-3)


def test_a_line_a_chunk_and_evaluation_when_it_is_due(tmp_path):
    every = ("eval.every_env_steps=256", "logger.every_env_steps=128", "checkpoint.every_updates=5")
    train(tmp_path, *TINY, "total_env_steps=640", *every)
    lines = rows(tmp_path / "0")
    assert [r["env_steps"] for r in lines] == [0, 128, 256, 320, 384, 512, 640]
    assert ["eval/return_mean" in r for r in lines] == [True, False, True, False, False, True, True]


def test_no_episode_ended_is_null_not_zero(tmp_path):
    train(
        tmp_path,
        "env=gymnax/pendulum",
        "algo.num_steps=16",
        "total_env_steps=64",
        "network.hidden=[8]",
        "eval.num_episodes=1",
    )
    _, line = rows(tmp_path / "0")
    assert line["train/return_mean"] is None
    assert line["eval/length_mean"] == 200


def test_chunks_do_not_change_the_numbers():
    """Two chunks of 3 updates are one of 6, bit for bit, and the sums of their metrics too."""
    experiment = build(*TINY)
    compiled = program.trace([experiment], layout_of([experiment])).compile()
    run, whole = compiled.chunk(compiled.init(), 6)
    half, first = compiled.chunk(compiled.init(), 3)
    half, second = compiled.chunk(half, 3)
    equal = jax.tree.map(
        lambda a, b: np.array_equal(jax.device_get(a), jax.device_get(b)), run.state.params, half.state.params
    )
    assert all(jax.tree.leaves(equal))
    for name in whole:
        np.testing.assert_allclose(whole[name].sum, first[name].sum + second[name].sum, rtol=1e-5, atol=1e-5)
        assert whole[name].count == first[name].count + second[name].count


def test_every_leaf_of_a_run_is_a_strong_nonempty_array():
    experiment = build(*TINY)
    traced = program.trace([experiment], layout_of([experiment]))
    run = traced.compile().init()
    for path, leaf in jax.tree_util.tree_leaves_with_path(run):
        strong = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) or not leaf.weak_type
        assert isinstance(leaf, jax.Array) and leaf.size and strong, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_compiled_once_resume_included(tmp_path, caplog):
    """init, chunk and evaluate are compiled once each; nothing of a run is compiled while it trains."""
    phases: list[str] = []

    def watched(compiled):
        phases.append("compiled")
        return compiled

    events: list[str] = []

    def count(name: str, seconds: float, **_: object) -> None:
        if name == "/jax/core/compile/backend_compile_duration" and phases:
            events.append(name)

    from jax._src import monitoring

    monitoring.register_event_duration_secs_listener(count)
    try:
        overrides = (*TINY, "total_env_steps=640", "eval.every_env_steps=128", "checkpoint.every_updates=4")
        train(tmp_path, *overrides, change=watched)
        after_first = len(events)
        phases.clear()
        train(tmp_path, *overrides, "total_env_steps=1280", resume=Resume(tmp_path / "0", "all"), change=watched)
    finally:
        monitoring.unregister_event_duration_listener(count)
    assert phases == ["compiled"]
    assert after_first == 0, "something was compiled after the programs were"
    assert len(events) == 0, "something was compiled after a resume"


def test_nan_stops_names_the_metric_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    """The learning rate turns NaN in the second chunk: its line is written with nulls, its Run is not saved."""
    real = common.progress

    def poisoned(hp, step, **kwargs):
        return jnp.where(step < 15, real(hp, step, **kwargs), jnp.nan)

    monkeypatch.setattr(common, "progress", poisoned)
    overrides = ("total_env_steps=6400", "checkpoint.every_updates=10", "eval.every_env_steps=640")
    with pytest.raises(Diverged, match=r"loss/\w+ is not finite at 1,280 environment steps"):
        train(tmp_path, *TINY, *overrides)
    summary = json.loads((tmp_path / "0/summary.json").read_text())
    assert summary["status"] == "failed" and "not finite" in summary["error"]
    _, good, bad = rows(tmp_path / "0")
    assert (good["env_steps"], bad["env_steps"], summary["env_steps"]) == (640, 1280, 1280)
    assert good["loss/lr"] > 0 and bad["loss/lr"] is None
    assert checkpoints(tmp_path / "0") == [10]


def after(good, losses):
    """A change of the program: after so many updates, the members' losses are these."""

    def change(compiled):
        made = 0

        def updates(run, num_updates, counted):
            nonlocal made
            made += num_updates
            run, counted = compiled.updates(run, num_updates, counted)
            told = {"loss/value": Mean(np.array(losses), np.ones(len(losses)))}
            return run, counted | (told if made > good else {})

        return compiled._replace(updates=updates)

    return change


@pytest.mark.slow
def test_a_member_that_diverges_keeps_its_last_good_checkpoint(tmp_path):
    """The second of two, in the fourth chunk. The other goes on; of the second nothing is written any more."""
    every = ("checkpoint.every_updates=1", "total_env_steps=640", "checkpoint=default")
    first, second = train(tmp_path, *TINY, *every, seeds=(0, 1), change=after(3, [1.0, np.inf]))
    assert (first["status"], second["status"]) == ("finished", "failed")
    assert second["error"] == "Diverged: loss/value is not finite at 256 environment steps"
    assert [len(rows(tmp_path / name)) for name in ("0", "1")] == [11, 5]
    assert saved(tmp_path / "0")[0] == 10
    update, leaves = saved(tmp_path / "1")
    assert update == 3 and {x.shape[0] for x in leaves.values()} == {1}
    assert not (tmp_path / "1/checkpoints/pack.json").exists()


def test_only_sound_chunks_are_checkpointed(tmp_path):
    """The environment turns bad after a while: checkpoints before stay, none is made after."""
    every = ("checkpoint.every_updates=10", "eval.every_env_steps=null")
    with pytest.raises(Diverged, match="loss/value"):
        train(tmp_path, *TINY, "total_env_steps=6400", *every, change=after(20, [np.inf]))
    assert checkpoints(tmp_path / "0") == [10, 20]


def checkpoints(run_dir):
    """The updates that are saved."""
    return sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdecimal())


def test_a_stop_saves_at_the_end_of_a_chunk(tmp_path):
    (summary,) = train(tmp_path, *TINY, "total_env_steps=6400", "eval.every_env_steps=640", stop=StopAfter(3))
    assert summary["status"] == "stopped"
    assert summary["env_steps"] == 640 * 3
    assert (tmp_path / "0/checkpoints/30").exists()


def test_evaluation_plays_exactly_one_episode_each():
    experiment = build(*TINY, "eval.num_episodes=64", "eval.mode=sampled")
    compiled = program.trace([experiment], layout_of([experiment])).compile()
    episodes = compiled.evaluate(compiled.init(), 0)
    length, total = np.asarray(episodes.length), np.asarray(episodes.episode_return)
    assert length.shape == (1, 64)
    np.testing.assert_array_equal(length, total)  # CartPole gives 1 a step
    assert length.min() >= 8 and length.std() > 1  # a fresh policy does not fall at once ...
    assert length.max() < 200  # ... but soon: several episodes would go on to the 500 steps that end them all


@pytest.mark.slow
def test_greedy_and_sampled_differ():
    episodes = {}
    for mode in ("greedy", "sampled"):
        experiment = build(*TINY, "eval.num_episodes=16", f"eval.mode={mode}")
        compiled = program.trace([experiment], layout_of([experiment])).compile()
        run = compiled.init()
        episodes[mode] = [np.asarray(compiled.evaluate(run, u).episode_return) for u in (0, 0, 1)]
    for first, again, later in episodes.values():
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, later)  # other episodes each time
    assert not np.array_equal(episodes["greedy"][0], episodes["sampled"][0])


def test_disk_full_ends_the_run_and_says_so(tmp_path, monkeypatch):
    from rlexp.loggers import jsonl

    def full(*_):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(jsonl.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path, *TINY, "total_env_steps=640")
    monkeypatch.undo()
    assert json.loads((tmp_path / "0/summary.json").read_text())["status"] == "failed"


def test_out_of_memory_names_the_remedies():
    from rlexp.session import remedy

    text = remedy(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes"))
    for word in ("algo.num_envs", "algo.num_minibatches", "network.remat", "algo.gradient_accumulation"):
        assert word in text


def test_with_several_processes_an_error_of_the_runtime_says_that_one_died(monkeypatch):
    from rlexp.session import remedy

    error = jax.errors.JaxRuntimeError("UNAVAILABLE: task 1 heartbeat timeout\nmore")
    assert remedy(error) == "UNAVAILABLE: task 1 heartbeat timeout"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    text = remedy(error)
    assert "another process of this run died" in text and "resume=" in text and "heartbeat timeout)" in text
    assert "died" not in remedy(OSError(28, "No space left on device"))


QUICK = ("algo=pqn", "env=probe/obs_action_reward", "algo.num_envs=4", "algo.num_steps=4", "network.hidden=[4]")


@pytest.mark.parametrize("saves", [True, False])
def test_a_stop_before_the_first_update_says_what_is_saved(tmp_path, capsys, saves):
    given = (
        *QUICK,
        "total_env_steps=64",
        "eval.num_episodes=2",
        "logger.progress=plain",
        f"checkpoint.enabled={saves}",
    )
    (summary,) = train(tmp_path, *given, stop=StopAfter(0))
    again = hints.command("rlexp", hints.resume(tmp_path / "0"))
    said = f" and saved; go on with: {again}\n" if saves else "; checkpoint=off saves nothing\n"
    assert capsys.readouterr().out.endswith(f"stopped by SIGTERM{said}") and summary["status"] == "stopped"
    assert [path.name for path in tmp_path.glob("0/checkpoints/*")] == (["0"] if saves else [])


@pytest.mark.slow
@pytest.mark.parametrize("memory", [(), ("algo=dqn", "algo.num_updates=1")])
def test_a_run_that_was_stopped_before_its_first_update_goes_on(tmp_path, memory):
    """With the memory that was filled. What was evaluated by then is evaluated, and its line written, once more."""
    sizes = (
        ("algo.source.capacity=256", "algo.source.batch_size=8", "algo.source.prefill_env_steps=64") if memory else ()
    )
    given = (*TINY, *memory, *sizes, "total_env_steps=256", "eval.every_env_steps=128")
    train(tmp_path / "cut", *given, stop=StopAfter(0))
    train(tmp_path / "cut", *given, resume=Resume(tmp_path / "cut/0", "all"))
    train(tmp_path / "whole", *given)
    assert_same(tmp_path / "cut/0", tmp_path / "whole/0")
    (meta,) = {checkpoint.latest_meta(tmp_path / name / "0/checkpoints")["num_lines"] for name in ("cut", "whole")}
    assert meta == len(rows(tmp_path / "cut/0")) and not list(tmp_path.glob("cut/0/metrics.before*"))
