"""Run by test_selectors.py, one process of two: `choosing_child.py PORT INDEX` prints what the shards of both choose, as JSON."""

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

if __name__ == "__main__":
    port, index = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index), initialization_timeout=60)
    from replay import test_selectors as given

    mesh = jax.make_mesh((4,), ("data",))
    assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
    over = NamedSharding(mesh, P("data"))
    arrays = (given.WEIGHT, given.HELD, given.AGE, given.NUMBER)
    mine = [jax.make_array_from_callback(x.shape, over, lambda at, x=x: x[at]) for x in arrays]
    found = {name: np.asarray(item).tolist() for name, item in given.over_shards(mesh, mine).items()}
    print(json.dumps(found))
