"""Every algorithm learns: bars on several seeds, each bar one program of packed seeds. `make test-slow`."""

import json
import subprocess

import numpy as np
import pytest
from support import environment, rlexp_command, train

pytestmark = pytest.mark.slow

ONLY_AT_THE_END = ("eval.every_env_steps=null", "eval.num_episodes=128", "checkpoint=off")


def final_returns(tmp_path, *overrides: str, num_seeds: int) -> np.ndarray:
    """The mean return of each seed's last policy, over 128 episodes."""
    summaries = train(tmp_path, *ONLY_AT_THE_END, *overrides, seeds=range(num_seeds))
    returns = np.array([s["objective"] for s in summaries])
    print(overrides, "mean", returns.mean(), "median", np.median(returns), "all", np.sort(returns).round(1).tolist())
    return returns


@pytest.mark.parametrize(("precision", "median"), [("f32", 495), ("bf16", 490)])
def test_ppo_solves_cartpole(precision, median, tmp_path):
    """The defaults of `python -m rlexp`, 16 seeds, sampled policy."""
    returns = final_returns(
        tmp_path, "env=gymnax/cartpole", f"precision={precision}", "eval.mode=sampled", num_seeds=16
    )
    assert returns.mean() >= 475
    assert np.median(returns) >= median


def test_ppo_solves_cartpole_on_four_devices(tmp_path):
    """Each environment is a shard of its own, so that four devices can share what one has by default."""
    overrides = ("env=gymnax/cartpole", "hardware.mesh.data=4", "algo.num_envs=4", "eval.mode=sampled")
    returns = final_returns(tmp_path, *overrides, num_seeds=16)
    assert returns.mean() >= 475
    assert np.median(returns) >= 495


def test_ppo_swings_up_pendulum(tmp_path):
    returns = final_returns(tmp_path, "experiment=pendulum", num_seeds=8)
    assert returns.mean() >= -300


def test_ppo_solves_acrobot(tmp_path):
    returns = final_returns(tmp_path, "experiment=acrobot", num_seeds=8)
    assert returns.mean() >= -100


@pytest.mark.timeout(1800)  # 24 seeds of DQN: 15 minutes were too few on a machine that others used
@pytest.mark.parametrize(("overrides", "mean"), [("algo=pqn", 490), ("experiment=cartpole_dqn", 480)])
def test_value_based_algorithms_solve_cartpole(overrides, mean, tmp_path):
    """Published: 491 to 498. Eight seeds say little: of DQN's most end at 500, and one in ten far below."""
    assert final_returns(tmp_path, overrides, "env=gymnax/cartpole", num_seeds=24).mean() >= mean


def test_impala_solves_cartpole(tmp_path):
    """With another epsilon of RMSProp some seeds of 24 were lost: docs/algorithms/impala.md."""
    assert final_returns(tmp_path, "algo=impala", "env=gymnax/cartpole", num_seeds=24).mean() >= 475


@pytest.mark.parametrize("recipe", ["pendulum_sac", "pendulum_td3"])
def test_critics_of_actions_swing_up_pendulum(recipe, tmp_path):
    """In 50,000 steps. Published: -157 to -151."""
    assert final_returns(tmp_path, f"experiment={recipe}", num_seeds=8).mean() >= -180


def test_sac_with_discrete_actions_solves_cartpole(tmp_path):
    """Published: 406."""
    assert final_returns(tmp_path, "experiment=cartpole_sac", num_seeds=8).mean() >= 400


def test_one_seed_on_four_devices_by_environments(tmp_path):
    """One member: the environments, not the members, are laid over the devices. In a process, as a user starts it."""
    command = rlexp_command("logger=quiet", "hardware.mesh.data=4", "hardware.emulate=true")
    command += ["algo.num_envs=4", "eval.mode=sampled", "eval.num_episodes=128", "hydra.run.dir=run"]
    own = environment(XDG_CACHE_HOME=str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["objective"] >= 450  # one seed: PureJaxRL's worst end at 350 to 450, its mean is 490
