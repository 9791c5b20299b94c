"""A pack on a machine that shares no disk with the others: `python -m rlexp.sweep.remote URL NAME [COORDINATOR NUMBER INDEX]`.

URL is the sweep's directory in the object store. What the worker needs is brought from there, and what it leaves goes
there: its checkpoints and metrics as every run's, and its journal with each line. With several machines, process 0's
address, their number and the place among them come after the pack's name.

Exit codes: 0 all is over, or told in the journal; 75 a signal stopped it, and it is to go on later.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from rlexp.storage import store
from rlexp.sweep import worker
from rlexp.sweep.packing import PACKS
from rlexp.sweep.worker import AGAIN, Task


def main(url: str, name: str, processes: dict[str, Any] | None) -> int:
    """The exit code."""
    sweep_dir = Path.home() / "rlexp" / "sweeps" / hashlib.sha256(url.encode()).hexdigest()[:16]
    sweep_dir.mkdir(parents=True, exist_ok=True)
    store.attach(sweep_dir, url)
    task = Task(sweep_dir, name, [])
    store.pull_file(task.file)
    if not store.pull_file(task.journal):
        task.journal.unlink(missing_ok=True)  # of a try before `retry`
    for job in json.loads(task.file.read_text())["jobs"]:
        store.pull(worker.place(url, job["dir"]), sweep_dir / job["dir"])
    store.pull(f"{url}/{PACKS}/{name}", sweep_dir / PACKS / name)
    again = worker.run(sweep_dir, name, processes, told=store.push_file, asked=_asked)
    lead = not processes or processes["index"] == 0  # which alone has a journal
    return AGAIN if again and lead else 0


def _asked() -> bool:
    """Whether a person has ended this start, or its machine goes away."""
    return Path(os.environ.get("RLEXP_START", "."), "asked").exists()


if __name__ == "__main__":
    together = sys.argv[3:]
    sys.exit(
        main(
            sys.argv[1],
            sys.argv[2],
            {"coordinator": together[0], "number": int(together[1]), "index": int(together[2])} if together else None,
        )
    )
