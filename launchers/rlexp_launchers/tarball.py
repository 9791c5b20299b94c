"""The code of a checkout as one file, named by what is in it: machines that share no disk run exactly what is here."""

import gzip
import hashlib
import importlib.util
import io
import re
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rlexp.config import ConfigError

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("rlexp", "rlexp_launchers", "hydra_plugins")
_SECRET = r"^\.env|\.(pem|key)$|credential|netrc"
_LARGEST = 200e6  # bytes; more is a data set or a checkpoint that somebody forgot


class Tarball(NamedTuple):
    """A file to copy, and the names of what it holds."""

    path: Path
    code: str  # hash of the names and contents of all files
    lock: str  # hash of what the environment is made of


def make(folder: Path, modules: Iterable[str], *, install: str) -> Tarball:
    """Packs tracked files as they are now, changed or not, and new ones that git does not ignore.

    Args:
      folder: for the file, which is made once for each content.
      modules: those that the configurations name. A user's own come along, with the whole of their package.
      install: how the environment is made, which is a part of the lock.

    Raises:
      ConfigError: there is no checkout, or too much in it.
    """
    files = {file.relative_to(_ROOT).as_posix(): file for file in _own()} | _users(modules)
    digest, lock, size = hashlib.sha256(), hashlib.sha256(install.encode()), 0
    contents = {}
    for name in sorted(files):
        contents[name] = files[name].read_bytes()
        size += len(contents[name])
        digest.update(f"{name}\0{len(contents[name])}\0".encode() + contents[name])
        if name in ("constraints.txt", "pyproject.toml"):
            lock.update(contents[name])
    if size > _LARGEST:
        largest = max(contents, key=lambda name: len(contents[name]))
        raise ConfigError(
            f"launcher: {size / 1e6:.0f} MB of files would be sent to each worker, and at most {_LARGEST / 1e6:.0f} MB are; the "
            f"largest is {largest}; name it in .gitignore, or remove it"
        )
    code = digest.hexdigest()[:16]
    path = folder / f"{code}.tar.gz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with gzip.open(part, "wb", compresslevel=6) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
            for name, data in contents.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), files[name].stat().st_mode & 0o777
                tar.addfile(info, io.BytesIO(data))
        part.replace(path)
    return Tarball(path, code, lock.hexdigest()[:16])


def _own() -> list[Path]:
    files = _listed(_ROOT)
    if _ROOT / "pyproject.toml" not in files:
        raise ConfigError(
            f"launcher: what is sent to each worker is a git checkout of rlexp, and {_ROOT} is none; run from a checkout"
        )
    return files


def _users(modules: Iterable[str]) -> dict[str, Path]:
    """{name in the tarball: file} of the packages of modules that are not ours."""
    found = {}
    for top in sorted({module.split(".")[0] for module in modules} - set(_PACKAGES)):
        spec = importlib.util.find_spec(top)
        if spec is None or not spec.origin or "site-packages" in spec.origin:
            continue
        origin = Path(spec.origin)
        alone = not spec.submodule_search_locations
        folder = origin.parent
        files = [origin] if alone else _listed(folder) or [file for file in sorted(folder.rglob("*")) if _is_sent(file)]
        root = folder if alone else folder.parent
        found |= {file.relative_to(root).as_posix(): file for file in files}
    return found


def _listed(folder: Path) -> list[Path]:
    """What git tracks or would track there; nothing where it is no repository."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\0")
    except (OSError, subprocess.SubprocessError):
        return []
    return [file for file in (folder / name for name in listed if name) if _is_sent(file)]


def _is_sent(file: Path) -> bool:
    """Not what looks like a secret, though git may not have been told to ignore it."""
    return file.is_file() and "__pycache__" not in file.parts and not re.search(_SECRET, file.name, re.I)
