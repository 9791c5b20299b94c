"""Which settings are traced, by exact path; and that each member of a pack trains with its own."""

import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import traced_parts

from rlexp import compose, experiment, sameness
from rlexp.config import ConfigError
from rlexp.storage import checkpoint
from rlexp.sweep.packing import Job, grouped
from rlexp.training.layout import layout_of
from rlexp.training.metrics import mean
from rlexp.training.program import Run, trace
from rlexp.types import Settings

PARTS = ("env=probe/action_reward", "logger=quiet", "algo.num_envs=4", "algo.num_steps=8", "algo.num_minibatches=1")


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Each class of traced_parts as a module."""
    for name in ("Paying", "Scaling", "Wide"):
        module = ModuleType(f"traced_{name.lower()}")
        part = vars(traced_parts)[name]
        module.Config, module.make = part.Config, part.make
        monkeypatch.setitem(sys.modules, module.__name__, module)


def node(*, pay: float = 1.0, scale: float = 1.0, width: int = 4, seed: int = 0) -> dict:
    made, _ = compose.compose_node([*PARTS, f"seed={seed}", "total_env_steps=320", "eval.num_episodes=2"])
    made["env"] = {"module": "traced_paying", "params": {"pay": pay}}
    made["network"] = {"module": "traced_wide", "params": {"width": width}}
    made["algo"]["source"] = {"module": "traced_scaling", "hp": {"scale": scale, "calls": 10.0}}
    return made


def packed(*nodes: dict) -> list[list[int]]:
    built = [experiment.build(one) for one in nodes]
    jobs = [Job(i, (), one.node, one.config, one.modules, Path(str(i))) for i, one in enumerate(built)]
    return [[job.number for job in pack] for pack in grouped(jobs, pack="auto", max_pack=None)]


def test_a_dict_of_the_name_of_a_traced_one_shapes_the_program_elsewhere():
    assert packed(node(width=4), node(width=5), node(width=4)) == [[0, 2], [1]]


def test_traced_settings_may_differ_in_a_pack():
    assert packed(node(), node(pay=2.0), node(scale=3.0), node(seed=5)) == [[0, 1, 2, 3]]


def test_a_traced_setting_that_is_missing_or_longer_is_another_program():
    less, longer = node(), node()
    less["algo"]["source"]["hp"].pop("calls")
    longer["algo"]["source"]["hp"]["calls"] = [1.0, 2.0]
    assert len({sameness.pack_key(one) for one in (node(), less, longer)}) == 3


def test_each_member_trains_with_its_own():
    members = [
        experiment.build(one) for one in (node(pay=1.0, scale=1.0), node(pay=5.0, scale=1.0), node(pay=1.0, scale=3.0))
    ]
    compiled = trace(members, layout_of(members)).compile()
    run, metrics = compiled.chunk(compiled.init(), 5)
    scales = [1.0, 0.9, 0.8, 0.7, 0.6]  # a schedule, out of the setting
    np.testing.assert_allclose(mean(metrics["env/scale"]), np.array([1, 1, 3]) * np.mean(scales), rtol=1e-6)
    np.testing.assert_allclose(mean(metrics["train/return_mean"]), [4.0, 20.0, 4.0])
    np.testing.assert_allclose(np.asarray(compiled.evaluate(run, 5).episode_return)[:, 0], [4.0, 20.0, 4.0])
    np.testing.assert_array_equal(run.settings.env["pay"], [1.0, 5.0, 1.0])
    # What was learnt differs too: the source's rewards are what the update sees.
    leaves = [np.asarray(x) for x in jax.tree.leaves(run.state.params["critic"])]
    assert any(not np.array_equal(x[0], x[1]) for x in leaves) and any(not np.array_equal(x[0], x[2]) for x in leaves)


def test_what_is_traced_is_a_number():
    wrong = node()
    wrong["env"]["params"]["pay"] = "much"
    with pytest.raises(ConfigError, match=r"env\.params\.pay: 'much' is not allowed"):
        experiment.build(wrong)


def test_every_line_of_the_table_is_asked():
    """A path below a line has its rule; names that only begin alike have not."""
    assert not sameness.must("algo.hp.lr").pack and sameness.must("algo.hpx").pack
    assert not sameness.must("launcher.pack", host=True).pack and sameness.must("launchers").pack
    assert sameness.must("eval.mode", host=True).job and not sameness.must("logger.curve", host=True).job
    assert not sameness.must("hardware.mesh.data").resume and sameness.must("network.params.width").resume


class Before(NamedTuple):
    """A Run as it was saved before there were settings."""

    state: dict
    data: jax.Array


def test_a_checkpoint_from_before_settings_is_opened(tmp_path):
    settings = Settings({"pay": jnp.full((1,), 2.0)}, {})
    run = Run({"params": jnp.arange(3.0)[None]}, jnp.ones((1, 2)), settings)
    config = checkpoint.Config(
        module="", enabled=True, every_minutes=None, every_updates=None, keep_last=1, keep_best=0, restore="all"
    )
    checkpoint.put(config, tmp_path / "old", 7, Before(run.state, run.data), {}, None)
    other = jax.tree.map(lambda x: x + 1, settings)
    found = checkpoint.restore(tmp_path / "old", run, warn=pytest.fail, settings=other)
    assert isinstance(found.run, Run) and float(found.run.settings.env["pay"][0]) == 3.0
    np.testing.assert_array_equal(found.run.state["params"], run.state["params"])
    checkpoint.put(config, tmp_path / "new", 7, run, {}, None)  # what has its own keeps it
    assert (
        float(checkpoint.restore(tmp_path / "new", run, warn=pytest.fail, settings=other).run.settings.env["pay"][0])
        == 2.0
    )
