"""metrics.jsonl: what is written is what is read, and a crash at any byte costs at most the last line."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.loggers import jsonl

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, rows: list[dict], start_env_steps: int = 0) -> None:
    logger = jsonl.make(path, start_env_steps=start_env_steps)
    for row in rows:
        logger.log(row)
    logger.close({})


def rows(*steps: int) -> list[dict]:
    return [{"env_steps": n, "wall_s": n / 3} for n in steps]


def test_round_trip_with_env_steps_and_wall_s_first(tmp_path):
    path = tmp_path / jsonl.NAME
    write(path, [{"loss/policy": 0.1 + 0.2, "wall_s": 1 / 3, "train/return_mean": None, "env_steps": 128}])
    assert path.read_text() == (
        '{"env_steps": 128, "wall_s": 0.3333333333333333, "loss/policy": 0.30000000000000004, '
        '"train/return_mean": null}\n'
    )
    assert jsonl.read(path) == [
        {"env_steps": 128, "wall_s": 1 / 3, "loss/policy": 0.1 + 0.2, "train/return_mean": None}
    ]


def test_scalars_of_numpy_and_jax_become_plain_numbers(tmp_path):
    row = {"env_steps": np.int64(1 << 40), "wall_s": np.float64(0.5), "a": np.float32(0.1), "b": jnp.float32(0.1)}
    row |= {"c": jnp.int32(7), "d": jnp.bfloat16(0.1)}
    write(tmp_path / "m", [row])
    (read,) = jsonl.read(tmp_path / "m")
    assert read["env_steps"] == 1 << 40
    assert read["a"] == read["b"] == float(np.float32(0.1))  # all digits: the float32 comes back
    assert read["c"] == 7
    assert isinstance(read["c"], int)
    assert abs(read["d"] - 0.1) < 1e-3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf"), None])
def test_what_json_cannot_say_is_null(tmp_path, value):
    write(tmp_path / "m", [{"env_steps": 1, "wall_s": 1.0, "loss": value}])
    line = (tmp_path / "m").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"env_steps": 1, "wall_s": 1.0, "loss": None}


def test_no_file_has_no_lines(tmp_path):
    assert jsonl.read(tmp_path / "none") == []
    jsonl.truncate(tmp_path / "none", 0)
    assert not (tmp_path / "none").exists()


@settings(max_examples=30)
@given(cut=st.integers(0, 240))
def test_a_file_cut_at_any_byte_keeps_its_whole_lines(cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "m"
    write(path, rows(10, 20, 30, 40))
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    whole = data.count(b"\n")
    assert jsonl.read(path) == rows(10, 20, 30, 40)[:whole]
    jsonl.truncate(path, 1_000)
    assert path.read_bytes() == data[: data.rfind(b"\n") + 1]
    write(path, rows(50), start_env_steps=1_000)  # a resumed run's first line starts on a line of its own
    assert jsonl.read(path) == [*rows(10, 20, 30, 40)[:whole], *rows(50)]


def test_truncate_drops_what_lies_beyond_the_checkpoint(tmp_path):
    path = tmp_path / "m"
    write(path, rows(10, 20, 30, 40))
    before = path.read_bytes().splitlines(keepends=True)
    jsonl.truncate(path, 20)
    assert path.read_bytes() == b"".join(before[:2])
    assert sorted(x.name for x in tmp_path.iterdir()) == ["m"]


def test_truncate_that_fails_leaves_the_file(tmp_path, monkeypatch):
    path = tmp_path / "m"
    write(path, rows(10, 20, 30))
    before = path.read_bytes()

    def fail(*_):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        jsonl.truncate(path, 10)
    assert path.read_bytes() == before


def test_a_new_run_starts_anew_and_a_resumed_one_goes_on(tmp_path):
    path = tmp_path / "m"
    write(path, rows(10, 20, 30))
    write(path, rows(30, 40), start_env_steps=20)
    assert jsonl.read(path) == rows(10, 20, 30, 40)
    for _ in range(2):  # a run that starts at 0 may log an evaluation at 0
        write(path, rows(0, 10))
        assert jsonl.read(path) == rows(0, 10)


BAD = (b"null", b"true", b'"9"', b"-1", b"1.5", b"[]", b"1" + b"0" * 19)  # as env_steps


@pytest.mark.parametrize(
    "bad",
    [b"\x00\x00\n", b"{}\n", b"[1]\n", b'{"env_steps": 1\n', b"[" * 100_000 + b"\n"]
    + [b'{"env_steps": %s}\n' % value for value in BAD],
)
def test_a_broken_line_in_the_middle_is_named(tmp_path, bad):
    path = tmp_path / "m"
    write(path, rows(10, 20))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bad + second)
    with pytest.raises(ValueError, match=r"m, line 2: not a JSON object with env_steps"):
        jsonl.read(path)


def test_a_killed_process_leaves_whole_lines(tmp_path):
    path = tmp_path / "m"
    program = (
        "import itertools, sys; from pathlib import Path; from rlexp.loggers import jsonl\n"
        "logger = jsonl.make(Path(sys.argv[1]), start_env_steps=0)\n"
        "for n in itertools.count():\n"
        "    logger.log({'env_steps': n, 'wall_s': n / 3, **{f'metric/{i}': n / (i + 3) for i in range(30)}})\n"
        "    n == 300 and print('enough', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert path.read_bytes().endswith(b"}\n")
    assert [row["env_steps"] for row in jsonl.read(path)][:301] == list(range(301))


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "m"
    path.symlink_to("/dev/full")
    logger = jsonl.make(path, start_env_steps=0)
    with pytest.raises(OSError, match="cannot write the metrics: No space left on device") as caught:
        logger.log({"env_steps": 1, "wall_s": 1.0})
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)


def test_sync_puts_the_lines_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    logger = jsonl.make(tmp_path / "m", start_env_steps=0)
    logger.log({"env_steps": 1, "wall_s": 1.0})
    assert synced == []
    logger.sync()
    assert synced == [(tmp_path / "m").stat().st_size]
    logger.close({})
    assert len(synced) == 2
