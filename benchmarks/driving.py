"""How drivers by rule and a trained agent fare on layouts that the agent never saw: one row for each driver, over seeds.

The agent is that of a recipe, such as `experiment=driving/ppo`, on 100,000 layouts; a recipe of recorded data has the
episodes of one `driving/ppo`, its teacher, which is a row of its own then. All drive on 10,000 other layouts; a seed plays as many
whole episodes with each driver, on layouts and starts of its own. Intervals are Student's, 95%, over seeds.
"""

import collections
import dataclasses
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from scipy import stats

import rlexp
from benchmarks import recipes
from benchmarks.measure import BENCH, Sample, Say, run, table, verdict, write
from rlexp.envs.base import Env
from rlexp.envs.driving import drivers, world
from rlexp.envs.driving.scenario import KINDS
from rlexp.envs.driving.vehicle import MAX_ACCELERATION, MAX_CURVATURE
from rlexp.loading import Agent
from rlexp.overrides import quoted
from rlexp.sources.rollout import clip_action
from rlexp.storage import rundir
from rlexp.types import TimeStep

# The first seed that each is scored on; settings were chosen on those before it
RECIPES = {"ppo": 5, "ppo_lq": 4, "sac": 1, "sac_lq": 1, "bc": 1, "bc_lq": 1, "apg": 1}
TEACHER = 5  # the seed of a driver by driving/ppo,
RECORDED = {"bc": 1_000, "bc_lq": 1_000}  # of whose episodes so many are the data
EPISODES, OF_A_KIND = 2_048, 512  # of a driver and seed, on all kinds of layout and on each
TIMEOUT_S = 3 * 3600
SECONDS = "seconds.txt"  # in a run's directory, once it has finished
SEEN, UNSEEN = 100_000, 10_000  # layouts
METRICS = ("accuracy", "collision", "off_road", "run_red_light", "progress_ratio", "score")
PUBLISHED = 0.974  # V-Max's accuracy, on recorded traffic (Charraut et al. 2025): an aim, not a peer
ORDER = ("random", "constant_speed", "idm", "agent")  # the worst first
DRIVERS = (*ORDER, "expert")
BY_LAYOUT = ("idm", "agent")  # who is told apart by kind of layout
EXPERT = 0.99  # its accuracy, which says that the layouts can be driven


def measure(out: Path, *, rounds: int, quick: bool, say: Say, recipe: str = "ppo") -> None:
    """Each round is a seed, from the recipe's first on.

    Args:
      recipe: one of RECIPES, with as many steps as it has.
    """
    episodes, of_kind = (16, 16) if quick else (EPISODES, OF_A_KIND)
    teacher = _teacher(quick, say) if recipe in RECORDED else None
    common = _common(recipe, quick)
    if teacher:
        common.append(quoted("algo.source.path", str(_recorded(teacher, 16 if quick else RECORDED[recipe], say))))
    teach = _driven_by(teacher, episodes) if teacher else None
    own = yaml.safe_dump(recipes.settings(f"driving/{recipe}"))
    of_whom = {"fingerprint": recipes.fingerprint(own), "git": rundir.git_state()}  # now: what follows takes hours
    samples: dict[str, list[Sample]] = collections.defaultdict(list)
    apart: dict[str, dict[str, list[Sample]]] = {kind: {name: [] for name in BY_LAYOUT} for kind in KINDS}
    players: dict[str, dict[str, Callable]] = {}  # by kind of layout, or "all"

    seeds = list(range(RECIPES[recipe], RECIPES[recipe] + rounds))
    for seed in seeds:
        where = _place(recipe, seed)
        seconds = _train(where, [*common, f"seed={seed}"], say)
        agent = rlexp.load(where)
        players = players or {"all": _players(agent, episodes, "all")} | {
            kind: _players(agent, of_kind, kind) for kind in KINDS
        }
        policy = agent.algorithm.policy(agent.state, False)
        played = {name: _played(players["all"][name], policy, seed) for name in DRIVERS}
        played["agent"]["seconds"] = seconds
        if teach:
            played["teacher"] = teach(seed)
        for name, sample in played.items():
            samples[name].append(sample)
            say(f"  seed {seed}, {name}: accuracy {sample['accuracy']:.3f}, score {sample['score']:.3f}")
        for kind, name in itertools.product(KINDS, BY_LAYOUT):
            apart[kind][name].append(_played(players[kind][name], policy, seed))
    results = {name: _intervals(found) for name, found in samples.items()}
    by_layout = {kind: {name: _intervals(x) for name, x in found.items()} for kind, found in apart.items()}
    rows = [[name, *(_shown(results[name][key]) for key in METRICS)] for name in samples]
    print(table(f"{rounds} seeds of {episodes} episodes; driving/{recipe}", ["driver", *METRICS], rows))
    rows = [
        [kind, name, *(_shown(by_layout[kind][name][key]) for key in METRICS)]
        for kind, name in itertools.product(KINDS, BY_LAYOUT)
    ]
    print(table(f"the same, {of_kind} episodes on one kind of layout", ["layout", "driver", *METRICS], rows))
    better = {f"{b} - {a}": _better(samples[a], samples[b]) for a, b in itertools.pairwise(ORDER)}
    print("accuracy, seed by seed: " + ", ".join(f"{pair} {_shown(found)}" for pair, found in better.items()))
    holds = sum((found["interval"] or [found["mean"]])[0] > 0 for found in better.values()) / len(better)
    print(verdict("of random < constant speed < idm < agent, in accuracy, share that holds", holds, 1.0, at_least=True))
    print(verdict("the expert's accuracy", results["expert"]["accuracy"]["mean"], EXPERT, at_least=True))
    print(
        verdict(
            "the agent's accuracy beside V-Max's on recorded traffic",
            results["agent"]["accuracy"]["mean"],
            PUBLISHED,
            at_least=True,
        )
    )
    write(
        out / file_of(recipe),
        settings={
            "rlexp": common,
            **of_whom,
            "seeds": seeds,
            "episodes": episodes,
            "episodes_of_a_kind": of_kind,
            "unseen": [SEEN, SEEN + UNSEEN],
        },
        samples=samples | {f"{kind}, {name}": apart[kind][name] for kind, name in itertools.product(KINDS, BY_LAYOUT)},
        results=results | {"by_layout": by_layout, "better": better},
    )


def file_of(recipe: str) -> str:
    """Of its results."""
    return "driving.json" if recipe == "ppo" else f"driving_{recipe}.json"


def _common(recipe: str, quick: bool) -> list[str]:
    few = 20 if recipe in RECORDED else 20_480  # updates, or environment steps
    return [
        f"experiment=driving/{recipe}",
        f"env.layouts={SEEN}",
        "logger=quiet",
        "eval.every_env_steps=null",
        quoted("compilation_cache", str(BENCH / "cache" / "rlexp")),
        *([f"total_env_steps={few}"] if quick else []),
    ]


def _train(where: Path, overrides: list[str], say: Say) -> float:
    """How long it took, in seconds."""
    if (seconds := _trained(where, overrides)) is not None:
        say(f"  {overrides[-1]}: trained before, by this commit and these settings")
        return seconds
    shutil.rmtree(where, ignore_errors=True)
    seconds = run(
        [sys.executable, "-m", "rlexp", *overrides, quoted("hydra.run.dir", str(where))], timeout_s=TIMEOUT_S
    )[1]
    (where / SECONDS).write_text(f"{seconds}\n")
    return seconds


def _teacher(quick: bool, say: Say) -> Path:
    """The run directory of the driver that is learnt from."""
    where = _place("ppo", TEACHER)
    _train(where, [*_common("ppo", quick), f"seed={TEACHER}"], say)
    return where


def _recorded(teacher: Path, episodes: int, say: Say) -> Path:
    """A data set of its greedy episodes, beside it and so as old as it is: one that is there is taken."""
    where = teacher / f"greedy-{episodes}-v0"
    if where.is_dir():
        return where
    say(f"  {episodes} episodes of the teacher's")
    into = [quoted("record.path", str(where)), quoted("hydra.run.dir", str(teacher / f"record-{episodes}"))]
    what = [quoted("resume", str(teacher)), f"record.num_episodes={episodes}", "record.mode=greedy"]
    run([sys.executable, "-m", "rlexp", "run=record", *what, *into], timeout_s=TIMEOUT_S)
    return where


def _driven_by(run_dir: Path, episodes: int) -> Callable[[int], Sample]:
    agent = rlexp.load(run_dir)
    player = _players(agent, episodes, "all")["agent"]
    policy = agent.algorithm.policy(agent.state, False)
    return lambda seed: _played(player, policy, seed)


def _trained(where: Path, overrides: list[str]) -> float | None:
    """How long it took, of a training that another call of this part finished: hours of them may be spread over calls."""
    try:
        seconds = float((where / SECONDS).read_text())
        by = json.loads((where / "environment.json").read_text())["git"]
    except FileNotFoundError:
        return None
    told = yaml.safe_load((where / "overrides.yaml").read_text())
    now = rundir.git_state()
    return seconds if now and not now["dirty"] and (by, told) == (now, overrides) else None


def _place(recipe: str, seed: int) -> Path:
    return BENCH / "runs" / "driving" / recipe / str(seed)


def _played(player: Callable[[Any, jax.Array], tuple], policy: Any, seed: int) -> Sample:
    ended, told = jax.device_get(player(policy, jax.random.key(seed)))
    assert ended.all()
    return {key: float(x) for key, x in told.items()}


def _players(agent: Agent, episodes: int, kind: str) -> dict[str, Callable[[Any, jax.Array], tuple]]:
    """{driver: (an agent's policy, key) -> what was told at the ends of the episodes}, compiled once for all seeds.

    Drivers by rule steer as they mean to; `grip`, which makes an action's largest curvature what tyres hold, is for the others.
    """
    unseen = dataclasses.replace(agent.config.env, layouts=UNSEEN, first_layout=SEEN)
    if kind != "all":
        unseen = dataclasses.replace(unseen, scenarios=[kind])
    held, free = world.make(unseen), world.make(dataclasses.replace(unseen, grip=None))
    act = agent.algorithm.act

    def random(policy: Any, at: Any, row: TimeStep, key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (episodes, 2), minval=-1.0) * jnp.asarray([MAX_ACCELERATION, MAX_CURVATURE])

    def by_rule(rule: Callable) -> Callable:
        return lambda policy, at, row, key: jax.vmap(rule)(at.inner)

    def trained(policy: Any, at: Any, row: TimeStep, key: jax.Array) -> jax.Array:
        return clip_action(held.spec, act(policy, agent.algorithm.carry(episodes), row, key)[0])

    return {
        "random": _player(held, random, episodes),
        "constant_speed": _player(free, by_rule(drivers.constant_speed), episodes),
        "idm": _player(free, by_rule(drivers.idm), episodes),
        "agent": _player(held, trained, episodes),
        "expert": _player(free, by_rule(drivers.expert), episodes),
    }


def _player(env: Env, drive: Callable[..., jax.Array], episodes: int) -> Callable[[Any, jax.Array], tuple]:
    def play(policy: Any, key: jax.Array) -> tuple:
        def step(carry: Any, key: jax.Array) -> Any:
            at, row, ended = carry
            at, row = jax.vmap(env.step)(at, drive(policy, at, row, key))
            told = {name: jnp.where(row.last & ~ended, row.info[name], 0.0) for name in METRICS}
            return (at, row, ended | row.last), told

        at, row = jax.vmap(env.reset)(jax.random.split(key, episodes))
        keys = jax.random.split(jax.random.fold_in(key, 1), env.spec.max_episode_steps)
        (_, _, ended), told = jax.lax.scan(step, (at, row, jnp.zeros((episodes,), bool)), keys)
        return ended, {name: jnp.sum(x) / episodes for name, x in told.items()}

    return jax.jit(play)


def _intervals(found: list[Sample]) -> dict[str, dict[str, Any]]:
    return {key: _interval([x[key] for x in found]) for key in METRICS}


def _better(worse: list[Sample], better: list[Sample]) -> dict[str, Any]:
    """By how much in accuracy, on the same layouts; the interval leaves out 0 where that is shown."""
    return _interval([y["accuracy"] - x["accuracy"] for x, y in zip(worse, better, strict=True)])


def _interval(values: list[float]) -> dict[str, Any]:
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"mean": mean, "interval": None}
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {"mean": mean, "interval": [mean - half, mean + half]}


def _shown(result: dict[str, Any]) -> str:
    if result["interval"] is None:
        return f"{result['mean']:.3f}"
    return f"{result['mean']:.3f} ± {result['mean'] - result['interval'][0]:.3f}"
