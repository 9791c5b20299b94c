"""Records beside TensorFlow: what we write it reads, and what it writes we read, to the bit. `make test-tensorflow`."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlexp.envs.womd import features, generate, tfrecord

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".tensorflow" / "bin" / "python"
NUM = 3
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ROOT / ".tensorflow" / ".stamp").exists(), reason="TensorFlow's environment is not there: make tensorflow"
    ),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    place = tmp_path_factory.mktemp("tensorflow")
    sizes = {"points": generate.POINTS, "paths": generate.PATHS, "path_points": generate.PATH_POINTS}
    names = {np.dtype(np.float32): "float", np.dtype(np.int64): "int64", np.dtype(object): "bytes"}
    table = {n: (names[f.dtype], [sizes.get(d, d) for d in f.shape]) for n, f in features.TABLE.items()}
    (place / "table.json").write_text(json.dumps(table))

    def run(what: str, *places: Path) -> None:
        script = Path(__file__).with_name("tensorflow_oracle.py")
        command = [PYTHON, script, place / "table.json", what, *places]
        done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    return run


@pytest.fixture(scope="module")
def drives():
    return list(generate.records(("crossing", "merge"), NUM, seed=5))


def same(ours: dict, theirs: dict, prefix: str) -> None:
    for name in features.TABLE:
        x, y = ours[name], theirs[f"{prefix}{name}"]
        assert x.shape == y.shape, name
        if x.dtype == object:
            assert x.astype("S").tolist() == y.tolist(), name
        else:
            assert x.dtype == y.dtype, name
            bits = np.int32 if x.dtype == np.float32 else np.int64
            np.testing.assert_array_equal(x.view(bits), y.view(bits), err_msg=name)


def test_tensorflow_reads_what_we_write(drives, oracle, tmp_path):
    features.write(tmp_path / "a.tfrecord", drives[:2])
    features.write(tmp_path / "b.tfrecord", drives[2:])
    oracle("read", tmp_path / "a.tfrecord", tmp_path / "b.tfrecord", tmp_path / "read.npz")
    read = np.load(tmp_path / "read.npz")
    assert len(read.files) == NUM * len(features.TABLE)
    for i, drive in enumerate(drives):
        same(drive, read, f"{i}:")


def test_we_read_what_tensorflow_writes(drives, oracle, tmp_path):
    """And the file is, to the byte, what we make of its messages."""
    rng = np.random.default_rng(0)
    wild = {}  # values of all sizes and signs
    for name, feature in features.TABLE.items():
        x = drives[0][name]
        if feature.dtype == np.float32:
            bits = rng.integers(0, 2**32, x.shape, np.uint32).view(np.float32)
            wild[name] = np.where(np.isfinite(bits), bits, np.float32(-0.0)).astype(np.float32)
        elif feature.dtype == np.int64:
            wild[name] = rng.integers(-(2**63), 2**63 - 1, x.shape, np.int64)
        else:
            wild[name] = x
    given = {
        f"{i}:{n}": x.astype("S") if x.dtype == object else x
        for i, r in enumerate((drives[1], wild))
        for n, x in r.items()
    }
    np.savez(tmp_path / "given.npz", **given)
    oracle("write", tmp_path / "given.npz", tmp_path / "theirs.tfrecord")
    for i, (_, _, found) in enumerate(features.read(str(tmp_path / "theirs.tfrecord"))):
        same(found, given, f"{i}:")
    tfrecord.write(tmp_path / "ours.tfrecord", (data for *_, data in tfrecord.records([tmp_path / "theirs.tfrecord"])))
    assert (tmp_path / "ours.tfrecord").read_bytes() == (tmp_path / "theirs.tfrecord").read_bytes()
