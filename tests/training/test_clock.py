"""The source owns the clock; and an algorithm need have neither environments nor a learning rate, and may have several torsos."""

import sys
from types import ModuleType

import jax
import pytest
from support import rows
from training import imitation

from rlexp import compose, experiment
from rlexp.machine.stop import Stop
from rlexp.training.loop import Member, train_pack
from rlexp.training.schedule import chunk_end


@pytest.fixture
def built(monkeypatch):
    """A run of 12 updates that learns from a data set."""
    for name in ("Data", "Imitate"):
        part, module = vars(imitation)[name], ModuleType(f"imitation_{name.lower()}")
        module.Config, module.make = part.Config, part.make
        monkeypatch.setitem(sys.modules, module.__name__, module)
    made, _ = compose.compose_node(["logger=quiet", "env=probe/obs_action_reward", "network.hidden=[4]"])
    made["algo"] = {"module": "imitation_imitate", "source": {"module": "imitation_data"}, "hp": {"pull": 1.0}}
    made |= {"total_env_steps": 12, "eval": {"every_env_steps": 5, "num_episodes": 4, "mode": "greedy"}}
    return experiment.build(made)


def test_a_data_set_counts_updates(built, tmp_path):
    assert (built.total_updates, built.total_env_steps, chunk_end(built, 5)) == (12, 12, 10)
    (summary,) = train_pack([Member(built, tmp_path, "12345678")], stop=Stop())
    lines = rows(tmp_path)
    assert [line["env_steps"] for line in lines if line["env_steps"]] == [5, 10, 12]
    assert [line["env/calls"] for line in lines if line["env_steps"]] == [2.0, 7.0, 10.5]
    assert summary["agent_steps"] is None and not any("agent_steps" in line for line in lines)  # there is no agent
    assert lines[-1]["loss/policy"] < 0.5 and summary["objective"] == 1.0


def test_a_second_torso_may_see_more_than_the_observation(built):
    state = jax.eval_shape(built.algorithm.init, jax.random.key(0), {"pull": 1.0})
    first = [x.shape[0] for x in jax.tree.leaves(state.params["critic"]) if x.ndim == 2]
    assert 1 + 3 in first  # obs_action_reward observes one number


def test_environment_steps_are_what_the_source_takes():
    def of(*overrides):
        node, _ = compose.compose_node(["logger=quiet", "env=probe/obs_action_reward", *overrides])
        return experiment.build(node)

    one = of("algo.num_envs=4", "algo.num_steps=8")
    assert one.env_steps_per_update == 32 and one.source_of(one.settings).env_steps_per_update == 32
    two = of("algo=dqn", "algo.num_envs=8", "algo.num_steps=4", "shards=2")
    source = two.source_of(two.settings)
    assert (source.env_steps_per_update, two.env_steps_per_update) == (16, 32)
    assert two.env_steps(3) == 2 * source.prefill_env_steps + 3 * 32


def test_a_run_of_before_that_learnt_from_its_memory_alone_still_opens():
    """A new one is refused in one line (tests/cli/test_bad_replay.py)."""
    node, _ = compose.compose_node(["logger=quiet", "algo=dqn", "total_env_steps=5000"])
    assert experiment.build(node, num_shards=1).total_env_steps == 8320
