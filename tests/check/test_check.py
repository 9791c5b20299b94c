"""`run=check`: a sound mesh passes, and what is wrong with another is seen."""

import inspect
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from support import build

from rlexp.modes import check
from rlexp.training.loop import Member

pytestmark = pytest.mark.timeout(400)

SMALL = (
    "algo=pqn",
    "env=probe/obs_action_reward",
    "algo.num_envs=8",
    "algo.num_steps=16",
    "algo.num_epochs=2",
    "algo.num_minibatches=2",
    "algo.base_num_envs=4",
    "algo.lr_scaling=linear",
    "algo.batch_scaling=keep_minibatch",
    "network.hidden=[8]",
    "hardware.mesh.data=4",
)


@pytest.mark.slow
def test_a_sound_mesh_passes(tmp_path, capsys):
    experiment = build(*SMALL)
    assert check.check_run(Member(experiment, tmp_path, "c0ffee00"))
    numbers = json.loads((tmp_path / "check.json").read_text())
    assert numbers["passed"] and numbers["devices"] == 4 and numbers["same_twice"]
    assert 0 < numbers["params_difference"] <= 1e-5  # another order of sums, so not equal to the bit
    assert numbers["collectives"]["count"] >= 4 and numbers["collectives"]["bytes"] > 0  # four gradient steps
    assert numbers["collectives"]["share"] > 0
    assert (numbers["rows_an_update"], numbers["num_minibatches"], numbers["num_epochs"]) == (128, 4, 1)
    assert numbers["lr"] == pytest.approx(2 * experiment.config.algo.hp.lr)
    for curve in numbers["curves"].values():
        assert len(curve["one"]) == len(curve["all"]) == 5 and curve["apart"] <= 1e-3
    table, where = capsys.readouterr().out.split("All numbers: ")
    assert where.strip() == str(tmp_path / "check.json")
    for word in (
        "parameters after 20 updates",
        "evaluation return at 5 points",
        " ms",
        " KiB",
        " MiB",
        "minibatches of an update",
        "2 choices",
        "float32[1]",
    ):
        assert word in table
    assert table.count("pass") == 5 and "FAIL" not in table


@pytest.mark.slow
def test_what_is_wrong_fails(tmp_path, capsys, monkeypatch):
    """One device trains something else than all of them, and all of them something else the second time."""
    trained, calls = check._trained, []

    def drifting(compiled):
        found = trained(compiled)
        calls.append(compiled)
        shift = 1e-3 * len(calls)
        return found._replace(
            params=[x + shift for x in found.params], run=[x + shift for x in found.run if x.dtype.kind == "f"]
        )

    monkeypatch.setattr(check, "_trained", drifting)
    assert not check.check_run(Member(build(*SMALL), tmp_path, "c0ffee00"))
    numbers = json.loads((tmp_path / "check.json").read_text())
    assert not numbers["passed"] and not numbers["same_twice"] and numbers["params_difference"] > 1e-5
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert capsys.readouterr().out.partition("All numbers")[0].count("FAIL") == 2


@pytest.mark.parametrize(
    ("one", "all_of_them", "apart"),
    [
        ([1.0, 2.0, 4.0], [1.0, 2.0, 3.9], pytest.approx(0.025)),
        ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], 0.0),
        ([np.nan, 2.0, 4.0], [np.nan, 2.0, 4.0], 0.0),
        ([np.nan, 2.0, 4.0], [1.0, 2.0, 4.0], float("inf")),  # an episode ended in one of them only
        ([np.nan, np.nan], [np.nan, np.nan], None),  # nothing to compare
    ],
)
def test_how_far_curves_are_apart(one, all_of_them, apart):
    assert check._apart(np.array(one), np.array(all_of_them)) == apart


def test_an_update_is_timed_without_what_comes_before_the_first():
    """Resets, and what fills a memory."""
    made, trained = [], []

    def init():
        made.append(len(made))
        return jnp.zeros(())

    def chunk(run, num_updates):
        trained.append(num_updates)
        return run + num_updates, {}

    go_on = inspect.unwrap(check._chunks)(SimpleNamespace(init=init, chunk=chunk))
    for _ in range(3):
        go_on()
    assert made == [0] and trained == [check.NUM_UPDATES] * 3


@pytest.mark.slow
def test_what_is_no_number_on_one_device_fails(tmp_path, monkeypatch):
    """In whichever leaf it is."""
    trained, calls = check._trained, []

    def broken(compiled):
        found = trained(compiled)
        calls.append(compiled)
        return found if len(calls) < 3 else found._replace(params=[*found.params[:-1], found.params[-1] * np.nan])

    monkeypatch.setattr(check, "_trained", broken)
    assert not check.check_run(Member(build(*SMALL), tmp_path, "c0ffee00"))
