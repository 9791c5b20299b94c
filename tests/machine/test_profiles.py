"""Every profile is consistent, a user adds one by a YAML file, and the real devices are held against it."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from support import build, command_line, fingerprint

from rlexp import compose, session
from rlexp.config import Config, ConfigError, parse
from rlexp.machine import hardware
from rlexp.sweep import hydra_jobs, packing
from rlexp.training import program
from rlexp.training.layout import layout_of

PROFILES = sorted(path.stem for path in (compose.CONF_DIR / "hardware").glob("*.yaml"))
SIZES = {  # profile: (chips, hosts, topology)
    "cpu": (1, 1, None),
    "gpu": (1, 1, None),
    "gpu-2": (2, 1, None),
    "gpu-4": (4, 1, None),
    "gpu-8": (8, 1, None),
    "gpu-16": (16, 2, None),
    "gpu-32": (32, 4, None),
    "v4-8": (4, 1, "2x2x1"),
    "v4-16": (8, 2, "2x2x2"),
    "v4-32": (16, 4, "2x2x4"),
    "v4-64": (32, 8, "2x4x4"),
}


def profile(*overrides: str) -> hardware.Config:
    return build(*overrides).config.hardware


@dataclass(frozen=True)
class Device:
    platform: str
    device_kind: str
    id: int


def devices_here(monkeypatch: pytest.MonkeyPatch, platform: str, kind: str, num: int, processes: int = 1) -> None:
    found = [Device(platform, kind, i) for i in range(num)]

    def devices(asked: str | None = None) -> list[Device]:
        if asked not in (None, platform):
            raise RuntimeError(f"no {asked} here")
        return found

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(jax, "process_count", lambda: processes)


def test_these_profiles_are_there():
    assert set(SIZES) == set(PROFILES)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_consistent(name):
    config = profile(f"hardware={name}")
    topology = config.tpu.topology if config.tpu else None
    assert (config.chips, config.hosts, topology) == SIZES[name]
    assert (config.mesh.data, config.mesh.model) == (config.chips, 1)
    assert config.num_envs == 4 * config.chips
    assert config.platform == name.split("-")[0].replace("v4", "tpu")
    if config.tpu:
        assert math.prod(int(n) for n in config.tpu.topology.split("x")) == config.chips
        assert config.chips == config.hosts * math.prod(config.tpu.chips_per_host)
        assert config.device_kind == "TPU v4"
    if config.platform == "gpu":
        assert config.hosts == -(-config.chips // 8)


def test_more_hops_take_longer():
    waits = [profile(f"hardware={name}").rates.collective_s for name in ("v4-8", "v4-16", "v4-32", "v4-64")]
    assert waits == sorted(waits) and waits[0] < waits[-1]
    assert profile("hardware=gpu-16").rates.interconnect < profile("hardware=gpu-8").rates.interconnect


V5E = """
defaults:
  - v4-8
  - _self_

device_kind: TPU v5 lite
chips: 16
hosts: 4
tpu:
  generation: v5e
  topology: 4x4
  chip_config: default
  chips_per_host: [2, 2, 1]
memory_bytes: 16e9
rates:
  matmul:
    bf16: 197e12
    f32: 32.8e12
  memory: 819e9
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_user_adds_a_profile_by_one_file(tmp_path):
    """And it is planned for as ours are."""
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware/v5e-16.yaml").write_text(V5E)
    search = compose.search_path(str(tmp_path))
    config = profile(*search, "hardware=v5e-16")
    assert (config.mesh.data, config.num_envs, config.memory_bytes) == (16, 64, 16_000_000_000)
    assert config.rates.interconnect == profile("hardware=v4-8").rates.interconnect
    done = command_line(
        tmp_path, "--config-dir", str(tmp_path), "hardware=v5e-16", "run=plan", "algo.num_steps=8", tpu_compiler=True
    )
    assert done.returncode == 0, done.stderr
    assert "16 x TPU v5 lite (4x4)" in done.stdout


def test_the_mesh_decides_how_many_devices():
    mesh = hardware.make(profile("hardware=v4-8", "hardware.mesh.data=2", "hardware.emulate=true"))
    assert mesh.shape == {"data": 2, "model": 1} and mesh.devices.flat[0].platform == "cpu"
    assert hardware.make(profile("hardware=v4-8", "hardware.emulate=true")).size == 4


@pytest.mark.parametrize(
    ("cores", "members", "more", "size"),
    [
        (2, 4, (), 2),
        (2, 3, (), 1),
        (4, 6, (), 3),
        (64, 8, (), 4),  # of the virtual devices that there are
        (4, 1, (), 1),
        (4, 8, ("hardware.pack_devices=1",), 1),
        (4, 8, ("hardware=v4-8", "hardware.mesh.data=2", "hardware.emulate=true"), 2),
    ],
)
def test_a_pack_on_one_cpu_is_spread_over_its_cores(monkeypatch, cores, members, more, size):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert hardware.make(profile(*more), members).shape == {"data": size, "model": 1}


@pytest.mark.parametrize(
    ("cores", "more", "processes", "made"),
    [
        (4, ("hardware.mesh.data=4",), 1, [4]),
        (4, ("hardware.mesh.data=2", "hardware.mesh.model=2"), 2, [2]),
        (4, (), 1, []),
        (4, ("hardware.mesh.data=2",), 2, []),  # one each, which is there
        (2, ("hardware.mesh.data=4",), 1, []),  # refused when the mesh is made
        (2, ("hardware.mesh.data=4", "hardware.emulate=true"), 1, [4]),
    ],
)
def test_a_cpu_has_a_device_for_each_core_that_is_asked_for(monkeypatch, cores, more, processes, made):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setenv("NPROC", "1")  # a user's own stays
    config, updates = profile(*more), []
    monkeypatch.setattr(jax.config, "update", lambda *change: updates.append(change))
    hardware.prepare(config, num_processes=processes, decompositions=2)
    assert [number for name, number in updates if name == "jax_num_cpu_devices"] == made
    assert os.environ["NPROC"] == "1"


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        ("env=gymnax/cartpole", None),
        ("env=driving/mixed", None),
        ("env=brax/ant", 3),
        ("env=brax/ant hardware.mesh.data=2", 5),
        ("env=brax/ant hardware.mesh.data=4 hardware.emulate=true", 9),
        ("env=brax/ant +env.kwargs.backend=mjx", 4),
        ("env=brax/ant +env.kwargs.backend=spring", None),
        ("env=playground/cartpole_balance", 4),
        ("env=wrapped env@env.inner=brax/ant", 3),
        ("env=wrapped env@env.inner=gymnax/catch", None),
        ("env=managed env@env.inner=brax/ant", 3),
        ("env=wrapped env@env.inner=wrapped env@env.inner.inner=playground/cartpole_balance", 4),
    ],
)
def test_who_decomposes_matrices_gets_one_thread_more_than_that_keeps(monkeypatch, words, threads):
    """On two cores. Of more a small program becomes slower, up to twice."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    config, _ = parse(compose.compose_node(words.split())[0], Config)
    monkeypatch.setattr(jax.config, "update", lambda *change: None)
    monkeypatch.setenv("NPROC", "1")  # put back afterwards, whatever it was
    monkeypatch.delenv("NPROC")
    session.connect(config)
    assert os.environ.get("NPROC") == (threads and str(threads))


@pytest.mark.parametrize(("members", "threads"), [(1, 3), (2, 5), (3, 7), (9, 9)])
def test_of_a_pack_each_device_has_its_own(monkeypatch, members, threads):
    """On four cores, of which a pack takes one for each member."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(jax.config, "update", lambda *change: None)
    monkeypatch.setenv("NPROC", "1")
    monkeypatch.delenv("NPROC")
    hardware.prepare(profile(), num_members=members, decompositions=2)
    assert int(os.environ["NPROC"]) == max(4, threads)


def test_of_several_packs_those_that_decompose_matrices_are_prepared_first(monkeypatch):
    """JAX starts with the first."""
    order, groups = [], []
    for env in ("gymnax/cartpole", "brax/ant", "gymnax/catch"):
        config, modules = parse(compose.compose_node([f"env={env}"])[0], Config)
        groups.append([packing.Job(0, (), {}, config, modules, Path())])
    monkeypatch.setattr(hydra_jobs, "at_once", len)
    monkeypatch.setattr(session, "prepare", lambda node, config, *args, **more: order.append(config.env.module))
    hydra_jobs._check(groups, elsewhere=False)
    assert order == ["rlexp.envs.brax", "rlexp.envs.gymnax", "rlexp.envs.gymnax"]


def test_too_few_devices_are_one_line(monkeypatch):
    devices_here(monkeypatch, "gpu", "NVIDIA L4", 1)
    with pytest.raises(ConfigError) as error:
        hardware.make(profile("hardware=gpu-8"))
    assert "8 gpu device(s) are wanted" in str(error.value) and "1 NVIDIA L4 are here" in str(error.value)
    assert all(way in str(error.value) for way in ("launcher=", "hardware.emulate=true", "run=plan"))
    assert "\n" not in str(error.value)


def test_another_generation_is_refused(monkeypatch):
    devices_here(monkeypatch, "tpu", "TPU v5 lite", 4)
    with pytest.raises(ConfigError, match=r"4 tpu device.s. are wanted, TPU v4.*4 TPU v5 lite are here"):
        hardware.make(profile("hardware=v4-8"))
    devices_here(monkeypatch, "tpu", "TPU v4", 4)
    assert hardware.make(profile("hardware=v4-8")).size == 4


def test_one_process_may_leave_devices_alone_several_may_not(monkeypatch):
    devices_here(monkeypatch, "tpu", "TPU v4", 16)
    assert hardware.make(profile("hardware=v4-8")).size == 4
    devices_here(monkeypatch, "tpu", "TPU v4", 16, processes=4)
    with pytest.raises(ConfigError, match="16 TPU v4 are here"):
        hardware.make(profile("hardware=v4-8"))


def test_the_command_that_people_know_says_what_is_missing(tmp_path):
    done = command_line(tmp_path, "algo=ppo", "hardware=v4-32", "precision=bf16")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "16 tpu device(s) are wanted, TPU v4" in done.stderr and "cpu are here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_may_go_on_on_other_hardware():
    here = fingerprint("shards=4", "algo.num_envs=16")
    assert here == fingerprint("shards=4", "algo.num_envs=16", "hardware=v4-8")
    assert here != fingerprint("shards=2", "algo.num_envs=16", "hardware=v4-8", "hardware.mesh.data=2")


@pytest.mark.parametrize(
    ("options", "told"),
    [("xla_gpu_fooo: 1", "xla_gpu_fooo"), ("xla_cpu_enable_fast_math: perhaps", "not a valid bool")],
)
def test_options_that_the_compiler_does_not_know(options, told):
    config = profile(f"hardware.compiler_options={{{options}}}")
    for mesh_of in (hardware.make, lambda config: hardware.make(config, num_members=2), hardware.describe):
        with pytest.raises(ConfigError, match=rf"^hardware\.compiler_options: .*{told}[^\n]*$"):
            mesh_of(config)


@pytest.mark.parametrize("value", ["null", "[1]", "{a: 1}"])
def test_options_that_are_no_values_of_flags(value):
    with pytest.raises(ConfigError, match=r"^hardware\.compiler_options\.xla_dump_to: .* is not allowed"):
        profile(f"hardware.compiler_options={{xla_dump_to: {value}}}")


def test_virtual_devices_are_compiled_for_without_the_options_of_real_ones():
    config = profile("hardware=gpu", "hardware.emulate=true")
    assert config.compiler_options and not hardware.compiler_options(config)
    assert hardware.compiler_options(profile("hardware=gpu-32")) == config.compiler_options


def test_options_are_left_out():
    """One of them, and all, as docs/platforms/gpu.md has it; what is given later is there."""
    name = "hardware.compiler_options"
    left = profile("hardware=gpu", f"~{name}.xla_gpu_command_buffer_scheduling_mode").compiler_options
    assert left == {"xla_gpu_enable_while_loop_double_buffering": True}
    for none in (f"{name}={{}}", f"++{name}={{}}"):
        assert profile("hardware=gpu", none).compiler_options == {}
    assert profile("hardware=gpu", f"{name}={{}}", f"+{name}.xla_a=1").compiler_options == {"xla_a": 1}
    with pytest.raises(ConfigError, match=r"^hardware\.compiler_option: unknown key; did you mean"):
        profile("hardware.compiler_option={}")


@pytest.mark.parametrize("env", ["gymnax/cartpole", "gymnasium/cartpole"])
def test_what_trains_and_evaluates_is_compiled_with_the_options(env):
    """They are known to nobody, so that each program which has them is refused."""
    lead = build(f"env={env}", "algo.num_envs=4", "algo.num_steps=8", "total_env_steps=64", "eval.num_episodes=1")
    traced = program.trace([lead], layout_of([lead])._replace(compiler_options={"xla_gpu_fooo": 1}))
    programs = [lambda: traced.lower_chunk().compile()]
    programs += [] if lead.on_host else [traced.compile_evaluate]
    for compiled in programs:
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_gpu_fooo'"):
            compiled()
