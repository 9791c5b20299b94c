"""Nothing waits without a time-out: of calls that can, each has one, or is named here with what ends it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlexp

# Waits that have one even where they are given none, or whose end is another's to see to.
KNOWN = {
    "launchers/rlexp_launchers/keepers.py: patience.wait()": "sleeps, and counts its tries",
    "launchers/rlexp_launchers/keepers.py: self._in.get()": "a thread that lives for its tasks; retire() ends it",
    "launchers/rlexp_launchers/pool.py: keeper.join()": "retired; each of its calls of gcloud has a time-out",
    "launchers/rlexp_launchers/pool.py: self._out.get()": "while it is not empty, and has no other reader",
    "launchers/rlexp_launchers/slices.py: patience.wait()": "sleeps, and counts its tries",
    "launchers/rlexp_launchers/slices.py: silent.wait()": "the same",
    "rlexp/__main__.py: HydraConfig.get()": "a setting of Hydra's",
    "rlexp/loggers/wandb.py: iter(work.get, None)": "a thread that lives for its work; close() waits for it, with a time-out",
    "rlexp/loggers/wandb.py: thread.join()": "in the same thread",
    "rlexp/sources/door.py: context.read()": "Door.evict ends who has the word for silence_s, and Door.close all",
    "rlexp/sources/door.py: life.answers.get()": "the learner's wait has a time-out, and ends in Door.close",
    "rlexp/sources/door.py: self._left.wait()": "within asyncio.timeout",
    "rlexp/training/loop.py: saves.wait()": "for a disk, or a store with time-outs of its own",
    "rlexp/sweep/__main__.py: subprocess.run([sys.executable, '-m', 'wandb', 'sync', *map(str, runs)], check=False)": (
        "a command that the user watches"
    ),
    "rlexp/training/saves.py: self.wait()": "for a disk, or a store with time-outs of its own",
}
FOLDERS = ("rlexp", "launchers", "hydra_plugins")
OF_FILES = ("rlexp/storage/checkpoint/alike.py",)  # whose futures are TensorStore's, of files
BARE = {"join", "get", "wait", "result", "exception", "acquire", "recv", "accept", "communicate"}  # with nothing given
RUNS = {"run", "call", "check_call", "check_output"}  # of subprocess


def waits(source: str) -> Iterator[str]:
    """Calls that may wait without end. `",".join(x)`, `d.get(x)` and `t.join(3)` are given something, and are none."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        limit = given.get("timeout")
        has_limit = limit is not None and not (isinstance(limit, ast.Constant) and limit.value is None)
        match node.func:
            case ast.Attribute(ast.Name("subprocess"), attr) if attr in RUNS:
                if not has_limit:
                    yield ast.unparse(node)
            case ast.Attribute(_, "read") if isinstance(node.func.value, ast.Name) and node.func.value.id == "context":
                yield ast.unparse(node)  # of a stream of gRPC
            case ast.Attribute(_, attr) if attr in BARE and not node.args and not given.keys() - {"timeout", "block"}:
                if not has_limit and not _is_false(given.get("block")):
                    yield ast.unparse(node)
            case ast.Name("iter") if len(node.args) == 2 and ast.unparse(node.args[0]).endswith((".get", ".recv")):
                yield ast.unparse(node)


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_no_wait_is_without_a_time_out():
    root = Path(rlexp.__file__).parents[1]
    found = set()
    for path in (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))):
        name = path.relative_to(root).as_posix()
        found |= {f"{name}: {wait}" for wait in waits(path.read_text()) if name not in OF_FILES}
    assert found == KNOWN.keys()


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("thread.join()", 1),
        ("thread.join(timeout=None)", 1),
        ("queue.get()", 1),
        ("queue.get(block=True)", 1),
        ("event.wait()", 1),
        ("made().result()", 1),
        ("lock.acquire()", 1),
        ("process.communicate()", 1),
        ("subprocess.run(command, check=True)", 1),
        ("iter(queue.get, None)", 1),
        ("thread.join(3); event.wait(LOOK_S); queue.get(timeout=3); future.result(x); process.wait(timeout=1)", 0),
        ("lock.acquire(blocking=False); queue.get(block=False); queue.get_nowait(); subprocess.run(x, timeout=3)", 0),
        ("','.join(x); d.get(x); x.at[0].get(mode='clip'); file.read(); iter(x)", 0),
    ],
)
def test_what_counts_as_one(line, number):
    assert len([*waits(line)]) == number
