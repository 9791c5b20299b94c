"""`python -m rlexp.sweep dashboard`: what it saves on a stand-in for W&B's server, by W&B's own library and real HTTP."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_up_sweep import made_up
from support import QUIET, REPOSITORY, environment, rlexp_command, rows
from wandb_views import Views, panels, run_sets, texts

from rlexp.sweep import dashboard
from rlexp.sweep.__main__ import main
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.results import gather

sys.path.insert(0, str(REPOSITORY / "tests/loggers"))
import wandb_standin

PROJECT, GROUP = "cart poles", "s-c0ffee"
LOSSES = {
    "loss/policy": -0.1,
    "loss/approx_kl": 0.01,
    "loss/clip_fraction": 0.1,
    "loss/entropy": 0.6,
    "loss/none": None,
}
OTHERS = {"train/return_mean": 2.0, "throughput/env_steps_per_second": 9e4, "time/chunk_s": 0.1, "env/pole": 1.0}


def wandb(**more: Any) -> dict[str, Any]:
    return {"runs": "each", "mode": "auto", "project": PROJECT, "entity": None, "group": GROUP} | more


def two_by_two(directory: Path, logger: dict[str, Any] | None = None, *, folder: str | None = "run-1-x") -> Path:
    """Learning rates times networks, two seeds each, in one environment."""
    lines = [
        f"algo.hp.lr={lr} network={network} seed={seed}"
        for lr in ("0.001", "0.01")
        for network in ("mlp", "lstm")
        for seed in range(2)
    ]
    made_up(directory, [(line, 10.0 + i) for i, line in enumerate(lines)])
    for job in Manifest(directory).jobs():
        given = dict(o.split("=") for o in job.overrides)
        config = {
            "seed": int(given["seed"]),
            "env": {"name": "CartPole-v1"},
            "algo": {"module": "rlexp.algos.ppo", "hp": {"lr": float(given["algo.hp.lr"])}},
            "network": {"module": f"rlexp.networks.{given['network']}", "hidden": [8]},
            "logger": {"wandb": logger or wandb()},
        }
        run_dir = directory / job.dir
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
        lines = [line | OTHERS | LOSSES for line in rows(run_dir)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if folder:
            (run_dir / "wandb" / folder).mkdir(parents=True)
    return directory


# Without a key; with one; again, after a reader has changed what there is; and when the server refuses.
_CHILD = """
import os, sys
from rlexp.sweep.__main__ import main

directory, key = sys.argv[1:]
codes = [main(["dashboard", directory])]
os.environ["WANDB_API_KEY"] = key
codes += [main(["dashboard", directory]) for _ in range(3)]
print(codes)
"""


def home(tmp_path: Path, **more: str) -> dict[str, str]:
    """An environment without a key of the user's."""
    (tmp_path / "home").mkdir()
    env = {k: v for k, v in environment().items() if not k.startswith("WANDB_") and "proxy" not in k.lower()}
    return env | {"HOME": str(tmp_path / "home"), "WANDB_BASE_URL": "http://127.0.0.1:9"} | more


@pytest.mark.slow
def test_it_is_saved_and_saved_again(tmp_path, monkeypatch):
    directory = two_by_two(tmp_path / "s")
    views = Views(wandb_standin._graphql, PROJECT)
    first: dict[str, Any] = {}
    asked: list[bool] = []

    def answer(runs: Any, query: str, variables: Any, url: str) -> dict[str, Any]:
        found = views.answer(runs, query, variables, url)
        if "upsertView" in found and views.num_saves == 2:  # both are there: their reader changes them
            first.update({view["id"]: json.loads(view["spec"]) for view in views.saved.values()})
            for view in views.saved.values():
                spec = json.loads(view["spec"])
                if view["type"] == "runs":
                    spec["blocks"][-1:] = [{"type": "paragraph", "children": [{"text": "I see a plateau."}]}] * 2
                else:
                    own = spec["section"]["panelBankConfig"]["sections"][0] | {"name": "My own", "panels": []}
                    spec["section"]["panelBankConfig"]["sections"].append(own)
                view["spec"] = json.dumps(spec)
        asked.append("GetDefaultEntity" in query)
        if sum(asked) == 3:  # by the third: what comes next is refused
            server.refuse.set()
        return found

    monkeypatch.setattr(wandb_standin, "_graphql", answer)
    with wandb_standin.serve() as server:
        env = home(tmp_path, WANDB_BASE_URL=server.url)
        command = [sys.executable, "-c", _CHILD, str(directory), wandb_standin.KEY]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    said = done.stderr.splitlines()
    assert done.stdout.splitlines()[-1:] == ["[2, 0, 0, 2]"], done.stdout + done.stderr
    assert (
        said[0].startswith("rlexp.sweep: dashboard: W&B: no API key")
        and "permission denied" in said[-1]
        and len(said) == 2
    )
    assert wandb_standin.KEY not in done.stdout + done.stderr
    # Saved twice, and there is one of each.
    assert views.num_saves == 4 and [view["type"] for view in views.saved.values()] == ["runs", "project-view"]
    (report,), (workspace,) = views.of("runs"), views.of("project-view")
    assert report["displayName"] == workspace["displayName"] == f"Sweep {Manifest(directory).recall('dashboard')}"
    assert "I see a plateau." in texts(report["spec"]) and "I see a plateau." not in texts(first[report["id"]])
    sections = [section["name"] for section in workspace["spec"]["section"]["panelBankConfig"]["sections"]]
    assert sections == [
        *("Learning curves", "Hyperparameters", "Learning diagnostics", "Environment", "Throughput", "My own")
    ]
    for line in done.stdout.splitlines()[:2]:
        assert f"{server.url}/someone/" in line

    there = {name for name, value in rows(directory / "0")[0].items() if value is not None}
    for view in (report, workspace):
        lines = [panel["config"] for panel in panels(view["spec"]) if panel["viewType"] == "Run History Line Plot"]
        drawn = [name for config in lines for name in config["metrics"]]
        assert set(drawn) <= there and {
            "eval/return_mean",
            *dashboard._FIRST,
            "throughput/env_steps_per_second",
        } <= set(drawn)
        assert all(c["xAxis"] == "env_steps" and (c["groupAgg"], c["groupArea"]) == ("mean", "stddev") for c in lines)
        for run_set in run_sets(view["spec"]):
            (one,) = run_set["filters"]["filters"]
            assert (one["key"], one["value"]) == ({"section": "run", "name": "group"}, GROUP)
            assert run_set["sort"]["keys"][0] == {
                "key": {"section": "summary", "name": "objective"},
                "ascending": False,
            }
        grouped = [tuple(key["name"] for key in run_set["grouping"]) for run_set in run_sets(view["spec"])]
        # A choice of a group is known by the key that differs as it does, and the seed is no key: it is what is averaged over.
        assert set(grouped) <= {("algo.value.hp.lr", "network.value.module"), ()} and grouped[0]
        (importance,) = [p["config"] for p in panels(view["spec"]) if p["viewType"] == "Parameter Importance"]
        assert importance["targetKey"] == "objective"
        (parallel,) = [p["config"] for p in panels(view["spec"]) if p["viewType"] == "Parallel Coordinates Plot"]
        assert [c["accessor"] for c in parallel["columns"]] == [
            *("config:algo.value.hp.lr", "config:network.value.module", "summary:objective")
        ]
    words = "\n".join(texts(report["spec"]))
    assert (
        "| 1 | lr=0.01, network=lstm | 16.5 |" in words and "python -m rlexp -m algo.hp.lr=0.01 network=lstm" in words
    )


def sweep_of(tmp_path: Path, jobs: list[str], configs: list[dict[str, Any]]) -> tuple[Any, Any]:
    directory = made_up(tmp_path / "s", [(line, float(i)) for i, line in enumerate(jobs)])
    for i, config in enumerate(configs):
        (directory / str(i) / "config.yaml").write_text(yaml.safe_dump({"logger": {"wandb": wandb()}} | config))
        (directory / str(i) / "wandb" / "run-1-x").mkdir(parents=True)
    results = gather(directory)
    return results, dashboard._facts(results, dashboard._home(directory, results.jobs))


def test_columns_are_keys_of_the_configurations(tmp_path):
    """Also of a key that is itself called `value`, of what brings other groups along, and of environments and algorithms."""
    jobs = ["env=a algo=dqn algo.value=mean +experiment=x", "env=b algo=ppo algo.value=categorical +experiment=y"]
    configs = [
        {"env": {"name": "A"}, "algo": {"module": "m.dqn", "value": "mean"}, "source": {"module": "replay", "size": 1}},
        {
            "env": {"name": "B"},
            "algo": {"module": "m.ppo", "value": "categorical"},
            "source": {"module": "rollout", "size": 1},
        },
    ]
    results, facts = sweep_of(tmp_path, jobs, configs)
    assert facts.columns.pop("experiment") in ("env.name", "source.module", "algo.module")
    assert facts.columns == {"env": "environment", "algo": "algorithm", "algo.value": "algo.value"}
    assert dashboard._stored("algo.value") == "algo.value.value"
    assert (
        dashboard._where(facts.home, results, "A") == f"Metric('Group') == '{GROUP}' and Config('environment') == 'A'"
    )
    odd = facts.home._replace(group="it's 5=5")
    assert dashboard._where(odd, results, "A") == "Metric('ID') in ['a0000000']"


@pytest.mark.parametrize(("rates", "there"), [(("1", "2"), {"algo.hp.lr": "algo.hp.lr"}), (("1",), {})])
def test_hyperparameters_differ_within_an_environment(tmp_path, rates, there):
    """Which is the same in all of its runs: without another one there is no section."""
    pairs = [(env, lr) for env in "ab" for lr in rates]
    configs = [{"env": {"name": env}, "algo": {"module": "m.dqn", "hp": {"lr": lr}}} for env, lr in pairs]
    results, facts = sweep_of(tmp_path, [f"env={env} algo.hp.lr={lr}" for env, lr in pairs], configs)
    assert dashboard._differing(results, facts, "a") == there
    assert dashboard._differing(results, facts, None) == {"env": "environment"} | there == facts.columns
    assert there or dashboard._parameters(results, facts, "a") == []


def test_a_population_shows_its_schedules(tmp_path):
    names = ["population/generation", "population/parent", "population/algo.hp.lr", "eval/return_mean", "loss/policy"]
    assert dashboard.charts(names) == {
        "Learning curves": ["eval/return_mean"],
        "Learning diagnostics": ["loss/policy"],
        "Schedules": ["population/algo.hp.lr"],
    }


@pytest.mark.parametrize(
    ("logger", "folder", "wanted"),
    [
        (wandb(mode="disabled"), None, "were made without W&B (logger.wandb.mode=disabled)"),
        (wandb(), None, "were made without W&B (they have no wandb/)"),
        (wandb(mode="offline"), "offline-run-1-x", "are offline; upload them first: python -m rlexp.sweep sync "),
    ],
)
def test_a_sweep_that_the_server_cannot_know(tmp_path, capsys, logger, folder, wanted):
    directory = two_by_two(tmp_path / "s", logger, folder=folder)
    before = sorted(tmp_path.rglob("*"))
    assert main(["dashboard", str(directory)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlexp.sweep: dashboard: ") and wanted in line
    assert sorted(tmp_path.rglob("*")) == before and Manifest(directory).recall("dashboard") is None


def test_what_was_synced_is_there(tmp_path):
    directory = two_by_two(tmp_path / "s", wandb(mode="offline"), folder="offline-run-1-x")
    (directory / "3/wandb/offline-run-1-x/run-x.wandb.synced").touch()
    assert dashboard._home(directory, Manifest(directory).jobs()) == (None, PROJECT, GROUP, False)


def test_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["dashboard", str(two_by_two(tmp_path / "s"))]) == 2
    assert capsys.readouterr().err == (
        "rlexp.sweep: dashboard: it needs wandb-workspaces; pip install 'rlexp[dashboard]' brings it\n"
    )


@pytest.mark.slow
def test_a_server_that_is_not_there_or_is_silent(tmp_path):
    """The second takes requests and never answers: bounded by W&B's own limit."""
    directory = two_by_two(tmp_path / "s")
    env = home(tmp_path, WANDB_API_KEY=wandb_standin.KEY, WANDB_HTTP_TIMEOUT="2")
    command = [sys.executable, "-m", "rlexp.sweep", "dashboard", str(directory)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 2 and "http://127.0.0.1:9 cannot be reached" in done.stderr and done.stderr.count("\n") == 1
    )
    with wandb_standin.serve() as server:
        server.silence.set()
        env["WANDB_BASE_URL"] = server.url
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and f"dashboard: W&B at {server.url}: " in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_of_a_sweep_that_trained(tmp_path, monkeypatch):
    """Everything that it names is on the server: metrics, keys of configurations, the group, the objective."""
    views = Views(wandb_standin._graphql, "rlexp")
    monkeypatch.setattr(wandb_standin, "_graphql", views.answer)
    small = (
        "env=probe/action_reward",
        "algo.num_steps=16",
        "network.hidden=[8]",
        "eval.num_episodes=2",
        "total_env_steps=256",
    )
    quiet = [option for option in QUIET if not option.startswith("logger")]
    swept = ("algo.hp.lr=1e-3,1e-2", "network.activation=tanh,relu", "seed=1,2")
    with wandb_standin.serve() as server:
        env = home(tmp_path, WANDB_API_KEY=wandb_standin.KEY, WANDB_BASE_URL=server.url)
        command = rlexp_command(
            "-m", *swept, *small, *quiet, "eval.every_env_steps=128", "logger.curve=false", "hydra.sweep.dir=s"
        )
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        verb = [sys.executable, "-m", "rlexp.sweep", "dashboard", "s"]
        done = subprocess.run(verb, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        runs = list(server.runs.values())
    (report,), (workspace,) = views.of("runs"), views.of("project-view")
    history = {name for run in runs for row in run.history for name in row}
    for view in (report, workspace):
        drawn = {
            n for p in panels(view["spec"]) if p["viewType"] == "Run History Line Plot" for n in p["config"]["metrics"]
        }
        assert drawn <= history and {"loss/approx_kl", "loss/clip_fraction", "loss/entropy"} <= drawn
        for run_set in run_sets(view["spec"]):
            (one,) = run_set["filters"]["filters"]
            assert {run.group for run in runs} == {one["value"]}
            for key in run_set["grouping"]:
                assert len({_at(run.config, key["name"]) for run in runs}) == 2
    assert all("objective" in run.summary and run.project == "rlexp" for run in runs)


def _at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config
