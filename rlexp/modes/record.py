"""`run=record`: plays whole episodes with a trained policy, and writes them as a data set of Minari's."""

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from rlexp import hints
from rlexp.algos.base import Algorithm
from rlexp.envs.base import Env, HostEnv, batched
from rlexp.experiment import Experiment
from rlexp.loading import Agent, load
from rlexp.recorded import spaces
from rlexp.recorded.writing import Played, check_kinds, check_place, id_of, write
from rlexp.sources.rollout import clip_action
from rlexp.storage import rundir
from rlexp.training.members import Member
from rlexp.types import Continuous, EnvSpec, Key, PyTree, TimeStep

_STREAM = 3  # of a seed; rlexp.training.parts has the others
_NUM_STEPS = 64  # of compiled environments in one call
_MOST_BYTES = 2**28  # of the observations of episodes that are played side by side
_MOST_ENVS = 32


def check(experiment: Experiment) -> None:
    """Raises ConfigError where the data set cannot be made."""
    config = experiment.config
    check_place(config.record.path)
    check_kinds(experiment.env_of(experiment.settings), config.record.format)


def record_run(member: Member, resume_dir: Any) -> float:
    """Writes the data set, and a run directory as evaluation does; gives the mean return."""
    experiment, config = member.experiment, member.experiment.config
    began, place = time.perf_counter(), check_place(config.record.path)
    agent = load(resume_dir, node=experiment.node)
    sampled = config.record.mode == "sampled"
    policy = agent.algorithm.policy(agent.state, sampled)
    key = jax.random.fold_in(jax.random.key(config.seed), _STREAM)
    returns = write(
        place,
        played(agent.env, agent.algorithm, policy, key, num_episodes=config.record.num_episodes),
        **spaces.of(agent.env),
        env_spec=_gymnasium_spec(experiment.modules["env"], config.env),
        data_format=config.record.format,
        about=_about(member, agent, resume_dir),
    )
    mean = float(np.mean(returns))
    summary = rundir.summary(objective=mean, env_steps=agent.env_steps, resumed_from=agent.env_steps)
    rundir.write_json(member.dir / "summary.json", summary)
    print(
        f"{len(returns)} {config.record.mode} episodes, return {mean:,.2f} ± {np.std(returns):,.2f}, in "
        f"{time.perf_counter() - began:,.1f} s: {place}\n"
        f"learn from it: {hints.learn_from(str(place), rundir.read_overrides(member.dir) or ())}\n"
        f"Minari's own reader has it as {id_of(place)!r} under MINARI_DATASETS_PATH={str(place).removesuffix(id_of(place))}",
        flush=True,
    )
    return mean


def _about(member: Member, agent: Agent, resume_dir: Any) -> dict[str, Any]:
    config = member.experiment.config
    return {
        "algorithm_name": member.experiment.modules["algo"].rpartition(".")[2],
        "rlexp_env": member.experiment.spec.name,
        "rlexp_env_config": agent.experiment.node["env"],  # a member of a population may have other numbers now
        "rlexp_seed": config.seed,
        "rlexp_mode": config.record.mode,
        "rlexp_run": rundir.id_of(resume_dir),
        "rlexp_env_steps": agent.env_steps,
    }


def _gymnasium_spec(module: str, config: Any) -> Any:
    """Where the environment is one of Gymnasium's: from it Minari's `recover_environment` makes it again, as it was made here. None
    where it cannot be written down, since a class and not its name was registered."""
    if module != "rlexp.envs.gymnasium":
        return None
    import gymnasium

    spec = copy.deepcopy(gymnasium.spec(config.id.rpartition(":")[2]))  # what stands before it was imported to make it
    spec.kwargs |= config.kwargs
    spec.max_episode_steps = config.max_episode_steps or spec.max_episode_steps
    try:
        spec.to_json()
    except (TypeError, ValueError):
        return None
    return spec


# --- playing -----------------------------------------------------------------------------------------------------------


def played(
    env: Env | HostEnv, algorithm: Algorithm, policy: PyTree, key: Key, *, num_episodes: int
) -> Iterator[list[Played]]:
    """Episodes in lots. Each begins with a seed of its own, which is noted: as many short ones as long ones."""
    reset_key, act_key = jax.random.split(key)
    seeds = np.asarray(jax.random.bits(reset_key, (num_episodes,), np.uint32))
    num_envs = _side_by_side(env.spec, num_episodes)
    begin, advance, close = (
        _on_host(env, algorithm, policy, num_envs)
        if isinstance(env, HostEnv)
        else _compiled(env, algorithm, policy, num_envs)
    )
    unit = _own_units(env)
    try:
        for lot, at in enumerate(range(0, num_episodes, num_envs)):
            chosen = seeds[at : at + num_envs]
            filled = np.concatenate([chosen, np.zeros((num_envs - len(chosen),), np.uint32)])
            yield _episodes(begin(filled), advance, jax.random.fold_in(act_key, lot), chosen, unit)
    finally:
        close()


def _side_by_side(spec: EnvSpec, num_episodes: int) -> int:
    each = sum(np.prod(x.shape, dtype=np.int64) * x.dtype.itemsize for x in jax.tree.leaves(spec.observation))
    fitting = _MOST_BYTES // max(1, int(each) * spec.max_episode_steps)
    return max(1, min(_MOST_ENVS, fitting, num_episodes))


def _episodes(now: Any, advance: Callable, key: Key, seeds: np.ndarray, unit: Callable) -> list[Played]:
    """Of one lot, whose state is `now`: (…, TimeStep [B])."""
    parts: list[Any] = []
    over = np.zeros((len(seeds),), bool)
    while not over.all():
        now, rows = advance(now, key, len(parts))
        parts.append(rows)
        over |= rows[2].last[:, : len(seeds)].any(axis=0)
    final: Any = jax.device_get(now[-1])
    obs = jax.tree.map(lambda *x: np.concatenate(x), *(p[0] for p in parts), jax.tree.map(lambda x: x[None], final.obs))
    action = np.concatenate([p[1] for p in parts])
    after: Any = jax.tree.map(lambda *x: np.concatenate(x), *(p[2]._replace(obs=(), info=()) for p in parts))
    out = []
    for b, seed in enumerate(seeds):
        length = int(np.argmax(after.last[:, b])) + 1
        rows = jax.tree.map(lambda x, b=b, length=length: x[: length + 1, b], obs)
        out.append(
            Played(
                int(seed),
                rows,
                unit(action[:length, b]),
                after.reward[:length, b],
                bool(after.discount[length - 1, b] == 0),
            )
        )
    return out


def _compiled(env: Env, algorithm: Algorithm, policy: PyTree, num_envs: int) -> tuple[Callable, Callable, Callable]:
    envs = batched(env)

    def begin(seeds: Any) -> Any:
        state, timestep = envs.reset(jax.vmap(jax.random.key)(seeds))
        return state, algorithm.carry(num_envs), timestep

    def step(now: Any, key: Key) -> tuple[Any, Any]:
        state, carry, timestep = now
        action, carry, _ = algorithm.act(policy, carry, timestep, key)
        action = clip_action(env.spec, action)
        state, after = envs.step(state, action)
        return (state, carry, after), (timestep.obs, action, after)

    def advance(now: Any, key: Key, call: Any) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.fold_in(key, call), _NUM_STEPS)
        return jax.lax.scan(step, now, keys)

    started, compiled = jax.jit(begin), jax.jit(advance)

    def fetched(now: Any, key: Key, call: int) -> tuple[Any, Any]:
        now, rows = compiled(now, key, call)
        return now, jax.device_get(rows)

    return started, fetched, lambda: None


def _on_host(env: HostEnv, algorithm: Algorithm, policy: PyTree, num_envs: int) -> tuple[Callable, Callable, Callable]:
    opened = env.open(num_envs)

    def acted(carry: PyTree, timestep: TimeStep, key: Key) -> tuple[Any, Any]:
        action, carry, _ = algorithm.act(policy, carry, timestep, key)
        return clip_action(env.spec, action), carry

    act = jax.jit(acted)

    def advance(now: Any, key: Key, call: int) -> tuple[Any, Any]:
        carry, timestep = now
        action, carry = act(carry, timestep, jax.random.fold_in(key, call))
        action = jax.device_get(action)
        after = opened.step(action)
        row = timestep.obs, action, after
        return (carry, after), jax.tree.map(lambda x: np.asarray(x)[None], row)

    return lambda seeds: (algorithm.carry(num_envs), opened.reset(seeds)), advance, opened.close


def _own_units(env: Env | HostEnv) -> Callable[[np.ndarray], np.ndarray]:
    """From the platform's actions to those that the environment itself has."""
    own = env.own_action if isinstance(env, HostEnv) else None
    if own is None:
        return lambda action: action
    assert isinstance(env.spec.action, Continuous)
    middle, half = spaces.scale_of(own)
    return lambda action: np.clip(middle + half * action, own.low, own.high).astype(np.float32)
