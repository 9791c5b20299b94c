"""The devices that a profile asks for, held against those that are there; for run=plan, devices that are only described."""

import contextlib
import importlib.util
import os
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from rlexp.config import Bytes, ConfigError, Count, Flag, Host, NonNegative, Positive, load_module, schema


@schema
class MeshConfig:
    """Sizes of the two mesh axes. Their product is the number of devices that a run wants."""

    data: Count
    """Devices that share the environments, or the members of a pack."""
    model: Count
    """Devices that share a parameter."""


@schema
class ParamRule:
    """Where a parameter lies."""

    path: str
    """Regular expression, searched in the parameter's path, such as "actor/.*/kernel"."""
    spec: list[Literal["data", "model"] | None]
    """The mesh axis of each of the parameter's dimensions."""


@schema
class TpuConfig:
    """What the TPU compiler must know of a slice."""

    generation: str
    """Its name for the chip: v4."""
    topology: str
    """Chips in each direction: 2x2x4."""
    chip_config: str
    """megacore, where the two cores of a chip are one device (v4); default elsewhere."""
    chips_per_host: list[Count]
    """Chips of one host in each direction: [2, 2, 1]."""


@schema
class MatmulRates:
    """Peak rates of matrix products, in floating-point operations a second."""

    bf16: Positive
    """bfloat16 factors, float32 sums."""
    f32: Positive
    """float32 factors at full precision."""


@schema
class Rates:
    """Peak rates of one chip, from data sheets: bounds, which no program reaches."""

    matmul: MatmulRates
    """Matrix products."""
    memory: Positive
    """Bytes a second, to and from the chip's main memory."""
    interconnect: Positive
    """Bytes a second that a chip sends to others, while it receives as many."""
    collective_s: NonNegative
    """Seconds that a collective takes beside its bytes."""


@schema
class Config:
    """A hardware profile."""

    module: Host[str]
    platform: Literal["cpu", "gpu", "tpu"]
    """The kind of device."""
    device_kind: str | None
    """The device's own name, such as "TPU v4"; null takes any of the platform."""
    chips: Count
    """Devices of the whole machine."""
    hosts: Count
    """Hosts that they are spread over."""
    tpu: TpuConfig | None
    """The slice; null where the platform is another."""
    mesh: MeshConfig
    """How the devices are arranged; all chips on the data axis by default."""
    emulate: Host[Flag]
    """Virtual CPU devices in place of the real ones: the same mesh, at a crawl."""
    pack_devices: Host[Count | None]
    """Where the mesh is one CPU: the virtual devices that members of a pack are spread over; null: one for each core."""
    num_envs: Count
    """The default of algo.num_envs: 4 on one device, 4 times the data axis elsewhere."""
    param_rules: list[ParamRule]
    """First match wins; a parameter without a match is on every device."""
    compiler_options: Host[dict[str, Flag | int | float | str]] = field(default_factory=dict)
    """Flags of XLA without their dashes, by which training and evaluation are compiled for these devices."""
    memory_bytes: Bytes | None
    """Main memory of a chip; null where it is that of the machine at hand."""
    rates: Rates
    """What run=plan divides by."""


# The TPU compiler asks these of the machine that it runs on. The topology that is compiled for is given by name.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it is for a device's sake that one process at a time may have it: a compiler has none
}


def prepare(
    config: Config, *, plan: bool = False, num_processes: int = 1, num_members: int = 1, decompositions: int = 0
) -> None:
    """Chooses the platform. Must run before JAX starts its backend, since virtual devices are made there.

    Args:
      num_members: of the largest pack that this process will train.
      decompositions: of batches of matrices that a device may have side by side; on a CPU they need a pool of threads that they
        cannot fill, not to wait for ever.

    Raises:
      ConfigError: the processes cannot share the devices, or the backend has started with fewer virtual devices.
    """
    if _wanted(config) % num_processes:
        raise ConfigError(
            f"processes.number: {num_processes} processes cannot share the {_wanted(config)} devices of hardware.mesh evenly"
        )
    if config.emulate or config.platform == "cpu" or (plan and config.platform == "tpu"):
        jax.config.update("jax_platforms", "cpu")
        enough_threads(max(_wanted(config) // num_processes, min(num_members, _pack_devices(config))), decompositions)
    if config.emulate or (config.platform == "cpu" and num_processes < _wanted(config) <= _cores()):
        try:
            jax.config.update("jax_num_cpu_devices", _wanted(config) // num_processes)
        except RuntimeError as error:
            if jax.device_count("cpu") < _wanted(config):
                raise ConfigError(
                    f"hardware.mesh: {jax.device_count('cpu')} virtual devices were made before {_wanted(config)} were "
                    "asked for, and a process makes them once; give each number of devices a command of its own"
                ) from error
    elif config.platform == "cpu" and num_members > 1 and num_processes == 1:
        with contextlib.suppress(RuntimeError):  # JAX has started: the devices that it has must do
            jax.config.update("jax_num_cpu_devices", min(num_members, _pack_devices(config)))


def decompositions(env: Any, path: str = "env") -> int:
    """How many decompositions of matrices could run side by side in a step and a reset of an environment, and of one within it.

    Its module says so, by a function `decompositions(config)`, which does not count one that needs what another one makes.
    Others have none.
    """
    within, own = getattr(env, "inner", None), getattr(load_module(env.module, path), "decompositions", None)
    return (own(env) if own else 0) + (decompositions(within, f"{path}.inner") if within is not None else 0)


def enough_threads(num_devices: int, decompositions: int) -> None:
    """Asks for a pool that so many devices cannot fill, unless NPROC is set already. Must run before JAX starts."""
    if decompositions:
        os.environ.setdefault("NPROC", str(_cpu_threads(num_devices, decompositions)))


def _cpu_threads(num_devices: int, decompositions: int) -> int:
    """What NPROC must be before JAX starts: the threads of the pool that XLA's virtual CPU devices share.

    A decomposition of a batch of matrices (Cholesky, QR, a solve) keeps the thread that it runs on and waits for others of the same
    pool. By default that has a thread for each core or device: on two cores four of them side by side, or one on each of two
    devices, wait for ever (jax 0.10.2; brax's and MuJoCo's bodies have them). With one thread more than all could keep, one always
    goes on. No more than that: XLA cuts its loops into a piece for each thread, and with fifty a small program takes up to twice
    as long.
    """
    return max(_cores(), 1 + decompositions * num_devices)


def make(config: Config, num_members: int = 1) -> Mesh:
    """The mesh ('data', 'model') of the devices that are there.

    A pack on one CPU is spread over virtual devices, one for each core, as far as its members can be shared out evenly: XLA
    uses a second core for parts of a program only, and a program of half the members on each core is nearly twice as fast.

    Raises:
      ConfigError: they are not those of the profile; and the ways on.
    """
    mesh = _real(config)
    if mesh is None:
        plan = "run=plan" if config.platform == "tpu" else "run=plan hardware.emulate=true"
        raise ConfigError(
            f"{_mismatch(config)}. Ways on: launcher=... to run where they are, hardware.emulate=true for virtual CPU "
            f"devices, {plan} to compile without them"
        )
    _check_options(config)
    if num_members > 1 and mesh.size == 1 and config.platform == "cpu" and not config.emulate:
        most = min(_pack_devices(config), len(jax.devices("cpu")))
        size = max(n for n in range(1, most + 1) if num_members % n == 0)
        return _grid(jax.devices("cpu")[:size], size, 1)
    return mesh


def compiler_options(config: Config) -> dict[str, Any]:
    """What a program of these devices is compiled with: none of it on virtual ones, which another compiler makes."""
    return {} if config.emulate else dict(config.compiler_options)


def _check_options(config: Config) -> None:
    if options := compiler_options(config):
        try:
            jax.jit(lambda: 0, compiler_options=options).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            told = str(error).partition(": ")[2] or str(error)
            raise ConfigError(f"hardware.compiler_options: XLA says of {options}: {told}") from error


def _real(config: Config) -> Mesh | None:
    platform = "cpu" if config.emulate else config.platform
    with contextlib.suppress(RuntimeError):  # no such platform here
        devices = jax.devices(platform)
        kinds = {d.device_kind for d in devices}
        right_kind = config.emulate or config.device_kind is None or kinds == {config.device_kind}
        # One process may leave devices alone. With several, each must take part.
        enough = len(devices) >= _wanted(config) if jax.process_count() == 1 else len(devices) == _wanted(config)
        if right_kind and enough:
            return _mesh(config, devices[: _wanted(config)])
    return None


def describe(config: Config) -> Mesh:
    """The mesh to compile for under run=plan: a TPU slice by its description, other devices as they are.

    Raises:
      ConfigError: there is no TPU compiler, it does not know the slice, or the devices are not there.
    """
    if config.emulate or config.platform != "tpu":
        mesh = _real(config)
        if mesh is None:
            raise ConfigError(
                f"{_mismatch(config)}. run=plan needs no devices where platform is tpu; elsewhere compile where they are, or "
                "with hardware.emulate=true for virtual CPU devices in the same mesh"
            )
        _check_options(config)
        return mesh
    assert config.tpu is not None, "a TPU profile without `tpu`"
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"hardware: run=plan for TPU {config.tpu.topology} needs the TPU compiler, libtpu, which is the extra `plan`: "
            "pip install '.[plan]' in a checkout of rlexp, or make libtpu"
        )
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies  # imported only now, since it is made for this alone

    name = f"{config.tpu.generation}:{config.tpu.topology}"
    try:
        devices = topologies.get_topology_desc(
            platform="tpu",
            topology_name=name,
            chip_config_name=config.tpu.chip_config,
            chips_per_host_bounds=tuple(config.tpu.chips_per_host),
            num_slices=1,
            wrap=(False,) * len(config.tpu.chips_per_host),
        ).devices
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"hardware.tpu: the compiler refuses the slice {name!r}: {str(error).splitlines()[0]}"
        ) from error
    if len(devices) != _wanted(config):
        raise ConfigError(
            f"hardware.mesh: {config.mesh.data} x {config.mesh.model} is {_wanted(config)} devices, and the slice {name!r} "
            f"that run=plan compiles for has {len(devices)}; choose a profile of that size, or hardware.emulate=true"
        )
    return _mesh(config, devices)


def memory_bytes(config: Config) -> int:
    """Main memory of a chip, in bytes."""
    if config.memory_bytes is not None:
        return config.memory_bytes
    return machine_bytes()


def machine_bytes() -> int:
    """Main memory of this machine, or what a container leaves of it."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return size


def _wanted(config: Config) -> int:
    return config.mesh.data * config.mesh.model


def _pack_devices(config: Config) -> int:
    return _cores() if config.pack_devices is None else config.pack_devices


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _mesh(config: Config, devices: Any) -> Mesh:
    return _grid(devices, config.mesh.data, config.mesh.model)


def _grid(devices: Any, data: int, model: int) -> Mesh:
    grid = np.array(devices).reshape(data, model)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def _mismatch(config: Config) -> str:
    platform = "cpu" if config.emulate else config.platform
    name = "" if config.emulate or config.device_kind is None else f", {config.device_kind}"
    there = [f"{sum(d.device_kind == k for d in jax.devices())} {k}" for k in sorted(_kinds())]
    return (
        f"hardware: {_wanted(config)} {platform} device(s) are wanted{name} (hardware.mesh {config.mesh.data} x "
        f"{config.mesh.model}), {', '.join(there)} are here"
    )


def _kinds() -> set[str]:
    return {d.device_kind for d in jax.devices()}
