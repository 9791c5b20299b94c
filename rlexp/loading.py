"""A trained run, opened again: for a notebook (`rlexp.load`) and for `run=eval`."""

import contextlib
import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlexp import experiment as experiments
from rlexp.algos.base import Algorithm
from rlexp.config import Config, ConfigError, TwoValues, load_module, parse
from rlexp.envs.base import Env, HostEnv
from rlexp.experiment import Experiment
from rlexp.machine import hardware
from rlexp.sameness import TRACED
from rlexp.storage import rundir, store
from rlexp.training.evaluate import Episodes, evaluate
from rlexp.training.layout import layout_of
from rlexp.training.player import Player
from rlexp.training.program import trace
from rlexp.types import Key, PyTree, TimeStep


class Agent(NamedTuple):
    """A trained agent and its world.

    agent = rlexp.load("outputs/2026-11-20/12-00-00-c0ffee42")
    env_state, timestep = jax.vmap(agent.env.reset)(jax.random.split(jax.random.key(0), 8))
    action, carry, _ = agent.act(agent.algorithm.carry(8), timestep, jax.random.key(1))
    """

    config: Config
    env: Env | HostEnv
    algorithm: Algorithm
    state: PyTree  # all that was learnt: params, normaliser, optimiser, hp, ...
    update: int  # updates that it was trained for
    env_steps: int  # and environment steps
    experiment: Experiment  # what all of this was built from
    explore: bool = False  # act as in training

    @property
    def params(self) -> PyTree:
        """The parameters of all networks."""
        return self.state.params

    def act(self, carry: PyTree, timestep: TimeStep, key: Key) -> tuple[Any, PyTree, PyTree]:
        """Actions [B] for time steps [B]: (action, carry, extras)."""
        return self.algorithm.act(self.algorithm.policy(self.state, self.explore), carry, timestep, key)

    def evaluate(self, key: Key, *, num_episodes: int) -> Episodes:
        """Plays as many whole episodes. They are others than those of training's evaluations; see `last_evaluation`."""
        policy = self.algorithm.policy(self.state, self.explore)
        if isinstance(env := self.env, HostEnv):
            with contextlib.closing(Player(env, self.algorithm, num_episodes)) as player:
                return player.episodes(policy, key)
        play = jax.jit(lambda policy, key: evaluate(env, self.algorithm, policy, key, num_episodes=num_episodes))
        return play(policy, key)

    def last_evaluation(self) -> Episodes:
        """The episodes of the run's evaluation at this update, equal to the bit: by the program that trains, on the devices
        of its hardware profile, and with its keys. Raises ConfigError where these devices are not here.
        """
        traced = trace([self.experiment], layout_of([self.experiment]))
        onto = traced.abstract_run.state
        state = jax.tree.map(lambda x, like: jax.device_put(x[None], like.sharding), self.state, onto)
        return jax.tree.map(lambda x: x[0], traced.compile_evaluate()(state, traced.settings(), self.update))


def load(run_dir: str | Path, *, node: Mapping[str, Any] | None = None) -> Agent:
    """Opens the newest sound checkpoint of a run, on one device.

    Args:
      run_dir: the run directory, or its URL in an object store.
      node: a resolved configuration to use in place of the run's own config.yaml.

    Raises:
      ConfigError: there is no run, no checkpoint, or the configuration does not fit it.
    """
    if isinstance(run_dir, str) and store.is_url(run_dir, "load"):
        run_dir = rundir.fetch(run_dir)
    run_dir = Path(run_dir).absolute()
    if node is None:
        if not (run_dir / "config.yaml").exists():
            raise ConfigError(f"load: {str(run_dir)!r} is no run directory (it has no config.yaml)")
        node = as_it_counted(dict(rundir.read_yaml(run_dir / "config.yaml")))
    config, modules = parse(node, Config)
    hardware.enough_threads(1, hardware.decompositions(config.env))  # a notebook may have no JAX running yet
    checkpoint = load_module(modules["checkpoint"], "checkpoint")
    meta = checkpoint.latest_meta(store.checkpoints(run_dir))
    if meta is None:
        raise ConfigError(f"resume: {str(run_dir)!r} has no checkpoint that can be read")
    own = rundir.read_yaml(run_dir / "config.yaml") if (run_dir / "config.yaml").exists() else node
    node = as_it_is_now(node, own, (meta.get("told") or [{}])[0])
    config, modules = parse(node, Config)
    experiment = experiments.build(node, parsed=(config, modules), num_shards=meta["num_shards"])
    shapes = jax.eval_shape(experiment.algorithm.init, jax.random.key(0), jax.tree.map(np.float32, experiment.hp))
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), shapes)
    restored = checkpoint.restore_state(store.checkpoints(run_dir), abstract, warn=warnings.warn)
    state = jax.tree.map(lambda x: x[0], restored.run)
    env = experiment.env_of(experiment.settings)
    explore = config.eval.mode == "sampled"
    return Agent(
        config, env, experiment.algorithm, state, restored.update, restored.meta["env_steps"], experiment, explore
    )


def as_it_is_now(node: Mapping[str, Any], own: Mapping[str, Any], told: Mapping[str, float | int]) -> dict[str, Any]:
    """A configuration with the traced settings that a member of a population has now, where they are those that it began with.

    Args:
      own: the run's own configuration, of when it began; what is another in `node` was asked for.
      told: what its checkpoint tells of the member.
    """
    out = copy.deepcopy(dict(node))
    for name, value in told.items():
        path = name.partition("/")[2]
        if path.startswith(tuple(f"{part}." for part in TRACED)):
            *parts, last = path.split(".")
            inner, began = out, own
            for part in parts:
                inner, began = inner.get(part, {}), began.get(part, {})
            if last in inner and inner[last] == began.get(last):  # another environment has other ones
                inner[last] = value
    return out


def as_it_counted(node: dict[str, Any]) -> dict[str, Any]:
    """A config.yaml that gives one setting unlike values under two names: that of the older name counted once."""
    try:
        parse(node, Config)
    except TwoValues as two:
        part, key = two.ours.split(".")
        return as_it_counted(node | {part: node[part] | {key: two.counts}})
    return node
