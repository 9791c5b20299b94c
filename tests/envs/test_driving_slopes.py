"""The driving world differentiates: in reverse mode, step after step, wherever vehicles are."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suites import node_of

from rlexp.config import parse
from rlexp.envs.driving import drivers, observation, rewards, scenario, traffic, world
from rlexp.envs.driving.state import State, advance, begin

WEIGHTS = {"progress": 0.1, "aside": 0.1, "speeding": 0.2, "discomfort": 0.02}  # of the terms that have slopes
STEPS = 12
CONFIG = parse(node_of("driving/mixed") | {"grip": 5.0}, world.Config, "env")[0]


def start(key: Any) -> State:
    return begin(scenario.draw_start(key, scenario.KINDS, density=jnp.ones(()), logged=jnp.asarray(0.3)))


def paid(at: State, added: Any) -> Any:
    """What is paid to a driver by rule who does something beside the rule, step by step."""

    def step(before: State, extra: Any) -> tuple[State, Any]:
        after = advance(before, drivers.expert(before) + extra)
        told = rewards.terms(rewards.events(before, after), after)
        return after, sum(weight * told[name] for name, weight in WEIGHTS.items())

    return jnp.sum(jax.lax.scan(step, at, added)[1])


@pytest.mark.slow
def test_slopes_are_those_of_finite_differences():
    """In float64; and in float32, compiled, they are nearly the same."""
    num = 24
    rng = np.random.default_rng(0)
    added = rng.normal(0, [0.5, 0.005], (num, STEPS, 2)).astype(np.float32)
    along = rng.normal(0, [1.0, 0.02], (num, STEPS, 2))
    at = jax.tree.map(lambda x: x[:num], starts(84))
    single = jax.device_get(jax.jit(jax.vmap(jax.grad(paid, 1)))(at, added))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else x, at)
        moved = added + 1e-6 * along * np.array([1, 0, -1])[:, None, None, None]

        def all_of(at: Any, there: Any, here: Any, back: Any) -> Any:
            value, slope = jax.value_and_grad(paid, 1)(at, here)
            return slope, (paid(at, there) - value) / 1e-6, (value - paid(at, back)) / 1e-6

        slope, forwards, backwards = jax.device_get(jax.jit(jax.vmap(all_of))(exact, *moved))
    ours = np.sum(slope * along, axis=(1, 2))
    smooth = np.abs(forwards - backwards) < 1e-4 * np.abs(forwards)  # the others are at a bend, of a minimum say
    assert smooth.sum() >= num - 3 and np.abs(ours).min() > 1e-4
    np.testing.assert_allclose(ours[smooth], (forwards + backwards)[smooth] / 2, rtol=1e-4)
    near = np.abs(single - slope) <= 1e-3 * np.abs(slope).max(axis=(1, 2), keepdims=True)
    assert near.all(axis=(1, 2)).sum() >= num - 2, near.mean(axis=(1, 2))


def odd(kind: Any, at: State) -> State:
    """The state as it is, or an odd one."""
    car = jax.tree.map(lambda x: x[1], traffic.places(at.scenario, at.cars))
    still = at.ego._replace(speed=jnp.zeros(()))
    egos = [
        at.ego,
        still,
        still._replace(position=car.position, heading=car.heading),  # in the very place of a car
        at.ego._replace(position=car.position + 0.7),  # over it
        at.ego._replace(position=at.scenario.lanes.position[0, 20], heading=at.scenario.lanes.heading[0, 20]),
        at.ego._replace(position=at.ego.position + 900.0),
        still._replace(curvature=jnp.full((), 1e-25)),
    ]
    ego = jax.tree.map(lambda *x: jnp.stack(x)[kind], *egos)
    halted, gathered = kind == 1, kind == 2
    cars = at.cars._replace(
        speed=jnp.where(halted, 0.0, at.cars.speed),
        station=jnp.where(gathered, at.cars.station[:, :1], at.cars.station),
    )
    return at._replace(ego=ego, cars=cars, view=traffic.seen(at.scenario, ego, cars))


@functools.cache
def starts(num: int) -> State:
    """States [num] in all kinds of layout."""
    return jax.device_get(jax.jit(jax.vmap(start))(jax.random.split(jax.random.key(0), num)))


def slopes_of(at: State, kind: Any, action: Any, seed: Any) -> Any:
    """Derivatives of all that a step gives, by the state and the action: without the reset, which no state has a part in."""
    leaves, structure = jax.tree.flatten(odd(kind, at))
    varied = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def step(values: list, action: Any) -> list:
        own = list(leaves)
        for i, value in zip(varied, values, strict=True):
            own[i] = value
        after, happened = world.drive(CONFIG, jax.tree.unflatten(structure, own), action)
        told = (
            rewards.terms(happened, after),
            rewards.metrics(after),
            observation.observe(after, 8, leader=True),
        )
        return [x for x in jax.tree.leaves((after, happened, told)) if jnp.issubdtype(x.dtype, jnp.floating)]

    out, back = jax.vjp(step, [leaves[i] for i in varied], action)
    keys = jax.random.split(jax.random.key(seed), len(out))
    return back([jax.random.normal(key, x.shape) for key, x in zip(keys, out, strict=True)])


@pytest.mark.slow
def test_slopes_are_numbers_in_all_layouts_wherever_vehicles_are():
    num = 84
    at, kind = starts(num), np.arange(num) % 7
    rng = np.random.default_rng(1)
    action = rng.uniform(-1, 1, (num, 2)) * [6.0, 0.3] * rng.choice([1.0, 0.0, 1e-22], (num, 1))
    given = jax.device_get(jax.jit(jax.vmap(slopes_of))(at, kind, action.astype(np.float32), np.arange(num)))
    for i, x in enumerate(jax.tree.leaves(given)):
        wrong = ~np.isfinite(x.reshape(num, -1)).all(axis=1)
        assert not wrong.any(), (i, x.shape, kind[wrong])
    assert np.abs(given[1]).max() > 0
