"""Run by test_checkpoint_processes.py in processes of its own: `checkpoint_child.py four|one|forever DIRECTORY`."""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parent))
from conftest import abstract, build_run, config, never, same

from rlexp.storage import checkpoint

CAPACITY = 200_000  # forever: 5.6 MB a checkpoint


def sharding(num_devices: int, *axes: str) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    return NamedSharding(mesh, PartitionSpec(*axes))


def onto(run, target):
    """Shapes and types of the Run, to be laid out as `target`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target), run)


def four(directory: Path) -> None:
    """One device -> four -> one, two and four (split and copied), in a process that has four."""
    expected = build_run(1)
    restored = checkpoint.restore(directory / "from_one", onto(expected, sharding(4, "data")), warn=never)
    assert restored is not None
    assert same(restored.run, expected)
    checkpointer = checkpoint.make(config(), directory / "from_four")
    checkpointer.save(3, restored.run, {}, None)
    checkpointer.close()
    for target in (sharding(1, "data"), sharding(2, "data"), sharding(4, "data"), sharding(4)):
        restored = checkpoint.restore(directory / "from_four", onto(expected, target), warn=never)
        assert restored is not None
        assert same(restored.run, expected), target
        assert all(x.sharding.is_equivalent_to(target, x.ndim) for x in jax.tree.leaves(restored.run)), target
    fresh = jax.tree.map(lambda x: x, restored.run)._replace(data={"other": restored.run.data["half"]})
    part = checkpoint.restore_into(directory / "from_one", fresh, what="learner", warn=never)
    assert part is not None
    assert same(part.run.state, expected.state)
    assert same(part.run.data, fresh.data)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(part.run)} == {4}


def one(directory: Path) -> None:
    """Restores on the only device what four have saved."""
    assert jax.device_count() == 1
    restored = checkpoint.restore(directory / "from_four", abstract(build_run()), warn=never)
    assert restored is not None
    assert same(restored.run, build_run(1))


def forever(directory: Path) -> None:
    """Saves until it is killed; prints each update that is on the disk."""
    checkpointer = checkpoint.make(config(keep_last=1, keep_best=0), directory)
    for update in range(1, 1000):
        checkpointer.save(update, build_run(update, capacity=CAPACITY), {"env_steps": 10 * update}, None)
        checkpointer.wait()
        print(update, flush=True)


if __name__ == "__main__":
    assert "orbax.checkpoint" not in sys.modules  # 0.3 s that a run without checkpoints need not pay
    jax.config.update("jax_num_cpu_devices", 4 if sys.argv[1] == "four" else 1)
    {"four": four, "one": one, "forever": forever}[sys.argv[1]](Path(sys.argv[2]))
