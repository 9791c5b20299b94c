"""Environments of the host are held to what they say of themselves, whatever steps them."""

import sys
from typing import Any

import jax
import numpy as np
import pytest
from support import QUIET, SMALL

from rlexp import compose, experiment
from rlexp.config import Host, schema
from rlexp.envs.host import HostEnv, Opened
from rlexp.types import Discrete, EnvSpec, TimeStep

SEEDS, ACTIONS = np.arange(2, dtype=np.uint32), np.zeros(2, np.int32)
GOOD = TimeStep(
    obs={"a": np.zeros((2, 3), np.float32), "b": np.zeros((2,), np.uint8)},
    reward=np.zeros(2, np.float32),
    discount=np.ones(2, np.float32),
    first=np.zeros(2, bool),
    last=np.zeros(2, bool),
    info={"score": np.zeros(2, np.float32)},
)
given: dict[str, Any] = {}


@schema
class Config:
    """Gives the rows that `given` has."""

    module: Host[str]


def make(config: Config) -> HostEnv:
    observation = {"a": jax.ShapeDtypeStruct((3,), np.float32), "b": jax.ShapeDtypeStruct((), np.uint8)}
    spec = EnvSpec("Odd", observation, Discrete(2), 9)

    def open(num_envs: int) -> Opened:
        return Opened(
            lambda seeds: given["reset"],
            lambda action: given["step"],
            lambda: None,
            get_state=lambda: given["get_state"],
            draw=lambda: np.zeros((8, 8, 3), np.uint8),
        )

    return HostEnv(spec, open, info=("score",), state=jax.ShapeDtypeStruct((4,), np.float64), film=lambda: open(1))


@pytest.fixture(scope="module")
def env() -> Any:
    """As every source, evaluation and recording opens it."""
    node, _ = compose.compose_node([*QUIET, *SMALL, "source=host"])
    sys.modules["odd_rows"] = sys.modules[__name__]
    node["env"] = {"module": "odd_rows"}
    built = experiment.build(node)
    return built.env_of(built.settings)


@pytest.fixture(autouse=True)
def good():
    given.update(reset=GOOD, step=GOOD, get_state=np.zeros((2, 4)))


def test_what_it_promised_goes_through_untouched(env):
    opened = env.open(2)
    assert opened.reset(SEEDS) is GOOD and opened.step(ACTIONS) is GOOD and opened.get_state() is given["get_state"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": np.zeros(2)}, r"reward: expected float32\[2\], got float64\[2\]"),
        ({"reward": 1.0}, r"reward: expected float32\[2\], got 1\.0"),
        ({"discount": np.ones(3, np.float32)}, r"discount: expected float32\[2\], got float32\[3\]"),
        ({"first": np.zeros(2, int)}, r"first: expected bool\[2\], got int64\[2\]"),
        ({"last": np.zeros((2, 1), bool)}, r"last: expected bool\[2\], got bool\[2, 1\]"),
        (
            {"obs": GOOD.obs | {"a": np.zeros((2, 4), np.float32)}},
            r"obs\.a: expected float32\[2, 3\], got float32\[2, 4\]",
        ),
        ({"obs": GOOD.obs | {"b": np.zeros(2, np.int64)}}, r"obs\.b: expected uint8\[2\], got int64\[2\]"),
        ({"obs": {"a": GOOD.obs["a"]}}, r"expected obs\.a, obs\.b, reward, .*, got no obs\.b"),
        ({"obs": GOOD.obs["a"]}, r"expected obs\.a, obs\.b, reward, .*, got obs"),
        ({"obs": GOOD.obs | {"b": [0, 0]}}, r"expected obs\.a, obs\.b, .*, got obs\.b\.0"),
        ({"info": ()}, r"expected .*, info\.score, got no info\.score"),
        ({"info": {"score": GOOD.reward, "extra": GOOD.reward}}, r"expected .*, info\.score, got info\.extra"),
        ({"info": {"score": np.zeros(2)}}, r"info\.score: expected float32\[2\], got float64\[2\]"),
    ],
)
@pytest.mark.parametrize("call", ["reset", "step"])
def test_what_it_did_not_promise_is_told(env, change, said, call):
    opened = env.open(2)
    for _ in range(2):  # not the first one alone
        opened.reset(SEEDS), opened.step(ACTIONS)
    given[call] = GOOD._replace(**change)
    with pytest.raises(ValueError, match=f"^Odd: {call}: {said}$"):
        opened.reset(SEEDS) if call == "reset" else opened.step(ACTIONS)


def test_a_state_that_grows_is_told_as_it_is_saved_not_as_it_is_restored(env):
    opened = env.open(2)
    given["get_state"] = np.zeros((2, 5))
    with pytest.raises(ValueError, match=r"^Odd: get_state: expected float64\[2, 4\], got float64\[2, 5\]$"):
        opened.get_state()


def test_one_that_is_filmed_is_held_too(env):
    opened = env.film()
    with pytest.raises(ValueError, match=r"^Odd: reset: obs\.a: expected float32\[1, 3\], got float32\[2, 3\]$"):
        opened.reset(SEEDS[:1])
    assert opened.draw().shape == (8, 8, 3)
