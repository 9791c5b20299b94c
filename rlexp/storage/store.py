"""Runs in an object store: `output_root=gs://bucket/prefix`. The only file that knows gcsfs, fsspec and epath.

A run's small files are written to a local directory, its working copy, as those of any run are; `push` uploads what has
changed. A file `.store.json` in that directory, or in the directory of its sweep, says where. Checkpoints are never on
the local disk: Orbax writes them into the store, since the hosts of a run share no disk.

    outputs/2026-11-20/12-00-00-c0ffee42/metrics.jsonl    the working copy
    gs://bucket/prefix/outputs/2026-11-20/12-00-00-c0ffee42/metrics.jsonl, …/checkpoints/976/…

Nothing heavy is imported before a store is used.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from rlexp.config import ConfigError
from rlexp.names import one_line
from rlexp.storage import regular

if TYPE_CHECKING:
    from etils import epath

    AnyPath = Path | epath.Path
else:
    AnyPath = PurePath  # what both are

MARKER = ".store.json"
LOCAL_ROOT = "outputs"  # where working copies are, if the store does not say more
_CHECKPOINTS = "checkpoints"
_LONGEST = 3500  # bytes of a directory's path: what lies in it has names too, and Linux has an end at 4096
_LONGEST_PART = 255  # of a file system
_REACH_S = 20  # gcsfs alone would try for a minute
_NOT_PUSHED = (".lock", ".part", ".tar.gz", ".tmp", ".sqlite", "-journal", ".token", MARKER)


class StoreError(OSError):
    """A store could not be read or written; one line."""


# --- where things are -------------------------------------------------------------------------------------------------


def is_url(text: str, key: str = "output_root") -> bool:
    """Whether it names an object store, and not a directory. Raises ConfigError for a store that we do not know."""
    scheme, is_there, rest = text.partition("://")
    if not is_there:
        return False
    if scheme != "gs" or not rest.split("/")[0]:
        raise ConfigError(f"{key}: {text!r} is not allowed; expected a directory, or gs://<bucket>/<prefix>")
    return True


def local_root(output_root: str) -> str:
    """The local directory that run directories are made in."""
    return LOCAL_ROOT if "://" in output_root else os.path.expanduser(output_root)


def cache_dir(output_root: str, local: str) -> str:
    """The folder of the compilation cache: beside the runs where they are in a store, since then the disk may be new."""
    return f"{output_root.rstrip('/')}/compilation_cache" if "://" in output_root else local


def place(output_root: str, directory: Path) -> str:
    """The URL that belongs to a local directory: the same path below the output root, seen from the current directory."""
    directory = Path(os.path.abspath(directory))
    inside = directory.is_relative_to(Path.cwd()) and directory != Path.cwd()
    name = directory.relative_to(Path.cwd()).as_posix() if inside else f"{directory.name}-{_hash(str(directory))}"
    return f"{output_root.rstrip('/')}/{name}"


def working_copy(url: str, output_root: str) -> Path:
    """The local directory for a run in the store, which was made with this output root."""
    name = url.removeprefix(output_root.rstrip("/") + "/")
    if name == url:
        name = f"{url.rsplit('/', 1)[1]}-{_hash(url)}"
    return Path(name) if "/" in name else Path(LOCAL_ROOT, name)


def attach(directory: Path, url: str) -> None:
    """Makes a local directory, there already, the working copy of a URL. Raises OSError."""
    if url_of(directory) != url:
        part = directory / f"{MARKER}.{os.getpid()}.part"  # hosts that share a disk all do this
        part.write_text(json.dumps({"url": url}))
        os.replace(part, directory / MARKER)


def url_of(directory: Path) -> str | None:
    """Where a local directory is in the store; None where it is not."""
    directory = Path(os.path.abspath(directory))
    for parent in (directory, *directory.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                url = str(json.loads(regular.read_text(parent / MARKER))["url"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ConfigError(f"{parent / MARKER}: this does not say where in a store the run is") from error
            return url if parent == directory else f"{url}/{directory.relative_to(parent).as_posix()}"
    return None


def unusable(directory: Path) -> str | None:
    """Why checkpoints cannot be written to a local directory or opened there; None where they can."""
    name = os.fsencode(directory)
    if "\\" in str(directory):
        return "TensorStore, which writes the arrays, reads a backslash as a slash"
    if not name.isascii() and name != str(directory).encode(errors="replace"):
        return "its name is not UTF-8"
    if len(name) > _LONGEST:
        return f"its name has {len(name)} bytes; allowed: {_LONGEST}"
    if (longest := max(map(len, name.split(b"/")))) > _LONGEST_PART:
        return f"a part of its name has {longest} bytes; allowed: {_LONGEST_PART}"
    return None


def checkpoints(run_dir: Path) -> AnyPath:
    """Where the checkpoints of a run are. Raises ConfigError where gcsfs is needed and missing."""
    url = url_of(run_dir)
    return run_dir / _CHECKPOINTS if url is None else _path(f"{url}/{_CHECKPOINTS}")


def is_remote(path: AnyPath) -> bool:
    """Whether it lies in a store."""
    return not isinstance(path, Path) and str(path).startswith("gs://")


def join(directory: AnyPath, relative: str) -> AnyPath:
    """`directory / relative`, where relative may begin with `../`."""
    joined = os.path.normpath(directory / relative)
    return _path(joined.replace("gs:/", "gs://", 1)) if is_remote(directory) else Path(joined)


# --- the working copy -------------------------------------------------------------------------------------------------

_pushed: dict[Path, tuple[str, int, int]] = {}  # what the store has, as far as this process knows: URL, bytes, mtime
_pushing = threading.Lock()


def push(*directories: Path) -> None:
    """Uploads the files of working copies that have changed. Does nothing for directories that are not in a store.

    Raises:
      OSError: one line; the store cannot be written.
    """
    _push([path for directory in directories if url_of(directory) for path in _files(directory)])


def push_file(path: Path) -> None:
    """The same for one file."""
    _push([path])


def _files(directory: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(directory):
        inner[:] = [name for name in inner if name != _CHECKPOINTS]
        yield from (Path(folder, name) for name in names)


def _push(paths: Sequence[Path]) -> None:
    with _pushing:
        urls = {folder: url_of(folder) for folder in {path.parent for path in paths}}
        changed = {}
        for path in paths:
            url = urls[path.parent]
            if url is None or path.name.endswith(_NOT_PUSHED) or path.name.startswith(".write-") or path.is_symlink():
                continue
            with contextlib.suppress(FileNotFoundError):  # a file of W&B, perhaps, that was there a moment ago
                stat = path.stat()
                state = (f"{url}/{path.name}", stat.st_size, stat.st_mtime_ns)
                if _pushed.get(path) != state:
                    changed[path] = state
        while changed:
            try:
                with _told(f"{next(iter(changed.values()))[0]} cannot be written"):
                    _filesystem().put([str(path) for path in changed], [url for url, _, _ in changed.values()])
                _pushed.update(changed)
                return
            except FileNotFoundError:
                there = {path: state for path, state in changed.items() if path.exists()}
                if len(there) == len(changed):
                    raise
                changed = there


def pull(url: str, directory: Path) -> bool:
    """Brings a working copy up to date with the store, all but checkpoints, and attaches it; False where nothing is there.

    A file that was written here after the store's stays as it is.

    Raises:
      ConfigError: the store cannot be read, or the directory holds something else.
    """
    here = url_of(directory)
    if here != url and directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"resume: {str(directory)!r}, the working copy of {url!r}, holds something else ({here})")
    try:
        with _told(f"{url} cannot be read"):
            found = _list(url)
            small = {name: info for name, info in found.items() if _CHECKPOINTS not in name.split("/")[:-1]}
            if not small:
                return False
            directory.mkdir(parents=True, exist_ok=True)
            attach(directory, url)
            wanted = {name: directory / name for name, info in small.items() if _is_newer(info, directory / name)}
            parts = {name: path.with_name(f".{path.name}.{os.getpid()}.part") for name, path in wanted.items()}
            if wanted:
                _filesystem().get([f"{url}/{name}" for name in wanted], [str(part) for part in parts.values()])
            for name, path in wanted.items():
                os.replace(parts[name], path)
                written = small[name]["mtime"].timestamp()
                os.utime(path, (written, written))  # by the store's clock, which may not be ours
                stat = path.stat()
                _pushed[path] = (f"{url}/{name}", stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"resume: {error}") from error
    return True


def pull_file(path: Path) -> bool:
    """The same for one file of a working copy, whoever wrote it last here; False where the store has none. Raises OSError."""
    url = url_of(path.parent)
    if url is None:
        return False
    url = f"{url}/{path.name}"
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _told(f"{url} cannot be read"):
            _filesystem().get_file(url, str(part))
        os.replace(part, path)
    except FileNotFoundError:
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def bring(path: Path) -> None:
    """A file of a working copy, where it is not here: another machine has written it. Raises OSError."""
    if not path.exists():
        pull_file(path)


def _is_newer(info: dict[str, Any], path: Path) -> bool:
    """Whether the store's file is to replace the local one. It is uploaded after it is written: the same one is newer too."""
    return not path.exists() or info["mtime"].timestamp() > path.stat().st_mtime


# --- single objects ---------------------------------------------------------------------------------------------------


def reach(url: str) -> None:
    """Raises ConfigError, within seconds, where a store cannot be read: no credentials, no such bucket, no network."""
    bucket, _, prefix = url.removeprefix("gs://").partition("/")
    try:
        store = _filesystem()
        from fsspec import asyn

        asyn.sync(
            store.loop,
            store._call,
            "GET",
            "b/{}/o",
            bucket,
            prefix=prefix,
            maxResults=1,
            json_out=True,
            timeout=_REACH_S,
        )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"output_root: {url!r} cannot be used: {_reason(error)}") from error


def exists(url: str) -> bool:
    """Whether there is an object of this name. Raises OSError."""
    with _told(f"{url} cannot be read"):
        return _filesystem().isfile(url)


def read_text(path: AnyPath) -> str:
    """A small file, local or in the store. Raises FileNotFoundError; OSError."""
    with _told(f"{path} cannot be read"):
        return path.read_text() if is_remote(path) else regular.read_text(path)


def read_text_or_none(url: str) -> str | None:
    """None where there is no such object. Raises OSError."""
    try:
        return read_text(_path(url))
    except FileNotFoundError:
        return None


def read_all(url: str, name: str) -> dict[str, bytes]:
    """{URL of its folder: content} of all objects below a URL that have this name. Raises OSError."""
    with _told(f"{url} cannot be read"):
        folders = [found.removesuffix(f"/{name}") for found in _list(url) if found.endswith(f"/{name}")]
        urls = [f"{url}/{folder}/{name}" for folder in folders]
        contents = _filesystem().cat(urls) if urls else {}
        return {f"{url}/{folder}": contents[f"{url}/{folder}/{name}".removeprefix("gs://")] for folder in folders}


def sizes(directory: AnyPath) -> dict[str, int]:
    """{path below a directory of the store: bytes} of all that is there, in one listing. Raises OSError."""
    with _told(f"{directory} cannot be read"):
        return {name: int(info["size"]) for name, info in _list(str(directory)).items()}


def unlink(path: Path) -> None:
    """Removes a file of a working copy, if it is there, here and in the store. Raises OSError."""
    if path.exists():
        path.unlink()
        if url := url_of(path.parent):
            _remove(f"{url}/{path.name}")


def remove(path: AnyPath | str) -> None:
    """Removes a directory of the store and all that is in it, if it is there. Raises OSError."""
    _remove(str(path))


def _remove(url: str) -> None:
    with _told(f"{url} cannot be removed"), contextlib.suppress(FileNotFoundError):
        _filesystem().rm(url, recursive=True)


def _list(url: str) -> dict[str, dict[str, Any]]:
    """{path below the URL: what the store says of it}."""
    prefix = url.removeprefix("gs://").rstrip("/") + "/"
    found = _filesystem().find(url, detail=True)
    return {name.removeprefix(prefix): info for name, info in found.items() if name.startswith(prefix)}


def _path(url: str) -> AnyPath:
    prepare()
    from etils import epath

    return epath.Path(url)


# --- gcsfs ------------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Must come before anything, JAX and Orbax too, opens a gs:// path. Raises ConfigError where gcsfs is missing."""
    # Else gcsfs asks of each bucket whether it is hierarchical, and warns where it is not told.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import fsspec.config
        import gcsfs  # noqa: F401
    except ImportError as error:
        raise ConfigError("output_root: gs:// needs gcsfs; install it with: pip install 'rlexp[gcs]'") from error
    # A remembered listing would be wrong: other hosts write too, and TensorStore, past gcsfs. Of epath's own one as well.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    for name in ("fsspec", "gcsfs"):  # they tell of each file that is read, and print tracebacks of what they raise too
        logging.getLogger(name).setLevel(logging.CRITICAL)


@functools.cache
def _filesystem() -> Any:
    prepare()
    import fsspec

    return fsspec.filesystem("gcs")


def is_used() -> bool:
    """Whether this process has opened a store. If it fails, Orbax's threads may wait for the store for ten minutes more."""
    return _filesystem.cache_info().currsize > 0


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever gcsfs raises becomes a StoreError of one line. FileNotFoundError stays one."""
    try:
        yield
    except (ConfigError, FileNotFoundError):
        raise
    except Exception as error:
        raise StoreError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    from fsspec.exceptions import FSTimeoutError

    text = one_line(error)[:300]
    login = "log in with: gcloud auth application-default login"
    if isinstance(error, FSTimeoutError):
        return f"no answer within {_REACH_S} s; is the network there?"
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket"
    if "auth" in type(error).__module__ or text.endswith(", 401"):
        return f"{text}; {login}"
    if text.startswith("Forbidden") or text.endswith(", 403"):
        return f"these credentials may not ({text}); {login}"
    return text


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
