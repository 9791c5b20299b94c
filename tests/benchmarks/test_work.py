"""What the benchmarks ask of rlexp is a configuration that it takes, with the settings that the peer gets."""

import pytest
from omegaconf import OmegaConf

from benchmarks.work import FULL, REPLAY, overrides
from rlexp import compose

WORKS = {"ppo": FULL, **REPLAY}


@pytest.mark.parametrize("name", WORKS)
def test_the_command_line_says_the_work(name):
    work = WORKS[name]
    node = OmegaConf.create(compose.compose_node(overrides(work))[0])
    assert node.total_env_steps == work.total_env_steps
    assert list(node.network.hidden) == list(work.hidden)
    assert (node.algo.num_envs, node.algo.hp.lr, node.algo.hp.gamma) == (work.num_envs, work.lr, work.gamma)
    if name in REPLAY:
        source = node.algo.source
        assert (node.algo.num_steps, node.algo.num_updates) == (1, work.num_updates)
        assert (source.capacity, source.batch_size) == (work.capacity, work.batch_size)
        assert (node.algo.hp.tau, node.algo.target_update_every) == (work.tau, work.num_updates)
        assert work.capacity % work.num_envs == 0 and work.total_env_steps % (10 * work.num_envs) == 0
