"""A population: who goes on as whose copy, with which settings; all of a member is copied, and a killed one does the same again."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import StopAfter, assert_same, build, rows, saved

from rlexp import compose, experiment, loading, session
from rlexp.config import Config as WholeConfig
from rlexp.config import ConfigError, parse
from rlexp.machine.stop import Stop
from rlexp.sources.base import Place
from rlexp.storage import checkpoint, store
from rlexp.sweep import packs
from rlexp.sweep.leavers import leavers
from rlexp.sweep.lineage import GENERATION, PARENT
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job, apart
from rlexp.sweep.parameters import written
from rlexp.sweep.population import Config, make
from rlexp.sweep.space import Choices, Interval
from rlexp.training import changes, program
from rlexp.training.between import Moment
from rlexp.training.layout import layout_of
from rlexp.training.loop import Member, Resume, train_pack
from rlexp.training.saves import Saves

from .searches import Killed

LR, ENTROPY, PAY = "algo.hp.lr", "algo.hp.entropy_coef", "env.params.pay"
SPACE = {LR: Interval(1e-5, 1e-2, True, None, False), ENTROPY: Interval(0.0, 0.05, False, None, False)}


def config(members: int, space: Any = SPACE, **given: Any) -> Config:
    values: dict[str, Any] = {
        "module": "rlexp.sweep.population", "number": 0, "population": members, "interval": None, "warmup": None,
        "selection": "truncation", "fraction": 0.25, "explore": "perturb", "factor": 0.2, "seed": 0,
    }  # fmt: skip
    return Config(**values | given, space=written(space))


def moment(returns: Any, values: Any = None, *, at: int = 1000, before: int = 900) -> Moment:
    """With the same values for all members, by key; where none are given, some."""
    values = values or {LR: 1e-3, ENTROPY: 0.01}
    told = [
        {GENERATION: 0, PARENT: i} | {f"population/{key}": x for key, x in values.items()} for i in range(len(returns))
    ]
    return Moment(before, at, np.asarray(returns, np.float64), told)


# --- who -----------------------------------------------------------------------------------------------------------------


def test_truncation_copies_the_best_over_the_worst():
    returns = [
        5,
        1,
        9,
        3,
        7,
        np.nan,
        8,
        2,
        6,
    ]  # a quarter of eight are two; who has failed is no one's copy, and no one's parent
    found = make(config(9)).exchange(moment(returns))
    assert found is not None
    assert [i for i, parent in enumerate(found.parents) if parent != i] == [1, 7]
    assert {found.parents[1], found.parents[7]} <= {2, 6}
    assert [one[PARENT] for one in found.told] == list(found.parents)
    assert {one[GENERATION] for one in found.told} == {1}
    assert found.words.startswith("generation 1 at 1,000 steps: 2 of 9 members begin as copies: 1 of ")
    seeds = [make(config(9, seed=seed)).exchange(moment(returns)) for seed in range(20)]
    assert {found.parents[1] for found in seeds if found} == {2, 6}


def test_a_tournament_is_of_pairs():
    returns = [5, 1, 9, 3, np.nan]
    seen = set()
    for seed in range(60):
        found = make(config(5, selection="tournament", seed=seed)).exchange(moment(returns))
        assert found is not None and found.parents[2] == 2 and found.parents[4] == 4
        for member, parent in enumerate(found.parents):
            assert parent == member or returns[parent] > returns[member]
        seen.add(found.parents[1])
    assert seen == {0, 2, 3}  # whoever it met is better


@pytest.mark.parametrize("selection", ["truncation", "tournament"])
def test_equals_are_left_alone(selection):
    found = make(config(4, selection=selection)).exchange(moment([2, 2, 2, 2]))
    assert found is not None and list(found.parents) == [0, 1, 2, 3] and not found.words
    assert found.told[3][f"population/{LR}"] == 1e-3


def test_it_is_the_time_for_it():
    one = make(config(4, interval=500, warmup=1500))
    returns = [1, 2, 3, 4]
    assert one.exchange(moment(returns, at=1000, before=900)) is None  # it warms up
    assert one.exchange(moment(returns, at=1900, before=1800)) is None
    assert one.exchange(moment(returns, at=2040, before=1940)) is not None  # over 2000
    assert make(config(4)).exchange(moment(returns)) is not None
    assert make(config(5)).exchange(moment(returns)) is None  # one of the population goes on alone, or a part of it


# --- with which settings -------------------------------------------------------------------------------------------------

SPACES = {
    "log": Interval(1e-5, 1e-2, True, None, False),
    "linear": Interval(0.9, 0.99, False, None, False),
    "step": Interval(0.1, 0.7, False, 0.2, False),
    "whole": Interval(2, 40, True, None, True),
    "choices": Choices(["0.1", "0.3", "0.5"]),
}


@pytest.mark.parametrize("explore", ["perturb", "resample"])
def test_values_never_leave_their_bounds_also_in_float32(explore):
    hook = make(config(40, SPACES, explore=explore, selection="tournament"))
    ends = [{key: float(p.corners()[end]) for key, p in SPACES.items()} for end in (0, -1)]
    told = [one.told[i] for i, one in enumerate(moment(np.arange(40), ends[i % 2]) for i in range(40))]
    at = moment(np.arange(40))._replace(told=told)
    seen: dict[str, set[float]] = {key: set() for key in SPACES}
    for step in range(30):
        found = hook.exchange(at)
        assert found is not None
        for key, parameter in SPACES.items():
            values = [value for member, value in enumerate(found.settings[key]) if found.parents[member] != member]
            seen[key].update(values)
            if isinstance(parameter, Interval):
                assert all(parameter.low <= x <= parameter.high and x == np.float32(x) for x in values)
        at = Moment(at.env_steps, at.env_steps + 100 * (step + 1), at.returns, found.told)
    assert {round(x, 6) for x in seen["step"]} == {0.1, 0.3, 0.5, 0.7}
    assert {round(x, 6) for x in seen["choices"]} == {0.1, 0.3, 0.5}
    assert all(x == round(x) for x in seen["whole"]) and len(seen["whole"]) > 4
    assert max(seen["log"]) > 0.5e-2 and min(seen["log"]) < 2e-5


def test_a_perturbed_value_is_near_its_parents_and_each_parameter_has_a_key_of_its_own():
    pairs = set()
    for seed in range(40):
        found = make(config(4, seed=seed)).exchange(moment([1, 2, 3, 4]))
        assert found is not None
        lr, entropy = found.settings[LR][0], found.settings[ENTROPY][0]
        assert any(lr == pytest.approx(x) for x in (0.8e-3, 1.2e-3))
        assert any(
            entropy == pytest.approx(x, abs=1e-7) for x in (0.0, 0.02)
        )  # a fifth of its width, within its bounds
        pairs.add((lr > 1e-3, entropy > 0.01))
        alone = make(config(4, {LR: SPACE[LR]}, seed=seed)).exchange(moment([1, 2, 3, 4]))
        assert alone is not None and alone.settings[LR] == found.settings[LR]
    assert len(pairs) == 4


# --- on the devices --------------------------------------------------------------------------------------------------------

# 10 updates, an evaluation after every second one. The return is four times what the environment pays, a traced setting.
WORK = (
    "env=probe/action_reward", "algo.num_envs=4", "algo.num_steps=8", "algo.num_epochs=1", "algo.num_minibatches=1",
    "network.hidden=[4]", "eval.num_episodes=2", "eval.every_env_steps=64", "total_env_steps=320",
)  # fmt: skip


def member(number: int, *overrides: str, explore: str = "perturb") -> experiment.Experiment:
    node, _ = compose.compose_node(["logger=quiet", "compilation_cache=null", *WORK, f"seed={number}", *overrides])
    space = {LR: SPACE[LR], PAY: Interval(0.5, 90.0, True, None, False)}
    node["between"] = vars(config(4, space, fraction=0.5, explore=explore))
    node["env"] = {"module": "traced_paying", "params": {"pay": 1.0 + number}}
    node["algo"]["hp"]["lr"] = 1e-3 * (1 + number)
    return experiment.build(node)


def members(*overrides: str, explore: str = "perturb") -> list[experiment.Experiment]:
    return [member(number, *overrides, explore=explore) for number in range(4)]


@pytest.fixture(scope="module")
def traced(paying) -> program.Traced:
    """Compiled once for all tests, on one device."""
    one = members("hardware.pack_devices=1")
    made = program.trace(one, layout_of(one))
    compiled = made.compile()
    return made._replace(compile=lambda: compiled)


def leaves(run: Any) -> dict[str, np.ndarray]:
    """By path; of keys their data."""

    def data(x: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return {jax.tree_util.keystr(path): data(x) for path, x in jax.tree_util.tree_leaves_with_path(run)}


@pytest.mark.parametrize("devices", [1, 4])
def test_a_copy_has_all_that_its_parent_has_but_the_keys(devices, traced):
    if devices > 1:
        one = members(f"hardware.pack_devices={devices}")
        shardings = program.trace(one, layout_of(one)).abstract_run
        run = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), traced.compile().init(), shardings)
        traced = traced._replace(abstract_run=shardings)
    else:
        run = traced.compile().init()
        run, _ = traced.compile().chunk(run, 3)
    assert len(jax.tree.leaves(run)[0].sharding.device_set) == devices
    before, copy = leaves(run), changes._copied(traced)
    for _ in range(2):
        before = leaves(run)
        lrs = np.asarray([0.1, 0.2, 0.3, 0.4], np.float32)
        run = copy(run, np.asarray([2, 1, 2, 0], np.int32), {LR: lrs})
    assert copy._cache_size() == 1
    after = leaves(run)
    for path, x in after.items():
        wanted = lrs if path.endswith("hp['lr']") else before[path] if "key" in path else before[path][[2, 1, 2, 0]]
        assert x.tobytes() == wanted.tobytes(), path
    assert sum("key" in path for path in after) >= 2 and any("opt_state" in path for path in after)


def trained(
    directory: Path,
    traced: program.Traced | None,
    *,
    stop: Stop | None = None,
    resume: bool = False,
    devices: int = 1,
    explore: str = "perturb",
    goal: float | None = None,
) -> list[Any]:
    made = members(f"hardware.pack_devices={devices}", f"stop_at.return={goal or 'null'}", explore=explore)
    found = [Member(one, directory / str(i), f"{i:08d}") for i, one in enumerate(made)]
    for one in found:
        one.dir.mkdir(parents=True, exist_ok=True)
    home = directory / "pack"
    going = Resume(home, "all") if resume else None
    return train_pack(found, stop=stop or Stop(), directory=home, traced=traced, resume=going)


@pytest.fixture(scope="module")
def undisturbed(traced, tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    assert [s["status"] for s in trained(directory, traced)] == ["finished"] * 4
    return directory


def test_lineage_and_settings_are_in_each_members_lines(undisturbed):
    lines = [rows(undisturbed / str(i)) for i in range(4)]
    lines = [[line for line in own if line["env_steps"]] for own in lines]
    copies = 0
    for i, own in enumerate(lines):
        assert [line[GENERATION] for line in own] == [0, 1, 2, 3, 4]
        assert own[0][PARENT] == i and own[0][f"population/{LR}"] == np.float32(1e-3 * (1 + i))
        for before, line in zip(range(5), own[1:], strict=False):
            parent, lr = int(line[PARENT]), line[f"population/{LR}"]
            parents = lines[parent][before]
            assert parent == i or parents["eval/return_mean"] > own[before]["eval/return_mean"]
            ratio = lr / parents[f"population/{LR}"]
            assert ratio == 1 if parent == i else any(ratio == pytest.approx(x) for x in (0.8, 1.2))
            assert line["eval/return_mean"] == pytest.approx(4 * line[f"population/{PAY}"])
            copies += parent != i
        # What is told is what the program has: also at the end, of what is gone on with.
        (kept,) = [x for path, x in saved(undisturbed / str(i))[1].items() if "hp" in path and "'lr'" in path]
        assert kept == np.float32(own[-1][f"population/{LR}"])
    assert copies >= 2


def test_a_member_is_opened_with_the_settings_that_it_has_now(undisturbed):
    i = max(range(4), key=lambda i: rows(undisturbed / str(i))[-1][f"population/{PAY}"])
    last = rows(undisturbed / str(i))[-1]
    assert last[f"population/{PAY}"] != 1.0 + i
    agent = loading.load(undisturbed / str(i), node=member(i, "hardware.pack_devices=1").node)
    assert agent.experiment.settings.env["pay"] == last[f"population/{PAY}"]
    assert float(agent.last_evaluation().episode_return.mean()) == last["eval/return_mean"]


def test_what_is_asked_for_anew_counts_more_than_what_a_member_has_now():
    own = {"algo": {"hp": {"lr": 1e-3, "gamma": 0.9}}, "seed": 3}
    told = {GENERATION: 2, f"population/{LR}": 0.5}
    assert loading.as_it_is_now(own, own, told)["algo"]["hp"] == {"lr": 0.5, "gamma": 0.9}
    asked = {"algo": {"hp": {"lr": 2e-3, "gamma": 0.9}}}
    assert loading.as_it_is_now(asked, own, told) == asked
    # In another environment, or in this one within another.
    pays = {f"population/{PAY}": 2.0}
    for node in ({"env": {"name": "other"}}, {"env": {"params": {}}}, {"env": {"inner": {"params": {"pay": 1.0}}}}):
        assert loading.as_it_is_now(node, {"env": {"params": {"pay": 1.0}}}, pays) == node


def test_a_killed_population_makes_the_same_choices_again(undisturbed, traced, tmp_path):
    assert [s["status"] for s in trained(tmp_path, traced, stop=StopAfter(3))] == ["stopped"] * 4
    meta = checkpoint.latest_meta(store.checkpoints(tmp_path / "pack"))
    of_one = checkpoint.latest_meta(store.checkpoints(tmp_path / "2"))  # which points to its pack
    assert meta is not None and of_one is not None and of_one["told"] == [meta["told"][2]]
    trained(tmp_path, traced, stop=StopAfter(1), resume=True)
    assert [s["status"] for s in trained(tmp_path, traced, resume=True)] == ["finished"] * 4
    for i in range(4):
        assert_same(tmp_path / str(i), undisturbed / str(i))


def test_a_killed_bandit_makes_the_same_choices_again(traced, tmp_path):
    """It goes by all exchanges before, which no line has."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    trained(whole, traced, explore="pb2")
    trained(killed, traced, explore="pb2", stop=StopAfter(3))
    meta = checkpoint.latest_meta(store.checkpoints(killed / "pack"))
    of_one = checkpoint.latest_meta(store.checkpoints(killed / "2"))
    assert meta is not None and of_one is not None and of_one["remembered"] is None
    assert [row[0] for row in meta["remembered"]["stretches"]] == [0] * 4 + [1] * 4 + [2] * 4
    assert [s["status"] for s in trained(killed, traced, explore="pb2", resume=True)] == ["finished"] * 4
    for i in range(4):
        assert_same(killed / str(i), whole / str(i))
    rates = {line[f"population/{LR}"] for i in range(4) for line in rows(whole / str(i))[-1:]}
    assert rates - {np.float32(1e-3 * (1 + i)) for i in range(4)}
    alone = checkpoint.latest_meta(store.checkpoints(whole / "2"))  # nothing is exchanged where one goes on alone
    assert alone is not None and alone["remembered"] is None


def test_who_has_reached_its_goal_leaves_as_it_was_evaluated(traced, tmp_path):
    """Without the exchange members 0 and 1 would go on as copies of 2 and 3; and nobody is a copy of who left."""
    ended = trained(tmp_path, traced, goal=7.9)
    assert [(s["env_steps"], s["objective"]) for s in ended[1:]] == [(64, pytest.approx(4.0 * i)) for i in (2, 3, 4)]
    for i in (1, 2, 3):
        (kept,) = [x for path, x in saved(tmp_path / str(i))[1].items() if "hp" in path and "'lr'" in path]
        assert kept == np.float32(1e-3 * (1 + i)) == np.float32(rows(tmp_path / str(i))[-1][f"population/{LR}"])
    assert [s["status"] for s in ended] == ["finished"] * 4 and ended[0]["env_steps"] == 320
    assert {line[PARENT] for line in rows(tmp_path / "0") if line["env_steps"]} == {0}


def test_a_killed_population_comes_by_it_again_that_a_member_left(traced, tmp_path, monkeypatch):
    """It has a checkpoint that the population has not: but nobody has gone on with it alone."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    trained(whole, traced, goal=15.9)
    with monkeypatch.context() as patch:
        patch.setattr(Saves, "save", kill)
        with pytest.raises(Killed):
            trained(cut, traced, goal=15.9)
    assert checkpoint.own_meta(store.checkpoints(cut / "3")) is not None
    made = members("stop_at.return=15.9")
    pack = [Job(i, (), one.node, one.config, one.modules, cut / str(i)) for i, one in enumerate(made)]
    assert leavers(pack, made, cut / "pack") == {} != leavers(pack, made, cut / "another")
    trained(cut, traced, goal=15.9)
    for i in range(4):
        assert_same(cut / str(i), whole / str(i))


def kill(*_: Any) -> None:
    raise Killed


@pytest.mark.slow
def test_four_devices_make_the_same_choices(undisturbed, paying, tmp_path):
    assert [s["status"] for s in trained(tmp_path, None, devices=4)] == ["finished"] * 4
    for i in range(4):  # the programs round otherwise, with one member on a device or four
        lines = zip(rows(tmp_path / str(i)), rows(undisturbed / str(i)), strict=True)
        for ours, theirs in lines:
            exact = [name for name in theirs if name.startswith(("population/", "eval/"))]
            assert [ours[name] for name in exact] == [theirs[name] for name in exact]
            assert ours.get("loss/lr") == pytest.approx(theirs.get("loss/lr"))


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return build(*WORK)


@pytest.mark.parametrize(
    ("interval", "every", "told"),
    [
        (None, 640, r"eval\.every_env_steps: 640 is not allowed; expected less than total_env_steps 320"),
        (16, 16, r"sweeper\.interval: 16 is not allowed; expected at least 32"),
        (None, 16, r"eval\.every_env_steps: 16 is not allowed; expected at least 32"),
        (100, 64, r"sweeper\.interval: 100 .*multiple of eval\.every_env_steps 64.*the nearest is 128"),
        (32, 64, r"sweeper\.interval: 32 .*multiple of eval\.every_env_steps 64.*the nearest is 64"),
        (128_000, 64, r"sweeper\.interval: 128000 is not allowed; expected less than total_env_steps 320"),
        (300, 300, r"sweeper\.interval: 300 .*multiple of it above 0 and at most 288, where the last update begins"),
        (None, None, r"eval\.every_env_steps: null is not allowed with sweeper=pbt"),
    ],
)
def test_an_interval_that_cannot_be_is_told(interval, every, told, small):
    evaluation = dataclasses.replace(small.config.eval, every_env_steps=every)
    one = small._replace(config=dataclasses.replace(small.config, eval=evaluation))
    hook = make(config(4, interval=interval))
    with pytest.raises(ConfigError, match=told):
        hook.check(one, 4)
    hook.check(one, 1)  # it is gone on with alone


@pytest.mark.parametrize(
    ("interval", "warmup", "last"), [(64, 257, 256), (128, 257, 256), (192, 256, 192), (100, 300, 224), (64, 320, 256)]
)
def test_a_warmup_after_the_last_exchange_is_told(interval, warmup, last, small):
    evaluation = dataclasses.replace(small.config.eval, every_env_steps=math.gcd(interval, 100))
    one = small._replace(config=dataclasses.replace(small.config, eval=evaluation))
    words = rf"sweeper\.warmup: {warmup} is not allowed; expected at most {last}, the last exchange before total_env_steps 320"
    with pytest.raises(ConfigError, match=words):
        make(config(4, interval=interval, warmup=warmup)).check(one, 4)
    make(config(4, interval=interval, warmup=last)).check(one, 4)
    ends = [one.env_steps(update) for update in range(one.total_updates)]
    due = [now for before, now in itertools.pairwise(ends) if now // interval > before // interval]
    assert due[-1] == last


def test_a_memory_of_the_host_is_told(small):
    source = small.source_of(small.settings)._replace(places=Place.HOST)
    with pytest.raises(ConfigError, match=r"algo\.source: it keeps data in the host's memory"):
        make(config(4)).check(small._replace(source_of=lambda settings: source), 4)


def test_populations_of_a_sweep_share_their_programs(tmp_path):
    programs, made = packs.Programs(), []
    for number in range(2):
        nodes = [build(*WORK, f"seed={4 * number + i}").node for i in range(2)]
        nodes = [node | {"between": vars(config(2, number=number))} for node in nodes]
        built = [experiment.build(node) for node in nodes]
        pack = [Job(i, (), one.node, one.config, one.modules, tmp_path / str(i)) for i, one in enumerate(built)]
        made.append(programs.of(pack, built))
    assert made[0].abstract_run is made[1].abstract_run


def test_a_population_is_not_taken_apart(small, tmp_path, monkeypatch):
    """Neither over several hosts, nor where memory is short."""
    node = small.node | {"between": vars(config(4))}
    built = experiment.build(node)
    pack = [Job(i, (f"seed={i}",), node, built.config, built.modules, tmp_path / str(i)) for i in range(4)]
    with pytest.raises(ConfigError, match=r"hardware: over 2 hosts each job trains alone"):
        apart(pack, 2, "auto")
    manifest = Manifest(tmp_path)
    for job in pack:
        manifest.add(job.number, job.overrides)

    def small_memory(members, **how):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(packs, "train_pack", small_memory)
    packs.train(pack, tmp_path, manifest, stop=Stop(), programs=packs.Programs())
    assert [job.status for job in manifest.jobs()] == ["failed"] * 4
    assert all("out of memory" in str(job.error) for job in manifest.jobs())


def test_it_is_told_before_anything_is_made():
    """By the process that trains, and by the one that only hands over."""
    node, _ = compose.compose_node(["logger=quiet", "compilation_cache=null", *WORK])
    node["between"] = vars(config(4, interval=100))
    read, modules = parse(node, WholeConfig)
    with pytest.raises(ConfigError, match=r"sweeper\.interval: 100 is not allowed; expected a multiple"):
        session.prepare(node, read, modules, None, num_members=4)
    session.prepare(node, read, modules, None)
