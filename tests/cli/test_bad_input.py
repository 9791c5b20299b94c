"""Bad input: one line with the path, the value, what is allowed and the nearest name; exit code 2; nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ALGORITHMS, command_line

from rlexp import __main__ as cli

RECORDED = ("source=dataset", "algo.source.path=data/mine-v0", "algo.source.sequence_length=8")
SAMPLED = ("source=replay", "algo.source.num_updates=1", "algo.source.sequence_length=8", "algo.source.batch_size=16")
# (arguments, words that the line must hold)
WRONG = [
    # misspelt keys, with and without +
    (["algo.hp.lrr=1"], ["algo.hp.lrr", "unknown key", '"lr"']),
    (["+algo.hp.lrr=1"], ["algo.hp.lrr", "unknown key", '"lr"']),
    (["++algo.hp.lrr=1"], ["algo.hp.lrr", "unknown key", '"lr"']),
    (["algo.num_env=8"], ["algo.num_env", "unknown key", '"num_envs"']),
    (["+algo.lrr=1"], ["algo.lrr", "unknown key. Allowed"]),
    (["sed=1"], ["sed", "unknown key", '"seed"']),
    (["+sed=1"], ["sed", "unknown key", '"seed"']),
    (["total_env_step=1"], ["total_env_step", '"total_env_steps"']),
    (["eval.episodes=3"], ["eval.episodes", '"num_episodes"']),
    (["logger.wandb.projct=x"], ["logger.wandb.projct", '"project"']),
    (["checkpoint.every_minute=1"], ["checkpoint.every_minute", '"every_minutes"']),
    (["hardware.mesh.dta=1"], ["hardware.mesh.dta", '"data"']),
    (["env.params.gravty=1"], ["gravty", '"gravity"']),
    (["network.hiden=[64]"], ["network.hiden", '"hidden"']),
    # misspelt groups and options
    (["algo=ppoo"], ["algo=ppoo", '"ppo"', f"Allowed: {', '.join(ALGORITHMS)}"]),
    (["algoo=ppo"], ["algoo", '"algo"']),
    (["env=gymnax/cartpol"], ["env=gymnax/cartpol", '"gymnax/cartpole"']),
    (["env=cartpole"], ["env=cartpole", "gymnax/cartpole"]),
    (["network=mpl"], ["network=mpl", '"mlp"']),
    (["hardware=v4-33"], ["hardware=v4-33", '"v4-32"']),
    (["-m", "seed=0,1", "resume=auto"], ["resume", "'auto'", "leave out -m"]),
    (["--cfg", "job", "algo.hp.lrr=1"], ["algo.hp.lrr", '"lr"']),
    (["hardware=abacus"], ["hardware=abacus", "no such option. Allowed"]),
    (["algo=[ppo,dqn]"], ["algo=[ppo,dqn]", "-m algo=ppo,dqn"]),
    (["processes.number=3", "hardware.mesh.data=4"], ["processes.number", "3 processes", "4 devices"]),
    (["precision=bf32"], ["precision=bf32", "bf16"]),
    (["logger=quite"], ["logger=quite", '"quiet"']),
    (["experiment=nothing_like_it"], ["experiment=nothing_like_it", "Allowed"]),
    (["debug=nanns"], ["debug=nanns", '"nans"']),
    (["debug=nan"], ["debug: nan", "nans"]),
    # wrong types
    (["seed=x"], ["seed", "'x'", "integer"]),
    (["seed=-1"], ["seed", "-1", "greater than or equal to 0"]),
    (["seed=true"], ["seed", "True", "integer"]),
    (["algo.hp.lr=fast"], ["algo.hp.lr", "'fast'", "number"]),
    (["algo.num_steps=1.5"], ["algo.num_steps", "1.5", "integer"]),
    (["algo.anneal_lr=maybe"], ["algo.anneal_lr", "'maybe'", "boolean"]),
    (["network.hidden=64"], ["network.hidden", "64", "list"]),
    (["network.activation=rel"], ["network.activation", "'rel'", "'relu'", '"relu"']),
    (["eval.mode=gredy"], ["eval.mode", "'gredy'", '"greedy"']),
    (
        ["run=profile", "env=gymnasium/cartpole", "source=inference", "algo.source.tls_key=x"],
        ["tls_certificate", "missing"],
    ),
    (
        ["run=profile", "env=gymnasium/cartpole", "source=inference", "algo.source.slurm={timeout_min: 5}"],
        ["algo.source.slurm", "algo.source.start=slurm", "processes"],
    ),
    (["run=trian"], ["run", "'trian'", '"train"']),
    (["checkpoint.restore=some"], ["checkpoint.restore", "'some'", "'learner'"]),
    (["algo.hp.lr=nan"], ["algo.hp.lr", "nan", "finite"]),
    (["algo.hp.lr=[1"], ["algo.hp.lr=[1", "cannot be read"]),
    (["algo"], ["algo", "cannot be read"]),
    # zero and negative counts, values out of bounds
    (["algo.num_envs=0"], ["algo.num_envs", "0", "greater than or equal to 1"]),
    (["algo.num_envs=-4"], ["algo.num_envs", "-4"]),
    (["total_env_steps=0"], ["total_env_steps", "0"]),
    (["eval.num_episodes=0"], ["eval.num_episodes", "0"]),
    (["algo.hp.gamma=1.5"], ["algo.hp.gamma", "1.5", "less than or equal to 1"]),
    (["algo.hp.lr=0"], ["algo.hp.lr", "0", "greater than 0"]),
    (["checkpoint.every_minutes=-1"], ["checkpoint.every_minutes", "-1"]),
    (["network.hidden=[64,0]"], ["network.hidden", "0"]),
    # fields that do not go together
    (["algo.num_minibatches=7"], ["algo.num_minibatches", "7", "512", "nearest that fits is 8"]),
    (["algo.gradient_accumulation=3"], ["gradient_accumulation", "3"]),
    (["shards=3"], ["algo.num_envs", "4", "3 shards", "nearest that fits is 3"]),
    (["shards=0"], ["shards", "0", "'auto'"]),
    (["hardware.mesh.data=64"], ["hardware", "64 cpu", "launcher=", "hardware.emulate=true", "run=plan"]),
    (["hardware.mesh.data=64", "shards=6", "algo.num_envs=96"], ["shards", "6", "64"]),
    (["env=gymnax/pendulum", "algo=dqn"], ["env", "continuous", "dqn"]),
    (["env=gymnax/pendulum", "algo=pqn"], ["env", "continuous", "pqn"]),
    (["algo=td3"], ["env: CartPole-v1 has discrete actions; td3 needs continuous ones"]),
    (["network=gru", "algo=sac"], ["network", "memory", "rlexp.algos.sac", "network=mlp"]),
    (["network=mlp", "algo=r2d2"], ["network: r2d2", "memory", "network=gru", "algo=dqn"]),
    (["network=gru", "algo=bc"], ["algo.sequence_length: 1", "network with a memory", "such as 16"]),
    (["network=transformer", "algo=bc"], ["algo.sequence_length: 1", "network with a memory", "such as 16"]),
    (["network=transformer", "algo=td3", "env=gymnax/pendulum"], ["network", "memory", "rlexp.algos.td3"]),
    (["network=transformer", "network.heads=5"], ["network.heads", "5", "64", "nearest that fits is 4"]),
    (["algo=r2d2", "algo.burn_in=24"], ["algo.burn_in", "24", "at most 23"]),
    (["algo=r2d2", "source=rollout"], ["algo.source: r2d2", "source=replay_sequences"]),
    (["algo=r2d2", "algo.sequence_length=100000"], ["algo.source.capacity", "100000", "it needs"]),
    (["algo=sac", "source=rollout"], ["algo.source: sac", "memory", "source=replay_50k"]),
    (["algo=td3", "env=gymnax/pendulum", "source=rollout"], ["algo.source: td3", "memory", "source=replay_50k"]),
    (["algo=ppo", "source=replay"], ["algo.source: ppo learns from what was just played", "source=rollout"]),
    (["algo=pqn", "network=gru", *SAMPLED], ["algo.source: pqn learns from what was just played", "source=rollout"]),
    (
        ["algo=pqn", *RECORDED],
        ["algo.source: pqn learns from what was just played", "gives recorded data", "source=rollout"],
    ),
    (
        ["algo=impala", *SAMPLED],
        ["algo.source: impala learns from what was just played", "gives samples", "source=rollout"],
    ),
    (["algo=sac", "algo.source.sequence_length=null"], ["algo.source.sequence_length: null", "such as 1"]),
    (
        ["algo=dqn", "source=dataset", "algo.num_updates=1", "algo.source.selector=prioritised"],
        ["algo.source.selector: source=dataset", "no such key", "one of source=replay, "],
    ),
    (
        ["algo=bc", "env=gymnasium/cartpole", "algo.source.path=data/mine-v0"],
        ["algo.source.path: source=host", "no such key", "one of source=dataset"],
    ),
    (["algo=bc", "algo.source.path=gs://bucket/mine-v0"], ["algo.source.path: 'gs://bucket/mine-v0'", "directory"]),
    (["network=cnn"], ["network", "image"]),
    (["network=gru", "algo=dqn"], ["network", "memory", "rlexp.algos.dqn", "network=mlp"]),
    (["network=lstm", "algo.num_minibatches=3"], ["algo.num_minibatches", "3", "4 environments", "fits is 2"]),
    # modules of the user's own
    (["env.module=no.such.module"], ["env.module", "no.such.module"]),
    (["env.module=json"], ["env.module", "json", "Config"]),
    (["env.name=CartPole-v7"], ["env.name", "CartPole-v7", "CartPole-v1"]),
    # directories
    (["output_root=/dev/null/here"], ["output_root", "/dev/null/here"]),
    (["output_root=/proc/here"], ["output_root", "/proc/here"]),
    (["--config-dir", "/no/such/dir"], ["--config-dir", "/no/such/dir"]),
    (["resume=nowhere"], ["resume", "nowhere", "run directory"]),
    (["resume=0123abcd"], ["resume", "0123abcd", "output_root"]),
    (["resume=."], ["resume", "'.'", "without a run"]),
    (["run=eval"], ["resume", "run=eval"]),
    # a search without -m
    (["sweeper=pbt"], ["sweeper=pbt", "add -m"]),
    (["sweeper.population=8"], ["sweeper.population=8", "add -m"]),
    # a sweep is checked before its first job
    (["-m", "algo.hp.lr=1e-3,fast"], ["algo.hp.lr", "'fast'"]),
    (["-m", "seed=1,2", "algo.num_minibatches=4,7"], ["algo.num_minibatches", "7"]),
]


def run_cli(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The command line in this process: no second import of JAX for each row of a table."""
    monkeypatch.setattr(sys, "argv", ["rlexp", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_one_line_and_nothing_left(arguments, words, tmp_path, monkeypatch, capfd):
    if "-m" in arguments:  # there Hydra sets up logging anew, which pytest's own does not survive
        done = command_line(tmp_path, *arguments)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        monkeypatch.chdir(tmp_path)
        code = run_cli([*arguments, "compilation_cache=null"], monkeypatch)
        out, err = capfd.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    missing = [word for word in words if word not in err]
    assert not missing, (missing, err)
    assert list(tmp_path.iterdir()) == []


def test_as_a_user_types_it(tmp_path):
    """The same in a process of its own, with nothing but the package on the path."""
    command = [sys.executable, "-m", "rlexp", "algo.hp.lrr=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=_environment())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        'rlexp: algo.hp.lrr: unknown key; did you mean "lr"? Allowed: adam_eps, clip_eps, entropy_coef, gae_lambda, gamma, lr, '
        "max_grad_norm, reward_scale, value_coef"
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(tmp_path, monkeypatch, capfd):
    """No space for the run directory: one line. (A small tmpfs would need root; /dev/full fails writes in the same way.)"""
    monkeypatch.chdir(tmp_path)
    from rlexp.storage import rundir

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    code = run_cli(["compilation_cache=null"], monkeypatch)
    _, err = capfd.readouterr()
    assert code == 2
    assert "No space left on device" in err and err.count("\n") == 1
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*")), rundir


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
