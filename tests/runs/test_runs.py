"""`rlexp.train`, `rlexp.sweep` and what they give: a command line from Python, many in one process."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support import QUIET, SMALL, environment

import rlexp
from rlexp import compose, runs
from rlexp.storage import rundir
from rlexp.sweep.manifest import Manifest

SMALLEST = [*QUIET, *SMALL, "total_env_steps=256"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where all of this happens, as in a notebook."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("notebook")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def trained(place):
    return rlexp.train(SMALLEST, {"algo": {"hp": {"lr": 1e-3}}}, seed=np.int64(3))


def test_importing_costs_nothing():
    heavy = "jax numpy hydra omegaconf pydantic rich yaml"
    code = f"import sys, rlexp; print([m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_run_and_what_it_gives(trained, place):
    assert trained.status == "finished" and trained.error is None
    assert trained.dir.parent.parent == place / "outputs"
    assert trained.summary == rundir.read_json(trained.dir / "summary.json")
    assert trained.objective == trained.summary["objective"] == trained.metrics()[-1]["eval/return_mean"]
    config = rundir.read_yaml(trained.dir / "config.yaml")
    assert (config["seed"], config["algo"]["hp"]["lr"]) == (3, 1e-3)
    assert trained.load().env_steps == rlexp.load(trained.dir).env_steps == 256


def test_who_opens_a_run_of_bodies_has_the_threads_that_it_needs(trained, monkeypatch):
    """As a command has, also where JAX has not begun: else XLA may wait for ever."""
    monkeypatch.setenv("NPROC", "1")  # put back afterwards, whatever it was
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr("rlexp.envs.gymnax.decompositions", lambda config: 1000, raising=False)
    trained.load()
    assert os.environ["NPROC"] == "1001"


@pytest.mark.slow
def test_again_in_the_same_process_and_in_a_thread(trained):
    """Another directory and another id; and signals are the main thread's alone."""
    given, found = [], []
    handlers, argv = list(logging.getLogger().handlers), list(sys.argv)
    thread = threading.Thread(target=lambda: found.append(rlexp.train(SMALLEST, seed=4)))
    thread.start()
    thread.join()
    again = rlexp.train(resume=trained.id, total_env_steps=640)
    given += [trained, *found, again]
    assert [run.status for run in given] == ["finished"] * 3
    assert again.dir == trained.dir and again.summary["resumed_from"] == 256
    assert found[0].id != trained.id and found[0].dir != trained.dir
    assert (logging.getLogger().handlers, sys.argv) == (handlers, argv)


@pytest.mark.slow
def test_a_sweep(place):
    ours = ("WANDB_RUN_GROUP", "HYDRA_FULL_ERROR")  # other packages set some of their own as they are imported
    before = [os.environ.get(name) for name in ours]
    swept = rlexp.sweep(SMALLEST, {"network.hidden": [[8]], "algo.hp.lr": (1e-3, 1e-4)}, seed=range(7, 8))
    assert [run.overrides[-2:] for run in swept.runs] == [[f"algo.hp.lr={lr}", "seed=7"] for lr in (0.001, 0.0001)]
    assert {run.status for run in swept.runs} == {"finished"}
    assert [run.objective for run in swept.runs] == [run.metrics()[-1]["eval/return_mean"] for run in swept.runs]
    assert swept.dir.parent.parent == place / "multirun"
    assert [os.environ.get(name) for name in ours] == before
    assert Manifest(swept.dir).owner() is None  # another process may go on with it


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rlexp.train("algo.hp.lrr=1"), "algo.hp.lrr: unknown key"),
        (lambda: rlexp.train(sed=1), '"seed"'),
        (lambda: rlexp.train(seed=object()), "seed: <object"),
        (lambda: rlexp.train({"algo.num_minibatches": 7}), "algo.num_minibatches: 7"),
        (lambda: rlexp.train(run="eval"), "resume: null is not allowed with run=eval"),
        (lambda: rlexp.train(config_dir="/no/such/dir"), "--config-dir: '/no/such/dir'"),
        (lambda: rlexp.sweep(seed=[]), "seed: there is nothing in []"),
        (lambda: rlexp.sweep({"algo.hp.lr": ["fast", 1]}), "algo.hp.lr: 'fast'"),
        (lambda: rlexp.sweep({"algo.num_minibatches": [4, 7]}), "algo.num_minibatches: 7"),
    ],
)
def test_what_is_wrong_is_raised(call, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rlexp.ConfigError) as error:
        call()
    assert words in str(error.value)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_values_arrive_as_they_were_given():
    name = "it's \\ a ${tricky} 'name' [x] \\"
    given = {
        "logger.wandb.name": "123",
        "logger.wandb.notes": name.replace("$", ""),
        "logger.wandb.tags": ["a", "true", "b c"],
        "eval": {"every_env_steps": None, "num_episodes": 3.0},
        "algo.anneal_lr": False,
        "network.hidden": (np.int32(4), 8),
        "output_root": Path("/tmp/a b"),
    }
    node, _ = compose.compose_node(runs.words([given], {"algo": "ppo", "env": "gymnax/acrobot"}))
    wandb = node["logger"]["wandb"]
    assert (wandb["name"], wandb["notes"], wandb["tags"]) == ("123", name.replace("$", ""), ["a", "true", "b c"])
    assert node["eval"]["every_env_steps"] is None and node["eval"]["num_episodes"] == 3
    assert node["algo"]["anneal_lr"] is False and node["network"]["hidden"] == [4, 8]
    assert (node["output_root"], node["env"]["name"]) == ("/tmp/a b", "Acrobot-v1")
