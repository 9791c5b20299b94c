"""One number of host.py in a process of its own: a source of ours, or what bounds it. Reads a JSON object, prints one."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlexp import compose, experiment
from rlexp.envs.base import action_struct
from rlexp.experiment import Experiment
from rlexp.machine import process
from rlexp.training import program
from rlexp.training.layout import layout_of
from rlexp.training.metrics import mean
from rlexp.training.parts import learn_from
from rlexp.types import Discrete, TimeStep


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


def _seconds(once: Callable[[], Any], seconds: float) -> float:
    """Of one call, the mean of all that fit; the first two are not counted."""
    once()
    once()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        once()
        calls += 1
    return (time.perf_counter() - began) / calls


def environments(lead: Experiment, seconds: float) -> dict[str, float]:
    """A bare loop with random actions, in EnvPool itself."""
    import envpool

    config: Any = lead.config
    num_envs = config.algo.num_envs
    kwargs = dict(config.env.kwargs, env_type="gymnasium", num_envs=num_envs, seed=0)
    pool: Any = envpool.make(config.env.id, **kwargs)
    pool.reset()
    rng, struct = np.random.default_rng(0), action_struct(lead.spec)
    if isinstance(lead.spec.action, Discrete):
        actions = rng.integers(lead.spec.action.num_actions, size=(64, num_envs)).astype(np.int32)
    else:
        space = pool.action_space
        actions = rng.uniform(space.low, space.high, (64, num_envs, *struct.shape)).astype(space.dtype)
    number = 0

    def once() -> None:
        nonlocal number
        number += 1
        pool.step(actions[number % len(actions)])

    return {"seconds_per_env_step": _seconds(once, seconds) / num_envs}


def learner(lead: Experiment, seconds: float) -> dict[str, float]:
    """The policy on recorded observations, and the update on a recorded batch."""
    config: Any = lead.config
    algorithm, num_envs, num_steps = lead.algorithm, config.algo.num_envs, config.algo.num_steps
    source = lead.source_of(lead.settings)
    state: Any = jax.jit(algorithm.init)(jax.random.key(0), jax.tree.map(np.float32, lead.hp))
    policy = jax.jit(lambda s: algorithm.policy(s, True))(state)
    _, batch, _ = source.next(source.init(jax.random.key(1), policy), policy)
    source.close()
    act, carry = jax.jit(algorithm.act), algorithm.carry(num_envs)
    rows = batch.trajectory
    zeros = np.zeros((num_envs,), np.float32)
    number, key = 0, jax.random.key(2)

    def acting() -> None:
        nonlocal number
        number += 1
        obs = jax.tree.map(lambda x: x[0, number % num_steps], rows.obs)
        first: Any = rows.first[0, number % num_steps]
        timestep: Any = TimeStep(obs, zeros, zeros + 1, first, np.zeros_like(first))  # type: ignore[arg-type]
        jax.device_get(act(policy, carry, timestep, key)[0])

    learn, placed = jax.jit(lambda s, b: learn_from(lead, s, b), donate_argnums=0), jax.device_put(batch)

    def learning() -> None:
        nonlocal state
        state, told = learn(state, placed)
        jax.block_until_ready((state, told))

    act_s, learn_s = _seconds(acting, seconds / 2), _seconds(learning, seconds / 2)
    return {
        "seconds_per_env_step": act_s / num_envs + learn_s / (num_envs * num_steps),
        "act_s": act_s,
        "learn_s": learn_s,
    }


def ours(lead: Experiment, seconds: float) -> dict[str, float]:
    """The program that trains, without evaluations and checkpoints."""
    compiled = program.trace([lead], layout_of([lead])).compile()
    run, metrics = compiled.chunk(compiled.init(), 2)
    began, updates = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        run, metrics = compiled.chunk(run, 2)
        updates += 2
    rate = updates * lead.env_steps_per_update / (time.perf_counter() - began)
    compiled.close()
    shares = {name: float(mean(x)[0]) for name, x in metrics.items() if name.endswith("_share") and "time/" in name}
    return {"env_steps": rate, **{name.removeprefix("time/"): share for name, share in shares.items()}}


if __name__ == "__main__":
    main()
