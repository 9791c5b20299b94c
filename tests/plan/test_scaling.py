"""The end of a sweep of plans: one table, one picture; and the presets that are planned with."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from support import QUIET, build, command_line

import rlexp
from rlexp import session
from rlexp.modes import scaling

TINY = ("algo=pqn", "algo.num_steps=8", "algo.num_epochs=1", "algo.num_minibatches=1", "network.hidden=[8]")


def row(settings: str, chips: int, rate: float | None, fits: bool = True) -> dict[str, Any]:
    known = {
        "flops_per_env_step": 9.0,
        "collectives": [{"op": "all-reduce", "count": 1, "bytes": 8}],
        "hours_to_total": 1.0,
    }
    rest = {"job": f"{settings} {chips}", "fits": fits, "total_bytes": 10, "capacity_bytes": 100}
    return {"settings": settings, "chips": chips, "env_steps_per_second_bound": rate, **known, **rest}


def test_efficiency_is_against_the_fewest_chips_of_the_same_settings():
    rows = [
        row("b", 8, 120.0),
        row("a", 16, 120.0),
        row("a", 4, 40.0),
        row("a", 8, None, fits=False),
        row("b", 4, 80.0),
    ]
    found = {(r["settings"], r["chips"]): r["efficiency"] for r in scaling.compare(rows)}
    assert found == {("a", 4): 1.0, ("a", 8): None, ("a", 16): 0.75, ("b", 4): 1.0, ("b", 8): 0.75}


def test_nothing_planned_is_no_picture_and_no_error(tmp_path):
    scaling.draw(scaling.compare([row("a", 4, None, fits=False)]), tmp_path / "scaling.png")
    scaling.Plans().report()
    assert (tmp_path / "scaling.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_sweep_tells_of_its_own_plans_and_not_of_those_before_it_in_this_process(tmp_path, monkeypatch):
    def plan(experiment, run_dir, resume_dir, overrides):
        (run_dir / "config.yaml").write_text("hardware: {mesh: {data: 4, model: 1}}")
        told = {k: v for k, v in row("", 4, 1.0).items() if k not in ("job", "settings", "chips")}
        (run_dir / "plan.json").write_text(json.dumps(told))

    monkeypatch.setattr(session, "prepare", lambda *_, **__: build())
    monkeypatch.setattr(session, "run", plan)
    for name in "ab":
        rlexp.sweep("run=plan", QUIET, {"hydra.sweep.dir": tmp_path / name}, seed=[1, 2])
    assert [len(json.loads((tmp_path / name / "scaling.json").read_text())) for name in "ab"] == [2, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sweep_over_slices_ends_with_a_table_and_a_picture(tmp_path):
    """The one that does not fit is told at the end, and the others are planned."""
    sizes = ("hydra.sweep.dir=sweep", *TINY)
    done = command_line(tmp_path, "-m", "hardware=v4-8,v4-16", "run=plan", *sizes, tpu_compiler=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "sweep/scaling.json").read_text())
    assert [r["chips"] for r in rows] == [4, 8]
    assert rows[0]["efficiency"] == 1 and 0.3 < rows[1]["efficiency"] < 1.1
    assert "Scaling, compiled and modelled, not run" in done.stdout
    assert (tmp_path / "sweep/scaling.png").read_bytes().startswith(b"\x89PNG")
    assert (
        rows[1]["env_steps_per_second_bound"]
        == json.loads((tmp_path / "sweep/1/plan.json").read_text())["env_steps_per_second_bound"]
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sweep_in_which_one_does_not_fit_plans_the_others(tmp_path):
    sizes = ("hydra.sweep.dir=sweep", "hardware.memory_bytes=10240,1e12", *TINY)
    done = command_line(tmp_path, "-m", "run=plan", *sizes)
    assert done.returncode == 2
    assert "too much" in done.stderr.splitlines()[-1]
    rows = json.loads((tmp_path / "sweep/scaling.json").read_text())
    assert [r["fits"] for r in rows] == [False, True]


@pytest.mark.parametrize(("name", "millions"), [("mlp_1m", 1), ("mlp_5m", 5), ("mlp_25m", 25)])
def test_presets_have_about_as_many_parameters_as_they_say(name, millions):
    """Of PPO's actor and critic together, on CartPole."""
    experiment = build("algo=ppo", "env=gymnax/cartpole", f"network={name}")
    state = jax.eval_shape(experiment.algorithm.init, jax.random.key(0), experiment.hp)
    count = sum(x.size for x in jax.tree.leaves(state.params))
    assert count == pytest.approx(millions * 1e6, rel=0.2)
    yaml = Path(__file__).parents[2] / f"conf/network/{name}.yaml"
    assert f"({count / 1e6:.3g} million)" in yaml.read_text()
