"""The run directory: who may write into it, what a run leaves there besides metrics and checkpoints, and how it is found."""

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

from omegaconf import OmegaConf
from yaml import YAMLError

from rlexp.config import ConfigError
from rlexp.storage import regular, store
from rlexp.written import yaml_of

PACKAGES = (
    "rlexp",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "hydra-core",
    "omegaconf",
    "gymnax",
    "numpy",
    "wandb",
)


# Files that runs of every kind write, beside those that `describe` does: of a run that begins they are somebody else's.
_OURS = (
    *("config.yaml", "overrides.yaml", "summary.json", "metrics.jsonl", "curve.png", "video.gif", "video.mp4"),
    *("plan.json", "program.hlo", "check.json", "profile.json"),
)
_LEAST_BYTES = 1 << 16  # no run needs less of the disk


def new_id() -> str:
    """Eight hex digits that name the run in its directory and in W&B; a letter first, or YAML might read a number."""
    return secrets.choice("abcdef") + secrets.token_hex(4)[1:]


def id_of(run_dir: Path) -> str:
    """The id of the run in a directory; a new directory's is the end of its name, where that is an id."""
    known = read_json(run_dir / "environment.json")
    if isinstance(known, dict) and isinstance(known.get("run_id"), str):
        return known["run_id"]
    match = re.search(r"-([0-9a-f]{8})$", run_dir.name)
    return match[1] if match else new_id()


def is_run(run_dir: Path) -> bool:
    """Whether a run has been here."""
    return (run_dir / "environment.json").exists()


def check(run_dir: Path) -> None:
    """Raises ConfigError where the record of a run, which a new start is added to, is not what `describe` wrote."""
    known = read_json(path := run_dir / "environment.json")
    if not (isinstance(known, dict) and isinstance(known.get("run_id"), str) and isinstance(known.get("starts"), list)):
        raise ConfigError(f"{path}: this is not the record of a run, or somebody has changed it")


def kind(run_dir: Path) -> str:
    """What the run in a directory did: train, eval, ..."""
    config = read_yaml(run_dir / "config.yaml")
    return str(config["run"]) if isinstance(config, dict) and "run" in config else "?"


def find(resume: str, output_root: str | Path) -> Path:
    """The run directory that `resume` names: a path, a URL, or the id of a run under the output root.

    Of a run in an object store it is the working copy, which is brought up to date.

    Raises:
      ConfigError: there is none, or it holds no run.
    """
    if store.is_url(resume, "resume"):
        return fetch(resume)
    path, output_root = Path(os.path.expanduser(resume)), str(output_root)
    if path.is_dir():
        if is_run(path):
            return _refreshed(Path(os.path.realpath(path)))
        raise ConfigError(f"resume: {resume!r} is a directory without a run in it (no environment.json)")
    if re.fullmatch(r"[0-9a-z]{8}", resume):
        root = Path(store.local_root(output_root))
        found = [path.parent for path in root.glob("**/environment.json") if _has_id(read_json(path), resume)]
        if here := _the_one(resume, sorted({os.path.realpath(directory) for directory in found})):
            return _refreshed(Path(here))
        if store.is_url(output_root):
            store.reach(output_root)
            texts = store.read_all(output_root, "environment.json")
            if url := _the_one(resume, sorted(u for u, text in texts.items() if _is_of(text, resume))):
                return fetch(url)
        raise ConfigError(f"resume: no run with the id {resume!r} under output_root {output_root!r}")
    raise ConfigError(
        f"resume: {resume!r} is neither a run directory nor a run's id; allowed: auto, a run directory, a W&B id"
    )


def _is_of(text: bytes, run_id: str) -> bool:
    with contextlib.suppress(ValueError):
        return _has_id(json.loads(text), run_id)
    return False


def _has_id(known: Any, run_id: str) -> bool:
    return isinstance(known, dict) and known.get("run_id") == run_id


def _the_one(run_id: str, places: Sequence[str]) -> str | None:
    """Raises ConfigError where there are several: a run was copied, and its copy has the same id."""
    if len(places) > 1:
        raise ConfigError(
            f"resume: {run_id!r} is the id of {len(places)} runs: {', '.join(places)}; give the directory"
        )
    return places[0] if places else None


def fetch(url: str) -> Path:
    """The working copy of a run in an object store, brought up to date. Raises ConfigError where there is no such run."""
    url = url.rstrip("/")
    store.reach(url)
    if (text := store.read_text_or_none(f"{url}/config.yaml")) is None:
        raise ConfigError(f"resume: {url!r} holds no run (it has no config.yaml)")
    directory = store.working_copy(url, str(OmegaConf.select(OmegaConf.create(text), "output_root")))
    store.pull(url, directory)
    return Path(os.path.realpath(directory))


def _refreshed(run_dir: Path) -> Path:
    """Another machine may have gone on with a run in an object store."""
    if url := store.url_of(run_dir):
        store.reach(url)
        store.pull(url, run_dir)
    return run_dir


def create(run_dir: Path) -> list[Path]:
    """Makes the directory; gives the directories that were not there before, outermost first.

    Raises:
      ConfigError: it cannot be made, or not be written to.
    """
    check_name(run_dir)
    fresh = missing(run_dir)
    try:
        make_private(run_dir)
        try_to_write(run_dir)
    except OSError as error:
        remove(fresh)
        raise ConfigError(
            f"output_root, or hydra.run.dir: cannot write to {str(run_dir)!r}: {error.strerror}"
        ) from error
    return fresh


def try_to_write(directory: Path) -> None:
    """Raises OSError where no file of some size can be made in a directory."""
    probe = directory / f".write-{new_id()}"
    try:
        probe.write_bytes(bytes(_LEAST_BYTES))
    finally:
        probe.unlink(missing_ok=True)


def check_place(run_dir: Path) -> None:
    """Raises ConfigError where a new run would lie among what a sweep or another run has written."""
    if (run_dir / "multirun.yaml").exists():
        raise ConfigError(f"hydra.run.dir: {str(run_dir)!r} holds a sweep; expected a directory of its own for a run")
    for path in (real := Path(os.path.realpath(run_dir)), *real.parents):
        of_run = path.name in ("checkpoints", "wandb", ".hydra") and is_run(path.parent)
        of_sweep = path.name in ("packs", "workers", "slurm", "leaderboard") and (path.parent / "sweep.sqlite").exists()
        if of_run or of_sweep:
            raise ConfigError(
                f"hydra.run.dir: {str(run_dir)!r} is within {path.name!r} of {str(path.parent)!r}, which is that one's alone"
            )


def check_name(run_dir: Path, key: str = "hydra.run.dir") -> None:
    """Raises ConfigError where a run could not be saved in a directory of this name."""
    if why := store.unusable(run_dir):
        raise ConfigError(f"{key}: {ascii(str(run_dir))[:300]} cannot hold a run: {why}")


def make_private(directory: Path) -> None:
    """Makes a directory that nobody else may enter: what is in it names code, which those run who go on with it."""
    if not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)


def missing(run_dir: Path) -> list[Path]:
    """A directory and those above it that are not there yet, outermost first."""
    return [p for p in [*reversed(run_dir.parents), run_dir] if not p.exists()]


def remove(fresh: Sequence[Path]) -> None:
    """Takes back what `create` made, after bad input that was found too late. Others' runs in between stay."""
    for path in reversed(fresh):
        if path is fresh[-1]:
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.rmdir()


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Before there is a run: a file or a directory that cannot be used is bad input."""
    try:
        yield
    except OSError as error:
        if isinstance(error, store.StoreError) and "gs://" in str(error):
            raise  # it was reached before
        raise ConfigError(str(error)) from error


class Before(NamedTuple):
    """What there was of a directory before a command began to write into it."""

    directory: Path
    missing: list[Path]
    names: frozenset[str]


def before(directory: Path) -> Before:
    """To be handed to `restore`."""
    names = frozenset(os.listdir(directory)) if directory.is_dir() else frozenset[str]()
    return Before(directory, missing(directory), names)


# What a run or a sweep may have made before its bad input was found.
_EARLY = re.compile(
    r"\.hydra|\.lock|\.store\.json|rlexp\.log|(config|overrides|multirun)\.yaml|environment\.json|"
    r"(sweep|optuna)\.sqlite.*|sweep\.lock|workers|slurm|(plan|summary)\.json|program\.hlo"  # a plan that does not fit
)


def restore(earlier: Before) -> bool:
    """Takes back what a command has made, after bad input that was found too late; of a directory that was there, our own files.

    Where there are results, of a sweep's jobs too, all stays. Gives whether it was taken back.
    """
    if _has_results(earlier):
        return False
    if earlier.missing:
        remove(earlier.missing)
        return True
    if not earlier.directory.is_dir():  # what is there is none of ours
        return True
    for name in set(os.listdir(earlier.directory)) - earlier.names:
        if _EARLY.fullmatch(name):
            path = earlier.directory / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return True


def _has_results(earlier: Before) -> bool:
    """Whether lines of metrics or a checkpoint have come since then."""
    for place, folders, files in os.walk(earlier.directory):
        here = Path(place)
        if here == earlier.directory:
            folders[:] = set(folders) - earlier.names
            files = set(files) - earlier.names
        if "metrics.jsonl" in files and (here / "metrics.jsonl").stat().st_size:
            return True
        if here.name == "checkpoints" and any(name.isdecimal() for name in folders):
            return True
    return False


def lock(run_dir: Path) -> IO[str]:
    """Held while the returned file is open. Two processes in one run directory would lose each other's lines."""
    file = open(run_dir / ".lock", "w")  # noqa: SIM115  open for the run's whole life
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"hydra.run.dir: another process is running in {str(run_dir)!r}") from error
    return file


def describe(
    run_dir: Path, *, run_id: str, node: dict[str, Any], overrides: Sequence[str], devices: Sequence[Any]
) -> None:
    """Writes config.yaml, overrides.yaml and environment.json; a resumed run adds a line to the list of its starts."""
    known: dict[str, Any] = read_json(run_dir / "environment.json") or {"starts": []}
    written = {"config.yaml": yaml_of(node), "overrides.yaml": yaml_of(list(overrides))}
    text = written["config.yaml"]
    if not known["starts"]:
        for name in _OURS:
            _keep_others(run_dir / name, written.get(name))
    _keep_edited(run_dir / "config.yaml", known.get("config_sha256"), text)
    for name, new in written.items():
        _write(run_dir / name, new)
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "host": platform.node(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in devices],
        "git": git_state(),
    }
    described = {"run_id": run_id, **start, "config_sha256": _sha256(text), "starts": [*known["starts"], start]}
    write_json(run_dir / "environment.json", described)


def _keep_edited(path: Path, written: str | None, new: str) -> None:
    """Renames a configuration that is not as a run wrote it, and says so: nothing reads it, but somebody wrote it."""
    try:
        found = regular.read_text(path, errors="surrogateescape")
    except OSError:
        return
    if written is None or _sha256(found) == written or found == new:
        return
    _set_aside(
        path,
        "edited",
        "was edited by hand, which changes nothing of a run that goes on (its settings are those of overrides.yaml and of the "
        "command line)",
    )


def _keep_others(path: Path, new: str | None) -> None:
    """Renames what has a name of ours in a directory in which no run has begun, and says so."""
    if not os.path.lexists(path):
        return
    if new is not None:  # of a run that was killed while it wrote these
        with contextlib.suppress(OSError, UnicodeError):
            if regular.read_text(path) == new:
                return
    _set_aside(path, "before", "was there before this run, which writes its own")


def _set_aside(path: Path, why: str, told: str) -> None:
    kept = path.with_name(f"{path.name}.{why}-{time.strftime('%Y-%m-%dT%H-%M-%S')}-{new_id()}")
    os.replace(path, kept)
    print(f"warning: {path} {told}; it is now {kept.name}", file=sys.stderr, flush=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all. What is no finite number is null, which JSON has."""
    _write(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(x) for name, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list | tuple) else value


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error


def summary(
    *,
    status: str = "finished",
    objective: float | None = None,
    env_steps: int = 0,
    compile_s: float | None = None,
    resumed_from: int | None = None,
) -> dict[str, Any]:
    """summary.json of what does not train: the same keys as of a training."""
    found = {"status": status, "objective": objective, "env_steps": env_steps, "agent_steps": None}
    return found | {"env_steps_per_second": None, "compile_s": compile_s, "resumed_from": resumed_from}


def read_json(path: Path) -> Any:
    """None where there is no such file, or it is no JSON."""
    try:
        return json.loads(regular.read_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def read_overrides(run_dir: Path) -> list[str] | None:
    """What the run in a directory was started with; None where that is not known."""
    try:
        return [str(override) for override in read_yaml(run_dir / "overrides.yaml")]
    except (OSError, ValueError, TypeError, YAMLError):
        return None


def read_yaml(path: Path) -> Any:
    """A file that `describe` wrote, as plain data. Raises ConfigError where somebody else has changed it."""
    try:
        with regular.opened(path, encoding="utf-8") as file:
            return OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # of the file system, of YAML, of OmegaConf
        raise ConfigError(f"{path}: this cannot be read ({type(error).__name__}: {error})") from error


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # as it was when the code was read, however long a sweep takes
def git_state() -> dict[str, Any] | None:
    """Commit of the code that runs, and whether it was changed since; None outside a repository."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
