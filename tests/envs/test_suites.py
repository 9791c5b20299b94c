"""What adapters of suites say to bad input, where a suite's own limit goes, and what `adapt` makes of its functions."""

import inspect
import re
import sys
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from suites import CONF, PACKAGES, SUITES, made, need, node_of
from suites import build_env as build
from support import SMALL, train
from support import build as composed

from rlexp.config import ConfigError, load_module, parse
from rlexp.envs import imports, wrapped
from rlexp.envs.base import Env, Transition
from rlexp.envs.suites import adapt, imported, one_hots
from rlexp.types import Discrete

PLAIN = {"sticky": 0.0, "action_repeat": 1, "reward_clip": None, "observation_noise": 0.0, "frame_stack": 1}


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


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            "raise AttributeError('module jax has no x')",
            r"cannot be imported here \(AttributeError: module jax has no x\)",
        ),
        (
            "from jax import no_such_name",
            r"cannot be imported here \(ImportError: cannot import name 'no_such_name' .*\)",
        ),
        (
            "import jax.no_such_module",
            r"cannot be imported here \(ModuleNotFoundError: No module named 'jax.no_such_module'\)",
        ),
        ("raise SystemExit(3)", r"cannot be imported here \(SystemExit: 3\)"),
        ("import no_such_package.part", r"no_such_package is not installed; pip install 'rlexp\[toys\]' brings it"),
    ],
)
def test_a_suite_that_does_not_import(raised, said, monkeypatch, tmp_path):
    for name in ("no_suite", "hypothesis"):  # which is installed, as a suite is
        (tmp_path / f"{name}.py").write_text(f"{raised}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name, called in (("no_suite", "no_suite"), ("hypothesis", f"hypothesis {version('hypothesis')}")):
        with pytest.raises(ConfigError) as error:
            imported(name, extra="toys")
        assert re.fullmatch(rf"env\.module: ({called} )?{said}", str(error.value)), error.value
        assert called in str(error.value) or "no_such_package" in raised


@pytest.mark.parametrize(
    "option", ["brax/ant", "craftax/full", "gymnax/cartpole", "gymnasium/cartpole", "envpool/pong"]
)
def test_no_adapter_ends_with_what_its_suite_raises_as_it_is_imported(option, monkeypatch, tmp_path):
    suite = option.partition("/")[0]
    (tmp_path / f"{suite}.py").write_text("raise AttributeError('jax has no x\\nand no y')\n")
    for name in [n for n in sys.modules if n.partition(".")[0] == suite]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    said = rf"^env\.module: {suite}( [\d.]+)? cannot be imported here \(AttributeError: jax has no x\)$"
    module = load_module(node_of(option)["module"], "env")
    config, _ = parse(node_of(option), module.Config, "env")
    with pytest.raises(ConfigError, match=said):
        inspect.unwrap(module.make)(config)  # which another test may have made, and is remembered


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_an_id_that_is_not_there(suite):
    need(suite)
    known = yaml.safe_load((CONF / suite / f"{SUITES[suite]}.yaml").read_text())["id"]
    said = rf'^env\.id: \w+ has no "{known}x"; did you mean "{known}"\? Allowed: .*{known}[^\n]*$'
    with pytest.raises(ConfigError, match=said):
        made(suite, id=f"{known}x")


def test_pgx_refuses_what_is_not_for_one_player_and_what_has_no_limit():
    need("pgx")
    with pytest.raises(
        ConfigError, match=r"^env\.id: chess is for several players; for one there are 2048, minatar-as"
    ):
        made("pgx", id="chess")
    with pytest.raises(ConfigError, match=r"^env\.max_episode_steps: 2048 has no limit of its own; give a number$"):
        made("pgx", id="2048", max_episode_steps=None)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    ("suite", "node"),
    [
        ("brax", {"id": "swimmer"}),
        ("jumanji", {"id": "Snake-v1", "kwargs": {"num_rows": 0}}),
        ("jumanji", {"id": "Maze-v0", "kwargs": {"nothing_like_it": 0}}),
        ("gymnax", {"name": "CartPole-v1"}),
        ("craftax", {"id": "Craftax-Classic-Symbolic-v1"}),
    ],
)
def test_a_suite_whose_code_raises_as_it_is_traced(suite, node, inner, monkeypatch):
    need(suite)

    def raises(*_):
        raise TypeError("clip() got an unexpected keyword\nargument")

    if suite == "gymnax":
        monkeypatch.setattr("gymnax.environments.classic_control.cartpole.CartPole.reset_env", raises)
    if suite == "craftax":
        monkeypatch.setattr("craftax.craftax_classic.envs.craftax_symbolic_env.generate_world", raises)
    key, name = next(iter(node.items()))
    node = {"module": f"rlexp.envs.{suite}", "max_episode_steps": None, "info": {}, "params": {}, "kwargs": {}} | node
    module = load_module(node["module"], "env")
    node = {k: v for k, v in node.items() if k in {field.name for field in fields(module.Config)}}
    if kwargs := node.get("kwargs"):  # the error names it, or there is nothing else that could be wrong
        key = rf"kwargs\.{next(iter(kwargs))}"
    place = r"env\.inner" if inner else "env"
    said = rf"^{place}\.{key}: {name} cannot be made \((TypeError|IndexError): [^\n]+\)$"
    if inner:
        module, node = wrapped, PLAIN | {"module": "rlexp.envs.wrapped", "inner": node}
    config, _ = parse(node, module.Config, "env")
    with pytest.raises(ConfigError, match=said):
        module.make(config)


@pytest.mark.parametrize(
    ("error", "kwargs", "key"),
    [
        (TypeError("got an unexpected keyword argument 'rows'"), {"cols": 1, "rows": 2}, "env.kwargs.rows"),
        (ValueError("'cuda' is not a valid Impl"), {"dt": 0.1, "impl": "cuda"}, "env.kwargs.impl"),
        (TypeError("shape must be nonnegative, got (-1, 12)"), {"rows": -1}, "env.kwargs.rows"),
        (TypeError("shape must be nonnegative, got (-1, 12)"), {"rows": -1, "cols": 12}, "env.kwargs"),
        (TypeError("shape must be nonnegative, got (-1, 12)"), {}, "env.id"),
        (ImportError("no module"), {"rows": -1}, "env.id"),
        (RuntimeError("no rows of levels"), {"rows": -1}, "env.kwargs.rows"),
        (RuntimeError("no levels"), {"rows": -1}, "env.id"),
    ],
)
def test_the_key_that_a_suite_cannot_make_an_environment_with(error, kwargs, key):
    assert imports.at_fault(error, kwargs) == key


def test_what_a_suite_says_of_an_error_is_a_line():
    assert imports.reason(ValueError("a\nb")) == "ValueError: a"
    assert imports.reason(ValueError()) == "ValueError: no reason given"
    assert imports.reason(KeyError("x" * 999)).endswith("x…") and len(imports.reason(KeyError("x" * 999))) < 250


@pytest.mark.parametrize("option", ["jumanji/snake", "jumanji/maze", "xminigrid/empty_6x6"])
def test_the_longest_limit(option):
    env = build(option, max_episode_steps=2**31 - 1)
    assert env.spec.max_episode_steps == 2**31 - 1
    jax.eval_shape(env.reset, jax.random.key(0))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 11, 12, 13, 2**31 - 1])
def test_sizes_of_what_xminigrids_player_sees(size):
    """Of a grid of 6 x 6, all of which 11 x 11 show from any corner."""
    need("xminigrid")
    if size in (1, 3, 11):
        assert build("xminigrid/empty_6x6", view_size=size).spec.observation.shape[:2] == (size, size)
        return
    with pytest.raises(
        ConfigError, match=rf"^env\.view_size: {size} is not allowed; expected an odd number, at most 11 here$"
    ):
        build("xminigrid/empty_6x6", view_size=size)


@pytest.mark.parametrize("option", ["jumanji/maze", "navix/empty_5x5", "xminigrid/empty_6x6"])
def test_a_limit_cuts_off_and_does_not_end(option):
    """All three take their own for an end, or could. Turning on the spot reaches no goal."""
    told = rows(build(option, max_episode_steps=5), 5)
    assert np.flatnonzero(told.last).tolist() == [4] and told.discount.all()


@pytest.mark.parametrize(("package", "option"), [("craftax_classic", "classic"), ("craftax", "full")])
def test_who_survives_in_craftax_has_achieved_what_it_did(package, option, monkeypatch):
    """Craftax's own code, but for the world and what happens in it, which take long to compile."""
    need("craftax")
    module = import_module(f"craftax.{package}.envs.craftax_symbolic_env")

    class State(NamedTuple):
        achievements: jax.Array

    def one_more(key, state, action, params, static):
        return State(state.achievements.at[state.achievements.sum()].set(True)), 0.0

    def over(state, params, *more):
        """Of a player of a million steps, ten times what either game lets live."""
        return jnp.asarray(state.achievements.sum() + 1_000_000 >= params.max_timesteps)

    none = State(jnp.zeros(len(module.Achievement), bool))
    monkeypatch.setattr(module, "generate_world", lambda key, params, static: none)
    monkeypatch.setattr(module, "craftax_step", one_more)
    monkeypatch.setattr(module, "render_craftax_symbolic", lambda state: jnp.zeros(3))
    monkeypatch.setattr(module, "is_game_over", over)
    told = rows(build(f"craftax/{option}", max_episode_steps=4, resets=None), 4)
    assert told.last[-1] and told.discount.all()
    done = {name: x[-1] for name, x in told.info.items() if name.startswith("Achievements/")}
    assert len(done) == len(module.Achievement) and sorted(done.values())[-5:] == [0, 100, 100, 100, 100]
    assert done["Achievements/collect_wood"] == 100
    if option == "classic":
        np.testing.assert_allclose(told.info["score"][-1], 101 ** (4 / 22) - 1, rtol=1e-4)


@pytest.mark.slow
def test_a_world_of_craftax_follows_from_its_key_and_not_from_its_place_in_a_batch():
    """On a processor XLA made the worlds of every eighth place alike."""
    need("craftax")
    env, keys = build("craftax/classic", resets=None), jax.random.split(jax.random.key(0), 20)
    worlds, _ = jax.jit(jax.vmap(env.reset))(keys)
    alone = jax.jit(env.reset)
    for i in (0, 8, 19):
        assert (worlds.inner.map[i] == alone(keys[i])[0].inner.map).all()
    assert len({world.tobytes() for world in np.asarray(worlds.inner.map)}) == 20


def test_a_goal_of_navix_that_nobody_reaches():
    """A ball, which its code looks for among the goals."""
    need("navix")
    said = r"^env\.id: Navix-KeyCorridorS3R1-v0 has a Ball for its goal, which nobody reaches"
    with pytest.raises(ConfigError, match=said):
        made("navix", id="Navix-KeyCorridorS3R1-v0")


@pytest.fixture(scope="module")
def rulesets(tmp_path_factory):
    """A file of two: to be beside a red ball, which is there; to hold a key, which is there too."""
    need("xminigrid")
    from xminigrid import benchmarks
    from xminigrid.core.constants import TILES_REGISTRY, Colors, Tiles
    from xminigrid.core.goals import AgentHoldGoal, AgentNearGoal
    from xminigrid.core.rules import EmptyRule

    ball, key = TILES_REGISTRY[Tiles.BALL, Colors.RED], TILES_REGISTRY[Tiles.KEY, Colors.BLUE]
    goals = jnp.stack([AgentNearGoal(ball).encode(), AgentHoldGoal(key).encode()])
    told = {
        "goals": goals,
        "rules": jnp.stack([EmptyRule().encode()[None]] * 2),
        "init_tiles": jnp.stack([jnp.stack([ball, key])] * 2),
        "num_rules": jnp.zeros(2, jnp.uint8),
    }
    path = tmp_path_factory.mktemp("xland") / "two"
    benchmarks.save_bz2_pickle(jax.tree.map(np.asarray, told), str(path))
    return str(path)


def test_an_episode_of_xland_has_one_of_many_goals(rulesets):
    env = made("xminigrid", id="XLand-MiniGrid-R1-9x9", ruleset=rulesets)
    assert sorted(x.shape for x in jax.tree.leaves(env.shared)) == [(2,), (2, 1, 7), (2, 2, 2), (2, 5)]
    states, _ = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 64))

    def act(carry, key):
        states, _ = carry
        states, row = jax.vmap(env.step)(states, jax.random.randint(key, (64,), 0, env.spec.action.num_actions))
        return (states, None), (row, states.inner.state.goal_encoding)

    _, (told, goal) = jax.jit(lambda s, k: jax.lax.scan(act, (s, None), k))(
        states, jax.random.split(jax.random.key(1), 300)
    )
    kinds = np.asarray(goal)[..., 0]
    ended = np.asarray(told.last & (told.discount == 0))
    assert all((ended & (kinds == kind)).sum() > 5 for kind in np.unique(kinds)) and len(np.unique(kinds)) == 2
    assert (np.asarray(told.reward)[ended] > 0).all() and not np.asarray(told.reward)[~ended].any()
    changes = (kinds[1:] != kinds[:-1]).any(axis=1)
    assert changes.any() and np.asarray(told.first)[1:][kinds[1:] != kinds[:-1]].all()  # drawn anew with an episode


@pytest.mark.slow
def test_xland_is_trained_in_with_its_goals_as_data(rulesets, tmp_path):
    options = ["env=xminigrid", "env.id=XLand-MiniGrid-R1-9x9", f"env.ruleset={rulesets}"]
    experiment = composed(*options, *SMALL)
    assert len(jax.tree.leaves(experiment.shared)) == 4
    train(tmp_path, *options, *SMALL)


@pytest.mark.parametrize(
    ("id", "ruleset", "said"),
    [
        ("XLand-MiniGrid-R1-9x9", None, r"ruleset: null is not allowed; .* has no goal of its own, .*: trivial-21k, "),
        ("XLand-MiniGrid-R1-9x9", "trivial-21", r"ruleset: there is no file .*; did you mean \"trivial-21k\"\?"),
        ("XLand-MiniGrid-R1-9x9", __file__, r"ruleset: '.*' could not be read \(OSError: Invalid data stream\)"),
        (
            "XLand-MiniGrid-R1-9x9",
            "trivial-21k",
            r"ruleset: 'trivial-21k' could not be downloaded, or read \(OSError: no",
        ),
        (
            "MiniGrid-Empty-6x6",
            "trivial-21k",
            r"ruleset: 'trivial-21k' is not allowed; .* has its own goal, expected null",
        ),
        ("MiniGrid-Playground", None, r"id: MiniGrid-Playground has no goal, so that nothing is ever paid"),
    ],
)
def test_goals_of_xminigrid(id, ruleset, said, monkeypatch, tmp_path):
    need("xminigrid")

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("xminigrid.benchmarks.DATA_PATH", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlretrieve", offline)
    with pytest.raises(ConfigError, match=rf"^env\.{said}"):
        made("xminigrid", id=id, ruleset=ruleset)


def test_freeway_of_pgx_is_cut_off_and_does_not_end():
    env = build("pgx/minatar_freeway", max_episode_steps=2600)
    told = rows(env, 2600)
    assert np.flatnonzero(told.last).tolist() == [2599] and told.discount.all()


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
