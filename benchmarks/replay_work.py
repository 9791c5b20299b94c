"""What is put into a replay and drawn from it, on every side of benchmarks/replay.py. Needs NumPy alone."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

LENGTH = 16  # rows of a trajectory
POOL = 1024  # different trajectories, which are inserted over and over


def columns(num_bytes: int, *, seed: int) -> dict[str, np.ndarray]:
    """Trajectories of `num_bytes` each, leaves [POOL, LENGTH, ...]. Random floats: there is nothing to compress."""
    random = np.random.default_rng(seed)
    size = num_bytes // (4 * LENGTH) - 3
    assert size > 0 and (size + 3) * 4 * LENGTH == num_bytes, f"{num_bytes} bytes are no {LENGTH} rows"
    return {
        "obs": random.standard_normal((POOL, LENGTH, size), np.float32),
        "action": random.integers(0, 4, (POOL, LENGTH), np.int32),
        "reward": random.standard_normal((POOL, LENGTH), np.float32),
        "discount": np.ones((POOL, LENGTH), np.float32),
    }


def weights(num: int, *, seed: int) -> np.ndarray:
    """Positive weights, of which few are large."""
    return np.random.default_rng(seed).exponential(size=num).astype(np.float32) + np.float32(0.01)


def rate(step: Callable[[], Any], *, each: int, seconds: float, warm_up: int = 3) -> float:
    """What `step` does a second, where a call does `each`. It returns when all of it is done."""
    for _ in range(warm_up):
        step()
    began, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        step()
        done += each
    return done / passed


def rates_in_turn(
    steps: Mapping[str, Callable[[], Any]], *, each: int, seconds: float, turns: int = 10
) -> dict[str, float]:
    """Of each of several sides what `rate` says of one, over as many seconds, which it has in parts: a side after the other."""
    done, passed = dict.fromkeys(steps, 0), dict.fromkeys(steps, 0.0)
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(turns):
        for name, step in steps.items():
            began, calls = time.perf_counter(), 0
            while (now := time.perf_counter() - began) < seconds / turns:
                step()
                calls += 1
            done[name], passed[name] = done[name] + calls * each, passed[name] + now
    return {name: done[name] / passed[name] for name in steps}
