"""What a run's environment is called where runs are listed."""

from pathlib import Path

import pytest
import yaml

from rlexp.compose import CONF_DIR
from rlexp.names import algorithm, environment

CARTPOLE = {"module": "rlexp.envs.gymnax", "name": "CartPole-v1"}
WRAPPED = {"module": "rlexp.envs.wrapped", "inner": CARTPOLE}


@pytest.mark.parametrize(
    ("env", "called"),
    [
        (CARTPOLE, "CartPole-v1"),
        ({"module": "rlexp.envs.brax", "id": "ant"}, "brax/ant"),
        ({"module": "rlexp.envs.gymnasium", "id": "CartPole-v1"}, "gymnasium/CartPole-v1"),
        ({"module": "rlexp.envs.driving.world", "scenarios": ["merge", "straight"]}, "driving/merge+straight"),
        (WRAPPED, "wrapped/CartPole-v1"),
        ({"module": "rlexp.envs.managers.managed", "inner": WRAPPED}, "managed/wrapped/CartPole-v1"),
        ({"module": "my_game"}, "my_game"),
        ({"module": "my_game", "id": 3}, "my_game"),
        ({"name": 3}, ""),
        ([], ""),
        (None, ""),
    ],
)  # fmt: skip
def test_environments_are_told_apart(env, called):
    assert environment({"env": env}) == called


def test_those_of_a_suite_have_names_of_their_own():
    """Two that differ by their parameters alone, such as a suite's variants of a task, may share one."""
    suites = ("brax", "driving", "jumanji", "playground", "navix", "probe", "pgx")
    found = {s: [yaml.safe_load(path.read_text()) for path in Path(CONF_DIR, "env", s).glob("*.yaml")] for s in suites}
    for suite, envs in found.items():
        called = [environment({"env": env}) for env in envs if isinstance(env, dict) and "module" in env]
        assert len(set(called)) > len(called) / 2, (suite, called)
        assert all(name.startswith(("probe", "recall", suite)) for name in called), called


@pytest.mark.parametrize("config", [None, [], 3, "env", {"algo": {"module": 3}}, {"algo": "ppo"}])
def test_of_a_broken_configuration_nothing_is_known(config):
    assert environment(config) == algorithm(config) == ""
