"""A real `wandb agent` runs a job of the sweep in docs/sweeps.md, against the stand-in for W&B's server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import QUIET, REPOSITORY, environment, rows

sys.path.insert(0, str(REPOSITORY / "tests/loggers"))
import wandb_standin

SMALL = {"algo.num_steps": 16, "network.hidden": [8], "eval.num_episodes": 2, "total_env_steps": 128}


def documented() -> dict:
    """The sweep's YAML in the docs."""
    (text,) = re.findall(
        r"\n((?:    .*\n|\n)*?    command:\n(?:    .*\n)+)", (REPOSITORY / "docs/sweeps.md").read_text()
    )
    return yaml.safe_load(text)


@pytest.mark.slow
def test_the_agent_runs_a_job(tmp_path, monkeypatch):
    sweep, run_id, calls = documented(), "ab12cd34", []
    assert sweep["metric"] == {"name": "eval/return_mean", "goal": "maximize"}
    chosen = {"algo.hp.lr": 0.002, "algo.num_epochs": 2, "network": "mlp_layernorm"}
    assert chosen.keys() == sweep["parameters"].keys()  # what the server chooses is one value for each
    quiet = dict(option.split("=") for option in QUIET if not option.startswith("logger"))
    values = chosen | SMALL | quiet | {"env": "probe/action_reward", "hydra.run.dir": "run"}
    real = wandb_standin._graphql

    def answer(runs, query, variables, url):
        if "query Viewer" in query:
            return {
                "viewer": {"id": "u", "entity": "someone", "username": "someone", "flags": "{}", "teams": {"edges": []}}
            }
        if "SweepWithRuns" in query:
            return {"project": {"sweep": {"name": "s", "config": yaml.safe_dump(sweep), "runs": {"edges": []}}}}
        if "CreateAgent" in query:
            return {"createAgent": {"agent": {"id": "agent"}}}
        if "Heartbeat" in query:
            calls.append(variables)
            args = {key: {"value": value} for key, value in values.items()}
            job = {"type": "run", "run_id": run_id, "program": sweep["program"], "args": args}
            return {"agentHeartbeat": {"agent": {"id": "agent"}, "commands": json.dumps([job] * (len(calls) == 1))}}
        return real(runs, query, variables, url)

    monkeypatch.setattr(wandb_standin, "_graphql", answer)
    (tmp_path / "home").mkdir()
    with wandb_standin.serve() as server:
        env = {k: v for k, v in environment().items() if not k.startswith("WANDB_") and "proxy" not in k.lower()}
        env |= {"HOME": str(tmp_path / "home"), "WANDB_BASE_URL": server.url, "WANDB_API_KEY": wandb_standin.KEY}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # the agent starts `python`
        command = [sys.executable, "-m", "wandb", "agent", "--count", "1", "someone/rlexp/s"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110)
        said = done.stdout + done.stderr
        assert done.returncode == 0 and list(server.runs) == [run_id], said
        run = server.runs[run_id]
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["algo"]["hp"]["lr"] == 0.002 and config["algo"]["num_epochs"] == 2
    assert config["network"]["hidden"] == [8] and config["network"]["layer_norm"] is True
    # The server hears the objective under the name that the sweep's metric has.
    assert run.exit_code == 0
    assert run.history[-1]["eval/return_mean"] == rows(tmp_path / "run")[-1]["eval/return_mean"]
