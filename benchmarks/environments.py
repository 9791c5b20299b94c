"""`python -m benchmarks environments [OPTION ...]`: makes the table of docs/environments.md.

Of each environment that is named, such as navix/empty_5x5, or of all: what it shows and takes, its limit; what a step of
random actions costs with 64 environments side by side, resets included; the mean return of random actions; and that of a
short run of PPO with its default settings, for which some are too hard. Numbers are kept in
benchmarks/results/environments.json, so that one environment can be measured without the others, and with them how many
episodes of random actions were terminated and truncated. What an environment can end by (`ends_by`) is written there by hand, and
held against these episodes; `ppo_entropy_coef` is there where PPO had another bonus for entropy than its default is now. `--specs`
measures nothing, `--untrained` no PPO, `--trained` nothing else; `--table` writes the tables from what is kept.

`--ids` is all that suites have beside: of each id without a file, such as navix:Navix-FourRooms-v0, the same without PPO, or in
which words it is refused, in environments_ids.json and a table of its own.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from benchmarks.measure import ROOT, Failed, Say, in_page, machine, run
from rlexp.config import ConfigError, load_module, parse
from rlexp.envs.base import Env, HostEnv, action_struct, batched, in_words
from rlexp.types import Continuous, Discrete, EnvSpec

CONF, DOCS = ROOT / "conf" / "env", ROOT / "docs" / "environments.md"
KEPT = ROOT / "benchmarks" / "results" / "environments.json"
OF_IDS = KEPT.with_name("environments_ids.json")
SUITES = ("brax", "craftax", "jumanji", "navix", "pgx", "playground", "xminigrid")
HEAD_OF_IDS = ["suite and id", "observation", "actions", "limit", "CPU µs a step", "random"]
HEAD = ["option", "observation", "actions", "limit", "ends by", "CPU µs a step", "random", "PPO"]
NUM_ENVS, NUM_STEPS, TRAIN_STEPS = 64, 1000, 100_000
TIMEOUT_S = 1800.0  # of a training; programs of bodies compile for minutes
FEW_STEPS = 200  # of ids of bodies and of pictures of Craftax: a step takes a millisecond and more
MOST_STEPS = 10_000  # of one random episode: those of Craftax end long before their limit of 100,000


def options() -> list[str]:
    """All files of conf/env that name an environment."""
    return sorted(str(p.relative_to(CONF).with_suffix("")) for p in CONF.rglob("*.yaml") if p.parent != CONF)


def ids() -> list[str]:
    """suite:id of all that the suites have and no file of conf/env names. Raises ConfigError: a suite is not installed."""
    named = {(node["module"], str(node.get("id"))) for node in map(_node, options())}
    modules = {suite: f"rlexp.envs.{suite}" for suite in SUITES}
    every = [(suite, name) for suite in SUITES for name in load_module(modules[suite], "env").ids()]
    return sorted(f"{suite}:{name}" for suite, name in every if (modules[suite], name) not in named)


def main(arguments: list[str], say: Say) -> int:
    """The exit code: 1 where one of them could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks environments", description=__doc__)
    parser.add_argument("options", nargs="*", metavar="OPTION")
    parser.add_argument("--ids", action="store_true", help="what has no file")
    parser.add_argument("--specs", action="store_true", help="no measurements")
    parser.add_argument("--untrained", action="store_true", help="random actions only")
    parser.add_argument("--trained", action="store_true", help="PPO only")
    parser.add_argument(
        "--table", action="store_true", help="nothing is built: the tables are written from what is kept"
    )
    chosen = parser.parse_args(arguments)
    no_file = chosen.ids or any(":" in option for option in chosen.options)
    every = ids() if no_file else options()
    if unknown := set(chosen.options) - set(every):
        parser.error(f"no such environment: {min(unknown)}")
    path, failed = OF_IDS if no_file else KEPT, False
    for option in [] if chosen.table else chosen.options or every:
        say(option)
        row = {key: x for key, x in _kept(path).get(option, {}).items() if key != "refused"}
        try:
            for part in _parts(option, chosen):
                row = ({} if no_file else {"ends_by": "either"}) | row | part
                check_ends(**row)
        except (ConfigError, Failed) as error:
            if no_file and isinstance(error, ConfigError):
                row = {"refused": str(error)}
            else:
                failed = True
                print(f"{option}: not measured: {error}", file=sys.stderr)
        if row:  # another process may have kept rows meanwhile
            kept = dict(sorted((_kept(path) | {option: row}).items()))
            path.write_text(json.dumps(kept, indent=1) + "\n")
    DOCS.write_text(with_tables(DOCS.read_text(), _kept(KEPT), _kept(OF_IDS)))
    return int(failed)


def _kept(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def with_tables(text: str, kept: dict[str, Any], of_ids: dict[str, Any]) -> str:
    """The page with the rows of what is kept in place of those that it had."""
    text = in_page(text, HEAD, [cells(option, kept[option]) for option in sorted(kept)])
    return in_page(text, HEAD_OF_IDS, [_cells_of_id(name, of_ids[name]) for name in sorted(of_ids)])


def cells(option: str, row: dict[str, Any]) -> list[str]:
    told = [f"`{option}`", row["observation"], row["actions"], str(row["limit"]), row["ends_by"]]
    mark = "†" if row.get("ppo_entropy_coef") else ""
    return [*told, _number(row, "us_a_step"), _number(row, "random"), _number(row, "ppo") + mark]


def _cells_of_id(name: str, row: dict[str, Any]) -> list[str]:
    label = "`{}` `{}`".format(*name.split(":"))
    if "refused" in row:
        return [label, f"refused: {row['refused']}", "", "", "", ""]
    told = [row["observation"], row["actions"], str(row["limit"])]
    return [label, *told, _number(row, "us_a_step"), _number(row, "random")]


def _number(row: dict[str, Any], name: str) -> str:
    return "" if row.get(name) is None else f"{row[name]:.3g}"


def observed(spec: EnvSpec) -> str:
    """[84, 84, 4], or of a dict: board [4, 4, 31], action_mask [4]."""
    leaves = jax.tree_util.tree_leaves_with_path(spec.observation)
    told = [f"{jax.tree_util.keystr(path, simple=True, separator='.')} {list(x.shape)}".strip() for path, x in leaves]
    return ", ".join(told)


def _parts(option: str, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is found, one part after the other, so that what comes before a failure is kept. Raises ConfigError, Failed."""
    env = made(option)
    actions = in_words(env.spec)[0].partition(",")[0]
    yield {"observation": observed(env.spec), "actions": actions, "limit": env.spec.max_episode_steps}
    if not (chosen.specs or chosen.trained):
        num_steps = min(max(env.spec.max_episode_steps, NUM_STEPS), MOST_STEPS)
        dear = option.startswith(("brax:", "craftax:", "playground:"))
        yield _random(env, num_steps=min(num_steps, FEW_STEPS) if dear else num_steps) | {"measured": _now()}
    if not (chosen.specs or chosen.untrained or ":" in option):
        yield {"ppo": _trained(option), "ppo_measured": _now(), "ppo_entropy_coef": None}


def _now() -> dict[str, Any]:
    found = machine()
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "cpu": found["cpu"], "cores": found["cores"]}


def check_ends(*, ends_by: str = "either", random_episodes: Mapping[str, int] | None = None, **_: Any) -> None:
    """Raises Failed where random actions ended by what is said not to happen."""
    for how, never in (("terminated", "truncation"), ("truncated", "termination")):
        if ends_by == never and (number := (random_episodes or {}).get(how, 0)):
            raise Failed(f"{number} episodes of random actions were {how}, and its ends_by is {never!r}")


def made(option: str, **changed: Any) -> Any:
    """The environment of a file of conf/env, with settings `changed`. Raises ConfigError."""
    return _made_of(_node(option) | changed)


def _node(option: str) -> dict[str, Any]:
    file, _, name = option.partition(":")
    node = yaml.safe_load((CONF / f"{file}.yaml").read_text())
    node.pop("defaults", None)
    return node | ({"id": name} if name else {})


def _made_of(node: Mapping[str, Any]) -> Any:
    module = load_module(node["module"], "env")
    return module.make(parse(node, module.Config, "env")[0])


def random_return(node: Mapping[str, Any]) -> float:
    """The mean over 64 episodes of random actions, or 4,096 where they are short. Raises ConfigError, Failed.

    Args:
      node: `env` of a composed configuration.
    """
    env = _made_of(node)
    limit = env.spec.max_episode_steps
    found = _random(env, num_envs=4096 if limit <= 200 else NUM_ENVS, num_steps=min(limit, MOST_STEPS))
    if "random" not in found:
        raise Failed("some episodes did not end")
    return found["random"]


def _random(env: Env | HostEnv, *, num_envs: int = NUM_ENVS, num_steps: int) -> dict[str, Any]:
    sizes = {"num_envs": num_envs, "num_steps": num_steps}
    play = random_play(env, **sizes) if isinstance(env, Env) else _on_host(env, **sizes)
    began = time.process_time()  # of the processor, which a busy machine does not change
    total, over, ends = jax.device_get(jax.block_until_ready(play(jax.random.key(0))))
    took = time.process_time() - began
    episodes = dict(zip(("terminated", "truncated"), map(int, ends), strict=True))
    found = {"us_a_step": took / (num_steps * num_envs) * 1e6, "random_episodes": episodes}
    return found | ({"random": float(total[over].mean())} if over.mean() > 0.9 else {})


def draws(env: Env, num_envs: int) -> Callable[[Any, Any], Any]:
    """(key, observations [B, ...]) -> actions [B, ...], drawn uniformly among those that are allowed."""
    spec = env.spec.action

    def draw(key: Any, obs: Any) -> Any:
        if isinstance(spec, Continuous):
            return jax.random.uniform(key, (num_envs, *spec.shape), jnp.float32, spec.low, spec.high)
        sizes = (spec.num_actions,) if isinstance(spec, Discrete) else spec.num_actions
        mask = obs.get("action_mask") if isinstance(obs, dict) else None
        logits = jnp.zeros((num_envs, sum(sizes))) if mask is None else jnp.where(mask, 0.0, -1e9)
        chosen, begin = [], 0
        for i, size in enumerate(sizes):
            of_choice = logits[:, begin : begin + size]
            chosen.append(jax.random.categorical(jax.random.fold_in(key, i), of_choice).astype(jnp.int32))
            begin += size
        return chosen[0] if isinstance(spec, Discrete) else jnp.stack(chosen, axis=1)

    return draw


def random_play(env: Env, *, num_envs: int, num_steps: int) -> Callable[[Any], tuple[Any, Any, Any]]:
    """A compiled program: key -> first episodes' returns [B], whether these ended [B], how many terminated, truncated [2]."""
    envs, draw = batched(env), draws(env, num_envs)

    def play(key: Any) -> Any:
        def step(carry: Any, key: Any) -> Any:
            state, row, total, over, ends = carry
            waits = row.last  # then this is no episode's last row, or the same one again
            state, row = envs.step(state, draw(key, row.obs))
            terminated = row.discount == 0.0
            ends += jnp.stack([jnp.sum(row.last & ~waits & how) for how in (terminated, ~terminated)])
            return (state, row, total + jnp.where(over, 0.0, row.reward), over | row.last, ends), None

        state, row = envs.reset(jax.random.split(key, num_envs))
        start = (state, row, jnp.zeros((num_envs,)), jnp.zeros((num_envs,), bool), jnp.zeros((2,), jnp.int32))
        (_, row, total, over, ends), _ = jax.lax.scan(step, start, jax.random.split(key, num_steps))
        return (total, over, ends), row.obs

    program = jax.jit(play).lower(jax.random.key(0)).compile()  # what is seen is not asked for, but has to be computed
    return lambda key: program(key)[0]


def _on_host(env: HostEnv, *, num_envs: int, num_steps: int) -> Callable[[Any], tuple[Any, Any, Any]]:
    """The same, which opens environments and closes them."""
    spec = env.spec.action
    assert isinstance(spec, Discrete | Continuous)

    def play(key: Any) -> Any:
        rng = np.random.default_rng(jax.random.key_data(key).tolist())
        opened = env.open(num_envs)
        try:
            row = opened.reset(rng.integers(2**32, size=num_envs, dtype=np.uint32))
            total, over, ends = np.zeros(num_envs), np.zeros(num_envs, bool), np.zeros(2, int)
            for _ in range(num_steps):
                waits, shape = row.last, (num_envs, *action_struct(env.spec).shape)
                if isinstance(spec, Discrete):
                    actions = rng.integers(spec.num_actions, size=shape, dtype=np.int32)
                else:
                    actions = rng.uniform(spec.low, spec.high, shape).astype(np.float32)
                row = opened.step(actions)
                terminated = np.asarray(row.discount) == 0.0
                ends += [np.sum(row.last & ~waits & how) for how in (terminated, ~terminated)]
                total, over = total + np.where(over, 0.0, row.reward), over | row.last
            return total, over, ends
        finally:
            opened.close()

    return play


def _trained(option: str) -> float:
    """The mean return of PPO's last policy. Raises Failed."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"env={option}", f"total_env_steps={TRAIN_STEPS}", "eval.every_env_steps=null", "checkpoint=off"]
        words += ["logger=quiet", f"hydra.run.dir={folder}/run"]
        if _node(option).get("resets") == "share":  # of few environments that is a world for each at every step
            words.append("env.resets=auto")
        run([sys.executable, "-m", "rlexp", *words], timeout_s=TIMEOUT_S)
        return json.loads((Path(folder) / "run" / "summary.json").read_text())["objective"]
