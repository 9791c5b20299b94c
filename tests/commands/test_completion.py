"""`rlexp completion`: what it offers, without importing JAX or Hydra; and that the scripts work in the shells themselves."""

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
import yaml
from support import ALGORITHMS, environment

from rlexp import compose
from rlexp.commands import completion

CASES = {
    "rlexp al": ["algo.", "algo="],
    "rlexp algo=": [f"algo={name}" for name in ALGORITHMS],
    "rlexp -m algo=ppo,pq": ["algo=ppo,pqn"],
    "rlexp env=gymnax/ca": ["env=gymnax/cartpole", "env=gymnax/catch"],
    "rlexp total": ["total_env_steps="],
    "rlexp algo.hp.l": ["algo.hp.lr="],
    "rlexp algo.so": [],  # PPO's source has no keys
    "rlexp algo=dqn algo.so": ["algo.source."],
    "rlexp experiment=cartpole_dqn algo.source.c": ["algo.source.capacity="],
    "rlexp ++algo.num_s": ["++algo.num_steps="],
    "rlexp env=gymnax/pendulum env.params.max_t": ["env.params.max_torque="],
    "rlexp run=pl": ["run=plan"],
    "rlexp network.activation=": [f"network.activation={x}" for x in ("gelu", "relu", "silu", "tanh")],
    "rlexp network=cnn network.fea": ["network.features="],
    "rlexp logger=quiet logger.wandb.mo": ["logger.wandb.mode="],
    "rlexp logger.wandb.mode=of": ["logger.wandb.mode=offline"],
    "rlexp debug=n": ["debug=nans", "debug=nojit", "debug=none"],
    "rlexp debug.nans=": ["debug.nans=false", "debug.nans=true"],
    "rlexp --c": ["--cfg", "--config-dir"],
    "rlexp --cfg ": ["all", "hydra", "job"],
    "rlexp sweep re": ["report", "resume", "retry"],
    "rlexp rep": ["replay=", "report"],
    "rlexp ls al": [],
    "rlexp algo=ppo rep": ["replay="],  # a verb comes first
    "rlexp 'un'closed [": [],
    "rlexp no.such.key=": [],
    "rlexp algo=nothing algo.": [],
}


@pytest.mark.parametrize("line", CASES)
def test_what_is_offered(line):
    assert completion.complete(line) == CASES[line]


def test_it_looks_where_hydra_looks():
    assert completion._CONF == compose.CONF_DIR
    lists = {"observations", "critic", "rewards", "terminations", "commands", "events", "randomisation", "curriculum"}
    free = {"between", "experiment", "replay"} | lists  # of which nothing need be chosen
    assert set(completion._groups([])) - free == {name for name, _ in completion._chosen([]).items()}


def test_folders_runs_and_ones_own_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "mine/algo/wild.yaml": "module: no.such.module\nbeast: {teeth: 3}\n",
        "mine/odd/broken.yaml": "\t: [",
        "outputs/a/b/environment.json": '{"run_id": "c0ffee42"}',
        "outputs/a/c/environment.json": "{",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert completion.complete("rlexp --config-dir mi") == ["mine/"]
    assert completion.complete("rlexp --config-dir mine algo=w") == ["algo=wild"]
    assert completion.complete("rlexp --config-dir mine algo=wild algo.beast.") == ["algo.beast.teeth="]
    assert completion.complete("rlexp --config-dir mine odd=broken od") == ["odd="]
    assert completion.complete("rlexp resume=") == ["resume=auto", "resume=c0ffee42", "resume=mine/", "resume=outputs/"]
    assert completion.complete("rlexp resume=outputs/a/") == ["resume=outputs/a/b/", "resume=outputs/a/c/"]
    assert completion.complete("rlexp report outp") == ["outputs/"]


def test_an_answer_imports_nothing_that_is_slow():
    code = """if True:
        import sys
        from rlexp.commands import completion
        assert completion.complete("rlexp algo=dqn algo.hp.") and completion.complete("rlexp algo=")
        print([m for m in "jax numpy hydra omegaconf pydantic rich".split() if m in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source <(rlexp completion bash)"),
    "zsh": (["zsh", "-f", "-i"], "source <(rlexp completion zsh)"),
    "fish": (["fish", "--no-config", "-i"], "rlexp completion fish | source"),
}
# What is typed before Tab, and what stands there afterwards; with a space where the word is whole.
TYPED = [
    ("algo=pq", "algo=pqn "),
    ("algo.hp.gae", "algo.hp.gae_lambda="),
    ("env=gymnax/cartp", "env=gymnax/cartpole "),
    ("logger.wandb.mode=off", "logger.wandb.mode=offline "),
    ("algo=dqn algo.source.cap", "algo=dqn algo.source.capacity="),
]


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(s, marks=pytest.mark.slow) for s in SHELLS if s != "bash")])
def test_in_the_shell_itself(shell, tmp_path):
    """Typed into a terminal. `rlexp` there writes down what it is called with, but for completion."""
    command, setup = SHELLS[shell]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {shell}: apt-get install {shell}")
    stub = tmp_path / "rlexp"
    stub.write_text(
        f'#!/bin/sh\nif [ "$1" = completion ]; then exec {sys.executable} -c "import rlexp.commands as c; c.main()" "$@"; fi\n'
        f'printf "%s|" "$@" >> {tmp_path}/typed\necho >> {tmp_path}/typed\n'
    )
    stub.chmod(0o755)
    own = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", HOME=str(tmp_path), TERM="dumb", PS1="> ")
    control, terminal = pty.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(  # fish wants a terminal of its own
        [sys.executable, "-c", take, *command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=own,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(terminal)
    seen = b""

    def read(seconds):
        nonlocal seen
        with contextlib.suppress(OSError):  # the shell has ended
            while select.select([control], [], [], seconds)[0]:
                seen += os.read(control, 4096)

    def wait_for(done):
        until = time.monotonic() + 60
        while not done():
            assert time.monotonic() < until and process.poll() is None, seen.decode(errors="replace")
            read(0.2)

    try:
        os.write(control, f"{setup}\necho READY > {tmp_path}/ready\n".encode())
        wait_for((tmp_path / "ready").exists)
        for typed, _ in TYPED:
            before = len((tmp_path / "typed").read_text().splitlines()) if (tmp_path / "typed").exists() else 0
            # `END` shows whether a space was put behind the word. The shell reads it once it has completed.
            os.write(control, f"rlexp {typed}\tEND\n".encode())
            wait_for(
                lambda n=before: (
                    (tmp_path / "typed").exists() and len((tmp_path / "typed").read_text().splitlines()) > n
                )
            )
    finally:
        process.kill()
        process.wait()
        os.close(control)
    lines = (tmp_path / "typed").read_text().splitlines()
    assert lines == [f"{full}END".replace(" ", "|") + "|" for _, full in TYPED]


def test_all_options_of_all_groups_can_be_reached():
    for path in compose.CONF_DIR.rglob("*/*.yaml"):
        group, *rest = path.relative_to(compose.CONF_DIR).with_suffix("").parts
        word = f"{group}={'/'.join(rest)}"
        if group != "local":
            assert word in completion.complete(f"rlexp {word[:-1]}")
            assert isinstance(yaml.safe_load(path.read_text()), dict)
