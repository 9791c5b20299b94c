"""Evaluation: before the first update, at the end, and again by run=eval, where it is the same to the bit."""

import json

import numpy as np
import pytest
from support import build, rows, saved, train, without_clock

from rlexp import session
from rlexp.loading import load
from rlexp.training.loop import Member, Resume

# Sums of real numbers over long episodes: a last bit anywhere is another return.
LONG = {
    "ppo": ("algo=ppo", "env=gymnax/pendulum", "algo.num_steps=64", "total_env_steps=1024"),
    "pqn": ("algo=pqn", "env=gymnax/cartpole", "algo.hp.lr=3e-3", "total_env_steps=20_000"),
    "dqn": ("algo=dqn", "env=gymnax/cartpole", "total_env_steps=8320"),
    "sac": ("algo=sac", "env=gymnax/pendulum", "total_env_steps=2048"),
    "td3": ("algo=td3", "env=gymnax/pendulum", "total_env_steps=2048"),
}
COMMON = ("network.hidden=[32]", "eval.num_episodes=16", "eval.mode=sampled", "eval.every_env_steps=null")


def evaluated(tmp_path, run_dir, *overrides) -> dict:
    """The line that run=eval leaves."""
    member = Member(build(*overrides, "run=eval", "logger=quiet"), tmp_path / f"eval-{run_dir.name}", "e0000000")
    assert session.evaluate_run(member, run_dir) == rows(member.dir)[0]["eval/return_mean"]
    (line,) = without_clock(rows(member.dir))
    return line


@pytest.mark.slow
@pytest.mark.parametrize("algo", LONG)
def test_eval_repeats_the_last_evaluation(algo, tmp_path):
    """Of a run, and of a member of a pack, which is evaluated alone."""
    overrides = (*LONG[algo], *COMMON)
    for seeds in ((0,), (0, 1)):
        where = tmp_path / str(len(seeds))
        train(where, *overrides, seeds=seeds)
        check_repeated(where, seeds[-1], *overrides)


def check_repeated(where, seed, *overrides) -> dict:
    line = evaluated(where, where / str(seed), *overrides, f"seed={seed}")
    last = without_clock(rows(where / str(seed)))[-1]
    assert line == {name: last[name] for name in line}
    agent = load(where / str(seed), node=build(*overrides, f"seed={seed}").node)
    returns = np.asarray(agent.last_evaluation().episode_return, np.float64)
    assert (returns.mean(), returns.std()) == (last["eval/return_mean"], last["eval/return_std"])
    assert line["eval/return_std"] > 0  # or there would be little to repeat
    return line


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run with an evaluation at the start, and one without; what both share."""
    where = tmp_path_factory.mktemp("begun")
    common = (  # long enough for episodes in which a last bit is another return
        "env=gymnax/cartpole",
        "algo.num_steps=64",
        "algo.hp.lr=3e-3",
        "network.hidden=[16]",
        "total_env_steps=7680",
        "eval.every_env_steps=3840",
        "eval.num_episodes=32",
        "eval.mode=sampled",
    )
    for name, more in {"with": (), "without": ("eval.at_start=false",)}.items():
        train(where / name, *common, *more, "checkpoint.every_updates=15")
    return where, common


@pytest.mark.slow
def test_an_evaluation_before_the_first_update(begun):
    """A line of its own, and nothing else differs: not a number, not the parameters."""
    where, _ = begun
    first, *others = rows(where / "with/0")
    assert first["env_steps"] == 0 and set(first) == {
        "env_steps",
        "agent_steps",
        "wall_s",
        "eval/return_mean",
        "eval/return_std",
        "eval/length_mean",
    }
    assert [row["env_steps"] for row in others] == [3840, 7680]
    assert without_clock(others) == without_clock(rows(where / "without/0"))
    (_, ours), (_, theirs) = saved(where / "with/0"), saved(where / "without/0")
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    summary = json.loads((where / "with/0/summary.json").read_text())
    assert summary["objective"] == others[-1]["eval/return_mean"]


def test_eval_repeats_the_last_evaluation_and_prints_it(begun, capsys):
    """Though its display is off."""
    where, common = begun
    line = check_repeated(where / "without", 0, *common)
    told = capsys.readouterr().out
    assert f"return {line['eval/return_mean']:,.2f} ± {line['eval/return_std']:,.2f}" in told
    assert "32 sampled episodes" in told and "7,680 environment steps" in told
    assert str(where / "without/0") in told and str(where / "without/eval-0") in told


def test_a_resumed_run_does_not_evaluate_at_its_start(begun):
    where, common = begun
    longer = [x for x in common if not x.startswith("total")]
    train(where / "with", *longer, "total_env_steps=11_520", resume=Resume(where / "with/0", "all"))
    assert [row["env_steps"] for row in rows(where / "with/0")] == [0, 3840, 7680, 11520]


def test_without_evaluations_in_between_the_start_has_one(tmp_path):
    """After what the source took before the first update, which is what the policy has seen by then."""
    small = ("algo=dqn", "network.hidden=[8]", "eval.num_episodes=2", "eval.every_env_steps=null")
    experiment = build(*small)
    assert experiment.prefill_env_steps > 0
    train(tmp_path, *small, f"total_env_steps={experiment.prefill_env_steps + 64}")
    first, last = rows(tmp_path / "0")
    assert first["env_steps"] == experiment.prefill_env_steps < last["env_steps"]
    assert 0 < first["agent_steps"] < first["env_steps"]  # episodes have ended
    assert np.isfinite(first["eval/return_mean"]) and "loss/td_error" not in first
