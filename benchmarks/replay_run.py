"""rlexp's replay, or flashbax's, as compiled programs in a process of its own; run by replay.py.

Reads a JSON object from the command line, prints one. Both are given NumPy arrays to insert and give arrays on the device; each
call has its state donated and is waited for. It inserts one batch, or draws those of `updates`, as inside of a training program.
As there, a draw writes over the batches of the one before, which are donated: memory that is asked for anew comes as pages
of zeros or not, as the allocator's luck has it, and of 26 MB that takes as long as the draw. All sides of a size take turns in
one process, so that they share that luck and whoever else uses the machine.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.replay_work import columns, rate, rates_in_turn, weights
from rlexp.machine import process
from rlexp.replay import ring as rings
from rlexp.replay import selectors, sums, table
from rlexp.replay.columns import Storage
from rlexp.replay.selectors import Draws

EXPONENT = 0.6


def main() -> None:
    """Measure what is asked for, print."""
    process.keep_memory()  # as `python -m rlexp` does
    asked = json.loads(sys.argv[1])
    measure = {"rates": rates, "curve": curve, "host bandwidth": host_bandwidth}[asked.pop("what")]
    device = jax.devices()[0]
    print(json.dumps({"sample": measure(**asked), "device": f"{device.platform} {device.device_kind}"}))


# --- trajectories a second ----------------------------------------------------------------------------------------------


def rates(
    *, sides: list[str], num_bytes: int, num_items: int, batch: int, updates: int, seconds: float, seed: int
) -> dict[str, dict[str, float]]:
    """Of each side inserts, and draws by both selectors, from a memory that is full."""
    pool = columns(num_bytes, seed=seed)
    items = [{k: v[i : i + batch] for k, v in pool.items()} for i in range(0, len(pool["action"]), batch)]
    makes: dict[str, Callable] = {"rlexp": ours, "rlexp, host": functools.partial(ours, storage="host")}
    makes["flashbax"] = flashbaxs
    rows: dict[str, dict[str, float]] = {side: {} for side in sides}

    def note(what: str, found: dict[str, float]) -> None:
        for side, number in found.items():
            rows[side][what] = number

    for selector in ("prioritised", "uniform"):
        puts, draws = {}, {}
        for side in sides:
            work = dict(selector=selector, num_items=num_items, batch=batch, updates=updates, seed=seed)
            insert, draws[side] = makes[side](items[0], **work)
            turns = itertools.cycle(items)

            def put(insert: Callable = insert, turns: Any = turns) -> None:
                insert(next(turns))

            puts[side] = put
            for _ in range(-(-num_items // batch)):
                put()
        if selector == "prioritised":
            note("inserts", rates_in_turn(puts, each=batch, seconds=seconds))
        note(selector, rates_in_turn(draws, each=updates * batch, seconds=seconds))
    return rows


def ours(
    item: Any,
    *,
    selector: str,
    num_items: int,
    batch: int,
    updates: int,
    seed: int,
    storage: Storage = "device",
) -> tuple[Callable, Callable]:
    """What source=replay does to add and to draw: a trajectory is a row of the ring."""
    weighted = selector == "prioritised"
    num_items -= num_items % batch  # blocks fill the ring exactly
    structs = {k: jax.ShapeDtypeStruct((batch, 1, *v.shape[1:]), v.dtype) for k, v in item.items()}

    @functools.partial(jax.jit, donate_argnums=0)
    def add(ring: rings.Ring, items: Any) -> rings.Ring:
        ring = rings.add(ring, {k: v[:, None] for k, v in items.items()})
        at = rings.starts(ring, num_envs=1, num_rows=batch, length=1)
        return rings.weigh(ring, at, jnp.ones(at.item.shape, jnp.float32)) if weighted else ring

    @functools.partial(jax.jit, donate_argnums=(1, 2, 3), keep_unused=True)
    def draw(ring: rings.Ring, sampled: Any, key: Any, over: Any) -> tuple[Any, Any, Any]:
        ring = ring._replace(table=ring.table._replace(sampled=sampled))
        key, uniform_key, weight_key = jax.random.split(key, 3)
        item = rings.draw(ring, uniform_key, num_envs=1, shape=(updates, batch), length=1)
        drawn = Draws(item, jnp.broadcast_to(1.0 / ring.size.astype(jnp.float32), item.shape))
        if isinstance(ring.table.weight, sums.Sums):
            drawn = selectors.prioritised(ring.table.weight, weight_key, otherwise=drawn)
        sampled = table.mark(ring.table, drawn.item).sampled
        return sampled, key, (drawn, rings.read(ring, drawn.item, num_envs=1, length=1))

    ring = jax.jit(functools.partial(rings.init, structs, capacity=num_items, weighted=weighted, storage=storage))()
    state = [ring, jax.random.key(seed), _zeros(draw, ring, ring.table.sampled, jax.random.key(seed), None)]

    def insert(items: Any) -> None:
        state[0] = jax.block_until_ready(add(state[0], items))

    def sample() -> Any:
        ring = state[0]
        bare = ring._replace(table=ring.table._replace(sampled=()))
        sampled, *state[1:] = jax.block_until_ready(draw(bare, ring.table.sampled, *state[1:]))
        state[0] = ring._replace(table=ring.table._replace(sampled=sampled))
        return state[2]

    return insert, sample


def flashbaxs(
    item: Any, *, selector: str, num_items: int, batch: int, updates: int, seed: int
) -> tuple[Callable, Callable]:
    """Its buffer of items, jitted and donated as its pages say; new items get the highest priority, as it has it."""
    import flashbax

    make = flashbax.make_prioritised_item_buffer if selector == "prioritised" else flashbax.make_item_buffer
    more: dict = {}
    if selector == "prioritised":
        more = dict(priority_exponent=EXPONENT, device=jax.devices()[0].platform)
    num_items -= num_items % batch
    buffer: Any = make(max_length=num_items, min_length=batch, sample_batch_size=batch, add_batches=True, **more)
    add = jax.jit(buffer.add, donate_argnums=0)

    @functools.partial(jax.jit, donate_argnums=(1, 2), keep_unused=True)
    def draw(state: Any, key: Any, over: Any) -> tuple[Any, Any]:
        key, *keys = jax.random.split(key, updates + 1)
        if updates == 1:
            return key, buffer.sample(state, keys[0])
        return key, jax.vmap(buffer.sample, in_axes=(None, 0))(state, jnp.stack(keys))

    kept, key = buffer.init({k: jnp.asarray(v[0]) for k, v in item.items()}), jax.random.key(seed)
    state = [kept, key, _zeros(draw, kept, key, None)]

    def insert(items: Any) -> None:
        state[0] = jax.block_until_ready(add(state[0], items))

    def sample() -> Any:
        state[1:] = jax.block_until_ready(draw(*state))
        return state[2]

    return insert, sample


def _zeros(draw: Callable, *args: Any) -> Any:
    """What the first draw may write over: like what it gives."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draw, *args)[-1])


# --- draws with their new priorities written back ---------------------------------------------------------------------


def curve(*, side: str, num_items: list[int], batch: int, seconds: float, seed: int) -> dict[str, float]:
    """Prioritised draws a second, for each number of items."""
    return {str(num): updated_draws(side, num, batch=batch, seconds=seconds, seed=seed) for num in num_items}


def updated_draws(side: str, num_items: int, *, batch: int, seconds: float, seed: int, steps: int = 100) -> float:
    """Draws a second; `steps` batches a call, as inside of a training step."""
    given = weights(num_items, seed=seed)
    if side == "rlexp":

        def step(state: sums.Sums, key: Any) -> tuple[sums.Sums, Any]:
            draw_key, new_key = jax.random.split(key)
            item = sums.draw(state, draw_key, shape=(batch,))
            return sums.update(state, item, jax.random.exponential(new_key, (batch,)) ** EXPONENT), item

        state: Any = sums.of(given)
    else:
        from flashbax.buffers import prioritised_trajectory_buffer as peer
        from flashbax.buffers import sum_tree

        set_batch = peer.SET_BATCH_FN[jax.devices()[0].platform]

        def step(state: Any, key: Any) -> tuple[Any, Any]:
            draw_key, new_key = jax.random.split(key)
            item = sum_tree.stratified_sample(state, batch, draw_key)
            return set_batch(state, item, jax.random.exponential(new_key, (batch,)) ** EXPONENT), item

        state = sum_tree.init(num_items)
        state = jax.jit(sum_tree.set_batch_bincount, donate_argnums=0)(
            state, np.arange(num_items, dtype=np.int32), given
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def many(state: Any, key: Any) -> tuple[Any, Any, Any]:
        key, call_key = jax.random.split(key)
        state, items = jax.lax.scan(step, state, jax.random.split(call_key, steps))
        return state, key, items

    held = [state, jax.random.key(seed)]

    def call() -> None:
        *held[:], items = many(*held)
        jax.block_until_ready(items)

    return rate(call, each=batch * steps, seconds=seconds, warm_up=1)


def host_bandwidth(*, num_bytes: int, seconds: float) -> dict[str, float]:
    """Bytes a second from the host's memory to the device: what the host tier could reach at best."""
    source = np.ones((num_bytes,), np.uint8)
    return {"bytes": rate(lambda: jax.block_until_ready(jax.device_put(source)), each=num_bytes, seconds=seconds)}


if __name__ == "__main__":
    main()
