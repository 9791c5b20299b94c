"""The compiled programs of a pack: begin, updates, evaluate. Each is compiled once, ahead of time. Where environments run on the
host, `rlexp.training.host` makes the same three of Python and a compiled half.

Every argument and result has the members as its first axis. Members differ in data only: seed, hyperparameters and
other traced settings.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.experiment import Experiment
from rlexp.training import host
from rlexp.training.evaluation import evaluation
from rlexp.training.layout import Layout, begin_shards, collect, feed_back, init_shards, over_members, run_shardings
from rlexp.training.parts import (
    BETWEEN,
    Program,
    Run,
    Traced,
    compiled_beside,
    hears,
    learn_from,
    member_data,
    refill_key,
    stacked_settings,
    train_keys,
)
from rlexp.types import Batch, Key, Metrics, PyTree, Settings, Shared


def changed_by(change: Callable, traced: Traced, seed: int) -> Callable[[Run, int, np.ndarray], Run]:
    """(run, update, returns [members]) -> run, by a Between's `change`, compiled at its first use. The run is donated."""

    def changed(run: Run, update: jax.Array, returns: jax.Array) -> Run:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), BETWEEN), update)
        return change(key, run, returns)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, traced.abstract_run)
    jitted = jax.jit(changed, donate_argnums=0, out_shardings=shardings)
    return lambda run, update, returns: jitted(run, np.int32(update), np.asarray(returns, np.float32))


def collect_once(
    experiment: Experiment, layout: Layout, run: Run, shared: Shared | None = None
) -> tuple[PyTree, Batch, Metrics]:
    """The first half of an update, of one member: (data, what was collected, metrics)."""
    source = experiment.source_of(run.settings, shared)
    with jax.named_scope("rollout"):
        return collect(layout, source)(run.data, experiment.algorithm.policy(run.state, True))


def learn_once(
    experiment: Experiment, layout: Layout, run: Run, batch: Batch, shared: Shared | None = None
) -> tuple[Run, Metrics]:
    """The second half: learn from what was collected, and tell the source what it was worth."""
    source, data = experiment.source_of(run.settings, shared), run.data
    state, updates = learn_from(experiment, run.state, batch)
    with jax.named_scope("update"):
        if hears(experiment, source, updates):
            data = feed_back(layout, source)(data, batch.ids, updates.priority)
        return Run(state, data, run.settings), jax.tree.map(jnp.sum, updates.metrics)


def update_once(experiment: Experiment, layout: Layout, run: Run, shared: Shared | None = None) -> tuple[Run, Metrics]:
    """Collect, learn, report: one step of the training loop, of one member. `shared` is closed over by a vmap: one for all."""
    data, batch, metrics = collect_once(experiment, layout, run, shared)
    run, losses = learn_once(experiment, layout, run._replace(data=data), batch, shared)
    return run, metrics | losses


def trace(experiments: Sequence[Experiment], layout: Layout) -> Traced:
    """Experiments may differ in seed, hp and settings only."""
    lead = experiments[0]
    if lead.on_host:
        return host.trace(experiments, layout)

    def begin_one(seed: jax.Array, hp: PyTree, settings: Settings, shared: Shared) -> tuple[Run, Metrics]:
        state_key, data_key = train_keys(seed)
        state = lead.algorithm.init(state_key, hp)
        data, counted = data_one(state, settings, data_key, shared)
        return Run(state, data, settings), counted

    def data_one(state: PyTree, settings: Settings, key: Key, shared: Shared) -> tuple[PyTree, Metrics]:
        policy = lead.algorithm.policy(state, True)
        return begin_shards(layout, lead.source_of(settings, shared))(key, policy)

    # traced once for its shapes and the loop
    once = jax.jit(lambda run, shared: update_once(lead, layout, run, shared), inline=True)

    def updates_one(run: Run, num_updates: jax.Array, total: Metrics, shared: Shared) -> tuple[Run, Metrics]:
        def body(_: Any, carry: tuple[Run, Metrics]) -> tuple[Run, Metrics]:
            run, total = carry
            run, metrics = once(run, shared)
            return run, jax.tree.map(jnp.add, total, metrics)

        return jax.lax.fori_loop(0, num_updates, body, (run, total))

    def refill_one(state: PyTree, settings: Settings, seed: jax.Array, update: jax.Array, shared: Shared) -> PyTree:
        source, policy = lead.source_of(settings, shared), lead.algorithm.policy(state, True)
        assert source.refill is not None
        again = source._replace(init=lambda key, policy: source.refill(key, policy, update))
        return init_shards(layout, again)(refill_key(seed, update), policy)

    # What is closed over here is one for all members.

    def begin_all(seeds: jax.Array, hp: PyTree, settings: Settings, shared: Shared) -> tuple[Run, Metrics]:
        return over_members(layout, lambda k, h, t: begin_one(k, h, t, shared))(seeds, hp, settings)

    # The two halves of it, with a state of another origin in between.

    def state_all(seeds: jax.Array, hp: PyTree) -> PyTree:
        return over_members(layout, lambda k, h: lead.algorithm.init(train_keys(k)[0], h))(seeds, hp)

    def data_all(state: PyTree, settings: Settings, seeds: jax.Array, shared: Shared) -> tuple[PyTree, Metrics]:
        return over_members(layout, lambda s, t, k: data_one(s, t, train_keys(k)[1], shared))(state, settings, seeds)

    def updates_all(run: Run, num_updates: jax.Array, total: Metrics, shared: Shared) -> tuple[Run, Metrics]:
        # one trip count for all members: a batched one would make every carry a select
        return over_members(layout, lambda r, t: updates_one(r, num_updates, t, shared))(run, total)

    def refill_all(state: PyTree, settings: Settings, seeds: jax.Array, update: jax.Array, shared: Shared) -> PyTree:
        return over_members(layout, lambda s, t, k: refill_one(s, t, k, update, shared))(state, settings, seeds)

    shapes = jax.eval_shape(begin_all, *member_data(experiments), lead.shared)[0]
    shardings = run_shardings(layout, shapes, lead.source_of(lead.settings).places)
    abstract_run = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, shardings
    )

    count = jax.ShapeDtypeStruct((), jnp.int32)
    per_member = layout.member_sharding
    abstract_shared = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=layout.replicated),
        jax.eval_shape(lambda shared: shared, lead.shared),
    )

    @functools.cache
    def placed_shared() -> Shared:
        return jax.device_put(lead.shared, layout.replicated)

    @functools.cache
    def counted() -> Metrics:
        # On the mesh as in the loop, or JAX traces it once more.
        of_one = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype, sharding=layout.replicated), abstract_run
        )
        num, metrics = layout.num_members, jax.eval_shape(once, of_one, abstract_shared)[1]
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((num, *s.shape), s.dtype, sharding=per_member), metrics)

    def lower_chunk() -> jax.stages.Lowered:
        updates = jax.jit(
            updates_all,
            donate_argnums=0,
            out_shardings=(shardings, per_member),
            compiler_options=layout.compiler_options,
        )
        return updates.lower(abstract_run, count, counted(), abstract_shared)

    @functools.cache
    def executables() -> tuple[Callable[[], jax.stages.Compiled], Callable[[], jax.stages.Compiled]]:
        placed = jax.device_put(member_data(experiments), per_member)
        begin = jax.jit(begin_all, out_shardings=(shardings, per_member)).lower(*placed, abstract_shared)
        return compiled_beside(begin), compiled_beside(lower_chunk())

    compile_evaluation = evaluation(experiments, layout, abstract_run, placed_shared)

    def of(members: Sequence[Experiment]) -> Traced:
        def compile_all() -> Program:
            began = time.perf_counter()
            (begin, updates), play = executables(), compile_evaluation(members)
            begin, updates = begin(), updates()
            placed, shared = jax.device_put(member_data(members), per_member), placed_shared()
            nothing = jax.device_put(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), counted()), per_member)

            def begin_run(learnt: Callable[[PyTree], PyTree] | None = None) -> tuple[Run, Metrics]:
                if learnt is None:
                    return begin(*placed, shared)
                seeds, hp, _ = placed
                state = learnt(jax.jit(state_all, out_shardings=shardings.state)(seeds, hp))
                fill = jax.jit(data_all, out_shardings=(shardings.data, per_member))
                data, metrics = fill(state, settings(), seeds, shared)
                return Run(state, data, settings()), metrics

            return Program(
                begin=begin_run,
                updates=lambda run, num_updates, total: updates(run, np.int32(num_updates), total, shared),
                nothing=nothing,
                evaluate=lambda run, update: play(run.state, run.settings, update),
                compile_s=time.perf_counter() - began,
                executable=updates,
            )

        def settings() -> Settings:
            return jax.device_put(stacked_settings(members), shardings.settings)

        def refill(run: Run, update: int) -> Run:
            seeds, *_ = jax.device_put(member_data(members), per_member)
            fill = jax.jit(refill_all, out_shardings=shardings.data)
            return run._replace(data=fill(run.state, run.settings, seeds, np.int32(update), placed_shared()))

        return Traced(abstract_run, settings, compile_all, lambda: compile_evaluation(members), lower_chunk, refill, of)

    return of(experiments)
