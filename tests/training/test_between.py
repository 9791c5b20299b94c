"""What acts between two chunks: it changes the Run, members leave without having failed, and all of it is exact after a resume."""

import json
import sys
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from support import StopAfter, build, rows, saved, without_clock

from rlexp import compose, experiment
from rlexp.config import ConfigError, Host, Number, schema
from rlexp.machine.stop import Stop
from rlexp.storage import checkpoint, store
from rlexp.training.between import Between, Leave
from rlexp.training.loop import Member, Resume, train_pack

# 8 updates, an evaluation after every second one. The reward is 1 a step, so each return is known.
WORK = (
    "env=probe/constant_reward", "algo.num_envs=4", "algo.num_steps=8", "algo.num_epochs=1", "algo.num_minibatches=1",
    "network.hidden=[4]", "eval.num_episodes=2", "eval.every_env_steps=64", "total_env_steps=256",
)  # fmt: skip


@schema
class Config:
    """Halves the learning rate of all but the best, and prunes one member at a time."""

    module: Host[str]
    prune: list[Number]


def make(config: Config) -> Between:
    def change(key: Any, run: Any, returns: jax.Array) -> Any:
        noise = jax.random.uniform(key, returns.shape)
        hp = run.state.hp | {"lr": run.state.hp["lr"] * (0.5 + noise)}
        return run._replace(state=run.state._replace(hp=hp))

    def leave(returns: np.ndarray) -> dict[int, Leave]:
        there = [int(i) for i in config.prune if np.isfinite(returns[int(i)])]
        return {i: Leave("pruned", "others are better") for i in there[:1]}

    return Between(change, leave)


@pytest.fixture(autouse=True)
def module(monkeypatch):
    made = ModuleType("hook_of_the_tests")
    made.Config, made.make = Config, make
    monkeypatch.setitem(sys.modules, "hook_of_the_tests", made)


def built(*overrides: str, prune: list[int] | None = None):
    node, _ = compose.compose_node(["logger=quiet", "compilation_cache=null", *WORK, *overrides])
    if prune is not None:
        node["between"] = {"module": "hook_of_the_tests", "prune": prune}
    return experiment.build(node)


def train(directory, *overrides, prune=None, seeds=(0,), resume=None, stop=None):
    members = []
    for seed in seeds:
        members.append(Member(built(*overrides, f"seed={seed}", prune=prune), directory / str(seed), f"{seed:08d}"))
        members[-1].dir.mkdir(parents=True, exist_ok=True)
    home = directory / "pack" if len(seeds) > 1 else None
    return train_pack(members, stop=stop or Stop(), resume=resume, directory=home)


@pytest.mark.slow
def test_members_leave_and_the_others_go_on_with_what_was_changed(tmp_path):
    whole = train(tmp_path / "whole", prune=[1, 0], seeds=(0, 1, 2))
    assert [s["status"] for s in whole] == ["pruned", "pruned", "finished"]
    assert [s["env_steps"] for s in whole] == [128, 64, 256]  # one at an evaluation
    assert json.loads((tmp_path / "whole/1/summary.json").read_text())["ended"] == "others are better"
    steps = [[line["env_steps"] for line in rows(tmp_path / "whole" / str(i)) if line["env_steps"]] for i in range(3)]
    assert steps == [[64, 128], [64], [64, 128, 192, 256]]
    # Each has its own checkpoint, of when it left; and the learning rate was changed as often as it was there.
    assert [saved(tmp_path / "whole" / str(i))[0] for i in range(3)] == [4, 2, 8]
    lrs = [line["loss/lr"] for line in rows(tmp_path / "whole/2") if line["env_steps"]]
    assert len(set(lrs)) == 4
    # Stopped in between, and gone on with: the same, bit for bit.
    cut = tmp_path / "cut"
    half = train(cut, prune=[1, 0], seeds=(0, 1, 2), stop=StopAfter(1))
    assert [s["status"] for s in half] == ["stopped", "pruned", "stopped"]
    of_one = checkpoint.latest_meta(store.checkpoints(cut / "0"))
    assert of_one is not None and of_one["ended"] == {}  # it would not be asked whether it has what it is to have
    again = train(cut, prune=[1, 0], seeds=(0, 1, 2), resume=Resume(cut / "pack", "all"))
    assert [s["status"] for s in again] == ["pruned", "pruned", "finished"]
    for i in range(3):
        (update, got), (wanted_update, wanted) = saved(cut / str(i)), saved(tmp_path / "whole" / str(i))
        assert update == wanted_update and all(got[k].tobytes() == wanted[k].tobytes() for k in wanted)
        assert without_clock(rows(cut / str(i))) == without_clock(rows(tmp_path / "whole" / str(i)))


@pytest.mark.slow
def test_a_run_ends_at_its_goal(tmp_path):
    (summary,) = train(tmp_path, "stop_at.return=1")
    assert (summary["status"], summary["env_steps"], summary["objective"]) == ("finished", 64, 1.0)
    assert "at least stop_at.return 1" in summary["ended"]
    (again,) = train(tmp_path, "stop_at.return=1", resume=Resume(tmp_path / "0", "all"))
    assert (again["status"], again["env_steps"]) == ("finished", 64)  # it has it already
    (more,) = train(tmp_path, "stop_at.return=2", resume=Resume(tmp_path / "0", "all"))
    assert (more["status"], more["env_steps"]) == ("finished", 256)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stop_at.return=much", r"stop_at\.return: 'much' is not allowed; expected a valid number"),
        ("++stop_at.retrun=1", r'stop_at\.retrun: unknown key; did you mean "return"\? Allowed: return'),
    ],
)
def test_bad_input_is_told(override, told):
    with pytest.raises(ConfigError, match=told):
        build(override)
