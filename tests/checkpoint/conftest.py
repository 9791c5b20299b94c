"""A Run as algorithms have it: every kind of container and of leaf that the platform knows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlexp.storage import checkpoint
from rlexp.storage.checkpoint import Checkpointer, Config


class State(NamedTuple):
    params: Any
    opt_state: Any
    hp: Any
    normaliser: Any
    key: Any
    step: Any


class Run(NamedTuple):
    state: Any
    data: Any


class Replay(NamedTuple):
    obs: Any
    done: Any
    priority: Any


def build_run(seed: int = 0, *, members: int = 4, width: int = 8, optimiser: Any = None, capacity: int = 16) -> Run:
    """Every number in it depends on the seed. Made in NumPy, since dozens of small compilations would take seconds."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, dtype: Any = np.float32) -> jax.Array:
        return jnp.asarray(rng.normal(size=(members, *shape)).astype(dtype))

    def like(x: Any) -> jax.Array:
        return jnp.asarray(rng.integers(1, 100, (members, *x.shape)).astype(x.dtype))

    params = {"torso": ({"kernel": normal(3, width)}, {"bias": normal(width)}), "head": {"kernel": normal(width, 2)}}
    optimiser = optimiser or optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    opt_state = jax.tree.map(like, jax.eval_shape(optimiser.init, jax.tree.map(lambda x: x[0], params)))
    keys = jax.random.split(jax.random.key(seed), (2, members))
    step = jnp.full((members,), seed, jnp.int32)
    hp = {"lr": normal(), "total_updates": normal()}
    half = normal(width, dtype=jnp.bfloat16)
    replay = Replay(
        jnp.asarray(rng.integers(0, 255, (members, capacity, 6), np.uint8)),
        jnp.asarray(rng.integers(0, 2, (members, capacity)).astype(bool)),
        (),
    )
    data = {"env": (keys[1], step + 1, None), "replay": replay, "half": half}
    return Run(State(params, opt_state, hp, (), keys[0], step), data)


def host(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each leaf, copied: NaNs and negative zeros are told apart, and typed keys compared."""

    def leaf(x: Any) -> tuple[str, tuple[int, ...], bytes]:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return str(x.dtype), x.shape, np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return [leaf(x) for x in jax.tree.leaves(tree)]


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and host(a) == host(b)


def abstract(run: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run)


def config(**changes: Any) -> Config:
    values = {"every_minutes": 10.0, "every_updates": None, "keep_last": 3, "keep_best": 1, "restore": "all"}
    return Config(**({"module": "rlexp.storage.checkpoint", "enabled": True} | values | changes))  # type: ignore[arg-type]


class Tools(NamedTuple):
    build_run: Callable[..., Run]
    same: Callable[[Any, Any], bool]
    host: Callable[[Any], Any]
    abstract: Callable[[Any], Any]
    config: Callable[..., Config]
    save: Callable[..., None]
    never: Callable[[str], None]


def save(directory: Path, *updates: int, **changes: Any) -> None:
    """Saves build_run(seed=update) for each, with a meta that tells the update, and closes."""
    checkpointer: Checkpointer = checkpoint.make(config(), directory)
    for update in updates:
        checkpointer.save(update, build_run(update, **changes), {"env_steps": 10 * update}, None)
    checkpointer.close()


def never(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


@pytest.fixture(scope="session")
def tools() -> Tools:
    """What the tests of this folder share."""
    return Tools(build_run, same, host, abstract, config, save, never)
