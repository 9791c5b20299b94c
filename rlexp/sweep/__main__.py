"""`python -m rlexp.sweep VERB DIR`: looks at a sweep, goes on with it, or ends it.

  status   its jobs    report     curves and tables as HTML and CSV    dashboard  the same as a report and a workspace of W&B
  resume   go on       retry      go on, and try what failed again     cancel     end it; what trains saves first
  sync     upload W&B runs that were offline

Exit codes: resume and retry those of the sweep; the others 0; 2 bad input.
"""

from rlexp.machine import process
from rlexp.overrides import override_key, quoted

if __name__ == "__main__":
    process.prepare()

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rlexp import endings, tables
from rlexp.compose import is_ours
from rlexp.config import ConfigError, load_module
from rlexp.names import plain
from rlexp.storage import rundir, store
from rlexp.sweep import journal, leaderboard, worker
from rlexp.sweep.lineage import shown
from rlexp.sweep.manifest import NAME, Manifest
from rlexp.sweep.supervise import BUDGETS

_OWNER_S = 900  # that the process of a sweep may take to save and end


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = endings.Parser(
        prog="python -m rlexp.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("status", "report", "dashboard", "resume", "retry", "sync", "cancel"))
    parser.add_argument("directory", type=Path, help="a sweep's directory, such as multirun/<date>/<time>-<id>")
    chosen = parser.parse_args(arguments)
    directory = chosen.directory.absolute()
    if not (directory / NAME).exists():
        print(f"rlexp.sweep: {str(chosen.directory)!r} holds no sweep (it has no {NAME})", file=sys.stderr)
        return 2
    try:
        manifest = Manifest(directory)
        if chosen.what == "cancel":  # what costs ends first, whatever else is out of reach
            return _cancel(manifest, directory)
        if chosen.what == "report":  # of what can be read
            return _report(directory)
        worker.fold_all(directory, manifest)
        if chosen.what == "status":
            _print(manifest)
        elif chosen.what == "dashboard":
            return _dashboard(directory)
        elif chosen.what == "sync":
            return _sync(manifest, directory)
        else:
            if chosen.what == "retry":
                manifest.own()  # until the command line runs it: nothing is changed of a sweep that another process runs
                failed = [job for job in manifest.jobs() if job.status == "failed"]
                from rlexp.sweep.refilling import try_again  # JAX is imported only now

                try_again(directory, failed)
                manifest.change([job.number for job in failed], status="pending", error=None)
                again = {job.number for job in failed}
                for count in BUDGETS:  # those of their packs, which need not have come to name them
                    for name in manifest.recall_all(count):
                        if worker.numbers(directory, name) & again:
                            manifest.drop(count + name)
            _go_on(manifest, directory)
    except Exception as error:
        return endings.told(error, program="rlexp.sweep")
    return 0


def _go_on(manifest: Manifest, directory: Path) -> None:
    """The same command line, in the same place. Does not return where it can be run."""
    command, cwd = _known(manifest, "command"), _known(manifest, "cwd")
    if not isinstance(cwd, str):
        raise ConfigError(f"{manifest.path}: somebody has changed 'cwd': expected a folder")
    many = {"-m", "--multirun"} & set(command)
    where = "hydra.sweep.dir" if many else "hydra.run.dir"  # else one job that was submitted
    again = [x for x in command if override_key(x) not in (where, "launcher.detach")]
    again = [*again, quoted(where, str(directory))] if many else _gone_on_with(again, directory)
    # All of this stands in the sweep's directory, and not in the command that was typed: who made that directory says what runs.
    endings.say(f"goes on in {cwd!r} with: python -m rlexp {shlex.join(again)}", program="rlexp.sweep")
    with rundir.preparing():
        os.chdir(cwd)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "rlexp", *again])


def _gone_on_with(command: list[str], run_dir: Path) -> list[str]:
    """The command line of a run that was submitted, as one that goes on. One that was to start from another run has that one's
    settings in its own directory, as soon as it has begun."""
    if url := store.url_of(run_dir):
        store.pull(url, run_dir)
    here, own = quoted("hydra.run.dir", str(run_dir)), [x for x in command if override_key(x) == "resume"]
    rest = [x for x in command if x not in own]
    if not own or own[-1].partition("=")[2].strip("'\"") in ("auto", "null", ""):
        return [*rest, here, "resume=auto"]
    return [*rest, here, quoted("resume", str(run_dir))] if rundir.is_run(run_dir) else [*command, here]


def _known(manifest: Manifest, name: str) -> Any:
    """What the sweep remembered when it began. Raises ConfigError where it was killed before."""
    if (found := manifest.command() if name == "command" else manifest.recall(name)) is None:
        raise ConfigError(f"{manifest.path.parent}: this sweep had hardly begun; give its own command line again")
    return found


def _cancel(manifest: Manifest, directory: Path) -> int:
    """The exit code: 2 where something could not be done, which is told at the end. Raises ConfigError where nothing was done."""
    if owner := manifest.owner():
        if owner["host"] != platform.node():
            raise ConfigError(
                f"cancel: the sweep is run by process {owner['pid']} on {owner['host']!r}; cancel it there"
            )
        os.kill(owner["pid"], signal.SIGTERM)
        until = time.monotonic() + _OWNER_S
        while manifest.owner() and time.monotonic() < until:
            time.sleep(0.2)
    name = _known(manifest, "launcher")
    if not is_ours(name):
        endings.say(f"imports {name!r}, which {manifest.path} names", program="rlexp.sweep")
    launcher = load_module(name, "launcher")
    troubles = []
    for step in (lambda: launcher.cancel(manifest), lambda: worker.fold_all(directory, manifest)):
        try:
            step()
        except ConfigError as error:
            troubles.append(str(error))
    left = [job.number for job in manifest.jobs() if job.status in ("pending", "running", "waiting")]
    manifest.change(left, status="stopped")
    try:
        _print(manifest)
    except (ConfigError, OSError) as error:
        if not troubles:  # a store that is out of reach has been told of
            troubles.append(str(error))
    if manifest.owner():
        troubles.append(f"process {owner and owner['pid']} still runs the sweep, and does not end")
    print(
        *(f"rlexp.sweep: cancel: {trouble}" for trouble in troubles),
        sep="\n",
        end="\n" * bool(troubles),
        file=sys.stderr,
    )
    return 2 if troubles else 0


def _sync(manifest: Manifest, directory: Path) -> int:
    """W&B's own upload of the runs that were offline, or were cut off. Gives its exit code."""
    # A run of a whole pack is in the sweep's own directory.
    places = {directory, *(directory / job.dir for job in manifest.jobs())}
    runs = [run for place in sorted(places) for run in sorted((place / "wandb").glob("offline-run-*"))]
    if not runs:
        print("no W&B run of this sweep was offline")
        return 0
    return subprocess.run([sys.executable, "-m", "wandb", "sync", *map(str, runs)], check=False).returncode


def _report(directory: Path) -> int:
    from rlexp.sweep import report  # Plotly and SciPy are imported only now

    if url := store.url_of(directory):
        store.pull(url, directory)
    try:
        written = report.write(directory)
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error}") from error
    print(*written.best, sep="\n")
    print(plain(f"{written.page}, tables in {written.tables[0].parent}/"))
    return 0


def _dashboard(directory: Path) -> int:
    from rlexp.sweep import dashboard

    if url := store.url_of(directory):
        store.pull(url, directory)
    print(*dashboard.save(directory), sep="\n")
    return 0


def _has_died(manifest: Manifest) -> bool:
    """Whether nothing of it runs any more, so that "running" is what a killed process or a full disk has left."""
    owner = manifest.recall("owner")
    if manifest.recall("launcher") != "rlexp_launchers.local" or not owner or owner["host"] != platform.node():
        return False  # it cannot be seen from here
    workers = (manifest.path.parent / worker.FOLDER).glob("*.jsonl")
    return manifest.owner() is None and not any(map(journal.is_open, workers))


def _print(manifest: Manifest) -> None:
    jobs = manifest.jobs()
    if any(job.status == "running" for job in jobs) and _has_died(manifest):
        jobs = [job._replace(status="stopped") if job.status == "running" else job for job in jobs]
    rows = []
    for job in jobs:
        objective = "" if job.objective is None else f"{job.objective:.4g}"
        rows.append(
            (str(job.number), job.status, str(job.attempt), objective, " ".join(shown(job.overrides)), job.error or "")
        )
    tables.show(("job", "status", "attempts", "objective", "overrides", "error"), rows, width=200)
    counts = Counter(job.status for job in jobs)
    print(", ".join(f"{n} {status}" for status, n in counts.items()))
    for line in leaderboard.lines(manifest.path.parent):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
