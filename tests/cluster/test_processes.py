"""Several real processes on loopback (Gloo): they train one run, agree, die, and go on. As a user starts them."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import pytest
from support import assert_same, environment, rows, saved

from .together import DEVICES, TIMEOUT_S, wait_for_checkpoint

pytestmark = pytest.mark.timeout(900)


def without_gloo(output: str) -> Sequence[str]:
    """Gloo tells of its connections, and two processes may write into one line of it."""
    return [line for line in output.splitlines() if line and "connected peer ranks" not in line]


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
def test_one_is_killed_then_all_and_the_resumed_run_is_the_undisturbed_one(number, start, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    undisturbed = start(number, f"hydra.run.dir={whole}")
    assert undisturbed.wait() == [0] * number, undisturbed.said(0)
    # Only process 0 speaks and logs.
    assert "training to" in undisturbed.said(0)
    assert [without_gloo(undisturbed.said(i)) for i in range(1, number)] == [[]] * (number - 1)
    assert [row["env_steps"] for row in rows(whole)] == list(range(0, 10241, 1280))
    assert json.loads((whole / "summary.json").read_text())["status"] == "finished"

    # One is killed: the others end by themselves, with a reason.
    first = start(number, f"hydra.run.dir={halves}")
    wait_for_checkpoint(halves, 40, first)
    first.running[1].kill()
    began = time.monotonic()
    codes = first.wait(timeout_s=TIMEOUT_S + 60)
    assert time.monotonic() - began < TIMEOUT_S + 30
    assert codes[1] == -signal.SIGKILL and 0 not in codes
    # JAX's runtime says so, or we do: whichever hears of it first ends the process.
    assert "another task died" in first.said(0) or "another process of this run died" in first.said(0)

    # Then all at once.
    second = start(number, f"resume={halves}")
    wait_for_checkpoint(halves, 100, second)
    second.kill()
    assert not (halves / "summary.json").exists()

    third = start(number, f"resume={halves}")
    assert third.wait() == [0] * number, third.said(0)
    assert json.loads((halves / "summary.json").read_text())["resumed_from"] >= 100 * 64
    assert_same(halves, whole)
    assert saved(halves)[0] == 160


@pytest.mark.slow
def test_recorded_traffic_that_two_read_is_what_one_reads(start, tmp_path):
    from rlexp.envs.womd import features, generate

    for i in range(2):
        features.write(tmp_path / f"{i}.tfrecord", generate.records(("merge",), 1 + i, seed=i))
    lines = []
    for number in (2, 1):
        own = ("env=womd", f"env.path={tmp_path}/*.tfrecord", "env.max_episode_steps=10", "total_env_steps=1280")
        processes = start(number, *own, f"hydra.run.dir={tmp_path / str(number)}")
        assert processes.wait() == [0] * number, processes.said(0)
        lines.append([row["env/progress_ratio"] for row in rows(tmp_path / str(number)) if "env/progress_ratio" in row])
    assert lines[0]
    np.testing.assert_allclose(lines[0], lines[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("damaged", "record 1 has a wrong checksum; it is damaged"),
        ("whole", "is not there; in "),
        ("some*", "some1: nothing in process 0 and '"),  # half of whose records would be the others'
    ],
)
def test_what_one_process_cannot_read_all_refuse(name, said, start, tmp_path):
    """A record is read by one of them; and a folder of one machine may not have what that of another has."""
    from rlexp.envs.womd import features, generate

    homes = [tmp_path / str(i) for i in range(2)]
    for home in homes:
        home.mkdir()
        features.write(home / "whole", generate.records(("merge",), 2, seed=0))
        content = bytearray((home / "whole").read_bytes())
        content[-10] ^= 1  # of record 1, which process 1 reads
        (home / "damaged").write_bytes(content)
        shutil.copy(home / "whole", home / "some0")
    (homes[1] / "whole").rename(homes[1] / "some1")
    own = [{"HOME": str(home)} for home in homes]
    processes = start(2, "env=womd", f"env.path='~/{name}'", f"hydra.run.dir={tmp_path / 'run'}", each=own)
    assert processes.wait() == [2, 2], processes.said(0) + processes.said(1)
    for i in range(2):
        (line,) = without_gloo(processes.said(i))
        assert line.startswith("rlexp: env.path: ") and said in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["ends", "is cut"])
def test_a_notice_on_one_host_makes_all_save_the_same_update(chunk, start, tmp_path):
    run_dir = tmp_path / "run"
    more = ("eval.every_env_steps=null", "checkpoint.every_updates=null", "checkpoint.every_minutes=0.01")
    processes = start(2, f"hydra.run.dir={run_dir}", "total_env_steps=1e8", *(more if chunk == "is cut" else ()))
    wait_for_checkpoint(run_dir, 20, processes)
    processes.running[1].send_signal(signal.SIGTERM)
    assert processes.wait(100) == [0, 0], processes.said(0) + processes.said(1)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert "stopped by another process and saved" in processes.said(0)
    update, leaves = saved(run_dir)
    assert summary["env_steps"] == update * 64
    # A chunk is cut where it takes over a second, as on a busy machine.
    behind = update - rows(run_dir)[-1]["env_steps"] // 64
    assert 0 <= behind < 20 if chunk == "ends" else behind == update
    (step,) = (leaf for path, leaf in leaves.items() if path.endswith("['state']['step']"))
    assert step == update


@pytest.mark.slow
def test_any_number_of_processes_opens_a_checkpoint(start, tmp_path):
    """Two save; one with four devices goes on, then one with one. The numbers are those of a run that was always alone."""
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    for number, until, devices in ((2, 40, 4), (1, 80, 4), (1, 100, 1)):
        total = f"total_env_steps={64 * until}"
        where = f"resume={run_dir}" if run_dir.exists() else f"hydra.run.dir={run_dir}"
        processes = start(number, total, where, f"hardware.mesh.data={devices}", "algo.anneal_lr=false")
        assert processes.wait() == [0] * number, processes.said(0)
    assert json.loads((run_dir / "summary.json").read_text())["resumed_from"] == 64 * 80
    processes = start(
        1, "total_env_steps=6400", f"hydra.run.dir={alone}", "hardware.mesh.data=1", "algo.anneal_lr=false"
    )
    assert processes.wait() == [0], processes.said(0)
    (_, wanted), (_, got) = saved(alone), saved(run_dir)
    params = [path for path in wanted if path.startswith("['state']['params']")]
    assert len(params) == 8
    for path in params:
        np.testing.assert_allclose(got[path], wanted[path], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_slurms_variables_are_enough(start, tmp_path):
    """Coordinator, number and index come from them."""
    processes = start(2, "total_env_steps=2560", f"hydra.run.dir={tmp_path / 'run'}", slurm=True)
    assert processes.wait() == [0, 0], processes.said(0)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert without_gloo(processes.said(1)) == []


CACHED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rlexp.machine import distributed
from rlexp.config import ProcessesConfig

coordinator, index, cache = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
distributed.start(ProcessesConfig(coordinator=coordinator, number=2, index=int(index), timeout_s=100), num_hosts=1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
spread = NamedSharding(Mesh(np.array(jax.devices()), "data"), PartitionSpec("data"))
x = jax.jit(lambda: jnp.sin(jnp.arange(8.0)), out_shardings=spread)()
total = jax.jit(lambda x: (x * x).sum(), out_shardings=NamedSharding(spread.mesh, PartitionSpec()))(x)
print("hits", len(hits), float(total.addressable_data(0)))
"""


@pytest.mark.slow
def test_each_process_finds_in_the_compilation_cache_what_process_0_wrote(tmp_path):
    (tmp_path / "cached.py").write_text(CACHED)

    def run() -> list[str]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        running = [
            subprocess.Popen(
                [sys.executable, "cached.py", f"localhost:{port}", str(i), str(tmp_path / "cache")],
                cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for i in (0, 1)
        ]  # fmt: skip
        said = [process.communicate(timeout=200)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0], said
        return [re.findall("hits .*", text)[0] for text in said]

    first, second = run(), run()
    numbers = [said.split()[2] for said in first]
    assert second == [f"hits 2 {numbers[0]}", f"hits 2 {numbers[1]}"] and numbers[0] == numbers[1]


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1])
def test_processes_that_do_not_find_each_other_say_so(missing, start, tmp_path):
    """One waits for the other, which never comes: one line, and nothing is left behind."""
    own = tmp_path / "temporary"
    own.mkdir()
    each = [{"TMPDIR": str(own)}] * 2
    processes = start(2, "processes.timeout_s=3", f"hydra.run.dir={tmp_path / 'run'}", each=each)
    processes.running[missing].kill()
    assert processes.wait(100)[1 - missing] == 2
    line = r"rlexp: processes\.coordinator: 'localhost:\d+' does not bring 2 processes together \(not within 3 s\).*\n"
    assert re.fullmatch(line, processes.said(1 - missing))
    assert not (tmp_path / "run").exists()
    killed = processes.running[missing].pid
    assert [path for path in own.iterdir() if str(killed) not in path.name] == []


@pytest.mark.slow
@pytest.mark.parametrize("run", ["eval", "profile"])
def test_one_process_evaluates_and_profiles(run, start, tmp_path):
    processes = start(1, f"hydra.run.dir={tmp_path / 'run'}", "total_env_steps=64")
    assert processes.wait(200) == [0], processes.said(0)
    processes = start(2, f"run={run}", f"resume={tmp_path / 'run'}", f"hydra.run.dir={tmp_path / 'second'}")
    assert processes.wait(100) == [2, 2], processes.said(0)
    assert re.fullmatch(
        rf"rlexp: run: {run} is done by one process, and here are 2.*", without_gloo(processes.said(0))[-1]
    )
    assert not (tmp_path / "second").exists()


@pytest.mark.slow
def test_run_check_holds_the_mesh_of_several_processes_against_one_device(start, tmp_path):
    run_dir = tmp_path / "run"
    processes = start(2, "run=check", f"hydra.run.dir={run_dir}")
    assert processes.wait(300) == [0, 0], processes.said(0) + processes.said(1)
    numbers = json.loads((run_dir / "check.json").read_text())
    assert numbers["passed"] and numbers["devices"] == DEVICES and 0 < numbers["params_difference"] <= 1e-5
    assert "the same seed twice" in processes.said(0) and without_gloo(processes.said(1)) == []


@pytest.mark.slow
def test_devices_must_be_shared_out_evenly(start, tmp_path):
    processes = start(3, f"hydra.run.dir={tmp_path / 'run'}")
    assert processes.wait(100) == [2, 2, 2]
    assert re.fullmatch(r"rlexp: processes\.number: 3 processes cannot share the 4 devices .*\n", processes.said(0))
    assert not (tmp_path / "run").exists()
