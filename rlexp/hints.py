"""What to type next: where a run or a sweep is, and the commands that evaluate it, go on with it, or report on it."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlexp.overrides import LISTS, override_key, quoted


def command(*words: str) -> str:
    """A command line that a shell takes as it stands."""
    return shlex.join(["python", "-m", *words])


def resume(run_dir: Path) -> str:
    """`resume=<directory>`, as Hydra reads it."""
    return _at("resume", str(run_dir))


def _at(key: str, path: str) -> str:
    return f"{key}={path}" if re.fullmatch(r"/[A-Za-z0-9_./-]+", path) else quoted(key, path)


def learn_from(path: str, overrides: Sequence[str]) -> str:
    """The command that clones what a run with these overrides has recorded, in its environment."""
    own = [o for o in overrides if override_key(o).split(".")[0] in ("env", *LISTS)]
    recipe = [o for o in overrides if override_key(o) == "experiment"]  # whose other settings are not those of BC
    said = command("rlexp", "algo=bc", "source=dataset", *own, _at("algo.source.path", path))
    return f"{said}, with the env of {recipe[-1]}" if recipe else said


def of_recipe(name: str) -> str:
    """Said when a run begins that could have settings made for its environment, in place of the defaults."""
    return (
        f"env={name}: the default settings are CartPole's; those for this one: {command('rlexp', f'experiment={name}')}"
    )


OF_ROWS = (
    "network=lq: with algo.normalize_observations=true what is not there, a row of zeros, is a row like another; "
    "algo.normalize_observations=rows leaves it out"
)


def loses_rows(node: Mapping[str, Any]) -> bool:
    """Whether OF_ROWS is to be said of a run with this configuration."""
    return node["network"]["module"] == "rlexp.networks.lq" and node["algo"].get("normalize_observations") is True


def after_run(run_dir: Path, *, total_env_steps: int, saved: bool) -> list[str]:
    """Said when a run has finished."""
    lines = [f"finished: {run_dir}"]
    if saved:
        again = resume(run_dir)
        lines += [
            f"  evaluate:      {command('rlexp', 'run=eval', again)}",
            f"  train longer:  {command('rlexp', again, f'total_env_steps={2 * total_env_steps}')}",
        ]
    return lines


def after_sweep(directory: Path, statuses: Sequence[str], *, results: bool) -> list[str]:
    """Said when a sweep's process ends, by the status of each job."""
    counts = Counter(statuses)
    where = str(directory)
    lines = [f"{', '.join(f'{n} {status}' for status, n in counts.items())}: {where}"]
    if results:
        lines.append(f"  report:   {command('rlexp.sweep', 'report', where)}")
    if counts.keys() - {"finished", "failed", "pruned"}:
        lines.append(f"  go on:    {command('rlexp.sweep', 'resume', where)}")
    if counts["failed"]:
        lines.append(f"  retry:    {command('rlexp.sweep', 'retry', where)}")
    return lines
