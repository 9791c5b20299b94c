"""A memory is written in place: no update copies what it holds, alone or in a pack."""

import math
import re

import jax
import pytest
from support import build

from rlexp.training import program
from rlexp.training.layout import layout_of

CAPACITY = 10_240
BREAKOUT = ("env=gymnax/breakout", "algo.num_envs=16", "network.hidden=[8]", f"algo.source.capacity={CAPACITY}")
PENDULUM = ("env=gymnax/pendulum", "algo.num_envs=16", "network.hidden=[8]", f"algo.source.capacity={CAPACITY}")
RECURRENT = ("algo=r2d2", "network.units=16", "network.torso.hidden=[8]", *BREAKOUT[:2], BREAKOUT[3])


@pytest.mark.parametrize("num_members", [1, 2])
@pytest.mark.parametrize(
    "overrides",
    [
        ("algo=dqn", *BREAKOUT),
        pytest.param(("algo=dqn", "algo.source.selector=prioritised", *BREAKOUT), marks=pytest.mark.slow),
        pytest.param(("algo=c51", "algo.n_step=3", *BREAKOUT), marks=pytest.mark.slow),
        pytest.param(("algo=sac", *PENDULUM), marks=pytest.mark.slow),
        pytest.param(RECURRENT, marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_no_update_copies_what_is_remembered(overrides, num_members):
    """XLA's CPU backend did so three times for every write, which was most of the time of an update.

    A column of one number a row may be copied.
    """
    members = [build("hardware.pack_devices=1", *overrides, f"seed={seed}") for seed in range(num_members)]
    traced = program.trace(members, layout_of(members))
    large = {leaf.size for leaf in jax.tree.leaves(traced.abstract_run.data) if leaf.size > num_members * CAPACITY}
    chunk = traced.compile().executable.as_text() or ""
    made = [re.search(r"= \w+\[([\d,]*)\]\S* copy\(", line) for line in chunk.splitlines()]
    copied = [sizes[1] for sizes in made if sizes]
    assert large and copied
    assert [sizes for sizes in copied if math.prod(map(int, filter(None, sizes.split(",")))) in large] == []
