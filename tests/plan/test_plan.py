"""`run=plan`: its numbers against a hand count and a real run, for every algorithm, here and for the TPU."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import ALGORITHMS, LIBTPU, build, command_line, environment

from rlexp.config import ConfigError
from rlexp.machine import hardware
from rlexp.modes import plan
from rlexp.modes.cost import Collective, Cost, Traffic
from rlexp.training import program
from rlexp.training.loop import Member, layout_of

pytestmark = pytest.mark.timeout(300)

KEYS = [
    "fits",
    "argument_bytes",
    "temp_bytes",
    "total_bytes",
    "capacity_bytes",
    "host_bytes",
    "flops_per_env_step",
    "bytes_per_env_step",
    "collectives",
    "compile_s",
    "roofline_s",
    "env_steps_per_second_bound",
    "hours_to_total",
]
SMALL = ("algo.num_steps=8", "network.hidden=[16]", "total_env_steps=1e6")
# Sizes that any of them takes; those that only some have are here by name.
SIZES = {"ppo": ("algo.num_epochs=1",), "pqn": ("algo.num_epochs=1", "algo.num_minibatches=2")}
SIZES["td3"] = ("env=gymnax/pendulum",)
SIZES["apg"] = ("env=gymnax/pendulum",)
RECORDED = (
    "bc",
    "iql",
    "decision_transformer",
)  # no environment is stepped, and so many rows a sequence are its own keys
SIZES["r2d2"] = ("network=gru", "network.units=16", "network.torso.hidden=[16]")


def small(algo: str) -> tuple[str, ...]:
    own = SIZES.get(algo, ())
    common = (x for x in SMALL if not x.startswith("network.") or "network=gru" not in own)
    return (*(x for x in common if not x.startswith("algo.num_steps") or algo not in RECORDED), *own)


def check_plan(found: dict[str, Any]) -> None:
    assert list(found) == KEYS
    assert found["fits"] is True
    assert 0 < found["argument_bytes"] < found["total_bytes"] < found["capacity_bytes"]
    assert found["temp_bytes"] > 0
    assert found["flops_per_env_step"] > 100 and found["bytes_per_env_step"] > 10
    assert list(found["roofline_s"]) == ["compute", "memory", "interconnect"]
    assert found["compile_s"] > 0
    assert found["hours_to_total"] == pytest.approx(1e6 / found["env_steps_per_second_bound"] / 3600, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_is_planned_here(algo, tmp_path):
    """On four devices, as the chunk of the same shards runs there."""
    member = Member(build(f"algo={algo}", *small(algo), "hardware.mesh.data=4"), tmp_path, "a0000000")
    found = plan.plan_run(member)
    assert json.loads((tmp_path / "plan.json").read_text()) == found
    check_plan(found)
    assert {c["op"] for c in found["collectives"]} == {"all-reduce"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["compile_s"] == found["compile_s"]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_is_planned_for_a_tpu(algo, tmp_path):
    run = (f"algo={algo}", *small(algo), "hydra.run.dir=run")
    done = command_line(tmp_path, "hardware=v4-32", "run=plan", *run, tpu_compiler=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "16 x TPU v4 (2x2x4)" in done.stdout
    found = json.loads((tmp_path / "run/plan.json").read_text())
    check_plan(found)
    assert found["capacity_bytes"] == 30.75 * 2**30
    assert {c["op"] for c in found["collectives"]} == {"all-reduce"}
    started = json.loads((tmp_path / "run/environment.json").read_text())
    assert [d.split(":")[0] for d in started["devices"]] == ["cpu"]  # it does not look for a TPU


def test_flops_against_a_hand_count():
    """PPO with two nets 4-64-64-{2, 1}: B environments, T steps, E epochs; a product of [n, i] and [i, o] is 2·n·i·o."""
    obs, hidden, actions, num_envs, num_steps, num_epochs = 4, 64, 2, 8, 128, 3
    actor, critic = (2 * (obs * hidden + hidden * hidden + hidden * out) for out in (actions, 1))
    samples = num_envs * num_steps
    acting = samples * actor + (num_steps + 1) * num_envs * critic  # the values once a rollout, of T + 1 rows
    # Forward; the same again for the kernels' gradients; and for those of what comes in, but for the observation.
    backward_inputs = 2 * (2 * hidden * hidden + hidden * actions + hidden)
    learning = num_epochs * samples * (2 * (actor + critic) + backward_inputs)
    sizes = (f"algo.num_envs={num_envs}", f"algo.num_steps={num_steps}", f"algo.num_epochs={num_epochs}")
    found, *_ = plan.plan(build("algo=ppo", "env=gymnax/cartpole", *sizes))
    # The compiler makes of products with one column what it likes: that is less than one in a hundred.
    assert found["flops_per_env_step"] == pytest.approx((acting + learning) / samples, rel=0.01)


MEASURE = """
import re, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
from support import build
from rlexp.modes import plan
from rlexp.training import program
from rlexp.training.loop import layout_of

def settled():  # a chunk's results are ready shortly before its temporaries are given back
    lowest = resident("VmRSS")
    until = time.monotonic() + 1
    while time.monotonic() < until:
        time.sleep(0.02)
        if (now := resident("VmRSS")) < lowest - 1e6:
            lowest, until = now, time.monotonic() + 1
    return lowest

def resident(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

experiment = build(*sys.argv[1:])
traced = program.trace([experiment], layout_of([experiment]))
told = plan.memory_of(traced.lower_chunk().compile())
compiled = traced.compile()
run, _ = compiled.chunk(compiled.init(), 1)
jax.block_until_ready(run)
peaks = []
for _ in range(3):
    before = settled()
    open("/proc/self/clear_refs", "w").write("5")  # forgets the peak
    run, _ = compiled.chunk(run, 1)
    jax.block_until_ready(run)
    peaks.append(resident("VmHWM") - before)
held = jax.tree.leaves((run, compiled.nothing))
raw = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in held]
print(told.argument, sum(x.nbytes for x in raw), told.temp, max(peaks))
"""


@pytest.mark.slow
def test_memory_against_a_real_run():
    """Arguments are what the run and a chunk's sums hold; temporaries are by how much the process grows while a chunk runs."""
    sizes = ["algo.num_envs=64", "algo.num_steps=256", "algo.num_minibatches=1", "network.hidden=[1024,1024]"]
    root = Path(plan.__file__).parents[2]
    # A large block is then given back at once, so that each chunk has to ask for its own.
    env = {"MALLOC_MMAP_THRESHOLD_": "262144", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    command = [sys.executable, "-c", MEASURE, *sizes, "algo.num_epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    argument, held, temp, grown = map(int, done.stdout.split())
    assert argument == held + 4  # and the number of updates
    assert temp > 300e6
    assert grown == pytest.approx(temp, rel=0.05)


@pytest.mark.slow
def test_collectives_are_counted_by_update():
    """PPO on four devices: with twice the minibatches, twice the gradients are summed. On one device nothing is."""

    def all_reduces(*overrides: str) -> dict[str, Any]:
        found, *_ = plan.plan(build("algo=ppo", *SMALL, "algo.num_envs=64", "algo.num_epochs=1", *overrides))
        return {c["op"]: c for c in found["collectives"]}

    four = all_reduces("hardware.mesh.data=4", "algo.num_minibatches=4")["all-reduce"]
    eight = all_reduces("hardware.mesh.data=4", "algo.num_minibatches=8")["all-reduce"]
    params = 4 * (4 * 16 + 16 + 16 * 2 + 2) + 4 * (4 * 16 + 16 + 16 + 1)
    assert params < (eight["bytes"] - four["bytes"]) / 4 < 1.2 * params
    assert (eight["count"] - four["count"]) % 4 == 0
    assert all_reduces() == {}


@pytest.mark.slow
def test_chips_meet_once_a_gradient_step(tmp_path):
    """On a TPU all gradients are one all-reduce. Metrics, all of an epoch in one, and the advantages' two moments are summed once
    an epoch; the normaliser, the explained variance and, as whole numbers, the transitions once an update."""
    for num_epochs, num_minibatches in ((2, 4), (3, 8)):
        run_dir = tmp_path / str(num_minibatches)
        run = ("algo=ppo", "algo.normalize_observations=true", "algo.num_envs=64", *SMALL, f"hydra.run.dir={run_dir}")
        sizes = (f"algo.num_epochs={num_epochs}", f"algo.num_minibatches={num_minibatches}")
        done = command_line(tmp_path, "hardware=v4-8", "run=plan", *run, *sizes, tpu_compiler=True)
        assert done.returncode == 0, done.stderr
        (found,) = json.loads((run_dir / "plan.json").read_text())["collectives"]
        assert (found["op"], found["count"]) == ("all-reduce", num_epochs * num_minibatches + 2 * num_epochs + 4)
        params = 4 * (4 * 16 + 16 + 16 * 2 + 2) + 4 * (4 * 16 + 16 + 16 + 1)
        least = num_epochs * num_minibatches * params
        assert least < found["bytes"] < 1.1 * least + 4096


RATES = hardware.Rates(
    matmul=hardware.MatmulRates(bf16=1e12, f32=1e11), memory=1e10, interconnect=1e9, collective_s=1e-3
)


def test_roofline():
    costs = Cost(
        flops=Counter({"bf16": 2e12, "f32": 3e11, "f32 default": 1e12}),
        bytes=1e10,
        collectives={Collective("all-reduce", 4): Traffic(2, 1e9), Collective("all-gather", 1): Traffic(5, 1e9)},
        operations=1.0,
        dynamic_loops=1,
    )
    tpu, cpu = (plan.roofline(costs, RATES, platform=p) for p in ("tpu", "cpu"))
    assert tpu.compute == pytest.approx(2 + 3 + 1) and cpu.compute == pytest.approx(2 + 3 + 10)
    assert tpu.memory == pytest.approx(1)
    assert tpu.interconnect == pytest.approx(2 * 3 / 4 * 1e9 / 1e9 + 2e-3)  # a group of one talks to nobody
    assert tpu.seconds == pytest.approx(6 + 1.502)


@pytest.mark.slow
def test_the_bound_is_that_of_the_slowest_part():
    found, *_ = plan.plan(build(*SMALL, "hardware.rates.memory=1", "eval.every_env_steps=320"))
    per_step = found["bytes_per_env_step"]
    assert found["env_steps_per_second_bound"] == pytest.approx(1 / per_step, rel=1e-3)
    assert found["roofline_s"]["memory"] == pytest.approx(320 * per_step)  # a chunk ends at the evaluation


@pytest.mark.slow
def test_what_does_not_fit_is_told_by_how_much(tmp_path):
    done = command_line(tmp_path, "run=plan", *SMALL, "hardware.memory_bytes=10240")
    assert done.returncode == 2
    assert "which has 10 KiB" in done.stderr and "too much" in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_the_tpu_compiler_refuses_is_told_by_how_much(tmp_path):
    big = ("algo.num_envs=131072", "algo.num_steps=512", "network.hidden=[512,512]", "algo.num_minibatches=1")
    done = command_line(tmp_path, "hardware=v4-8", "run=plan", *big, tpu_compiler=True)
    assert done.returncode == 2
    assert "which has 30.75 GiB" in done.stderr and "GiB too much" in done.stderr and done.stderr.count("\n") == 1


def test_other_failures_of_the_compiler_are_not_taken_for_it():
    assert plan._refused("INTERNAL: Used 3 of nothing") is None
    assert (
        plan._refused("RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (1.50G) exceeds")
        == 1.5 * 2**30
    )
    assert (
        plan._refused("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.00M of 30.75G") == 40 * 2**20
    )


def test_without_the_compiler_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"hardware: .*pip install '\.\[plan\]'") as error:
        hardware.describe(build("hardware=v4-8", "run=plan").config.hardware)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_without_gpus_the_ways_on_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"8 gpu device.*4 cpu are here.*hardware.emulate=true"):
        hardware.describe(build("hardware=gpu-8", "run=plan").config.hardware)
    found, *_ = plan.plan(build("hardware=gpu-4", "hardware.emulate=true", *SMALL))
    assert found["capacity_bytes"] == 80e9 and found["collectives"]


def test_a_mesh_that_is_no_slice_is_refused(tmp_path):
    done = command_line(tmp_path, "hardware=v4-8", "hardware.mesh.data=2", "run=plan", tpu_compiler=True)
    assert done.returncode == 2
    assert "2 x 1 is 2 devices, and the slice 'v4:2x2x1'" in done.stderr and done.stderr.count("\n") == 1


HOLDS = """
import sys
from rlexp import experiment, compose
from rlexp.machine import hardware
hardware.describe(experiment.build(compose.compose_node(["hardware=v4-8", "run=plan"])[0]).config.hardware)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_two_may_plan_at_once():
    if not (LIBTPU / "libtpu").is_dir():
        pytest.skip("no TPU compiler: make libtpu")
    with_compiler, command = environment(LIBTPU), [sys.executable, "-c", HOLDS]
    with subprocess.Popen(
        command, env=with_compiler, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == "here\n"  # it has the compiler, and keeps it
        second = subprocess.run(command, env=with_compiler, input="", capture_output=True, text=True, timeout=200)
        assert second.stdout == "here\n", second.stderr[-500:]
        other.stdin.close()


@pytest.mark.slow
def test_the_plan_is_of_the_chunk_that_runs():
    experiment = build(*SMALL)
    traced = program.trace([experiment], layout_of([experiment]))
    planned, run = traced.lower_chunk().compile().as_text(), traced.compile().executable.as_text()
    without_ids = lambda text: [line.split(", metadata")[0] for line in text.splitlines()]  # noqa: E731
    assert without_ids(planned) == without_ids(run)
