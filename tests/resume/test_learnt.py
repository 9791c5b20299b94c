"""What a run has at its beginning that starts from what another one has learnt (`checkpoint.restore=learner|params`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import SMALL, build, rows, saved

from rlexp.machine.stop import Stop
from rlexp.storage import checkpoint
from rlexp.training import program
from rlexp.training.loop import Member, Resume, layout_of, train_pack

SIZES = ("algo.source.capacity=96", "algo.source.batch_size=8", "algo.source.prefill_env_steps=64", "algo.num_envs=4")
TINY = (*SMALL, *SIZES, "algo.num_steps=8", "algo.num_updates=2", "eval.every_env_steps=null", "total_env_steps=96")


@pytest.mark.parametrize("what", ["learner", "params"])
@pytest.mark.parametrize("line", ["algo=dqn", "algo=sac env=gymnax/pendulum"])
def test_networks_that_were_trained_have_the_target_network_that_they_had(line, what, tmp_path):
    lead = build(*TINY, *line.split())
    hp = {name: jnp.float32(x) for name, x in lead.hp.items()}
    init = jax.jit(lambda key: jax.tree.map(lambda x: x[None], lead.algorithm.init(key, hp)))
    old, fresh = init(jax.random.key(0)), init(jax.random.key(1))
    old = old._replace(target=jax.tree.map(lambda x: x + 1.0, old.target))
    checkpoint.put(lead.config.checkpoint, tmp_path, 5, program.Run(old, (), ()), {}, None)
    found = checkpoint.restore_into(tmp_path, program.Run(fresh, (), ()), what=what, warn=pytest.fail)
    assert found is not None
    for name in ("params", "target"):
        for x, y in zip(*(jax.tree.leaves(getattr(s, name)) for s in (found.run.state, old)), strict=True):
            np.testing.assert_array_equal(x, y)


def choosing(params, action):
    """Parameters of the same shapes by which this one of two actions is worth most, whatever is seen."""

    def leaf(path, x):
        is_output = jax.tree_util.keystr(path).endswith("['bias']") and x.shape[-1] == 2
        return jnp.zeros_like(x).at[..., action].set(1.0) if is_output else jnp.zeros_like(x)

    return jax.tree_util.tree_map_with_path(leaf, params)


@pytest.mark.parametrize("env", ["gymnax/cartpole", pytest.param("gymnasium/cartpole", marks=pytest.mark.slow)])
def test_the_policy_that_was_taken_fills_the_memory(env, tmp_path):
    greedy = ("algo.hp.epsilon_start=0", "algo.hp.epsilon_end=0", "algo.hp.lr=1e-12")
    lead = build(*TINY, "algo=dqn", f"env={env}", *greedy)
    traced = program.trace([lead], layout_of([lead]))
    compiled = traced.compile()
    fresh = compiled.init()
    compiled.close()
    for action in (0, 1):
        old, new = tmp_path / f"old{action}", tmp_path / f"new{action}"
        run = fresh._replace(state=fresh.state._replace(params=choosing(fresh.state.params, action)))
        checkpoint.put(lead.config.checkpoint, old / "checkpoints", 5, run, {}, None)
        new.mkdir()
        train_pack([Member(lead, new, "00000000")], stop=Stop(), resume=Resume(old, "params"), traced=traced)
        _, leaves = saved(new)
        (taken,) = (x for path, x in leaves.items() if path.endswith("['columns']['action']"))
        (valid,) = (x for path, x in leaves.items() if path.endswith("['columns']['valid']"))
        assert taken.size == 96 and (taken == action).all()  # those of the prefill, and of the one rollout after it
        assert rows(new)[-1]["env_steps"] == 96 and rows(new)[-1]["agent_steps"] == valid.sum()
