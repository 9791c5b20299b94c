"""What sbatch is told: the launcher's own keys, `launcher.sbatch`, and shell lines of which a failing one fails the job."""

import re
import subprocess
from collections.abc import Sequence
from typing import Any

from rlexp.config import ConfigError

# Keys of the launcher that are handed on as they are. In `launcher.sbatch` they are understood too, but not in both.
NAMED = (
    "partition", "account", "qos", "constraint", "exclude", "comment", "gres", "gpus_per_task", "cpus_per_gpu",
    "mem", "mem_per_gpu", "mem_per_cpu",
)  # fmt: skip
_RENAMED = {"cpus": "cpus_per_task"}

# What the launcher sets itself, and what to write instead.
_OURS = {
    "job-name": "launcher.job_name",
    "time": "launcher.time",
    "nodes": "launcher.nodes",
    "cpus-per-task": "launcher.cpus",
    "signal": "launcher.signal_delay_s",
    "array": "launcher.array_parallelism",
    "output": "nothing: logs lie in slurm/ of the sweep",
    "error": "launcher.stderr_to_stdout",
    "open-mode": "nothing: a job that goes on appends to its log",
    "requeue": "nothing: a pack that saved is requeued always",
    "no-requeue": "nothing: a pack that saved is requeued always",
    "ntasks": "launcher.nodes: each has one process",
    "ntasks-per-node": "launcher.nodes: each has one process",
    "tasks-per-node": "launcher.nodes: each has one process",
    "wait": "nothing: the command waits, unless launcher.detach=true",
    "wrap": "launcher.setup",
    "clusters": "SLURM_CLUSTERS in the environment, which squeue and scancel read too",
    "parsable": "nothing: sbatch's answer is read here",
    "quiet": "nothing: sbatch's answer is read here",
    "test-only": "launcher.rehearse",
    "help": "nothing: it is not about a job",
    "usage": "nothing: it is not about a job",
    "version": "nothing: it is not about a job",
}
# Options of their own that one of ours begins with: sbatch understands what is cut short.
_WHOLE = {"mem", "no-kill", "cluster-constraint", "time-min"}


def check(config: Any) -> None:
    """Raises ConfigError for what sbatch would refuse, or would do otherwise than anybody means."""
    given = _given(config)
    memory = [key for key in ("mem", "mem_per_cpu", "mem_per_gpu") if key in given]
    if len(memory) > 1:
        raise ConfigError(
            f"launcher.{memory[1]}: not beside launcher.{memory[0]}; give one of mem, mem_per_cpu, mem_per_gpu"
        )
    if "cpus_per_gpu" in given and config.cpus is not None:
        raise ConfigError("launcher.cpus_per_gpu: not beside launcher.cpus; give one of them")
    gpus = [key for key in given if key in ("gpus", "gpus_per_node", "gpus_per_socket")]
    if "gpu" in str(given.get("gres", "")):
        gpus.append("gres")
    if "gpus_per_task" in given and gpus:
        raise ConfigError(f"launcher.gpus_per_task: not beside {gpus[0]}, which asks for GPUs too; give one of them")
    if "cpus_per_gpu" in given and "gpus_per_task" not in given:
        raise ConfigError("launcher.cpus_per_gpu: goes with launcher.gpus_per_task, which says how many GPUs there are")
    if "mem_per_gpu" in given and "gpus_per_task" not in given and not gpus:
        raise ConfigError(
            "launcher.mem_per_gpu: no GPUs are asked for; add launcher.gpus_per_task or launcher.gres=gpu:N"
        )
    if config.signal_delay_s >= 60 * config.time:
        raise ConfigError(
            f"launcher.signal_delay_s: {config.signal_delay_s} is not allowed with launcher.time={config.time}; expected less "
            f"than {60 * config.time} seconds, which is all of a job's time"
        )
    title(config.job_name, "sweep", "pack")
    checked(config.setup)


def parameters(config: Any, nodes: int) -> dict[str, Any]:
    """Of submitit's executor, without the job's name. Raises ConfigError."""
    given = _given(config)
    named = {_RENAMED.get(key, key): given.pop(key) for key in NAMED if key in given}
    return {
        "time": config.time,
        "signal_delay_s": config.signal_delay_s,
        "nodes": nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": config.cpus,
        # From Slurm 22.05 on srun does not take it over from sbatch: where a cluster binds to cores, the process would have one.
        "srun_args": [f"--cpus-per-task={config.cpus}"] if config.cpus is not None else None,
        "setup": checked(config.setup) or None,
        "array_parallelism": config.array_parallelism,
        "stderr_to_stdout": config.stderr_to_stdout,
        "additional_parameters": {"requeue": True, **{key.replace("_", "-"): value for key, value in given.items()}},
        **named,
    }


def _given(config: Any) -> dict[str, Any]:
    """What is asked for by the keys of NAMED and by `launcher.sbatch`, as one. Raises ConfigError."""
    found = {key: value for key in NAMED if (value := getattr(config, key)) is not None}
    for written, value in config.sbatch.items():
        where, key = f"launcher.sbatch.{written}", str(written).lstrip("-").replace("_", "-")
        if not re.fullmatch(r"[A-Za-z][\w-]*", key):
            raise ConfigError(f"{where}: this is not an option of sbatch; expected one such as mail-type")
        if instead := _instead(key):
            raise ConfigError(f"{where}: the launcher sets this itself; expected {instead}")
        key = key.replace("-", "_")
        if key in found:
            raise ConfigError(f"{where}: launcher.{key} says this too; leave one out")
        if value is None or value is False:  # switched off
            continue
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{where}: {value!r} is not allowed; expected a text, a number or true")
        found[key] = value
    for key, value in found.items():
        if not str(value).isprintable() or value == "":
            raise ConfigError(f"launcher.{key}: {value!r} is not allowed; expected a text of one line")
    return found


def _instead(key: str) -> str | None:
    """What to write for an option that is ours. sbatch takes the beginning of an option for the option."""
    if key in _OURS:
        return _OURS[key]
    if key in _WHOLE or key.replace("-", "_") in NAMED:
        return None
    return next((instead for ours, instead in _OURS.items() if ours.startswith(key)), None)


def title(template: str, sweep: str, pack: str) -> str:
    """A job's name. Raises ConfigError for a template that makes none."""
    left = template.replace("{sweep}", "").replace("{pack}", "")
    if not template or not re.fullmatch(r"[\w.:@%+=/-]*", left):
        raise ConfigError(
            f"launcher.job_name: {template!r} is not allowed; expected a text of letters, digits and .:@%+=/-_, in which "
            "{sweep} and {pack} are what they say"
        )
    return re.sub(r"[^\w.:@%+=/-]", "_", template.replace("{sweep}", sweep).replace("{pack}", pack))[:200]


_CHECK = """\
rlexp_failed=
trap 'rlexp_failed=yes' ERR
rlexp_check() {
  local code=$?
  if [ "$rlexp_failed" ] && [ "$code" != 0 ]; then
    echo "launcher.setup: exit code $code of: $1" >&2
    exit "$code"
  fi
  rlexp_failed=
}"""


def checked(setup: Sequence[str]) -> list[str]:
    """The lines, with an end of the job after each that fails. As under `set -e`, `[ -e x ] && …` may be false.

    Raises:
      ConfigError: they are not bash.
    """
    lines, whole, trouble = [], "", ""
    for line in setup:
        whole += line
        if trouble := _incomplete(whole):  # an if, or the like, over several lines
            whole += "\n"
            continue
        lines += [whole, f"rlexp_check {_quoted(whole)}"]
        whole = ""
    if whole:
        raise ConfigError(f"launcher.setup: bash does not understand {whole.strip()!r}: {trouble}")
    return [_CHECK, *lines, "trap - ERR"] if lines else []


def _incomplete(text: str) -> str:
    """What bash has against a text, at whose end a command must end; empty where that is nothing."""
    if text.endswith("\\"):
        return "it ends in a backslash"
    done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, check=False, timeout=60)
    said = done.stderr.strip().splitlines()
    return said[0].removeprefix("bash: ").removeprefix("-c: ") if said else ""


def _quoted(text: str) -> str:
    return "'" + " ".join(text.split()).replace("'", "'\\''") + "'"
