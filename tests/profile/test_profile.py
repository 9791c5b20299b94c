"""`run=profile`: what it measures, what it reads from traces of other platforms, and what it leaves behind."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from rlexp.modes import profile, three_way
from rlexp.storage import rundir
from rlexp.training import program
from rlexp.training.loop import Member, layout_of
from rlexp.training.parts import stacked_settings
from tests.support import build, train

pytestmark = pytest.mark.timeout(300)  # several programs are compiled, some in a process of their own

SMALL = (
    "algo=pqn",  # compiles in half the time of PPO
    "env=probe/obs_action_reward",
    "algo.num_envs=8",
    "algo.num_steps=4",
    "algo.num_epochs=1",
    "algo.num_minibatches=1",
    "network.hidden=[8]",
    "eval.num_episodes=4",
)


NOT_COMPILED = program.Program(*(None,) * 6)  # type: ignore[arg-type]


class Profiled(NamedTuple):
    dir: Path
    report: dict[str, Any]
    text: str


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profiled run."""
    directory = tmp_path_factory.mktemp("one_device")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profile, "_CHUNK_S", 0.01)
        profile.profile_run(Member(build(*SMALL), directory, "00000000"), None)
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained for two updates, on one device but in four shards."""
    directory = tmp_path_factory.mktemp("trained")
    overrides = [*SMALL, "shards=4", "total_env_steps=64"]
    train(directory, *overrides)
    node = build(*overrides).node
    rundir.describe(directory / "0", run_id="00000000", node=node, overrides=overrides, devices=jax.devices())
    return directory / "0"


@pytest.fixture(scope="module")
def four_devices(trained: Path) -> Profiled:
    """The trained run, profiled from the command line on four virtual devices, with a compilation cache."""
    directory = trained.parent / "profiled"
    arguments = [
        "run=profile",
        f"resume={trained}",
        "logger=quiet",
        "hardware.emulate=true",
        "hardware.mesh.data=4",
        f"compilation_cache={trained.parent / 'cache'}",
        f"hydra.run.dir={directory}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "rlexp", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=trained.parent,
        env=os.environ | {"PYTHONPATH": str(Path(profile.__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    return Profiled(directory, json.loads((directory / "profile.json").read_text()), done.stdout)


@pytest.mark.slow
def test_all_parts_are_measured(one_device: Path) -> None:
    report = json.loads((one_device / "profile.json").read_text())
    assert report["devices"] == {"platform": "cpu", "kind": "cpu", "num": 1}
    assert report["compile_s"] > 0
    assert set(report["seconds_per_update"]) == {"chunk", "rollout", "update"}
    assert min(report["seconds_per_update"].values()) > 0
    assert report["evaluation"]["seconds"] > 0 and report["evaluation"]["episodes"] == 4
    assert min(report["host_per_chunk"].values()) > 0
    assert report["fetched_per_chunk"]["arrays"] > 10
    assert report["fetched_per_chunk"]["bytes"] >= 4 * report["fetched_per_chunk"]["arrays"]
    assert report["env_steps_per_update"] == 32
    assert report["env_steps_per_second"] == pytest.approx(32 / report["seconds_per_update"]["chunk"])
    speeds = report["three_way"]["env_steps_per_second"]
    assert min(speeds.values()) > 0 and speeds["training"] == report["env_steps_per_second"]
    assert sum(report["three_way"]["shares"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_the_trace_is_split_by_scope_and_sorted(one_device: Path) -> None:
    trace = json.loads((one_device / "profile.json").read_text())["trace"]
    shares = {name: part["share"] for name, part in trace["parts"].items()}
    assert shares["rollout"] > 0 and shares["update"] > 0
    assert sum(shares.values()) == pytest.approx(1)
    costs = [op["seconds"] for op in trace["operations"]]
    assert len(costs) == 10 and costs == sorted(costs, reverse=True) and costs[-1] > 0
    # Counts are those of one update: most of these run once in it, or once in each of its four steps.
    assert {op["count"] for op in trace["operations"]} & {1.0, 4.0}


@pytest.mark.slow
def test_one_device_has_no_collectives(one_device: Path) -> None:
    trace = json.loads((one_device / "profile.json").read_text())["trace"]
    assert trace["collectives"] == {"seconds": 0.0, "count": 0.0, "share": 0.0}


@pytest.mark.slow
def test_what_is_left_behind(one_device: Path) -> None:
    report = json.loads((one_device / "profile.json").read_text())
    assert (one_device / report["trace"]["file"]).stat().st_size > 0
    assert list((one_device / "profile").rglob("*.trace.json.gz"))
    assert not (one_device / "profile" / "metrics.jsonl").exists()
    assert json.loads((one_device / "summary.json").read_text()) == {
        "status": "finished",
        "objective": None,
        "env_steps": 0,
        "agent_steps": None,
        "env_steps_per_second": None,
        "compile_s": report["compile_s"],
        "resumed_from": None,
    }


@pytest.mark.slow
def test_four_devices_have_collectives(four_devices: Profiled) -> None:
    collectives = four_devices.report["trace"]["collectives"]
    assert four_devices.report["devices"]["num"] == 4
    assert collectives["count"] >= 1 and collectives["seconds"] > 0 and 0 < collectives["share"] < 1
    assert collectives["count"] == int(collectives["count"])  # as many on each device, in each update


@pytest.mark.slow
def test_the_table(four_devices: Profiled) -> None:
    for words in (
        "compilation",
        "rollout",
        "update",
        "collectives",
        "evaluation",
        "host",
        "device to host",
        "all-reduce",
        "of the environment alone",
    ):
        assert words in four_devices.text
    assert str(four_devices.dir / "profile.json") in four_devices.text
    assert "\x1b" not in four_devices.text


@pytest.mark.slow
def test_the_program_is_compiled_without_the_cache(four_devices: Profiled) -> None:
    names = [path.name for path in (four_devices.dir.parent / "cache").iterdir()]
    assert any("collect_all" in name for name in names)  # the cache works
    assert "def updates_all(" in inspect.getsource(program)  # what would be found if it were there
    assert not any("updates_all" in name for name in names)


@pytest.mark.slow
def test_goes_on_from_a_checkpoint(trained: Path, four_devices: Profiled) -> None:
    assert json.loads((four_devices.dir / "summary.json").read_text())["resumed_from"] == 64
    experiment = build(*SMALL, "shards=4", "total_env_steps=64")
    traced = program.trace([experiment], layout_of([experiment]))
    run, update = profile._start(experiment, traced, NOT_COMPILED, trained)
    assert update == 2
    np.testing.assert_array_equal(run.state.step, [2])


@pytest.mark.slow
def test_takes_the_parameters_alone(trained: Path) -> None:
    experiment = build(*SMALL, "shards=4", "total_env_steps=64", "checkpoint.restore=params")
    traced = program.trace([experiment], layout_of([experiment]))
    fresh = traced.compile().init()
    begun = NOT_COMPILED._replace(begin=lambda learnt: (fresh._replace(state=learnt(fresh.state)), {}))
    run, update = profile._start(experiment, traced, begun, trained)
    assert update is None
    np.testing.assert_array_equal(run.state.step, [0])
    before, after = jax.tree.leaves(fresh.state.params), jax.tree.leaves(run.state.params)
    assert not all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "mesh", [pytest.param((), marks=pytest.mark.slow), ("hardware.emulate=true", "hardware.mesh.data=2")]
)
def test_the_environment_alone_takes_the_steps_that_the_policy_took(mesh: tuple[str, ...]) -> None:
    lead = build(*SMALL, "env=gymnax/catch", "shards=2", *mesh)
    layout = layout_of([lead])
    state = jax.jit(lead.algorithm.init)(jax.random.key(0), {name: np.float32(x) for name, x in lead.hp.items()})
    run = program.Run(jax.tree.map(lambda x: x[None], state), (), stacked_settings([lead]))
    parts = three_way.programs(lead, layout)
    worlds = parts.begin(run, lead.shared)
    later, (actions, _, first) = parts.act(run, lead.shared, worlds, jax.random.key(1))
    alone = parts.step(run, lead.shared, worlds[:2], actions)
    assert parts.env_steps == 8 * 1024 and actions.shape == (2, 1024, 4)
    assert jax.tree.leaves(later[0])[0].shape[:2] == (2, 4) and len(np.unique(actions)) == 3
    assert first.sum() == 8 * (1024 // 10)  # an episode of catch is nine steps, and its reset one
    for ours, theirs in zip(jax.tree.leaves(alone), jax.tree.leaves(later[:2]), strict=True):
        if not jax.numpy.issubdtype(ours.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(alone[0].steps, worlds[0].steps + 1024)


def test_what_a_run_is_bound_by() -> None:
    found = three_way.report(step=4e6, acting=2e6, training=1e6, begun=3)
    assert found["shares"] == pytest.approx({"environment": 0.25, "inference": 0.25, "learning": 0.5})
    assert found["bound_by"] == "learning" and found["episodes_begun"] == 3
    assert (
        three_way.report(step=1e6, acting=1.1e6, training=9e5, begun=3)["bound_by"] == "environment"
    )  # clocks differ a little


def test_which_clock_is_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stepping alone takes half a second, with inference two; the first turn compiles, and does not count."""
    turns = [0]

    def act(run: Any, shared: Any, worlds: Any, key: jax.Array) -> Any:
        turns[0] += 1
        return worlds, ("actions", (), jax.numpy.ones(3, bool))

    made = three_way.Programs(lambda *_: ("state", "row", "memory"), act, lambda *_: (), 1000)
    monkeypatch.setattr(three_way, "programs", lambda *_: made)

    def timed(f: Any, *args: Any) -> tuple[float, Any]:
        seconds = {made.act: 2.0, made.step: 0.5}[f] * (100.0 if turns[0] == 0 else 1.0)
        return seconds, f(*args)

    monkeypatch.setattr(profile, "_timed", timed)
    found = inspect.unwrap(profile._three_way)(build(), layout_of([build()]), (), (), 250.0)
    assert found["env_steps_per_second"] == {"step": 2000.0, "with_inference": 500.0, "training": 250.0}
    assert found["episodes_begun"] == 3 * (turns[0] - 1) > 0


def test_environments_of_the_host_take_the_same_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same seeds, with the actions of the policy; each turn other ones."""
    lead = build(*SMALL, "env=gymnasium/cartpole", "algo.num_envs=4")
    state = jax.jit(lead.algorithm.init)(jax.random.key(0), {name: np.float32(x) for name, x in lead.hp.items()})
    run = program.Run(jax.tree.map(lambda x: x[None], state), (), stacked_settings([lead]))
    env, seen, closed, clock = lead.env_of(lead.settings), list[np.ndarray](), list[bool](), [0.0]
    monkeypatch.setattr(three_way.time, "perf_counter", lambda: clock[0])

    def open(num: int) -> Any:
        opened = env.open(num)

        def reset(seeds: np.ndarray) -> Any:
            seen.append(np.asarray(seeds))
            return opened.reset(seeds)

        def step(actions: np.ndarray) -> Any:
            seen.append(opened.step(actions))
            clock[0] += 3.0 if len([x for x in seen if not isinstance(x, np.ndarray)]) <= 64 else 1.0
            return seen[-1]

        return opened._replace(reset=reset, step=step, close=lambda: closed.append(bool(opened.close() or True)))

    watched = lead._replace(env_of=lambda settings, shared=None: env._replace(open=open))
    turns = three_way.on_host(watched, run, jax.devices()[0])
    for _ in range(2):
        seen.clear()
        turn = next(turns)
        assert (turn.env_steps, turn.acting_s, turn.step_s) == (256, 3 * 64.0, 64.0)
        rows = [x for x in seen if not isinstance(x, np.ndarray)]
        for ours, theirs in zip(rows[:64], rows[64:], strict=True):
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        assert turn.begun == sum(int(x.first.sum()) for x in rows[:64]) > 4
    turns.close()
    assert closed == [True]


# --- traces of other platforms, as their profilers write them --------------------------------------------------------

GPU = """
planes { name: "/host:CPU"
  lines { name: "python" events { metadata_id: 1 duration_ps: 9000000 stats { metadata_id: 1 str_value: "add.1" } } }
  event_metadata { key: 1 value { id: 1 name: "add.1" } } stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }
planes { name: "/device:GPU:0"
  lines { name: "Stream #13(Compute,MemcpyD2H)"
    events { metadata_id: 1 duration_ps: 6000000 stats { metadata_id: 1 str_value: "loop_fusion.3" } }
    events { metadata_id: 1 duration_ps: 2000000 stats { metadata_id: 1 str_value: "loop_fusion.3" } }
    events { metadata_id: 2 duration_ps: 1000000 stats { metadata_id: 1 str_value: "while.7" }
             stats { metadata_id: 2 str_value: "kind_src:device kind_dst:pinned size:16 dest:0 async:1" } }
    events { metadata_id: 3 duration_ps: 1000000
             stats { metadata_id: 2 str_value: "kind_src:pinned kind_dst:device size:800 dest:0 async:1" } } }
  lines { name: "Stream #20(Compute)"
    events { metadata_id: 4 duration_ps: 4000000 stats { metadata_id: 1 str_value: "all-reduce-start.1" } }
    events { metadata_id: 4 duration_ps: 2000000 } }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 7000000 } }
  event_metadata { key: 1 value { id: 1 name: "loop_fusion_3" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2H" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyH2D" } }
  event_metadata { key: 4 value { id: 4 name: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "memcpy_details" } } }
"""

TPU = """
planes { name: "/device:TPU:0"
  lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 90000000 } }
  lines { name: "XLA Ops"
    events { metadata_id: 2 duration_ps: 50000000 }
    events { metadata_id: 3 duration_ps: 30000000 }
    events { metadata_id: 4 duration_ps: 10000000 } }
  lines { name: "Async XLA Ops" events { metadata_id: 4 duration_ps: 80000000 } }
  event_metadata { key: 1 value { id: 1 name: "jit_updates_all(123)" } }
  event_metadata { key: 2 value { id: 2 name: "%while.7 = (s32[]) while(%tuple.1), body=%b" } }
  event_metadata { key: 3 value { id: 3 name: "%fusion.3 = f32[8]{0} fusion(%p), kind=kLoop" } }
  event_metadata { key: 4 value { id: 4 name: "%all-gather.2 = f32[8]{0} all-gather(%p)" } } }
"""


def test_reads_the_trace_of_a_gpu() -> None:
    origins = {"loop_fusion.3": "rollout/add", "while.7": "update/while"}
    found = profile.summarise(ProfileData.from_text_proto(GPU), origins, num_device_updates=2)
    assert found["copies_to_host"] == pytest.approx({"seconds": 0.5e-6, "count": 0.5, "share": 1 / 16, "bytes": 8.0})
    assert found["collectives"] == pytest.approx({"seconds": 3e-6, "count": 1.0, "share": 6 / 16})
    assert found["parts"]["rollout"] == pytest.approx({"seconds": 4e-6, "count": 1.0, "share": 8 / 16})
    assert found["parts"]["update"]["share"] == pytest.approx(1 / 16)
    assert found["operations"][0]["name"] == "loop_fusion.3" and found["operations"][0]["origin"] == "rollout/add"


def test_reads_the_trace_of_a_tpu() -> None:
    found = profile.summarise(ProfileData.from_text_proto(TPU), {"fusion.3": "update/mul"}, num_device_updates=1)
    assert found["collectives"] == pytest.approx({"seconds": 10e-6, "count": 1.0, "share": 1 / 4})
    assert [(op["name"], op["origin"]) for op in found["operations"]] == [
        ("fusion.3", "update/mul"),
        ("all-gather.2", ""),
    ]


def test_an_empty_trace_is_no_division_by_zero() -> None:
    found = profile.summarise(ProfileData.from_text_proto(""), {}, num_device_updates=1)
    assert found["operations"] == [] and found["collectives"]["share"] == 0


def test_origins_are_short_and_of_merged_ones_the_first() -> None:
    hlo = """
  %dot.1 = f32[2] dot(%a, %b), metadata={op_type="x" op_name="jit(f)/while/body/closed_call/rollout/vmap()/dot" id=1}
  ROOT %all-reduce.2 = (f32[], f32[]) all-reduce(%c), metadata={op_name="jit(f)/update/(jvp(Head)/add:reduce_sum)"}
  plain = f32[] add(%d, %e)
  in_vmap.3 = f32[] add(%d, %e), metadata={op_name="jit(updates_all)/vmap(rollout)/add"}
"""
    assert profile.origins(hlo) == {
        "dot.1": "rollout/dot",
        "all-reduce.2": "update/jvp(Head)/add",
        "in_vmap.3": "vmap(rollout)/add",
    }


def test_workers_find_it_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Path]()

    def begin(learnt: Any = None) -> Any:
        raise KeyboardInterrupt  # it has come far enough

    made = NOT_COMPILED._replace(begin=begin, at=told.append)
    traced = program.Traced(*(None,) * 7)._replace(compile=lambda: made)  # type: ignore[arg-type]
    monkeypatch.setattr(program, "trace", lambda *_: traced)
    with pytest.raises(KeyboardInterrupt):
        profile.profile_run(Member(build(*SMALL), tmp_path, "00000000"), None)
    assert told == [tmp_path]
