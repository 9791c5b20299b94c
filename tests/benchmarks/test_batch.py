"""The benchmark of larger batches: what each of its settings makes of the rules."""

import pytest

from benchmarks import batch
from rlexp import compose, experiment
from rlexp.algos.common import epochs_and_minibatches


def built(overrides):
    node, _ = compose.compose_node(["compilation_cache=null", "checkpoint=off", *overrides])
    return experiment.build(node)


@pytest.mark.parametrize("task", batch.WIDE)
def test_the_rules_begin_from_256_environments(task):
    of_task, wide = [*batch.OF_ALL, *batch.WIDE[task]], batch.wide_settings(quick=False)
    base = built([*of_task, *wide["256 environments"]])
    scaled = built([*of_task, *wide["2,048 environments, keep_minibatch, lr sqrt scaled"]])
    assert scaled.hp["lr"] == pytest.approx(8**0.5 * base.hp["lr"])
    assert scaled.env_steps(1) == 8 * base.env_steps(1)
    _, few = epochs_and_minibatches(base.config.algo, base.num_shards)
    _, many = epochs_and_minibatches(scaled.config.algo, scaled.num_shards)
    assert scaled.env_steps(1) / many == base.env_steps(1) / few
