"""The programs of a run whose environments or data live on the host: begin, updates, evaluate, as `rlexp.training.program` has.

    source.next() in Python · the batch goes to the devices · the compiled half learns from it

Where the source has a memory, that is compiled too: the batch goes into it, each logical shard's part into its own, and what is
drawn from there is learnt from. Where inserts and samples run apart (`rlexp.sources.apart`), any number of batches comes between
two updates, each goes into the memory by itself, and the compiled half draws and learns.

The learning is spread over the mesh as ever, and the evaluation too where its environments are compiled. A policy acts on one
device, or where the source asks for devices of its own on those behind the mesh. So what environments of the host do does not
depend on how many devices there are, and the logical shards are what the update makes of the batch. Of several processes each steps
its part of the environments, and its batch goes to its own devices; the update is that of all, and so are the counts. A data set is
not acted in: each process reads its own shards. What stands in `Run.data` is what the source keeps for a checkpoint; it is the same
on all devices.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.config import ConfigError
from rlexp.envs.base import HostEnv
from rlexp.experiment import Experiment
from rlexp.machine import distributed
from rlexp.sources import apart
from rlexp.sources.base import HostSource, Memory, Place
from rlexp.training.crossing import crossing, first_to_act, here, over_processes
from rlexp.training.evaluate import Episodes
from rlexp.training.evaluation import Play, evaluation
from rlexp.training.layout import Layout, collect, feed_back, init_shards, remember, run_shardings
from rlexp.training.parts import (
    MEMORY,
    Program,
    Run,
    Traced,
    evaluation_key,
    hears,
    learn_from,
    member_data,
    refill_key,
    train_keys,
)
from rlexp.training.player import Player
from rlexp.training.shares import Shares
from rlexp.types import Batch, Key, Metrics, PyTree, Settings

WAITED = "time/learner_waited_s"  # a source's metric, where others act while the learner learns


def check(experiment: Experiment) -> None:
    """Raises ConfigError for what is not done with a source of the host."""
    config = experiment.config
    reasons = {
        "check": "compares one compiled program on several meshes",
    }
    if why := reasons.get(config.run):
        what = (
            "these environments run on the host" if experiment.steps_environments else "this data comes from the host"
        )
        raise ConfigError(
            f"run: {config.run} {why}, and {what}, outside of it; allowed: train|eval|plan|profile|record"
        )
    if config.run == "plan" or (num := jax.process_count()) == 1:
        return
    if config.hardware.mesh.data % num:
        does = "steps its environments" if experiment.steps_environments else "reads its part"
        raise ConfigError(
            f"hardware.mesh.data: {config.hardware.mesh.data} is no multiple of the {num} processes, each of which {does}"
        )
    source = experiment.source_of(experiment.settings)
    if source.num_devices:
        raise ConfigError(
            f"algo.source.num_devices: {source.num_devices} is not allowed with {num} processes, "
            "whose mesh has all of their devices; expected 0"
        )
    memory = source.memory
    if memory is not None and memory.apart is not None:
        raise ConfigError(
            f"algo.source.error_buffer: it is not allowed with {num} processes, since how many batches come between two updates "
            "depends on the clock of each; expected null"
        )


def trace(experiments: Sequence[Experiment], layout: Layout) -> Traced:
    """What `program.trace` is for compiled environments. Raises ConfigError for more than one member."""
    lead = experiments[0]
    if len(experiments) > 1:
        what = "environments run on the host" if lead.steps_environments else "data comes from the host"
        raise ConfigError(
            f"launcher.pack: {len(experiments)} members cannot share a program whose {what}; each trains alone"
        )
    source, algorithm, config = lead.source_of(lead.settings), lead.algorithm, lead.config
    actor = first_to_act(config, layout, source.num_devices)
    each_counts = lead.steps_environments and jax.process_count() > 1

    def init_one(seed: jax.Array, hp: PyTree) -> tuple[PyTree, Key]:
        state_key, data_key = train_keys(seed)
        return algorithm.init(state_key, hp), data_key

    def memory_of(settings: Settings) -> Memory | None:
        """With its settings as data of the program."""
        return lead.source_of(settings).memory

    def put_in(kept: PyTree, settings: Settings, batch: Batch) -> PyTree:
        memory = memory_of(settings)
        return kept if memory is None else remember(layout, memory)(kept, batch)

    def draw(kept: PyTree, settings: Settings, batch: PyTree) -> tuple[PyTree, Batch, Metrics]:
        """What is learnt from, of a batch that has come; of what is in the memory already where batches come in apart."""
        memory = memory_of(settings)
        if memory is None:
            return kept, batch, {}
        with jax.named_scope("replay"):
            kept = kept if memory.apart else put_in(kept, settings, batch)
            return collect(layout, memory.source)(kept, ())

    def learn_one(
        state: PyTree, kept: PyTree, settings: Settings, batch: PyTree, collected: Metrics, total: Metrics
    ) -> Any:
        if each_counts:
            collected = over_processes(collected)
        kept, batch, drawn = draw(kept, settings, batch)
        state, updates = learn_from(lead, state, batch)
        memory = memory_of(settings)
        if memory is not None and hears(lead, memory.source, updates):
            kept = feed_back(layout, memory.source)(kept, batch.ids, updates.priority)
        found = collected | drawn | jax.tree.map(jnp.sum, updates.metrics)
        told = updates.priority if hears(lead, source, updates) else None
        return state, kept, jax.tree.map(jnp.add, total, found), told

    def empty(key: Key, settings: Settings, num_calls: Any) -> PyTree:
        """The memory of all shards with nothing in it, after so many updates; () of a source that has none."""
        memory = memory_of(settings)
        if memory is None or memory.source.refill is None:
            return ()
        refill = memory.source.refill
        again = memory.source._replace(init=lambda key, policy: refill(key, policy, num_calls))
        return init_shards(layout, again)(jax.random.fold_in(key, MEMORY), policy)

    def policy_of(state: PyTree, explore: bool) -> PyTree:
        return algorithm.policy(state, explore)

    # What everything looks like. Of a Run each leaf has the members in front, of which there is one.
    seeds, hp, settings = member_data(experiments)
    state, key = jax.eval_shape(init_one, seeds[0], _first(hp))
    policy = jax.eval_shape(lambda s: policy_of(s, True), state)
    data, batch, collected = source.shapes(policy)
    kept = jax.eval_shape(empty, key, _first(settings), np.int32(0))
    limits = None if source.memory is None else source.memory.apart
    of_batch = collected
    if limits is not None:
        collected = apart.shapes(collected)
    _, drawn_from, drawn = jax.eval_shape(draw, kept, _first(settings), batch)
    updates = jax.eval_shape(lambda s, b: learn_from(lead, s, b)[1], state, drawn_from)
    total = collected | drawn | {name: jax.tree.map(_scalar, x) for name, x in updates.metrics.items()}
    places: PyTree = Place.REPLICATED
    if source.memory is not None:
        ahead = () if limits is None else jax.ShapeDtypeStruct((), np.float32)
        data = Remembered(data, kept, ahead)
        places = Remembered(Place.REPLICATED, source.memory.source.places, Place.REPLICATED)
    shapes = Run(
        *(jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *np.shape(x)), x.dtype), t) for t in (state, data, settings))
    )
    shapes = shapes._replace(settings=settings)
    shardings = run_shardings(layout, shapes, places)
    abstract_run = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )
    abstract_kept, kept_shardings = _kept(abstract_run.data), _kept(shardings.data)
    over = crossing(layout, batch, actor, each_counts=each_counts)

    def lower_learn() -> jax.stages.Lowered:
        def learn_all(state: PyTree, kept: PyTree, settings: Settings, *others: Any) -> Any:
            state, kept, total, told = learn_one(_first(state), _first(kept), _first(settings), *others)
            return _alone(state), _alone(kept), total, told

        learn = jax.jit(
            learn_all,
            donate_argnums=(0, 1, 5),
            out_shardings=(shardings.state, kept_shardings, layout.replicated, layout.replicated),
            compiler_options=layout.compiler_options,
        )
        placed: Any = ()
        if limits is None:
            placed = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), batch, over.batch_shardings
            )
        counted, sums = (
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.replicated), tree)
            for tree in (collected, total)
        )
        if each_counts:
            counted = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    (layout.mesh.shape["data"], *x.shape), x.dtype, sharding=over.of_devices
                ),
                counted,
            )
        return learn.lower(abstract_run.state, abstract_kept, abstract_run.settings, placed, counted, sums)

    @functools.cache
    def compiled() -> jax.stages.Compiled:
        return lower_learn().compile()

    env = lead.env_of(lead.settings)
    compile_evaluation = (
        None
        if isinstance(env, HostEnv)
        else evaluation(experiments, layout, abstract_run, lambda: jax.device_put(lead.shared, layout.replicated))
    )

    init_state = jax.jit(lambda *args: _alone(init_one(*args)), out_shardings=(shardings.state, layout.replicated))
    # Taken out on the mesh, where the state lies, and brought to the device that acts.
    explorer = jax.jit(lambda state: policy_of(_first(state), True), out_shardings=layout.replicated)
    # A memory is filled before the first update.
    begin_memory = jax.jit(
        lambda key, settings, num_calls: _alone(empty(key, _first(settings), num_calls)), out_shardings=kept_shardings
    )
    add = jax.jit(
        lambda kept, settings, batch: _alone(put_in(_first(kept), _first(settings), batch)),
        donate_argnums=0,
        out_shardings=kept_shardings,
    )
    judged = jax.jit(
        lambda state: policy_of(_first(state), config.eval.mode != "greedy"), out_shardings=layout.replicated
    )
    summed = jax.jit(over_processes, out_shardings=layout.replicated)

    def of(members: Sequence[Experiment]) -> Traced:
        member = members[0]
        seeds, hp, settings = member_data(members)

        @functools.cache
        def own_source() -> HostSource:
            """What trains, and fills the memory before: workers that others have started end with it, and come once."""
            return member.source_of(member.settings)

        def place(data: PyTree, kept: PyTree, ahead: float) -> PyTree:
            placed = over.everywhere(_alone(data))
            if source.memory is None:
                return placed
            return Remembered(placed, kept, () if limits is None else over.everywhere(np.full(1, ahead, np.float32)))

        def filled(
            source: HostSource, data: PyTree, key: Key, policy: PyTree, num_calls: int
        ) -> tuple[PyTree, Metrics]:
            """Of a source that has begun: with as much in the memory as the next update wants, and what was counted meanwhile."""
            if source.memory is None:
                return place(data, (), 0.0), {}
            traced, counted = settings_now(), list[Metrics]()
            kept = begin_memory(over.everywhere(key), traced, np.int32(num_calls))
            for _ in range(source.memory.num_prefills):
                data, batch, collected = source.next(data, policy)
                kept = add(kept, traced, over.put(batch))
                counted.append(collected)
            total = jax.tree.map(lambda *x: np.asarray(sum(x), x[0].dtype), *counted) if counted else {}
            if each_counts:
                jax.block_until_ready(kept)  # one program of all processes after the other
                total = jax.tree.map(np.asarray, here(summed(over.counts(total))))
            total = _alone(total)
            limits = source.memory.apart
            ahead = 0.0 if limits is None else apart.ahead_at_first(limits, source.memory.num_prefills)
            return place(data, kept, ahead), total

        def compile_all() -> Program:
            began = time.perf_counter()
            if each_counts:
                # The devices meet now: they have half a minute for it, and environments may take longer to open.
                nothing = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), collected)
                jax.block_until_ready(summed(over.counts(nothing)))
            learn, (play, close_play) = compiled(), player()
            source = own_source()
            feed: apart.Feed | None = None  # where inserts and samples run apart, since the first chunk

            def acting(state: PyTree) -> PyTree:
                """The policy, on the device that acts; nothing for a source that steps no environments."""
                return over.on_actor(explorer(state)) if lead.steps_environments else ()

            def close_feed() -> None:
                nonlocal feed
                before, feed = feed, None
                if before is not None:
                    before.close()

            def begin(learnt: Callable[[PyTree], PyTree] | None = None) -> tuple[Run, Metrics]:
                close_feed()
                state, key = init_state(seeds[0], _first(hp))
                state = learnt(state) if learnt else state
                key, policy = jax.device_put(here(key)[0], over.actor), acting(state)
                data, counted = filled(source, source.init(key, policy), key, policy, 0)
                return Run(state, data, settings_now()), counted

            def updates(run: Run, num_updates: int, counted: Metrics) -> tuple[Run, Metrics]:
                nonlocal feed
                state, kept = run.state, _kept(run.data)
                ahead = 0.0 if limits is None else float(np.asarray(here(run.data.ahead))[0])
                data = jax.device_put(_first(here(_stepped(run.data))), over.actor)
                sums = {name: jax.device_put(_first(counted[name]), layout.replicated) for name in total}
                shares = Shares()
                if limits is not None and feed is None:
                    feed = apart.Feed(source, limits, data=data, ahead=ahead, collected=of_batch)
                for _ in range(num_updates):
                    policy = jax.block_until_ready(acting(state))
                    shares.lap("learning")
                    if feed is None:
                        data, batch, collected = source.next(data, policy)
                        shares.lap("acting", waited=collected.get(WAITED))
                        batch, ids = over.put(batch), batch.ids
                    else:
                        data, batches, collected, ahead = feed.exchange(policy)
                        shares.lap("acting", waited=collected[WAITED])
                        for one in batches:
                            kept = add(kept, run.settings, over.put(one))
                        batch, ids = (), ()
                    collected = over.counts(collected)
                    shares.lap("copying")
                    jax.block_until_ready(sums)  # of the update before: no more than one batch waits on the devices
                    shares.lap("learning")
                    state, kept, sums, told = learn(state, kept, run.settings, batch, collected, sums)
                    if told is not None:
                        data = source.feedback(data, ids, np.asarray(told))
                sums = _alone(jax.tree.map(np.asarray, jax.block_until_ready(sums)))
                shares.lap("learning")
                spent = {name: jax.tree.map(np.add, counted[name], x) for name, x in shares.metrics().items()}
                return Run(state, place(data, kept, ahead), run.settings), sums | spent

            def close() -> None:
                close_feed()
                source.close()
                close_play()

            return Program(
                begin=begin,
                updates=updates,
                nothing=_alone(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), total)) | Shares().metrics(),
                evaluate=lambda run, update: play(run.state, run.settings, update),
                compile_s=time.perf_counter() - began,
                executable=learn,
                close=close,
                at=source.at,
            )

        def settings_now() -> Settings:
            return jax.device_put(settings, shardings.settings)

        def player() -> tuple[Play, Callable[[], None]]:
            """What plays the episodes of an evaluation, and what ends it."""
            if compile_evaluation is not None:
                return compile_evaluation(members), lambda: None
            own = Player(member.env_of(member.settings), algorithm, config.eval.num_episodes)

            def play(state: PyTree, settings: Settings, update: int) -> Episodes:
                del settings
                played = own.episodes(over.on_actor(judged(state)), evaluation_key(member.config.seed, update))
                return _alone(distributed.of_the_lead(played))

            return play, own.close

        def evaluate_once(state: PyTree, settings: Settings, update: int) -> Episodes:
            play, close = player()
            try:
                return play(state, settings, update)
            finally:
                close()

        def refill(run: Run, update: int) -> Run:
            source, policy = own_source(), over.on_actor(explorer(run.state))
            key = jax.device_put(refill_key(seeds[0], update), over.actor)
            assert source.refill is not None
            data, _ = filled(source, source.refill(key, policy, update), key, policy, update)
            return run._replace(data=data)

        return Traced(abstract_run, settings_now, compile_all, lambda: evaluate_once, lower_learn, refill, of)

    return of(experiments)


def goes_on(experiment: Experiment, run: Run) -> bool:
    """Whether a run that is resumed with this steps its environments on from where they were."""
    data = _first(here(_stepped(run.data)))
    return experiment.source_of(experiment.settings).goes_on(data)


class Remembered(NamedTuple):
    """What stands in `Run.data` of a source with a memory."""

    source: PyTree  # what the source keeps for a checkpoint, the same on all devices
    memory: PyTree  # the memory's, of each logical shard
    ahead: PyTree = ()  # where inserts and samples run apart: by how many samples inserts are ahead


def _stepped(data: PyTree) -> PyTree:
    return data.source if isinstance(data, Remembered) else data


def _kept(data: PyTree) -> PyTree:
    return data.memory if isinstance(data, Remembered) else ()


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


def _alone(tree: PyTree) -> PyTree:
    """With the axis of the members in front."""
    return jax.tree.map(lambda x: x[None], tree)


def _scalar(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), x.dtype)
