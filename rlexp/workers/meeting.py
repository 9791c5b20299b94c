"""How workers find the server: a folder of the run directory, with a note for all and a token for those who may read it.

The token is what lets a worker in: it is made anew for each server, lies in a file that only its owner reads, and goes to no
object store.
"""

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

NOTE, TOKEN = "server.json", "worker.token"
FOLDER = "workers"  # of the run directory


class Note(NamedTuple):
    """What a worker needs to know."""

    address: str  # as gRPC has it: host:port, or unix:path
    authority: str | None  # TLS: the file with the certificate of who signed the server's
    env: dict[str, Any]  # the environment's node of the configuration
    info: list[str]  # names of the environment's own numbers
    num_envs: int  # of a worker
    num_workers: int
    observation: list[tuple[str, list[int]]]  # (dtype, shape) of each leaf of one observation
    action: tuple[str, list[int]]  # of one environment
    max_message_bytes: int
    silence_s: float  # a server from which nothing comes, not even a ping's answer, is given up
    path: list[str]  # where Python finds modules


def post(folder: Path, note: Note, token: str) -> None:
    """Writes both; who reads one finds all of it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _put(folder / TOKEN, token)
    _put(folder / NOTE, json.dumps(note._asdict()))


def _put(path: Path, text: str) -> None:
    """In one piece, for nobody but the owner, whatever was there before."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


def read(folder: Path) -> tuple[Note, str] | None:
    """The note and the token; None where there is no server (yet, or any more).

    Raises ValueError for what is no note, and OSError for what may not be read.
    """
    try:
        note, token = Note(**json.loads((folder / NOTE).read_text())), (folder / TOKEN).read_text()
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / NOTE}: this is no note of a server of this version ({error})") from error
    return note._replace(observation=[(dtype, list(shape)) for dtype, shape in note.observation]), token


def remove(folder: Path) -> None:
    """The server has ended."""
    for name in (NOTE, TOKEN):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
