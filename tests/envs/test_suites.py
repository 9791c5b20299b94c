"""What adapters of suites say to bad input, where a suite's own limit goes, and what `adapt` makes of its functions."""

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from suites import CONF, PACKAGES, SUITES
from suites import build_env as build

from rlexp.config import ConfigError, load_module, parse
from rlexp.envs.base import Env, Transition
from rlexp.envs.suites import adapt, one_hots
from rlexp.types import Discrete


def made(suite: str, **changes) -> Env:
    node = yaml.safe_load((CONF / f"{suite}.yaml").read_text()) | changes
    module = load_module(node["module"], "env")
    return module.make(parse(node, module.Config, "env")[0])


def rows(env: Env, num_steps: int, action: int = 0):
    """Of one environment that always takes the same action, [T, ...]."""
    state, _ = env.reset(jax.random.key(0))
    _, timesteps = jax.jit(lambda s: jax.lax.scan(lambda s, _: env.step(s, jnp.int32(action)), s, length=num_steps))(
        state
    )
    return jax.device_get(timesteps)


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_a_suite_that_is_not_installed(suite, monkeypatch):
    package = PACKAGES.get(suite, suite)
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    # What is missing is told: mujoco, where mujoco_playground's own needs are not there either.
    needs = package.partition("_")[0]
    missing = package if needs == package or find_spec(needs) else needs
    said = rf"^env\.module: {missing} is not installed; pip install 'rlexp\[{suite}\]' brings it$"
    with pytest.raises(ConfigError, match=said):
        made(suite, id="x")


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_an_id_that_is_not_there(suite):
    pytest.importorskip(PACKAGES.get(suite, suite), reason=f"the extra {suite} is not installed")
    known = yaml.safe_load((CONF / suite / f"{SUITES[suite]}.yaml").read_text())["id"]
    said = rf'^env\.id: \w+ has no "{known}x"; did you mean "{known}"\? Allowed: .*{known}[^\n]*$'
    with pytest.raises(ConfigError, match=said):
        made(suite, id=f"{known}x")


def test_pgx_refuses_what_is_not_for_one_player_and_what_has_no_limit():
    pytest.importorskip("pgx", reason="the extra pgx is not installed")
    with pytest.raises(
        ConfigError, match=r"^env\.id: chess is for several players; for one there are 2048, minatar-as"
    ):
        made("pgx", id="chess")
    with pytest.raises(ConfigError, match=r"^env\.max_episode_steps: 2048 has no limit of its own; give a number$"):
        made("pgx", id="2048", max_episode_steps=None)


@pytest.mark.parametrize("option", ["jumanji/maze", "navix/empty_5x5", "xminigrid/empty_6x6"])
def test_a_limit_cuts_off_and_does_not_end(option):
    """All three take their own for an end, or could. Turning on the spot reaches no goal."""
    told = rows(build(option, max_episode_steps=5), 5)
    assert np.flatnonzero(told.last).tolist() == [4] and told.discount.all()


@pytest.mark.parametrize(("package", "option"), [("craftax_classic", "classic"), ("craftax", "full")])
def test_who_survives_in_craftax_has_achieved_what_it_did(package, option, monkeypatch):
    """Craftax's own code, but for the world and what happens in it, which take long to compile."""
    pytest.importorskip("craftax", reason="the extra craftax is not installed")
    module = import_module(f"craftax.{package}.envs.craftax_symbolic_env")

    class State(NamedTuple):
        achievements: jax.Array

    def one_more(key, state, action, params, static):
        return State(state.achievements.at[state.achievements.sum()].set(True)), 0.0

    none = State(jnp.zeros(len(module.Achievement), bool))
    monkeypatch.setattr(module, "generate_world", lambda key, params, static: none)
    monkeypatch.setattr(module, "craftax_step", one_more)
    monkeypatch.setattr(module, "render_craftax_symbolic", lambda state: jnp.zeros(3))
    monkeypatch.setattr(module, "is_game_over", lambda state, *settings: jnp.zeros((), bool))
    told = rows(build(f"craftax/{option}", max_episode_steps=4, resets=None), 4)
    assert told.last[-1] and told.discount.all()
    done = {name: x[-1] for name, x in told.info.items() if name.startswith("Achievements/")}
    assert len(done) == len(module.Achievement) and sorted(done.values())[-5:] == [0, 100, 100, 100, 100]
    assert done["Achievements/collect_wood"] == 100
    if option == "classic":
        np.testing.assert_allclose(told.info["score"][-1], 101 ** (4 / 22) - 1, rtol=1e-4)


@pytest.mark.slow
def test_freeway_of_pgx_is_cut_off_and_does_not_end():
    env = build("pgx/minatar_freeway", max_episode_steps=2600)
    told = rows(env, 2600)
    assert np.flatnonzero(told.last).tolist() == [2599] and told.discount.all()


def test_playgrounds_own_limit_is_not_set_beside_ours():
    """Before anything is imported."""
    with pytest.raises(ConfigError, match=r"^env\.kwargs\.episode_length: set env\.max_episode_steps instead$"):
        made("playground", id="CartpoleBalance", kwargs={"episode_length": 5})


def test_models_of_menagerie_are_not_downloaded(monkeypatch, tmp_path):
    pytest.importorskip("mujoco_playground", reason="the extra playground is not installed")
    from mujoco_playground._src import mjx_env

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "none")
    monkeypatch.setattr("rlexp.envs.playground._ASSETS", ("no_such_package",))
    said = rf"^env\.id: Go1Getup needs models of MuJoCo Menagerie, .* would download; put them into {tmp_path}/none, or pip"
    with pytest.raises(ConfigError, match=said):
        made("playground", id="Go1Getup")


# --- adapt, of a suite that does all that suites do ------------------------------------------------------------------------


def reset(key):
    state = {"seen": 0, "noise": jax.random.uniform(key), "metrics": {"paid": 0}}  # 0 becomes a fraction
    return state, observation(state)


def observation(state):
    image = jnp.zeros((2, 2, 3), jnp.uint8)
    return {"whole": jnp.int32(3), "image": image, "flag": jnp.zeros((2,), bool), "x": jnp.float16(0.5) + state["seen"]}


def step(key, state, action):
    assert key.dtype == jnp.uint32  # a key that suites of any age take
    state["seen"] = state["seen"] + 0.25
    state["metrics"]["paid"] = state["metrics"]["paid"] + action
    return Transition(
        state, observation(state), 1, state["seen"] >= 0.5, info=state["metrics"] | {"vector": jnp.zeros(3)}
    )


def adapted(**changes) -> Env:
    keywords = {"action": Discrete(2), "max_episode_steps": 5, "info": {}, "resets": None} | changes
    return adapt("toy", reset, step, **keywords)


def test_types_are_what_the_platform_has():
    spec = adapted().spec
    assert {k: x.dtype for k, x in spec.observation.items()} == {
        "whole": jnp.float32,
        "image": jnp.uint8,
        "flag": jnp.bool_,
        "x": jnp.float32,
    }


def test_a_state_that_begins_whole_keeps_its_fractions_and_nothing_is_written_into():
    env = adapted()
    state, first = env.reset(jax.random.key(0))
    state_again, one = env.step(state, jnp.int32(1))
    assert float(one.obs["x"]) == 0.75 and not one.last
    _, two = env.step(state_again, jnp.int32(1))
    assert two.last and two.discount == 0 and float(two.info["paid"]) == 2
    assert float(state.inner["seen"]) == 0 and float(state.inner["metrics"]["paid"]) == 0
    assert float(first.obs["x"]) == 0.5


def test_episodes_begin_with_a_reset_of_their_own():
    state, _ = adapted().reset(jax.random.key(0))
    seen = []
    for _ in range(9):
        state, timestep = adapted().step(state, jnp.int32(0))
        seen += [float(state.inner["noise"])] * bool(timestep.first)
    assert len(set(seen)) == 3


def test_info_that_is_not_told():
    with pytest.raises(ConfigError, match=r'^env\.info\.pad: unknown number; did you mean "paid"\? Allowed: paid$'):
        adapted(info={"pad": "sum"})


def test_one_hots():
    found = one_hots(jnp.array([[0, 2], [1, 0]], jnp.uint8), (2, 3))
    np.testing.assert_array_equal(found, [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]])
    assert found.dtype == jnp.float32


def test_every_suite_has_an_extra_and_worlds_has_all():
    text = (CONF.parents[1] / "pyproject.toml").read_text()
    (worlds,) = re.findall(r'^worlds = \["rlexp\[(.*)\]"\]', text, re.MULTILINE)
    assert worlds.split(",") == sorted(SUITES)
    assert all(re.search(rf'^{suite} = \["', text, re.MULTILINE) for suite in sorted(SUITES))
