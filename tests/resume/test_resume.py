"""What `resume` and `checkpoint.restore` do, in this process."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from support import build, fingerprint, rows, train, without_clock

from rlexp import __main__ as main
from rlexp import compose
from rlexp.__main__ import validate
from rlexp.compose import search_path
from rlexp.config import ConfigError
from rlexp.session import check_same
from rlexp.storage import rundir
from rlexp.training import program
from rlexp.training.loop import Resume, layout_of

TINY = (
    "env=gymnax/cartpole",
    "algo.num_envs=4",
    "algo.num_steps=16",
    "network.hidden=[8]",
    "eval.num_episodes=2",
    "eval.every_env_steps=320",
    "checkpoint.every_updates=5",
)


def params_of(run_dir, *overrides):
    """The parameters of the newest checkpoint."""
    from rlexp.storage import checkpoint

    experiment = build(*overrides)
    traced = program.trace([experiment], layout_of([experiment]))
    return checkpoint.restore(run_dir / "checkpoints", traced.abstract_run, warn=print).run.state


def test_a_larger_total_goes_on_and_the_schedule_follows(tmp_path):
    train(tmp_path, *TINY, "total_env_steps=640")
    (summary,) = train(tmp_path, *TINY, "total_env_steps=1280", resume=Resume(tmp_path / "0", "all"))
    assert (summary["status"], summary["env_steps"], summary["resumed_from"]) == ("finished", 1280, 640)
    lines = rows(tmp_path / "0")
    assert [r["env_steps"] for r in lines] == [0, 320, 640, 960, 1280]
    half_of_new = [r["loss/lr"] for r in lines[3:]]
    assert half_of_new[0] == pytest.approx(2.5e-4 * (1 - 12 / 20), rel=1e-5)  # updates 10 … 14 of 20, not of 10


@pytest.mark.slow
def test_lines_after_the_checkpoint_are_written_once(tmp_path):
    train(tmp_path / "a", *TINY, "total_env_steps=960")
    train(tmp_path / "b", *TINY, "total_env_steps=960")
    checkpoints = tmp_path / "b/0/checkpoints"
    newest = max(int(p.name) for p in checkpoints.iterdir() if p.name.isdecimal())
    (checkpoints / str(newest)).rename(tmp_path / "lost")  # as if killed before it was written
    with (tmp_path / "b/0/metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 9')  # and in the middle of a line
    train(tmp_path / "b", *TINY, "total_env_steps=960", resume=Resume(tmp_path / "b/0", "all"))
    assert without_clock(rows(tmp_path / "a/0")) == without_clock(rows(tmp_path / "b/0"))


def test_a_damaged_checkpoint_is_passed_over(tmp_path, capfd):
    train(tmp_path / "a", *TINY, "total_env_steps=960")
    checkpoints = tmp_path / "a/0/checkpoints"
    newest = max(int(p.name) for p in checkpoints.iterdir() if p.name.isdecimal())
    damaged = max(
        (p for p in (checkpoints / str(newest) / "run").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of the right size
    (summary,) = train(tmp_path / "a", *TINY, "total_env_steps=960", resume=Resume(tmp_path / "a/0", "all"))
    assert f"a damaged checkpoint is passed over for {newest - 5}" in " ".join(capfd.readouterr().err.split())
    assert summary["resumed_from"] == 960 - 5 * 64 and summary["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["learner", "params"])
def test_a_new_run_starts_from_what_was_learnt(what, tmp_path):
    train(tmp_path / "old", *TINY, "total_env_steps=640")
    # no update is large enough to move parameters by much at this learning rate
    new = (*TINY, "algo.num_envs=8", "algo.hp.lr=1e-12", "total_env_steps=128", "eval.every_env_steps=null")
    (summary,) = train(tmp_path / "new", *new, resume=Resume(tmp_path / "old/0", what))
    assert summary["resumed_from"] is None and summary["env_steps"] == 128
    old, fresh = params_of(tmp_path / "old/0", *TINY), params_of(tmp_path / "new/0", *new)
    for a, b in zip(jax.tree.leaves(old.params), jax.tree.leaves(fresh.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-8)
    count = lambda state: max(int(x.max()) for x in jax.tree.leaves(state.opt_state) if x.dtype == np.int32)  # noqa: E731
    assert count(old) == 10 * 16
    assert count(fresh) == (10 * 16 if what == "learner" else 0) + 16
    assert int(fresh.step[0]) == 1


def test_another_setting_is_refused_by_name(tmp_path):
    saved = fingerprint(*TINY)
    check_same(json.loads(json.dumps(saved)), fingerprint(*TINY, "total_env_steps=1e6", "eval.num_episodes=3"))
    for change, path in [
        ("algo.num_envs=8", "algo.num_envs"),
        ("algo.hp.lr=1e-3", "algo.hp.lr"),
        ("seed=1", "seed"),
        ("env.params.gravity=9.0", "env.params.gravity"),
        ("network.hidden=[9]", "network.hidden"),
        ("precision=bf16", "precision.compute"),
        ("algo=pqn", "algo"),
    ]:
        with pytest.raises(
            ConfigError, match=rf"^{re.escape(path)}: .*checkpoint.restore=learner.*all\|learner\|params"
        ):
            check_same(saved, fingerprint(*TINY, change) if change != "algo=pqn" else fingerprint("algo=pqn"))


def test_another_world_within_a_wrapper_is_refused_by_name():
    saved = fingerprint("env=wrapped")
    with pytest.raises(
        ConfigError, match=r"^env\.inner: 'my_game' is not what the checkpoint was made with \('rlexp\."
    ):
        check_same(saved, saved | {"env.inner": "my_game"})
    older = {path: value for path, value in saved.items() if path != "env.inner"}
    check_same(older, saved)  # which did not tell it


def test_found_by_id_or_directory(tmp_path, monkeypatch):
    run_dir = tmp_path / "2026-01-01" / "12-00-00-0123abcd"
    run_dir.mkdir(parents=True)
    rundir.write_json(run_dir / "environment.json", {"run_id": "0123abcd", "starts": []})
    assert rundir.find("0123abcd", tmp_path) == run_dir
    assert rundir.find(str(run_dir), tmp_path) == run_dir
    monkeypatch.setenv("HOME", str(tmp_path))
    inside = run_dir.relative_to(tmp_path)
    assert rundir.find("0123abcd", "~") == rundir.find(f"~/{inside}", "outputs") == run_dir
    assert Path(compose.compose_node(["output_root='~/runs'"])[1]).is_relative_to(tmp_path / "runs")
    assert rundir.id_of(run_dir) == "0123abcd"
    for name, words in [("0123abce", "no run with the id"), (str(tmp_path), "without a run"), ("x/y", "neither")]:
        with pytest.raises(ConfigError, match=words):
            rundir.find(name, tmp_path)


def test_one_process_in_a_directory(tmp_path):
    with rundir.lock(tmp_path), pytest.raises(ConfigError, match="another process"):
        rundir.lock(tmp_path)
    rundir.lock(tmp_path).close()


def test_auto_goes_on_with_training_only(tmp_path):
    (tmp_path / "environment.json").write_text('{"run_id": "c0ffee00"}')
    (tmp_path / "config.yaml").write_text("run: eval\n")
    with pytest.raises(ConfigError, match="holds a run=eval; resume=auto goes on with training only"):
        validate(["resume=auto", f"hydra.run.dir={tmp_path}"])


def test_a_resume_that_stands_in_a_file_is_not_passed_over(tmp_path):
    """The settings of the run could not come with it."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/again.yaml").write_text("# @package _global_\nresume: somewhere\n")
    with pytest.raises(ConfigError, match="resume: 'somewhere' stands in a YAML file"):
        validate([*search_path(str(tmp_path)), "experiment=again"])


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_resume_is_heard_however_it_is_set(sign, tmp_path):
    with pytest.raises(ConfigError, match="'nowhere' is neither a run directory nor"):
        validate([f"{sign}resume=nowhere", f"output_root={tmp_path}"])


@pytest.fixture
def recipe(tmp_path):
    """(the overrides that find it, the directory of a run that began, a function: a run that has these overrides)"""
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/finetune.yaml").write_text("# @package _global_\ncheckpoint:\n  restore: learner\n")

    def began(*overrides):
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        rundir.write_json(run_dir / "environment.json", {"run_id": "0123abcd", "starts": [{}]})
        (run_dir / "config.yaml").write_text("run: train\n")
        (run_dir / "overrides.yaml").write_text(yaml.safe_dump([*search_path(str(tmp_path / "conf")), *overrides]))
        return run_dir

    return search_path(str(tmp_path / "conf")), began


@pytest.mark.parametrize(
    "says",
    [
        "experiment=finetune",
        "checkpoint={restore: learner}",
        "checkpoint.restore='learner'",
        "++checkpoint.restore=params",
    ],
)
def test_what_begins_a_new_run_does_so_in_a_directory_of_its_own_however_it_is_said(says, recipe):
    path, began = recipe
    run_dir = began("seed=1")
    for found_by in (path, []):  # it may be that run's own YAML
        found, merged = main._resumed([*found_by, f"resume={run_dir}", says])
        assert found == run_dir and not any(o.startswith("hydra.run.dir") for o in merged)
    with pytest.raises(
        ConfigError, match=r"^hydra\.run\.dir: .* is the run that is started from, and checkpoint\.restore="
    ):
        validate([*path, f"resume={run_dir}", says, f"hydra.run.dir={run_dir}"])


@pytest.mark.parametrize("says", ["run='train'", "checkpoint.restore='all'", "seed=1"])
def test_a_run_that_began_from_another_one_goes_on_with_all_that_it_has(says, recipe):
    """By a recipe that says restore=learner, which was of its beginning."""
    path, began = recipe
    run_dir = began("experiment=finetune")
    _, merged = main._resumed([*path, f"resume={run_dir}", says])
    assert compose.composed(merged).run_dir == str(run_dir)
    assert main._what(merged) == ("train", "all")
    command, experiment = validate(
        [*path, "resume=auto", "experiment=finetune", f"hydra.run.dir={run_dir}", "logger=quiet"]
    )
    assert command.resume_dir == run_dir and experiment.config.checkpoint.restore == "all"
