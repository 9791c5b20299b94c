"""What every environment promises, over all files of conf/env and the table of docs/environments.md."""

import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from suites import CONF, SUITES, node_of
from suites import build_env as build

from benchmarks.environments import KEPT, OF_IDS, check_ends, observed, with_tables
from benchmarks.measure import Failed
from rlexp.config import load_module, parse
from rlexp.envs.base import Env, HostEnv, action_struct
from rlexp.storage import checkpoint
from rlexp.types import Continuous, Discrete, MultiDiscrete, TimeStep

ROOT = Path(__file__).parents[2]
OPTIONS = sorted(str(p.relative_to(CONF).with_suffix("")) for p in CONF.rglob("*.yaml"))
ADAPTERS = [o for o in OPTIONS if "/" not in o]  # of what they do not name
OPTIONS = [o for o in OPTIONS if "/" in o]
NUM_ENVS = 6
SHORT = 20  # the limit in these tests, of environments that may be cut off at all


def is_one(option: str) -> bool:
    suite, _, name = option.partition("/")
    return SUITES.get(suite) == name


def documented() -> dict[str, list[str]]:
    """{option: the other cells of its row}."""
    page, _, _ = (ROOT / "docs" / "environments.md").read_text().partition("\n## Suites")  # then come recipes
    rows = re.findall(r"^\| `(\w+/\w+)` \| (.*) \|$", page, re.MULTILINE)
    return {option: cells.split(" | ") for option, cells in rows}


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    from gymnax.utils import load_mnist

    images = np.arange(20 * 28 * 28, dtype=np.uint8).reshape(20, 28, 28).astype(np.int8)
    monkeypatch.setattr(load_mnist, "load_mnist", lambda: ((images, np.arange(20, dtype=np.uint8) % 10), None))


def actions(env: Env, seed: int) -> jax.Array:
    struct = action_struct(env.spec)
    rng = np.random.default_rng(seed)
    if isinstance(env.spec.action, Discrete):
        return jnp.asarray(rng.integers(env.spec.action.num_actions, size=NUM_ENVS), struct.dtype)
    if isinstance(env.spec.action, MultiDiscrete):
        sizes = env.spec.action.num_actions
        return jnp.asarray(rng.integers(sizes, size=(NUM_ENVS, len(sizes))), struct.dtype)
    low, high = env.spec.action.low, env.spec.action.high
    return jnp.asarray(rng.uniform(low, high, (NUM_ENVS, *struct.shape)), struct.dtype)


def another(env: Env, action: jax.Array) -> jax.Array:
    if isinstance(env.spec.action, Continuous):
        return -action
    return (action + 1) % jnp.asarray(env.spec.action.num_actions, action.dtype)


def described(tree, num_leading: int = 0):
    leaves, structure = jax.tree.flatten(tree)
    return [(x.shape[num_leading:], x.dtype) for x in leaves], structure


def test_table_of_the_documentation_is_complete():
    assert sorted(documented()) == OPTIONS
    page = (ROOT / "docs" / "environments.md").read_text()
    kept, of_ids = (json.loads(path.read_text()) for path in (KEPT, OF_IDS))
    assert with_tables(page, kept, of_ids) == page  # `python -m benchmarks environments --table`
    assert sorted({"envpool", "gymnasium", "gymnax_class", "managed", "waymax", "womd", "wrapped", *SUITES}) == ADAPTERS


def test_no_episode_of_the_table_ended_by_what_is_said_not_to_happen():
    for row in json.loads(KEPT.read_text()).values():
        check_ends(**row)
    with pytest.raises(Failed, match="2 episodes of random actions were truncated, and its ends_by is 'termination'"):
        check_ends(ends_by="termination", random_episodes={"terminated": 1, "truncated": 2})


def test_every_file_is_read():
    for option in OPTIONS:
        node = node_of(option)
        parse(node, load_module(node["module"], "env").Config, "env")


# Of a suite one environment, and now and then some whose actions, observations or ends are of another kind; the command that
# makes the table builds all of them.
ALSO = ("jumanji/tetris", "jumanji/connector", "jumanji/search_and_rescue", "navix/door_key_5x5", "pgx/minatar_freeway")
TRIED = [o for o in OPTIONS if o.partition("/")[0] not in SUITES or o in ALSO or is_one(o)]


@pytest.mark.parametrize("option", [pytest.param(o, marks=pytest.mark.slow if o in ALSO else ()) for o in TRIED])
def test_the_table_is_right(option):
    observation, choices, limit, *_ = documented()[option]
    spec = build(option).spec
    assert spec.max_episode_steps == int(limit)
    assert observed(spec) == observation
    assert all(leaf.dtype in (jnp.float32, jnp.bool_, jnp.uint8) for leaf in jax.tree.leaves(spec.observation))
    if isinstance(spec.action, Discrete):
        assert f"{spec.action.num_actions} choices" == choices
    elif isinstance(spec.action, MultiDiscrete):
        assert f"{' and '.join(map(str, spec.action.num_actions))} choices" == choices
    else:
        assert f"{spec.action.shape[0]} number{'s' * (spec.action.shape[0] > 1)}" == choices


# Of gymnax's one of each kind; each is a program of its own.
QUICK = ("breakout", "cartpole", "catch", "four_rooms", "memory_chain", "mnist_bandit", "pendulum")


def is_quick(option: str) -> bool:
    if option.startswith("gymnax/"):
        return option.removeprefix("gymnax/") in QUICK
    if option.startswith("driving/"):
        return option == "driving/merge"  # the others differ in the layouts that are drawn
    return option not in (
        *ALSO,
        "craftax/classic",
        "playground/cartpole_balance",
    )  # these two compile for 10 s and more


@pytest.mark.parametrize("option", [pytest.param(o, marks=() if is_quick(o) else pytest.mark.slow) for o in TRIED])
def test_contract(option, tmp_path):
    _, _, limit, ends_by, *_ = documented()[option]
    # An environment whose game always ends keeps its limit, and must never reach it; of the others episodes are cut.
    env = build(option, max_episode_steps=SHORT) if int(limit) > SHORT and ends_by != "termination" else build(option)
    limit = env.spec.max_episode_steps
    if isinstance(env, HostEnv):
        check_rows(host_rows(env), limit, ends_by)
        return
    reset, step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))
    state, timestep = reset(jax.random.split(jax.random.key(0), NUM_ENVS))
    assert np.asarray(timestep.first).all()
    assert described(timestep.obs, 1) == described(env.spec.observation)
    types, begun = described((state, timestep)), inner(state)
    of_suite = option.partition("/")[0] in SUITES
    if of_suite:  # their states hold a key, so that no two are alike, whatever the game begins with
        assert any((x != x[:1]).any() for x in begun)
    rows, num_resets = [jax.tree.map(np.asarray, timestep)], 0
    for t in range(3 * SHORT):
        before, action = state, actions(env, t)
        state, timestep = step(before, action)
        assert described((state, timestep)) == types
        again = rows[-1].last
        if again.any() and num_resets < 3:  # the reset does not look at the action
            num_resets += 1
            anew = inner(state)
            if of_suite:
                assert all(
                    any((x[i] != y[i]).any() for x, y in zip(begun, anew, strict=True)) for i in np.flatnonzero(again)
                )
            _, other = step(before, another(env, action))
            for x, y in zip(jax.tree.leaves(other), jax.tree.leaves(timestep), strict=True):
                np.testing.assert_array_equal(np.asarray(x)[again], np.asarray(y)[again])
        rows.append(jax.tree.map(np.asarray, timestep))
    assert num_resets
    assert not any(x.aval.weak_type for x in jax.tree.leaves((state, timestep)))
    assert reset._cache_size() == 1
    assert step._cache_size() == 1  # a weak type in what reset returned would have made a second program
    check_rows(jax.tree.map(lambda *x: np.stack(x), *rows), limit, ends_by)
    check_saved(state, tmp_path)


def inner(state: Any) -> list[np.ndarray]:
    """The leaves [B, ...] of what an environment's own game has."""
    leaves = jax.tree.leaves(state.inner)
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


class Kept(NamedTuple):
    """Of a Run, what holds the environments."""

    data: Any


def check_saved(state: Any, directory: Path) -> None:
    """A checkpoint has all of the environments' state, to the bit."""
    node = yaml.safe_load((CONF.parent / "checkpoint" / "default.yaml").read_text())
    config, _ = parse(node, checkpoint.Config, "checkpoint")
    checkpoint.put(config, directory, 1, Kept(state), {}, None)
    restored = checkpoint.restore(directory, jax.eval_shape(lambda: Kept(state)), warn=pytest.fail)
    assert restored is not None
    for was, now in zip(jax.tree.leaves(state), jax.tree.leaves(restored.run.data), strict=True):
        if jnp.issubdtype(was.dtype, jax.dtypes.prng_key):
            was, now = jax.random.key_data(was), jax.random.key_data(now)
        assert (was.dtype, was.shape) == (now.dtype, now.shape)
        assert np.asarray(was).tobytes() == np.asarray(now).tobytes()


WALK = {"id": "envs.drawn:Walk-v0", "vectorization_mode": "sync", "kwargs": {}}


@pytest.mark.parametrize(
    ("module", "more", "limit", "ends_by"),
    [
        ("sources.counting", {}, 1, "termination"),  # a HostEnv of one's own
        ("rlexp.envs.gymnasium", WALK | {"max_episode_steps": 3}, 3, "truncation"),
        ("rlexp.envs.gymnasium", WALK | {"max_episode_steps": None}, 10, "termination"),
    ],
)
def test_contract_of_a_class_of_ones_own(module, more, limit, ends_by):
    config, _ = parse({"module": module} | more, load_module(module, "env").Config, "env")
    env = load_module(module, "env").make(config)
    assert isinstance(env, HostEnv) and env.spec.max_episode_steps == limit
    check_rows(host_rows(env), limit, ends_by)


def host_rows(env: HostEnv) -> TimeStep:
    """[T, B, ...] of one that runs on the host, whose types are those of the spec at every step."""
    opened = env.open(NUM_ENVS)
    timestep = opened.reset(np.arange(NUM_ENVS, dtype=np.uint32))
    assert timestep.first.all()
    assert described(timestep.obs, 1) == described(env.spec.observation)
    types, rows = described(timestep), [timestep]
    for t in range(3 * SHORT):
        timestep = opened.step(np.asarray(actions(env, t)))
        assert described(timestep) == types
        rows.append(timestep)
    opened.close()
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def check_rows(rows: TimeStep, limit: int, ends_by: str) -> None:
    """The rules of first, last, reward and discount. Leaves are [T, B, ...]."""
    assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves((rows.obs, rows.reward, rows.info)))
    np.testing.assert_array_equal(rows.first[1:], rows.last[:-1])
    assert not (rows.first & rows.last).any()
    assert not rows.reward[rows.first].any()
    assert (rows.discount[rows.first] == 1).all()
    assert np.isin(rows.discount, (0, 1)).all()
    terminated, truncated = rows.last & (rows.discount == 0), rows.last & (rows.discount == 1)
    assert not (rows.discount == 0)[~rows.last].any()
    assert rows.last.any(axis=0).all()
    assert ends_by == "either" or not (terminated if ends_by == "truncation" else truncated).any()
    for b in range(rows.first.shape[1]):
        (starts,), (ends,) = np.nonzero(rows.first[:, b]), np.nonzero(rows.last[:, b])
        for start, end in itertools.takewhile(lambda pair: pair[1] is not None, itertools.zip_longest(starts, ends)):
            assert end - start <= limit
            assert not truncated[end, b] or end - start == limit
