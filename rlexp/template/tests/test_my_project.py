"""That the game does what its page says, and that it can be learnt."""

from pathlib import Path

import jax
import jax.numpy as jnp

import rlexp
from my_project import corridor

CONF = Path(__file__).resolve().parents[1] / "conf"


def test_the_way_to_the_end():
    env = corridor.make(corridor.Config(module="my_project.corridor", length=3, params={"slip": 0.0}))
    state, timestep = env.reset(jax.random.key(0))
    for place in (1, 2, 3):
        state, timestep = env.step(state, jnp.int32(1))
        assert int(jnp.argmax(timestep.obs)) == place
    assert bool(timestep.last) and float(timestep.discount) == 0.0  # a true end
    assert float(timestep.reward) == 1.0 and float(timestep.info["farthest"]) == 3.0
    _, timestep = env.step(state, jnp.int32(1))  # the next step resets
    assert bool(timestep.first) and int(jnp.argmax(timestep.obs)) == 0


def test_it_is_learnt(tmp_path):
    run = rlexp.train(
        "experiment=first", {"hydra.run.dir": tmp_path / "run"}, config_dir=CONF, logger="quiet", compilation_cache=None
    )
    assert run.objective > 0.8
