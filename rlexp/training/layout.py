"""Where everything lies: members of a pack, logical shards of the environments, and parameters, over the mesh ('data', 'model').

Every leaf of a Run has the members as its first axis, a pack of one too. `Run.data` has the logical shards as its second. The
source works shard by shard (`collect`); the update sees the global batch, and the compiler puts the reductions in.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as DeviceLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlexp.config import ConfigError
from rlexp.experiment import Experiment
from rlexp.machine import hardware
from rlexp.machine.hardware import ParamRule
from rlexp.sources.base import Memory, Place, Source
from rlexp.training import param_rules
from rlexp.types import Batch, Metrics, PyTree, Trajectory

_HOST_MEMORY = "pinned_host"  # what JAX calls memory of the host that a device reads and writes by itself


class Layout(NamedTuple):
    """A mesh and what is spread over its data axis."""

    mesh: Mesh
    num_shards: int  # logical shards of the environments
    num_members: int
    param_rules: Sequence[ParamRule]
    compiler_options: dict[str, Any] | None = None  # of what trains and evaluates

    @property
    def members_on_data(self) -> bool:
        """A pack of at least as many members as the data axis is spread by members; else environments are."""
        size = self.mesh.shape["data"]
        return self.num_members >= size and self.num_members % size == 0 and self.num_members > 1

    @property
    def replicated(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, P())

    @property
    def member_sharding(self) -> NamedSharding:
        """Of arrays whose only structure is the leading members axis."""
        return NamedSharding(self.mesh, P("data") if self.members_on_data else P())


def layout_of(members: Sequence[Experiment]) -> Layout:
    """The mesh of the hardware profile, with a pack on it. Raises ConfigError where the devices are not there."""
    lead = members[0]
    mesh = hardware.make(lead.config.hardware, len(members))
    options = hardware.compiler_options(lead.config.hardware)
    return Layout(mesh, lead.num_shards, len(members), tuple(lead.config.hardware.param_rules), options)


def over_members(layout: Layout, f: Callable) -> Callable:
    """f of one member -> f of all, on arrays with a leading members axis. One member costs nothing: no vmap, only a reshape."""
    if layout.num_members == 1:

        def single(*args: PyTree) -> PyTree:
            out = f(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: x[None], out)

        return single
    if not layout.members_on_data or layout.mesh.shape["data"] == 1:
        return jax.vmap(f)
    return jax.shard_map(
        jax.vmap(f), mesh=layout.mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )


def one_by_one(f: Callable, shards: PyTree) -> PyTree:
    """f of each shard of a leading axis, in turn and not vmapped: so the arrays of a shard are the same on any mesh.

    With other shapes XLA rounds differently, and a last bit is another trajectory some hundred steps later (docs/adr/0002).
    """
    if jax.tree.leaves(shards)[0].shape[0] == 1:  # a loop would copy a replay memory on its way in and out
        return jax.tree.map(lambda x: x[None], f(jax.tree.map(lambda x: x[0], shards)))
    return jax.lax.map(f, shards)


def _row_major(places: PyTree, data: PyTree) -> PyTree:
    """Else XLA may lay an axis of one shard before that of the members, and copies all data of a pack to and fro in each update."""

    def one(x: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # which has no layout
        return x if is_key else with_layout_constraint(x, DeviceLayout(tuple(range(x.ndim))))

    def of_place(place: Place, part: PyTree) -> PyTree:
        return part if place is Place.HOST else jax.tree.map(one, part)

    return jax.tree.map(of_place, places, data)


def shard_by_shard(places: PyTree, f: Callable, data: PyTree, *rest: PyTree) -> tuple:
    """(data, …) of f(data of a shard, …), for each shard; what is replicated is given to all, and taken of the first."""
    of_shards, of_all = _parted(places, data)

    def one(shard: PyTree) -> tuple:
        mine, *more = shard
        data, *out = f(_joined(mine, of_all), *more)
        return data, *out

    data, *out = one_by_one(one, (of_shards, *rest))
    data = jax.lax.platform_dependent(data, tpu=lambda data: data, default=functools.partial(_row_major, places))
    return _first_where_replicated(places, data), *out


def init_shards(layout: Layout, source: Source) -> Callable:
    """(key, policy) -> Data with a leading axis of logical shards. The key of a shard is the same on any mesh."""

    def init(key: jax.Array, policy: PyTree) -> PyTree:
        data = one_by_one(lambda k: source.init(k, policy), jax.random.split(key, layout.num_shards))
        return _first_where_replicated(source.places, data)

    return init


def begin_shards(layout: Layout, source: Source) -> Callable:
    """(key, policy) -> (Data as of `init_shards`, metrics of what was taken meanwhile)."""

    def begin(key: jax.Array, policy: PyTree) -> tuple[PyTree, Metrics]:
        if source.begin is None:
            return init_shards(layout, source)(key, policy), {}
        of_shard = source.begin
        data, metrics = one_by_one(lambda k: of_shard(k, policy), jax.random.split(key, layout.num_shards))
        return _first_where_replicated(source.places, data), jax.tree.map(lambda x: x.sum(axis=0), metrics)

    return begin


def collect(layout: Layout, source: Source) -> Callable:
    """(data, policy) -> (data, Batch [U, T+1, B, ...] with the shard as the major part of B, metrics)."""

    def local(data: PyTree, policy: PyTree) -> tuple[PyTree, Batch, Metrics]:
        data, batch, metrics = shard_by_shard(source.places, lambda shard: source.next(shard, policy), data)
        trajectory = Trajectory(*(jax.tree.map(lambda x: _merge(x, 2), leaf) for leaf in batch.trajectory))
        return data, Batch(trajectory, *(jax.tree.map(lambda x: _merge(x, 1), leaf) for leaf in batch[1:])), metrics

    def run(data: PyTree, policy: PyTree) -> tuple[PyTree, Batch, Metrics]:
        shards = local
        if layout.mesh.shape["data"] > 1 and not layout.members_on_data:
            samples: Any = P(None, "data")
            rows: Any = P(None, None, "data")
            specs = _specs(source.places, data)
            out_specs = (specs, Batch(rows, weight=samples, ids=samples, memory=samples), P("data"))
            shards = jax.shard_map(
                local,
                mesh=layout.mesh,
                in_specs=(specs, P()),
                out_specs=out_specs,
                axis_names={"data"},
                check_vma=False,
            )
        data, batch, metrics = shards(data, policy)
        return data, source.finish(batch), jax.tree.map(lambda x: x.sum(axis=0), metrics)

    return run


def remember(layout: Layout, memory: Memory) -> Callable:
    """(data, batch of all shards) -> data: each shard adds its own environments' rows, on the device that has it."""
    places = memory.source.places

    def local(data: PyTree, batch: Batch) -> PyTree:
        num_shards = jax.tree.leaves(_parted(places, data)[0])[0].shape[0]
        trajectory = jax.tree.map(lambda x: _split(x, num_shards, 2), batch.trajectory)
        parts = Batch(trajectory, *(jax.tree.map(lambda x: _split(x, num_shards), tree) for tree in batch[1:]))
        return shard_by_shard(places, lambda *shard: (memory.add(*shard),), data, parts)[0]

    def run(data: PyTree, batch: Batch) -> PyTree:
        if layout.mesh.shape["data"] == 1 or layout.members_on_data:
            return local(data, batch)
        specs, samples, rows = _specs(places, data), P(None, "data"), P(None, None, "data")
        of_batch: Any = Batch(rows, weight=samples, ids=samples, memory=samples)  # type: ignore[arg-type]
        return jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(specs, of_batch),
            out_specs=specs,
            axis_names={"data"},
            check_vma=False,
        )(data, batch)

    return run


def feed_back(layout: Layout, source: Source) -> Callable:
    """(data, ids, priority [U, B]) -> data: each shard hears of its own samples, on the device that has it."""

    def local(data: PyTree, ids: PyTree, priority: jax.Array) -> PyTree:
        num_shards = jax.tree.leaves(_parted(source.places, data)[0])[0].shape[0]
        samples = jax.tree.map(lambda x: _split(x, num_shards), (ids, priority))
        return shard_by_shard(source.places, lambda *shard: (source.feedback(*shard),), data, *samples)[0]

    def run(data: PyTree, ids: PyTree, priority: jax.Array) -> PyTree:
        if layout.mesh.shape["data"] == 1 or layout.members_on_data:
            return local(data, ids, priority)
        specs, samples = _specs(source.places, data), P(None, "data")
        return jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(specs, samples, samples),
            out_specs=specs,
            axis_names={"data"},
            check_vma=False,
        )(data, ids, priority)

    return run


def run_shardings(layout: Layout, abstract_run: Any, places: PyTree = Place.SHARD) -> Any:
    """A sharding for each leaf of a Run, with those of `data` in their places.

    Raises:
      ConfigError: for a parameter rule that cannot be followed, and where the devices reach no memory of their host.
    """
    places = jax.tree.broadcast(places, abstract_run.data)
    if Place.HOST in jax.tree.leaves(places):
        _check_host_memory(layout)
    members = layout.member_sharding
    shards = members if layout.members_on_data else NamedSharding(layout.mesh, P(None, "data"))
    where = {place: members if place is Place.REPLICATED else _in_memory(shards, place) for place in Place}
    rules = layout.param_rules
    param_rules.check(rules, layout.mesh, abstract_run.state)
    state = jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(layout.mesh, param_rules.spec_of(rules, path, x, layout.members_on_data)),
        abstract_run.state,
    )
    data = jax.tree.map(lambda place: where[place], places)
    settings = jax.tree.map(lambda _: members, abstract_run.settings)
    return abstract_run._replace(state=state, data=data, settings=settings)


def _parted(places: PyTree, data: PyTree) -> tuple[PyTree, PyTree]:
    """(what each shard has, what is replicated), with None for the leaves of the other."""
    places = jax.tree.broadcast(places, data)
    of_shards = jax.tree.map(lambda place, x: None if place is Place.REPLICATED else x, places, data)
    return of_shards, jax.tree.map(lambda place, x: x if place is Place.REPLICATED else None, places, data)


def _joined(of_shards: PyTree, of_all: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: y if x is None else x, of_shards, of_all, is_leaf=lambda x: x is None)


def _first_where_replicated(places: PyTree, data: PyTree) -> PyTree:
    """Leaves [S, ...], or [...] of what is the same in all shards."""
    places = jax.tree.broadcast(places, data)
    return jax.tree.map(lambda place, x: x[0] if place is Place.REPLICATED else x, places, data)


def _specs(places: PyTree, data: PyTree) -> PyTree:
    """Over the data axis, for a shard_map."""
    places = jax.tree.broadcast(places, data)
    return jax.tree.map(lambda place: P() if place is Place.REPLICATED else P("data"), places)


def _in_memory(sharding: NamedSharding, place: Place) -> NamedSharding:
    return sharding.with_memory_kind(_HOST_MEMORY) if place is Place.HOST else sharding


def _check_host_memory(layout: Layout) -> None:
    device = layout.mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _HOST_MEMORY not in kinds:
        raise ConfigError(
            f"algo.source: it keeps data in the host's memory, which {device.platform} devices cannot reach; "
            f"theirs are {', '.join(kinds)}"
        )


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """[S, ..., b, ...] -> [..., S * b, ...], where b becomes axis `axis` of the result. One shard needs no transpose."""
    x = jax.numpy.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _split(x: jax.Array, num_shards: int, axis: int = 1) -> jax.Array:
    """[..., S * b, ...] -> [S, ..., b, ...]: what `collect` put together."""
    return jax.numpy.moveaxis(x.reshape(*x.shape[:axis], num_shards, -1, *x.shape[axis + 1 :]), axis, 0)
