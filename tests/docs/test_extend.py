"""docs/how-to/extend.md, file by file and command by command, in a folder of its own."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support import build

from rlexp.algos.common import epochs_and_minibatches
from rlexp.compose import search_path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs/how-to/extend.md").read_text()
FILES = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
LARGE = re.findall(r"^    python -m rlexp (.*num_envs.*)$", PAGE, re.MULTILINE)
CONSOLE = [block.splitlines() for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    assert len(FILES) == 12
    for name, text in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "my_game/__init__.py").touch()
    return folder


def test_the_large_run_and_the_smaller_one_have_the_minibatches_that_the_page_says(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    first, then = map(shlex.split, LARGE)
    assert first[:2] == ["--config-dir", "conf"] and then[:2] == ["resume=large", "checkpoint.restore=params"]
    large = [*search_path(str(folder / "conf")), *first[2:-1]]
    for overrides, minibatches in ((large, (1, 64)), ([*large, *then[1:-1]], (4, 8))):
        experiment = build(*overrides)
        algo = experiment.config.algo
        assert epochs_and_minibatches(algo, 1) == minibatches
        assert experiment.env_steps_per_update == 8192 * minibatches[1]


def test_a_game_of_the_page_that_has_not_ended_is_cut_off(folder, monkeypatch):
    """Wrong presses alone, 20 of them; and who puts all out in five turns is at the end."""
    monkeypatch.syspath_prepend(folder)
    experiment = build(*search_path(str(folder / "conf")), "env=lights")
    env = experiment.env_of(experiment.settings)
    for press, turns, discount in ((jnp.argmin, 20, 1.0), (jnp.argmax, 5, 0.0)):
        state, row = jax.jit(env.reset)(jax.random.key(0))
        for turn in range(1, turns + 1):
            allowed = jnp.where(row.obs["action_mask"], row.obs["lit"], 0.5)
            state, row = jax.jit(env.step)(state, press(allowed).astype(jnp.int32))
            assert row.last == (turn == turns)
        assert (row.discount, row.info["hits"]) == (discount, 5.0 - 5.0 * discount)


def run(folder: Path, command: str) -> subprocess.CompletedProcess:
    words = shlex.split(command)
    words = [sys.executable, "-c", "import rlexp.commands as c; c.main()", *words[1:]] if words[0] == "rlexp" else words
    assert words[0] in ("python", sys.executable)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{folder}", "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"JAX_NUMPY_DTYPE_PROMOTION": "standard", "WANDB_MODE": "disabled"}
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_does_what_it_says(folder):
    results = {}
    for first, *expected in CONSOLE:
        done = run(folder, first.removeprefix("$ "))
        assert done.returncode == (2 if expected else 0), done.stdout + done.stderr
        for line in expected:
            assert line in done.stderr.splitlines()
        results[first] = done.stdout
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[1]["env/hits"] < lines[-1]["env/hits"] <= 5  # the environment's own number
    assert lines[-1]["eval/env/hits"] == lines[-1]["eval/return_mean"]
    assert lines[-1]["env/hits"] == pytest.approx(lines[-1]["train/return_mean"])
    assert lines[1]["train/length_mean"] > 7 and 5 <= lines[-1]["train/length_mean"] < 6.5
    assert lines[-1]["eval/return_mean"] > 4.8
    reinforce = [json.loads(line) for line in (folder / "run_reinforce/metrics.jsonl").read_text().splitlines()]
    assert reinforce[-1]["eval/return_mean"] > 4.5
    assert json.loads((folder / "run_residual/summary.json").read_text())["status"] == "finished"
    dice = [json.loads(line) for line in (folder / "run_dice/metrics.jsonl").read_text().splitlines()][-1]
    assert (
        4.5 < dice["eval/return_mean"] <= dice["eval/env/table"] <= 8
    )  # the most that lay there, and what was kept of it
    assert (folder / "run_logger/best.txt").read_text().endswith(" steps\n")
    assert (folder / "run_logger/metrics.jsonl").exists()
    update = 2048 * 256  # environment steps of the page's large run, and then some of the smaller one
    for command, steps in zip(LARGE, (update, update // 8), strict=True):
        done = run(folder, f"python -m rlexp {command} total_env_steps={steps} eval.at_start=false")
        assert done.returncode == 0, done.stdout + done.stderr
    large, smaller = (json.loads((folder / name / "summary.json").read_text()) for name in ("large", "smaller"))
    assert large["env_steps"] == update and smaller["env_steps"] == update // 8
    mean_return, mean_hits = map(float, results["$ python look.py"].split())
    assert mean_return == mean_hits > 4.8
