"""Run by test_threads.py: decomposes batches of matrices side by side, on the devices of the profile that its arguments change."""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlexp import compose
from rlexp.config import parse
from rlexp.machine import hardware

config = parse(compose.compose_node(sys.argv[1:])[0])[0].hardware
hardware.prepare(config, decompositions=4)  # as there are below
mesh = hardware.make(config)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
def decomposed(x: jax.Array) -> jax.Array:
    """The sum of four, over and over. x [B, 14, 14]."""

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return 0.0 * sum(jnp.linalg.cholesky(x + i) for i in range(4)) + x, None

    return jax.lax.scan(step, x, None, length=20)[0]


matrices = jnp.tile(jnp.eye(14), (2048 * mesh.size, 1, 1))
decomposed(jax.device_put(matrices, NamedSharding(mesh, P("data")))).block_until_ready()
print(mesh.size)
