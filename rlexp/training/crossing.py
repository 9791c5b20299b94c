"""What goes over between the host and the devices around an update whose data comes from the host.

A process brings its part of a batch to its own devices. What all processes have alike lies on all devices; what each has
counted for itself becomes one sum.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from rlexp.config import Config, ConfigError
from rlexp.training.layout import Layout
from rlexp.types import Batch, Metrics, PyTree, Trajectory


class Crossing(NamedTuple):
    """From the host to the mesh, and to the device that acts."""

    layout: Layout
    batch_shardings: Batch  # as the batch: rows [U, T+1, B], samples [U, B], over the data axis
    actor: SingleDeviceSharding
    each_counts: bool  # each of several processes has counts of its own

    @property
    def of_devices(self) -> NamedSharding:
        """Of counts, a row for each device of the data axis."""
        return NamedSharding(self.layout.mesh, P("data"))

    def put(self, batch: Batch) -> Batch:
        """The part of this process, which goes over while the devices still work."""
        if jax.process_count() == 1:
            return jax.device_put(batch, self.batch_shardings)
        return jax.tree.map(jax.make_array_from_process_local_data, self.batch_shardings, batch)

    def everywhere(self, tree: PyTree) -> PyTree:
        """What each process has alike, on all devices."""
        if jax.process_count() == 1:
            return jax.device_put(tree, self.layout.replicated)
        return jax.tree.map(lambda x: _everywhere(x, self.layout.replicated), tree)

    def counts(self, collected: Metrics) -> Metrics:
        """What the batch's metrics are, where the update wants them: of all processes alike, or of this one."""
        if not self.each_counts:
            return self.everywhere(collected)
        of_one = self.layout.mesh.shape["data"] // jax.process_count()

        def one_row(x: Any) -> jax.Array:
            rows = np.zeros((of_one, *np.shape(x)), np.asarray(x).dtype)
            rows[0] = x
            return jax.make_array_from_process_local_data(self.of_devices, rows)

        return jax.tree.map(one_row, collected)

    def on_actor(self, policy: PyTree) -> PyTree:
        """What all devices have alike, on the one that acts."""
        return jax.device_put(here(policy), self.actor)


def crossing(layout: Layout, batch: Batch, actor: Any, *, each_counts: bool) -> Crossing:
    """`batch` has the structure of those that will go over; `actor` is a device."""
    rows, samples = (NamedSharding(layout.mesh, spec) for spec in (P(None, None, "data"), P(None, "data")))
    shardings = Batch(
        Trajectory(*(jax.tree.map(lambda _: rows, x) for x in batch.trajectory)),
        *(jax.tree.map(lambda _: samples, x) for x in batch[1:]),
    )
    return Crossing(layout, shardings, SingleDeviceSharding(actor), each_counts)


def first_to_act(config: Config, layout: Layout, num_devices: int) -> Any:
    """Of the devices that act and do not learn, or of the mesh. Raises ConfigError where so many are not left."""
    learners = layout.mesh.devices
    if config.run == "plan" or not num_devices:  # a plan's devices are but described
        mine = [device for device in learners.flat if device.process_index == jax.process_index()]
        return (mine or [*learners.flat])[0]
    spare = [d for d in jax.local_devices(backend=learners.flat[0].platform) if d not in set(learners.flat)]
    if len(spare) < num_devices:
        raise ConfigError(
            f"algo.source.num_devices: {num_devices} are to act, and beside the {learners.size} of hardware.mesh this machine "
            f"has {len(spare)}; make the mesh smaller, or take 0, with which one device does both"
        )
    return spare[0]


def here(tree: PyTree) -> PyTree:
    """What all devices have alike, as a device of this process has it."""
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def over_processes(collected: Metrics) -> Metrics:
    """The sums, of rows that the processes have put on their devices."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), collected)


def _everywhere(x: Any, replicated: NamedSharding) -> jax.Array:
    """What every process has alike, on all devices of all of them: keys cannot be brought there, their numbers can."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        numbers = jax.make_array_from_process_local_data(replicated, np.asarray(jax.random.key_data(x)))
        return jax.jit(jax.random.wrap_key_data, out_shardings=replicated)(numbers)
    return jax.make_array_from_process_local_data(replicated, np.asarray(x))
