"""Several real processes that train one run, on loopback."""

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support import environment, rlexp_command

from rlexp.overrides import merge_overrides

TESTS = Path(__file__).resolve().parents[1]
DEVICES = 4  # of all processes together
SMALL = (
    "env=probe/obs_action_reward",
    "algo.num_envs=8",
    "algo.num_steps=8",
    "algo.num_epochs=1",
    "algo.num_minibatches=2",
    "algo.normalize_observations=true",
    "network.hidden=[8]",
    "eval.num_episodes=4",
    "eval.every_env_steps=1280",
    "checkpoint.every_updates=20",
    "checkpoint.keep_last=100",
    "total_env_steps=10240",  # 160 updates
    f"shards={DEVICES}",
    f"hardware.mesh.data={DEVICES}",
    "hardware.emulate=true",
    "logger.wandb.mode=disabled",
    "logger.curve=false",
    "logger.progress=plain",
)
TIMEOUT_S = 20


class Processes(NamedTuple):
    """The processes of one run, by index; their output goes to files."""

    running: list[subprocess.Popen]
    outputs: list[Path]

    def wait(self, timeout_s: float = 400) -> list[int]:
        """Exit codes."""
        until = time.monotonic() + timeout_s
        return [p.wait(timeout=max(0.1, until - time.monotonic())) for p in self.running]

    def said(self, index: int) -> str:
        return self.outputs[index].read_text()

    def kill(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def starting(tmp_path: Path) -> Iterator[Any]:
    """Gives start(number, *overrides): that many processes of one run, over `over`; what is left of them is killed at the end."""
    started: list[Processes] = []

    def start(
        number: int,
        *overrides: str,
        slurm: bool = False,
        over: tuple[str, ...] = SMALL,
        each: Sequence[Mapping[str, str]] = (),  # environment variables of each process
    ) -> Processes:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        together = (f"processes.number={number}", f"processes.timeout_s={TIMEOUT_S}") if number > 1 else ()
        outputs = [tmp_path / f"output{len(started)}-{i}" for i in range(number)]
        running = []
        for i, output in enumerate(outputs):
            slurms: dict[str, str] = {}
            own: tuple[str, ...] = ()
            if slurm:  # what srun tells its tasks; JAX takes the port from the job's number
                slurms = {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": str(i)}
                slurms |= {"SLURM_NTASKS": str(number), "SLURM_PROCID": str(i)}
            elif number > 1:
                own = (f"processes.coordinator=localhost:{port}", f"processes.index={i}")
            command = rlexp_command(*merge_overrides(over, [*together, *own, *overrides]))
            env = environment(TESTS, **slurms, **(each[i] if each else {}))
            env.pop("no_proxy", None)  # of tests of the store in this same process; JAX has a line for it
            with output.open("w") as file:
                running.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=file, stderr=subprocess.STDOUT))
        started.append(Processes(running, outputs))
        return started[-1]

    yield start
    for processes in started:
        processes.kill()


def wait_for_checkpoint(run_dir: Path, update: int, processes: Processes) -> None:
    """One of this update, or a later one."""
    until = time.monotonic() + 250
    while not any(
        int(path.name) >= update for path in (run_dir / "checkpoints").glob("[0-9]*") if path.name.isdecimal()
    ):
        assert all(p.poll() is None for p in processes.running), processes.said(0) + processes.said(1)
        assert time.monotonic() < until
        time.sleep(0.005)
