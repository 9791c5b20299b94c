"""One number of host.py in a process of its own: a source of ours, or what bounds it. Reads a JSON object, prints one."""

import json
import sys
import time
from typing import Any

import jax
import numpy as np

from rlexp import compose, experiment
from rlexp.envs.base import Opened, action_struct
from rlexp.experiment import Experiment
from rlexp.machine import process
from rlexp.sources.base import HostSource
from rlexp.sources.host import collector
from rlexp.training import program
from rlexp.training.layout import layout_of
from rlexp.training.metrics import mean
from rlexp.types import Discrete, TimeStep

_TIMES = 3  # that EnvPool is opened


def main() -> None:
    """Measure what is asked for, print."""
    process.keep_memory()  # as `python -m rlexp` does
    asked = json.loads(sys.argv[1])
    overrides = [*asked["overrides"], "logger=quiet", "shards=1"]
    measured = {"environments": environments, "learner": learner}.get(asked["side"])
    if measured is None:
        overrides.append(f"source={asked['side']}")
        measured = ours
    node, _ = compose.compose_node(overrides)
    print(json.dumps({"sample": measured(experiment.build(node), asked["seconds"])}))


def environments(lead: Experiment, seconds: float) -> dict[str, float]:
    """A bare loop with random actions, in EnvPool itself; the quickest of several times that it is opened."""
    import envpool

    config: Any = lead.config
    num_envs = config.algo.num_envs
    rng, struct = np.random.default_rng(0), action_struct(lead.spec)

    def opened() -> dict[str, float]:
        kwargs = dict(config.env.kwargs, env_type="gymnasium", num_envs=num_envs, seed=0)
        pool: Any = envpool.make(config.env.id, **kwargs)
        pool.reset()
        if isinstance(lead.spec.action, Discrete):
            actions = rng.integers(lead.spec.action.num_actions, size=(64, num_envs)).astype(np.int32)
        else:
            space = pool.action_space
            actions = rng.uniform(space.low, space.high, (64, num_envs, *struct.shape)).astype(space.dtype)
        for number in range(2):
            pool.step(actions[number])
        began, worked, calls = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < seconds / _TIMES:
            pool.step(actions[calls % len(actions)])
            calls += 1
        found = (time.perf_counter() - began, time.process_time() - worked)
        pool.close()
        names = ("seconds_per_env_step", "cpu_per_env_step")
        return {name: x / (calls * num_envs) for name, x in zip(names, found, strict=True)}

    return min((opened() for _ in range(_TIMES)), key=lambda found: found["seconds_per_env_step"])


def learner(lead: Experiment, seconds: float) -> dict[str, float]:
    """The program that trains, with the policy, on what one rollout recorded: `source=host` whose environments take no time."""
    config: Any = lead.config
    num_envs, num_steps = config.algo.num_envs, config.algo.num_steps
    found = ours(recorded(lead), seconds)
    per_update = num_envs * num_steps / found["env_steps"]
    act_s = found["acting_share"] * per_update / num_steps
    return {
        "seconds_per_env_step": 1 / found["env_steps"],
        "cpu_per_env_step": found["cpu_per_env_step"],
        "act_s": act_s,
        "learn_s": per_update - act_s * num_steps,
    }


def recorded(lead: Experiment) -> Experiment:
    """It, with a source that plays one rollout, and from then on acts on what was seen in that and gives the same batch."""
    config: Any = lead.config
    num_envs, num_steps = config.algo.num_envs, config.algo.num_steps

    def source_of(*args: Any) -> HostSource:
        real, env = lead.source_of(*args), lead.env_of(*args)
        seen: list[TimeStep] = []
        of = collector(
            env._replace(open=lambda num: _watched(env.open(num), seen)),
            lead.algorithm,
            num_envs=num_envs,
            num_steps=num_steps,
        )
        kept: Any = None

        def next(data: Any, policy: Any) -> Any:
            nonlocal kept
            key, keys, seeds = of.split(data.key)
            if kept is None:
                world = of.open(seeds)
                try:
                    kept = of.collect(world, policy, keys), lead.algorithm.carry(num_envs)
                finally:
                    world.envs.close()
            else:
                carry = kept[1]
                for t in range(num_steps):
                    placed, carry = of.act(policy, carry, seen[t], keys, t)
                    jax.tree.map(np.asarray, placed)
            return data._replace(key=key), *kept[0]

        return real._replace(next=next)

    return lead._replace(source_of=source_of)


def _watched(envs: Opened, seen: list[TimeStep]) -> Opened:
    """They, whose time steps are put into `seen`."""

    def put(timestep: TimeStep) -> TimeStep:
        seen.append(timestep)
        return timestep

    return envs._replace(reset=lambda seeds: put(envs.reset(seeds)), step=lambda action: put(envs.step(action)))


def ours(lead: Experiment, seconds: float) -> dict[str, float]:
    """The program that trains, without evaluations and checkpoints."""
    compiled = program.trace([lead], layout_of([lead])).compile()
    run, _ = compiled.chunk(compiled.init(), 2)
    metrics = compiled.nothing
    began, worked, updates = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        run, metrics = compiled.updates(run, 2, metrics)
        updates += 2
    steps = updates * lead.env_steps_per_update
    rate, cpu = steps / (time.perf_counter() - began), (time.process_time() - worked) / steps
    compiled.close()
    shares = {name: float(mean(x)[0]) for name, x in metrics.items() if name.endswith("_share") and "time/" in name}
    return {
        "env_steps": rate,
        "cpu_per_env_step": cpu,
        **{name.removeprefix("time/"): share for name, share in shares.items()},
    }


if __name__ == "__main__":
    main()
