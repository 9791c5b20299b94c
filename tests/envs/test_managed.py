"""Tasks made of terms: what they come to, in what order, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import point_world
import pytest
import yaml
from envs.test_env_contract import check_rows, described
from suites import CONF, build_env, need, node_of
from support import SMALL, StopAfter, assert_same, build, rows, train

from rlexp.compose import search_path
from rlexp.config import ConfigError, parse
from rlexp.envs import brax
from rlexp.envs.base import batched
from rlexp.envs.body_world import FACTORS
from rlexp.envs.managers import acting, managed
from rlexp.training.loop import Resume

B, T = 6, 40
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (T, B, 1)).astype(np.float32)
POINT = {"module": "point_world", "max_episode_steps": 12, "resets": None, "params": {"wind": 0.0}}
OWN: dict[str, Any] = {
    "module": "rlexp.envs.managers.managed",
    "inner": POINT,
    "observations": [{"function": "place"}],
    "concatenate": False,
    "rewards": [{"function": "near", "weight": 1.0}],
    "terminations": [{"function": "far"}],
    "commands": [],
    "events": [],
    "randomisation": [],
    "curriculum": [],
    "params": {},
}
NO_METRIC = {"metric": "reward/ner", "above": 1, "step": 1, "low": 0, "high": 1}


def made(**changes: Any):
    return managed.make(parse(OWN | changes, managed.Config, "env")[0])


def played(env: Any, actions: Any = ACTIONS) -> Any:
    """Rows [T + 1, B, ...] under the actions, and the last state."""
    envs = batched(env)

    def run(key: Any) -> Any:
        state, first = envs.reset(jax.random.split(key, B))
        state, later = jax.lax.scan(envs.step, state, jnp.asarray(actions))
        return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, later), state

    return jax.device_get(jax.jit(run)(jax.random.key(0)))


def nothing(moment: Any) -> None:
    """A term of a user's that forgot its `return`."""


def word(moment: Any) -> str:
    return "a"


def seen(name: str = "place", **term: Any) -> np.ndarray:
    return played(made(observations=[{"function": "place", "name": name, **term}]))[0].obs[name]


@pytest.fixture(scope="module")
def plain():
    return played(made())[0]


def test_terms_equal_to_the_worlds_own_are_its_task(plain):
    theirs = played(point_world.make(parse(POINT, point_world.Config, "env")[0]))[0]
    np.testing.assert_array_equal(plain.obs["place"], theirs.obs)
    np.testing.assert_array_equal(plain.reward, theirs.reward)
    for ours, own in zip(plain[2:5], theirs[2:5], strict=True):
        np.testing.assert_array_equal(ours, own)
    ends = plain.last
    np.testing.assert_array_equal(plain.info["place"][ends], theirs.info["place"][ends])
    assert (plain.discount == 0).any() and (ends & (plain.discount == 1)).any()


@pytest.mark.slow
def test_terms_of_the_driving_world_are_its_task():
    changes = {"max_episode_steps": 12, "scenarios": ["merge"]}
    node = node_of("driving/merge") | changes
    parts = {k: node_of(f"../{k}/driving")[k] for k in ("observations", "rewards", "terminations")}
    parts |= {k: [] for k in ("commands", "events", "randomisation", "curriculum")}
    ours = build_env("managed", inner=node, **parts)
    assert {"ego", "route", "cars", "lanes", "light"} == ours.spec.observation.keys()
    actions = np.random.default_rng(1).uniform([-6, -0.02], [6, 0.02], (16, B, 2)).astype(np.float32)
    ours, theirs = played(ours, actions)[0], played(build_env("driving/merge", **changes), actions)[0]
    for name in theirs.obs:
        np.testing.assert_array_equal(ours.obs[name], theirs.obs[name])
    np.testing.assert_allclose(ours.reward, theirs.reward, rtol=1e-6, atol=1e-7)
    for x, y in zip(ours[2:5], theirs[2:5], strict=True):
        np.testing.assert_array_equal(x, y)
    assert ours.last.any() and ours.first[1:].any()
    for name in theirs.info:
        np.testing.assert_array_equal(ours.info[name], theirs.info[name])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["brax/inverted_pendulum", "brax/ant", "playground/cartpole_balance"])
def test_terms_of_a_body_are_its_task_and_bodies_differ(option):
    suite = option.partition("/")[0]
    need(suite)
    node = node_of(suite) | node_of(option) | {"max_episode_steps": 10}
    lists = {k: node_of(f"../{k}/{suite}")[k] for k in ("observations", "rewards", "terminations")}
    lists |= {k: [] for k in ("commands", "events", "randomisation", "curriculum")}
    plain = build_env(option, max_episode_steps=10)
    actions = jnp.broadcast_to(ACTIONS[:14], (14, B, *plain.spec.action.shape))
    theirs = played(plain, actions)[0]
    ours = played(build_env("managed", inner=node, **lists), actions)[0]
    np.testing.assert_allclose(ours.obs["observed"], theirs.obs, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(ours.reward, theirs.reward)
    np.testing.assert_array_equal(ours.last, theirs.last)
    lists["randomisation"] = [*node_of("../randomisation/brax")["randomisation"]]
    lists["events"] = [{"function": "push", "mode": "interval", "every": [3, 3], "params": {"size": 0.5}}]
    told, state = played(build_env("managed", inner=node, **lists), actions)
    mass = settings(state)["mass"]
    assert len(np.unique(mass)) == B and np.abs(mass - 1).max() <= 0.2
    assert np.abs(told.obs["observed"][1] - theirs.obs[1]).max() > 1e-3
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(told))


@pytest.mark.slow
def test_each_factor_of_a_body_changes_how_it_moves():
    """An ant that falls onto its feet and pushes: its steps under factors that differ one at a time."""
    need("brax")
    config, _ = parse(node_of("brax/ant"), brax.Config, "env")
    world, most = brax.world(config), 30

    @jax.jit
    @jax.vmap
    def moved(params: Any) -> Any:
        def step(state: Any, _: None) -> Any:
            state, _ = world.step(jax.random.key(0), state, jnp.full((8,), 0.5), params)
            return state, state.pipeline_state.q

        return jax.lax.scan(step, world.reset(jax.random.key(0), params), length=most)[1]

    told = {name: np.ones(len(FACTORS) + 1, np.float32) for name in FACTORS}
    for i, name in enumerate(FACTORS, start=1):
        told[name][i] = 1.5
    own, *others = moved(told)
    for name, other in zip(FACTORS, others, strict=True):
        assert np.isfinite(other).all() and np.abs(other - own).max() > 1e-3, name


def test_the_contract_of_environments_holds():
    env = made(
        rewards=[{"function": "near", "weight": 1.0}, {"function": "action_rate_l2", "weight": -0.1}],
        observations=[{"function": "place", "history_length": 2}, {"function": "last_action"}],
    )
    reset, step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))
    state, row = reset(jax.random.split(jax.random.key(0), B))
    assert described(row.obs, 1) == described(env.spec.observation)
    types, kept = described((state, row)), [jax.device_get(row)]
    for t in range(T):
        state, row = step(state, ACTIONS[t])
        assert described((state, row)) == types
        kept.append(jax.device_get(row))
    assert not any(x.aval.weak_type for x in jax.tree.leaves((state, row)))
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    check_rows(jax.tree.map(lambda *x: np.stack(x), *kept), 12, "either")


def test_a_weight_of_0_is_not_computed(plain):
    terms = [{"function": "near", "weight": 1.0}, {"function": "speed", "weight": 0.0}]
    point_world.COMPUTED.clear()
    told = played(made(rewards=terms))[0]
    assert set(point_world.COMPUTED) == {"near"}
    np.testing.assert_array_equal(told.reward, plain.reward)
    assert "reward/speed" not in told.info


def test_rewards_are_weighed_and_added_up_and_logged_by_term(plain):
    terms = [{"function": "near", "weight": 2.0, "params": {"power": 2.0}}, {"function": "speed", "weight": "params.s"}]
    told = played(made(rewards=terms, params={"s": -0.5}))[0]
    speed = -0.5 * np.abs(plain.obs["place"][..., 1])
    goes_on = ~plain.first
    np.testing.assert_allclose(told.reward[goes_on], (2 * plain.reward + speed)[goes_on], rtol=1e-6)
    for b in range(B):
        (ends,) = np.nonzero(told.last[:, b])
        begins = np.nonzero(told.first[: ends[0] + 1, b])[0][-1]
        here = slice(begins + 1, ends[0] + 1)
        np.testing.assert_allclose(told.info["reward/near"][ends[0], b], 2 * plain.reward[here, b].sum(), rtol=1e-5)


def test_time_out_truncates_and_the_others_terminate():
    cuts = [{"function": "far", "time_out": True}, {"function": "time_out", "params": {"steps": 5}, "name": "late"}]
    told = played(made(terminations=cuts))[0]
    far, late = told.info["termination/far"][told.last], told.info["termination/late"][told.last]
    assert far.any() and late.any() and (far + late >= 1).all()
    np.testing.assert_array_equal(told.discount[told.last], 1 - late)  # where both end it, it has ended
    assert (told.discount[told.last] == 1).any() and (told.discount[told.last] == 0).any()


def test_what_is_seen_goes_through_modifiers_noise_clip_scale_and_history_in_this_order(plain):
    place = plain.obs["place"]
    np.testing.assert_allclose(seen(clip=[-0.2, 0.1], scale=[2, 3]), np.clip(place, -0.2, 0.1) * [2, 3], rtol=1e-6)
    bias = {"function": "bias", "params": {"value": 1.0}}
    noise = {"function": "constant", "params": {"bias": -3.0}}
    many = seen("many", modifiers=[bias], noise=noise, clip=[-1.9, 0], scale=2, history_length=3)
    single = np.clip(place + 1 - 3, -1.9, 0) * 2
    assert many.shape == (T + 1, B, 6)
    for b in range(B):
        began = 0
        for t in range(T + 1):
            began = t if plain.first[t, b] else began
            past = [max(t - i, began) for i in (2, 1, 0)]
            np.testing.assert_allclose(many[t, b], single[past, b].reshape(-1), rtol=1e-6)


def test_modifiers_with_a_memory_forget_it_with_the_episode(plain):
    place, params = plain.obs["place"], {"b": [0.5, 0.25], "a": [-0.5]}
    ours = seen(modifiers=[{"function": "digital_filter", "params": params}])
    total = seen(modifiers=[{"function": "integrator", "params": {"dt": 0.1}}])
    for b in range(B):
        for t in range(T + 1):
            again = plain.first[t, b]
            x, old = place[t, b], np.zeros(2) if again else place[t - 1, b]
            np.testing.assert_allclose(
                ours[t, b], 0.5 * x + 0.25 * old + 0.5 * (0 if again else ours[t - 1, b]), atol=1e-6
            )
            if not again:
                np.testing.assert_allclose(total[t, b], total[t - 1, b] + (x + old) / 2 * 0.1, atol=1e-6)
    np.testing.assert_allclose(total[plain.first], place[plain.first] * 0.05, atol=1e-6)


def test_noise_is_another_in_each_environment_and_step(plain):
    noise = {"function": "gaussian", "params": {"std": 0.5}}
    drawn = seen(noise=noise) - plain.obs["place"]
    assert len(np.unique(drawn)) == drawn.size
    assert abs(drawn.mean()) < 0.1 and 0.4 < drawn.std() < 0.6
    both = made(observations=[{"function": "last_action"}, {"function": "place", "noise": noise}])
    np.testing.assert_array_equal(played(both)[0].obs["place"] - plain.obs["place"], drawn)  # another term moves none


def test_one_vector_of_all_in_the_order_of_the_list(plain):
    both = [{"function": "time_left"}, {"function": "place"}]
    told = played(made(observations=both, concatenate=True))[0].obs
    assert told.shape == (T + 1, B, 3)
    np.testing.assert_array_equal(told[..., 1:], plain.obs["place"])
    assert told[0, 0, 0] == 1 and told.min(axis=(0, 1))[0] == 0


@pytest.fixture
def point_options(tmp_path):
    """The point world and its terms as files of the groups, and the overrides that choose them."""
    for group in ("env", "observations", "rewards", "terminations"):
        own = {k: v for k, v in POINT.items() if group == "env"} or {group: OWN[group]}
        (tmp_path / "conf" / group).mkdir(parents=True)
        header = "" if group == "env" else "# @package env\n"
        (tmp_path / "conf" / group / "point.yaml").write_text(header + yaml.safe_dump(own))
    chosen = [f"{group}=point" for group in ("observations", "rewards", "terminations")]
    return [*search_path(str(tmp_path / "conf")), "env=managed", "env@env.inner=point", *chosen]


@pytest.mark.slow
def test_it_trains_in_the_driving_world(tmp_path):
    few = ["env=managed", "env@env.inner=driving/straight", "env.rewards.0.weight=0.5", *SMALL, "total_env_steps=256"]
    (summary,) = train(tmp_path, *few, "algo.num_envs=4")
    assert summary["status"] == "finished"
    assert {"env/accuracy", "env/reward/progress", "env/termination/arrived"} <= rows(tmp_path / "0")[-1].keys()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rewards": [{"function": "nearr", "weight": 1}]},
            r"env\.rewards\.0\.function: unknown function \"nearr\"; did you",
        ),
        ({"rewards": [{"function": "near"}]}, r"env\.rewards\.0\.weight: this key is missing"),
        (
            {"rewards": [{"function": "near", "wieght": 1}]},
            r'env\.rewards\.0\.wieght: unknown key; did you mean "weight"',
        ),
        (
            {"rewards": [{"function": "near", "weight": "1.0x"}]},
            r"env\.rewards\.0\.weight: '1\.0x' is not allowed; exp",
        ),
        ({"rewards": [{"function": "near", "weight": "params.wnd"}]}, r'weight: .* has no .wnd.; did you mean "wind"'),
        (
            {"rewards": [{"function": "near", "weight": 1, "params": {"pwer": 2}}]},
            r'env\.rewards\.0\.params\.pwer: near takes no such param; did you mean "power"',
        ),
        (
            {"rewards": [{"function": "whole", "weight": 1}]},
            r"env\.rewards\.0: whole gives shape \[1\]; expected one num",
        ),
        (
            {"rewards": [{"function": "near", "weight": [1]}]},
            r"env\.rewards\.0\.weight: \[1\] is not allowed; expected",
        ),
        (
            {"rewards": [{"function": "envs.test_managed:nothing", "weight": 1}]},
            r"env\.rewards\.0: envs\.test_managed:nothing gives None; expected numbers",
        ),
        (
            {"observations": [{"function": "envs.test_managed:word"}]},
            r"env\.observations\.0: envs\.test_managed:word gives 'a'; expected numbers",
        ),
        (
            {"rewards": [{"function": "near", "weight": 1}] * 2},
            r"env\.rewards\.1\.name: 'near' is the name of env\.rewards",
        ),
        ({"rewards": ["near"]}, r"env\.rewards\.0: 'near' is not allowed; expected a node with `function:`"),
        ({"rewards": {"near": 1}}, r"env\.rewards: .* is not allowed; expected a valid list"),
        (
            {"terminations": [{"function": "nowhere:far"}]},
            r"env\.terminations\.0\.function: no Python module 'nowhere'",
        ),
        (
            {"terminations": [{"function": "point_world:fare"}]},
            r'point_world has no function .fare.; did you mean "far"',
        ),
        (
            {"terminations": [{"function": "point_world:speed"}]},
            r"env\.terminations\.0: speed gives float32; expected bool",
        ),
        ({"observations": []}, r"env\.observations: \[\] is not allowed"),
        (
            {"observations": [{"function": "place", "clip": [1, 0]}]},
            r"env\.observations\.0\.clip: \[1.*\] is not allowed",
        ),
        ({"observations": [{"function": "place", "scale": [1, 2, 3]}]}, r"0\.scale: .* which has shape \[2\]"),
        *(
            (
                {"observations": [{"function": "time_left", "modifiers": [modifier]}]},
                rf"0\.modifiers\.0\.params\.{name}: \[3\] numbers have no place in what is observed, which has shape \[\]",
            )
            for name, modifier in (
                ("value", {"function": "bias", "params": {"value": [1, 2, 3]}}),
                ("value", {"function": "scale", "params": {"value": [1, 2, 3]}}),
                ("low", {"function": "clip", "params": {"low": [1, 2, 3], "high": 5}}),
            )
        ),
        (
            {"events": [{"function": "envs.test_managed:spread", "mode": "startup", "params": {"size": [1.0, 2.0]}}]},
            r"^env\.events\.0: .*spread gives 'wind' shape \[2\]; expected one number",
        ),
        (
            {"observations": [{"function": "command", "params": {"name": "v"}}]},
            r"^env\.observations\.0\.params\.name: there is no command 'v'\. Allowed: none",
        ),
        (
            {"curriculum": [{"param": "wind", "function": "by_metric", "params": NO_METRIC}]},
            r"^env\.curriculum\.0\.params\.metric: there is no metric 'reward/ner'; did you mean \"reward/near\"",
        ),
        (
            {"events": [{"function": "push", "mode": "startup", "params": {"size": 0.1}}]},
            r"^env\.events\.0: .* cannot be .*; of mode: startup it is given \(key, env\.params\)",
        ),
        (
            {"observations": [{"function": "place", "noise": {"function": "gausian"}}]},
            r'observations\.0\.noise\.function: unknown function "gausian"; did you mean "gaussian"',
        ),
        ({"params": {"wnd": 1.0}}, r'env\.params\.wnd: neither the world nor a term reads it; did you mean "wind"'),
        (
            {
                "inner": node_of("driving/straight"),
                "observations": [{"function": "ego"}],
                "rewards": [{"function": "progress", "weight": 1}],
                "terminations": [],
                "params": {"collision": 1.0},
            },
            r"^env\.params\.collision: neither the world nor a term reads it\. Allowed: density, logged$",
        ),
        (
            {"inner": {"module": "counting_env", "resets": None}},
            r"env\.inner: counting_env makes no world for terms; expected driving",
        ),
    ],
)
def test_bad_input_is_one_line(changes, said):
    with pytest.raises(ConfigError, match=said) as caught:
        made(**changes)
    assert "\n" not in str(caught.value)


def test_terms_of_ones_own_module(plain):
    terms = [{"module": "point_world", "function": "near", "weight": 1.0}]
    np.testing.assert_array_equal(played(made(rewards=terms))[0].reward, plain.reward)


LISTS = {
    "observations": ["brax", "driving", "playground", "playground_locomotion", "driving_speed"],
    "critic": ["playground_locomotion", "driving"],
    "rewards": ["brax", "driving", "playground", "driving_speed"],
    "terminations": ["brax", "playground", "driving"],
    "commands": ["driving_speed"],
    "events": ["driving_pushes"],
    "randomisation": ["brax", "driving"],
    "curriculum": ["driving"],
}


@pytest.mark.slow
def test_the_lists_of_the_driving_world_fit_each_other():
    """The last of each; others are built by tests of their own."""
    for group, names in LISTS.items():
        assert {path.stem for path in (CONF.parent / group).glob("*.yaml")} - {"none"} == set(names)
    spec = build("env=managed", *(f"{group}={names[-1]}" for group, names in LISTS.items())).spec
    assert spec.observation.policy["speed"].shape == () and spec.observation.critic["cars"].shape == (12, 8)


@pytest.mark.slow
def test_the_parts_are_groups_and_their_settings_are_data():
    one, other = (build("env=managed", f"+env.params.density={x}").settings.env for x in (0.1, 0.9))
    assert one == {"density": 0.1} and other == {"density": 0.9}


def test_commands_are_drawn_anew_after_so_many_steps(plain):
    command = {
        "function": "uniform",
        "name": "goal",
        "params": {"low": [-1, 2], "high": [1, 3]},
        "resample_every": [3, 5],
    }
    told = played(
        made(
            commands=[command, {"function": "choice", "name": "kind", "params": {"values": [0, 5]}}],
            observations=[
                {"function": "place"},
                *[{"function": "command", "name": n, "params": {"name": n}} for n in ("goal", "kind")],
            ],
        )
    )[0]
    goal, kind = told.obs["goal"], told.obs["kind"]
    assert goal.shape == (T + 1, B, 2) and set(np.unique(kind)) == {0, 5}
    assert goal[..., 0].min() < 0 < goal[..., 0].max() <= 1 and goal[..., 1].min() >= 2
    np.testing.assert_array_equal(told.obs["place"], plain.obs["place"])
    lasted = set()
    for b in range(B):
        since = 0
        for t in range(1, T + 1):
            if told.first[t, b]:
                since = t
            else:
                assert kind[t, b] == kind[t - 1, b]  # once an episode
                if (goal[t, b] != goal[t - 1, b]).any():
                    lasted.add(t - since)
                    since = t
    assert lasted == {3, 4, 5}
    assert len(np.unique(goal[0, :, 0])) == B


def test_no_interval_follows_from_what_a_term_draws():
    """A term's own function has the same key, and splits it as one does."""
    for key in jax.random.split(jax.random.key(0), 3):
        of_terms = {int(jax.random.randint(k, (), 0, 2**30)) for k in (key, *jax.random.split(key, 64))}
        assert int(acting._steps(key, [0, 2**30 - 1])) not in of_terms


def test_events_change_the_world_at_a_reset_or_now_and_then(plain):
    at_reset = played(made(events=[{"function": "push", "mode": "reset", "params": {"size": 2.0}}]))[0]
    np.testing.assert_array_equal(at_reset.obs["place"][at_reset.first][:, 1], 2.0)
    pushes = {"function": "push", "mode": "interval", "every": [4, 4], "params": {"size": 0.5}}
    told = played(made(events=[pushes], terminations=[]))[0]
    calm = played(made(terminations=[]))[0]
    v, still = told.obs["place"][..., 1], calm.obs["place"][..., 1]
    np.testing.assert_allclose((v - still)[:4], 0, atol=1e-6)
    np.testing.assert_allclose((v - still)[4:8], 0.5 * 0.9 ** np.arange(4)[:, None] * np.ones((4, B)), atol=1e-5)
    np.testing.assert_allclose((v - still)[8], 0.5 * 0.9**4 + 0.5, atol=1e-5)


def task_state(state: Any) -> managed.State:
    """Of an episodic environment's state, with tallies or without."""
    return getattr(state.inner, "inner", state.inner)


def settings(state: Any) -> dict[str, np.ndarray]:
    return task_state(state).params


def winds(state: Any) -> np.ndarray:
    return settings(state)["wind"]


def test_settings_are_drawn_by_each_environment(plain):
    wind = {"param": "wind", "function": "uniform", "params": {"low": -0.2, "high": 0.2}}
    short, long = (made(randomisation=[wind | {"mode": mode}]) for mode in ("reset", "startup"))
    told = {
        mode: played(env, ACTIONS[:n])[1]
        for env, mode, n in ((short, "one", 1), (short, "two", 30), (long, "s1", 1), (long, "s2", 30))
    }
    one, two, first, last = (winds(told[k]) for k in ("one", "two", "s1", "s2"))
    assert len(np.unique(np.concatenate([one, two]))) == 2 * B  # others in each environment and episode
    np.testing.assert_array_equal(first, last)  # once for good
    assert len(np.unique(first)) == B and np.abs(first).max() <= 0.2
    scaled = made(
        randomisation=[wind | {"operation": "scale", "params": {"low": 2, "high": "params.most"}}],
        params={"wind": 0.1, "most": 3.0},
    )
    drawn = winds(played(scaled, ACTIONS[:1])[1])
    assert (drawn >= 0.2).all() and (drawn <= 0.3).all() and len(np.unique(drawn)) == B
    began = played(short, ACTIONS[:1])
    np.testing.assert_allclose(began[0].obs["place"][0, :, 1], winds(began[1]))  # the world begins with them


def test_a_term_does_not_take_the_name_of_a_metric_of_the_worlds_own(monkeypatch):
    """As some tasks of Playground tell their own rewards."""
    world_of = point_world.world
    tells = {"reward/near": jnp.zeros(())}
    monkeypatch.setattr(point_world, "world", lambda config: world_of(config)._replace(told=lambda *_: tells))
    with pytest.raises(
        ConfigError, match=r"^env: reward/near is a metric of the world's own; give the term another name"
    ):
        made()
    made(rewards=[{"function": "near", "name": "close", "weight": 1.0}])


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [("driving/straight", "observed_leader", True), ("playground/cartpole_balance", "privileged", "critic")],
)
def test_what_terms_say_is_not_said_of_the_inner_environment_too(option, key, value):
    suite = option.partition("/")[0]
    if suite == "playground":
        need(suite)
    inner = (node_of(suite) if suite == "playground" else {}) | node_of(option) | {key: value}
    with pytest.raises(ConfigError, match=rf"^env\.inner\.{key}: terms say .*; expected "):
        made(inner=inner)


def spread(key: Any, params: Any, size: Any) -> Any:
    return {"wind": params["wind"] + jnp.asarray(size) * jax.random.normal(key)}


def test_events_at_startup_set_settings_for_good():
    event = {"function": "envs.test_managed:spread", "mode": "startup", "params": {"size": 0.1}}
    one, two = (winds(played(made(events=[event]), ACTIONS[:n])[1]) for n in (1, 30))
    np.testing.assert_array_equal(one, two)
    assert len(np.unique(one)) == B


def test_a_curriculum_goes_on_with_an_environments_own_episodes_and_is_logged():
    by_length = {"function": "by_length", "params": {"above": 12, "step": 0.01, "low": -0.05, "high": 0.05}}
    told, state = played(made(curriculum=[by_length | {"param": "wind"}]))
    logged, level = told.info["curriculum/wind"], np.zeros(B)
    for b in range(B):
        began = 0
        for t in range(1, T + 1):
            if told.first[t, b]:
                began = t
            if told.last[t, b]:
                np.testing.assert_allclose(logged[t, b], level[b], atol=1e-6)
                level[b] = np.clip(level[b] + (0.01 if t - began >= 12 else -0.01), -0.05, 0.05)
    assert len(np.unique(level.round(3))) > 1
    linear = {"param": "wind", "function": "linear", "params": {"start": 0.0, "end": 0.1, "steps": 20}}
    metric = {
        "param": "up",
        "name": "far",
        "function": "by_metric",
        "params": {"metric": "termination/far", "above": 1, "step": 1, "low": 0, "high": 9},
    }
    both = made(curriculum=[linear, metric], rewards=[{"function": "near", "weight": "params.up"}], params={"up": 1.0})
    told, state = played(both)
    ends = told.last[:-1]
    np.testing.assert_allclose(winds(state), 0.1)
    up = settings(state)["up"]
    np.testing.assert_array_equal(up, 1 + (told.info["termination/far"][:-1] * ends).sum(axis=0))


def test_a_setting_that_refers_to_another_is_told_what_became_of_it():
    """A range that a curriculum widens; one that was drawn before; once for good, of what was drawn for good."""

    def term(param, function, **params):
        return {"param": param, "function": function, "params": params}

    wider = term("most", "linear", start=0.0, end=0.9, steps=1)
    to_most = term("wind", "uniform", low="params.most", high="params.most")
    state = played(made(curriculum=[wider], randomisation=[to_most], params={"most": 0.01}))[1]
    np.testing.assert_allclose(winds(state), 0.9)
    np.testing.assert_allclose(settings(state)["most"], 0.9)
    first, second = term("z", "uniform", low=0.5, high=1.0), term("wind", "uniform", low="params.z", high="params.z")
    for mode in ("reset", "startup"):
        both = [first | {"mode": mode}, second | {"mode": mode}]
        state = played(made(randomisation=both, params={"z": 0.0}))[1]
        assert len(np.unique(winds(state))) == B
        np.testing.assert_allclose(winds(state), settings(state)["z"])
    late = played(made(randomisation=[second, first], params={"z": 0.25}))[1]
    np.testing.assert_allclose(winds(late), 0.25)
    step = term("wind", "by_length", above=1, step="params.z", low=-1, high=1)
    own = term("z", "uniform", low=0.5, high=1.0) | {"mode": "startup"}
    told, state = played(made(curriculum=[step], randomisation=[own], params={"z": 0.0}))
    ends = told.last[:-1].sum(axis=0)
    np.testing.assert_allclose(winds(state), np.minimum(ends * settings(state)["z"], 1.0), rtol=1e-6)


def as_told(value: Any, ended: Any, metric: str, own: Any) -> Any:
    return ended.told[metric]


def test_a_curriculum_is_told_the_numbers_that_are_logged(monkeypatch):
    world, tallies = point_world.world, ("last", "mean", "max", "sum")

    def telling(config: Any) -> Any:
        return world(config)._replace(
            told=lambda happened, state: dict.fromkeys(tallies, state.x), info={how: how for how in tallies[1:]}
        )

    monkeypatch.setattr(point_world, "world", telling)
    names = (*tallies, "reward/near")
    levels = [f"level{i}" for i in range(len(names))]
    curriculum = [
        {"param": n, "name": n, "function": "envs.test_managed:as_told", "params": {"metric": m, "own": f"params.{n}"}}
        for n, m in zip(levels, names, strict=True)
    ]
    told, _ = played(made(curriculum=curriculum, params=dict.fromkeys(levels, 0.0)))
    ends, others = told.last[:-2], np.array([told.info[name][:-2] for name in names])
    assert ends.sum() > B and (others[:, ends].std(axis=0) > 0).all()  # they are different numbers
    for name, level in zip(names, levels, strict=True):  # the first row of an episode tells nothing
        np.testing.assert_allclose(told.info[f"curriculum/{level}"][2:][ends], told.info[name][:-2][ends], rtol=1e-6)


MANY = {
    "observations": [
        {"function": "place", "noise": {"function": "gaussian", "params": {"std": 0.1}}, "history_length": 2}
    ],
    "commands": [{"function": "uniform", "name": "goal", "params": {"low": -1, "high": 1}, "resample_every": [2, 4]}],
    "events": [{"function": "push", "mode": "interval", "every": [2, 5], "params": {"size": 0.1}}],
    "randomisation": [
        {
            "param": "wind",
            "function": "uniform",
            "params": {"low": 1, "high": 2},
            "mode": "startup",
            "operation": "scale",
        },
        {"param": "wind", "name": "gust", "function": "normal", "params": {"mean": 0, "std": 0.01}, "operation": "add"},
    ],
    "curriculum": [{"param": "wind", "function": "linear", "params": {"start": 0, "end": 0.1, "steps": 30}}],
}


@pytest.mark.parametrize("resets", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_the_contract_holds_with_all_of_them(resets):
    told, state = played(made(inner=POINT | {"resets": resets}, **MANY))
    assert not any(x.dtype == np.float64 for x in jax.tree.leaves((told, state)))
    if resets is None:
        check_rows(told, 12, "either")


def in_words(lists: dict[str, Any]) -> list[str]:
    """Overrides."""
    return [f"env.{k}={yaml.safe_dump(v, default_flow_style=True, width=9999).strip()}" for k, v in lists.items()]


@pytest.mark.slow
def test_it_is_composed_and_trains_and_resumes_exactly(tmp_path, point_options):
    few = [*point_options, *in_words(MANY), "algo.num_envs=8", *SMALL, "shards=4", "checkpoint.every_updates=2"]
    whole = [*few, "total_env_steps=512"]
    train(tmp_path / "one", *whole)
    train(tmp_path / "two", *whole, stop=StopAfter(1))
    train(tmp_path / "two", *whole, resume=Resume(tmp_path / "two" / "0", "all"))
    assert_same(tmp_path / "two" / "0", tmp_path / "one" / "0")
    assert {"env/place", "env/reward/near", "env/termination/far"} <= rows(tmp_path / "one" / "0")[-1].keys()


def test_on_four_devices_it_is_the_same_world():
    noise = {"function": "gaussian", "params": {"std": 1.0, "operation": "abs"}}  # nothing but noise
    env = made(
        **MANY | {"observations": [*MANY["observations"], {"function": "place", "name": "noise", "noise": noise}]}
    )
    envs = batched(env)

    @jax.jit
    def run(keys: Any, actions: Any) -> Any:
        state, _ = envs.reset(keys)
        state, told = jax.lax.scan(envs.step, state, actions)
        return told, state

    told = []
    for num in (1, 4):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:num]), "x")
        along, across = (jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in (("x",), (None, "x")))
        keys = jax.device_put(jax.random.split(jax.random.key(0), 8), along)
        rows, state = run(keys, jax.device_put(np.tile(ACTIONS, (1, 2, 1))[:, :8], across))
        assert len(rows.reward.devices()) == num
        told.append(jax.device_get((rows, state.inner)))
    (one, first), (four, second) = told
    np.testing.assert_array_equal(one.obs["noise"], four.obs["noise"])
    assert len(np.unique(one.obs["noise"])) == one.obs["noise"].size
    for x, y in zip(jax.tree.leaves((one, first)), jax.tree.leaves((four, second)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
