"""`python -m benchmarks same BASE`: does this tree train what the commit BASE trained, bit for bit, on this machine?

A dozen configurations run on both: each algorithm and precision alone, packed, on four devices, cut and resumed; two processes;
and what BASE has left half done, opened by this tree. Every leaf of the last checkpoints is compared, and every metric line by its
env_steps on the keys that BASE has. What this tree has besides is told as new, and is no difference.
"""

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import BENCH, ROOT, Failed, Say, machine, table, versions

HOME = BENCH / "same"
HERE = HOME / "here"  # where both trees run: a sweep goes on where it began, and should find no other modules there
ALGORITHMS, PRECISIONS = ("ppo", "pqn", "dqn"), ("f32", "bf16")
WHOLE, HALF = 10_240, 9_216  # environment steps; DQN's memory is filled by the first 8,192
WORK = (
    "algo.num_envs=8",
    "algo.num_steps=16",
    "network.hidden=[16]",
    "eval.every_env_steps=1024",
    "eval.num_episodes=4",
    "logger=quiet",
)
FOUR = ("hardware.mesh.data=4", "hardware.emulate=true")
EACH = (f"algo={','.join(ALGORITHMS)}", f"precision={','.join(PRECISIONS)}")
CLOCK = ("wall_s", "time/", "throughput/")
LANES = 2  # side by side; no two processes may share a compilation cache
TIMEOUT_S = 900


class Side(NamedTuple):
    """One of the two trees, within one lane."""

    tree: Path
    cache: Path

    def start(self, *arguments: str, module: str = "rlexp") -> subprocess.Popen[str]:
        """`python -m rlexp`, of this tree."""
        environment = os.environ | {
            "PYTHONPATH": f"{self.tree}{os.pathsep}{self.tree / 'launchers'}",
            "WANDB_MODE": "disabled",
            "JAX_PLATFORMS": "cpu",
        }
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(self.cache)}
        command = [sys.executable, "-m", module, *arguments]
        HERE.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *arguments: str, module: str = "rlexp") -> None:
        """The same, until it ends. Raises Failed."""
        _finish(self.start(*arguments, module=module), arguments)

    def train(self, directory: Path, *overrides: str, steps: int = WHOLE) -> None:
        """One run."""
        self.run(*WORK, *self._own(), *overrides, f"total_env_steps={steps}", f"hydra.run.dir={directory}")

    def sweep(self, directory: Path, *overrides: str, steps: int = WHOLE) -> None:
        """The jobs of a sweep, in the directories 0, 1, ..."""
        self.run("-m", *WORK, *self._own(), *overrides, f"total_env_steps={steps}", f"hydra.sweep.dir={directory}")

    def _own(self) -> tuple[str, ...]:
        return (f"compilation_cache={self.cache}",)


class Case(NamedTuple):
    """Something that both trees do in directories of their own."""

    name: str
    do: Callable[[Side, Path], None]
    begun_by_base: Callable[[Side, Path], None] | None = None  # what lies in the directory of either before


def cases() -> list[Case]:
    """What is compared; the longest first."""
    members = ("env.params.gravity=9.8,5.0", "seed=0,1")
    once = [
        Case("packed", lambda side, to: side.sweep(to, *EACH, *members)),
        Case("alone", lambda side, to: side.sweep(to, *EACH, "launcher.pack=off")),
        Case("four devices", lambda side, to: side.sweep(to, *EACH, *FOUR, "launcher.pack=off")),
        Case("a pack, stopped and resumed", _go_on_with_sweep, _stopped_sweep),
        Case("continuous, normalised", lambda side, to: side.train(to / "ppo", *_CONTINUOUS)),
        Case("images, linear learning rate", lambda side, to: side.train(to / "pqn", *_IMAGES)),
    ]
    chosen = (("ppo", "f32"), ("pqn", "bf16"), ("dqn", "f32"))
    for algo, precision in chosen:
        overrides = (f"algo={algo}", f"precision={precision}")
        once.append(Case(f"two processes, {algo} {precision}", lambda side, to, o=overrides: _two(side, to, *o)))
        once.append(
            Case(f"cut and resumed, {algo} {precision}", _go_on, lambda side, to, o=overrides: _half(side, to, *o))
        )
    return once


_CONTINUOUS = ("algo=ppo", "env=gymnax/pendulum", "algo.normalize_observations=true")
_IMAGES = ("algo=pqn", "env=gymnax/breakout", "network=cnn", "algo.lr_scaling=linear")


def _half(side: Side, to: Path, *overrides: str) -> None:
    side.train(to / "run", *overrides, steps=HALF)


def _go_on(side: Side, to: Path) -> None:
    side.run(f"resume={to / 'run'}", f"total_env_steps={WHOLE}")


def _stopped_sweep(side: Side, to: Path) -> None:
    """A pack of each algorithm; the second is stopped once it has saved, and the third has not begun."""
    overrides = (f"algo={','.join(ALGORITHMS)}", "seed=0,1", "checkpoint.every_updates=40", f"hydra.sweep.dir={to}")
    running = side.start("-m", *WORK, *side._own(), *overrides, f"total_env_steps={10 * WHOLE}")
    until = time.monotonic() + TIMEOUT_S
    while running.poll() is None and time.monotonic() < until:
        if any(path.parent.name == "checkpoints" for path in (to / "packs").glob("*/checkpoints/[0-9]*")):
            running.send_signal(signal.SIGTERM)
            break
        time.sleep(0.05)
    _finish(running, overrides)


def _go_on_with_sweep(side: Side, to: Path) -> None:
    side.run("resume", str(to), module="rlexp.sweep")


def _two(side: Side, to: Path, *overrides: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = (*WORK, *side._own(), *overrides, *FOUR, f"total_env_steps={WHOLE}", f"hydra.run.dir={to / 'run'}")
    together = ("processes.number=2", f"processes.coordinator=localhost:{port}")
    started = [side.start(*shared, *together, f"processes.index={i}") for i in range(2)]
    with ThreadPoolExecutor() as both:  # the output of each is read, or it would wait for that
        list(both.map(lambda process: _finish(process, overrides), started))


def _finish(process: subprocess.Popen[str], arguments: Sequence[str]) -> None:
    what = " ".join(arguments)[:200]
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{what} took longer than {TIMEOUT_S} s") from error
    finally:
        process.kill()
    if process.returncode:
        raise Failed(
            f"{what} ended with exit code {process.returncode}: {(output.strip() or 'no output').splitlines()[-1]}"
        )


# --- both sides of a case ----------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """One run of both trees."""

    case: str
    run: str  # its algorithm, precision and place
    leaves: int
    lines: int
    differences: list[str]
    new: list[str]


def compare_case(case: Case, base: Side, ours: Side, commit: str) -> list[Compared]:
    """Runs what is not there yet, and compares. What BASE has made is kept for the next time.

    Both write to the same place, one after the other: nothing that depends on a path can differ.
    """
    name = case.name.replace(" ", "-").replace(",", "")
    place, kept = HOME / "runs" / name, HOME / "base" / f"{commit}-{name}"
    known = {"machine": machine(), "versions": versions("jax", "jaxlib", "flax", "optax", "gymnax", "numpy")}
    known |= {"flags": os.environ.get("XLA_FLAGS", ""), "here": str(HERE)}
    done = kept / "done.json"
    if not done.exists() or json.loads(done.read_text()) != known:
        shutil.rmtree(kept, ignore_errors=True)
        _empty(place)
        if case.begun_by_base:
            case.begun_by_base(base, place)
            shutil.copytree(place, kept / "begun")
        case.do(base, place)
        shutil.copytree(place, kept / "whole")
        done.write_text(json.dumps(known))
    _empty(place)
    if case.begun_by_base:
        shutil.rmtree(place)
        shutil.copytree(kept / "begun", place)
    case.do(ours, place)
    runs = sorted(path.parent.relative_to(kept / "whole") for path in (kept / "whole").glob("**/summary.json"))
    if not runs:
        raise Failed(f"{case.name}: no run has ended")
    return [compare(case.name, kept / "whole" / run, place / run) for run in runs]


def _empty(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)


def compare(case: str, theirs: Path, ours: Path) -> Compared:
    """Every leaf of the last checkpoints, and every metric line."""
    config = _yaml(theirs / "config.yaml")
    name = f"{config['algo']['module'].split('.')[-1]} {config['precision']['compute']} {theirs.name}"
    differences, new = [], []
    wanted, got = saved(theirs), saved(ours)
    if wanted[0] != got[0]:
        differences.append(f"the last checkpoint is of update {got[0]}, and was of {wanted[0]}")
    theirs_now = {_today(path): leaf for path, leaf in wanted[1].items()}
    for path, leaf in theirs_now.items():
        if path not in got[1]:
            differences.append(f"{path} is gone")
        elif leaf.tobytes() != got[1][path].tobytes():
            differences.append(f"{path} differs")
    new += [path for path in got[1] if path not in theirs_now]
    told, told_new = compare_lines(_lines(theirs), _lines(ours))
    return Compared(case, name, len(wanted[1]), len(_lines(theirs)), differences + told, new + told_new)


# Leaves that have other names since, and the same bytes.
RENAMED = {"data.ring.rows.": "data.ring.table.columns."}


def _today(path: str) -> str:
    return next((now + path.removeprefix(then) for then, now in RENAMED.items() if path.startswith(then)), path)


def compare_lines(theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(what differs, what is new) between metric lines, by env_steps. Clocks are left out."""
    differences, new = [], {}
    by_steps = {line["env_steps"]: line for line in ours}
    for line in theirs:
        mine = by_steps.pop(line["env_steps"], None)
        if mine is None:
            differences.append(f"the line at {line['env_steps']} is gone")
            continue
        keys = [k for k in line if not k.startswith(CLOCK)]
        differences += [f"{k} at {line['env_steps']} differs" for k in keys if k not in mine or mine[k] != line[k]]
        new |= dict.fromkeys(k for k in mine if k not in line)
    return differences, [*(f"a line at {steps}" for steps in by_steps), *new]


def saved(run_dir: Path) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint: its update, and every leaf by its path."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    update = max(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdecimal())
    path = (run_dir / "checkpoints" / str(update) / "run").absolute()
    handler = ocp.PyTreeCheckpointHandler()
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), dict(handler.metadata(path).tree))
    tree = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return update, {jax.tree_util.keystr(keys, simple=True, separator="."): leaf for keys, leaf in leaves}


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _yaml(path: Path) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path))


# --- the command -------------------------------------------------------------------------------------------------------


def checkout(base: str) -> tuple[str, Path]:
    """(commit, its files). Raises Failed."""
    asked = subprocess.run(
        ["git", "rev-parse", "--verify", f"{base}^{{commit}}"], cwd=ROOT, capture_output=True, text=True
    )
    if asked.returncode:
        raise Failed(f"{base!r} is no commit")
    commit = asked.stdout.strip()[:12]
    tree = HOME / "trees" / commit
    if not tree.exists():
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        unfinished = tree.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        with tarfile.open(fileobj=BytesIO(packed)) as files:
            files.extractall(unfinished, filter="data")
        unfinished.rename(tree)
    return commit, tree


def this_tree() -> Path:
    """A copy of the working tree, so that one may go on editing."""
    tree = HOME / "trees" / f"this-{os.getpid()}"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return tree


def main(arguments: Sequence[str], say: Say) -> int:
    """The exit code: 1 for a difference, or where a side could not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks same", description=__doc__)
    parser.add_argument("base", metavar="BASE", help="a commit")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    chosen = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        commit, tree = checkout(chosen.base)
    except Failed as error:
        print(f"same: {error}", file=sys.stderr)
        return 1
    ours = this_tree()
    free: queue.Queue[Path] = queue.Queue()
    for lane in range(LANES):
        free.put(HOME / f"cache{lane}")

    @contextlib.contextmanager
    def a_cache() -> Iterator[Path]:
        cache = free.get()
        try:
            yield cache
        finally:
            free.put(cache)

    def compared(case: Case) -> list[Compared]:
        with a_cache() as cache:
            started = time.perf_counter()
            try:
                found = compare_case(case, Side(tree, cache), Side(ours, cache), commit)
            except Failed as error:
                found = [Compared(case.name, "", 0, 0, [str(error)], [])]
            told = "DIFFERS" if any(row.differences for row in found) else "same"
            say(f"  {case.name}: {told}, {time.perf_counter() - started:.0f} s")
            return found

    with ThreadPoolExecutor(LANES) as lanes:
        wanted = [case for case in cases() if chosen.only in case.name]
        rows = [row for found in lanes.map(compared, wanted) for row in found]
    shutil.rmtree(ours)
    cells = [
        [row.case, row.run, f"{row.leaves} leaves", f"{row.lines} lines", "DIFFERS" if row.differences else "same"]
        for row in rows
    ]
    print(table(f"this tree against {commit}", ["", "run", "saved", "metrics", ""], cells))
    for row in rows:
        if row.differences:
            print(f"{row.case}, {row.run}: {'; '.join(row.differences[:5])} ({len(row.differences)} differences)")
    if new := sorted({x for row in rows for x in row.new}):
        print(f"new: {', '.join(new)}")
    say(f"same: {time.perf_counter() - began:.0f} s")
    return int(any(row.differences for row in rows) or not rows)
