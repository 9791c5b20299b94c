"""What several tests need: experiments from overrides, and a pack trained in this process."""

import copy
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import core

from rlexp import compose, experiment
from rlexp.experiment import Experiment
from rlexp.machine.stop import Stop
from rlexp.storage import store
from rlexp.training import program
from rlexp.training.loop import Member, Resume, layout_of, train_pack
from rlexp.training.program import Program

QUIET = ("logger=quiet", "compilation_cache=null")
SMALL = (  # ten updates and three lines, by default PPO on CartPole
    "algo.num_steps=16",
    "network.hidden=[8]",
    "eval.num_episodes=2",
    "eval.every_env_steps=256",
    "total_env_steps=640",
)


@functools.cache
def _composed(*overrides: str) -> dict[str, Any]:
    return compose.compose_node([*QUIET, *overrides])[0]


def build(*overrides: str) -> Experiment:
    """The experiment of a command line, which is composed once."""
    return experiment.build(copy.deepcopy(_composed(*overrides)))


def fingerprint(*overrides: str) -> dict[str, Any]:
    """What must be equal to go on from a checkpoint of this command line."""
    return build(*overrides).fingerprint


class StopAfter(Stop):
    """Asks for the end when the trainer looks for the n-th time. It looks once before the first chunk, once after each, and once a
    second within one that takes so long.
    """

    def __init__(self, looks: int):
        self._looks = looks

    @property
    def reason(self) -> str | None:
        self._looks -= 1
        return "SIGTERM" if self._looks < 0 else None


def train(
    directory: Path,
    *overrides: str,
    seeds: Sequence[int] = (0,),
    resume: Resume | None = None,
    stop: Stop | None = None,
    change: Callable[[Program], Program] | None = None,
) -> list[dict[str, Any]]:
    """Trains a pack that differs in seeds only, as one program; gives the summaries. `change` is of the compiled program."""
    members = [Member(build(*overrides, f"seed={s}"), directory / str(s), f"{s:08d}") for s in seeds]
    for member in members:
        member.dir.mkdir(parents=True, exist_ok=True)
    traced = None
    if change is not None:
        experiments = [member.experiment for member in members]
        made = program.trace(experiments, layout_of(experiments))
        traced = made._replace(compile=lambda: change(made.compile()))
    return train_pack(members, stop=stop or Stop(), resume=resume, traced=traced)


ALGORITHMS = sorted(path.stem for path in (compose.CONF_DIR / "algo").glob("*.yaml"))
REPOSITORY = Path(experiment.__file__).parents[1]


def rlexp_command(*arguments: str) -> list[str]:
    """The command of `python -m rlexp`, to be run in `environment()`."""
    return [sys.executable, "-m", "rlexp", *arguments]


def environment(*more_path: Path, **more: str) -> dict[str, str]:
    """In which Python finds this tree first, installed or not, and then what these tests run on."""
    path = [str(REPOSITORY), str(REPOSITORY / "launchers"), *map(str, more_path), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | more


def processes(*words: str) -> list[int]:
    """Those whose command line holds all of these."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes()
        except OSError:
            continue
        if all(word.encode() in line for word in words):
            found.append(int(entry.parent.name))
    return found


# Where `make libtpu` puts the TPU compiler: apart, since it changes how JAX starts.
LIBTPU = Path(os.environ.get("RLEXP_LIBTPU", Path(__file__).resolve().parents[1] / ".libtpu"))


def listening(port: int) -> set[str]:
    """The local addresses of the listening sockets with this port."""
    found = set[str]()
    for name, family, length in (("tcp", socket.AF_INET, 8), ("tcp6", socket.AF_INET6, 32)):
        with open(f"/proc/net/{name}") as table:
            for line in table.readlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                address, _, number = local.partition(":")
                if state == "0A" and int(number, 16) == port:
                    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, length, 8)]
                    found.add(socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:"))
    return found


def wait_until(so: Callable[[], bool]) -> None:
    """Until it is so, for a minute at most."""
    deadline = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def command_line(directory: Path, *arguments: str, tpu_compiler: bool = False) -> subprocess.CompletedProcess[str]:
    """`python -m rlexp` in a process of its own. A test that needs the TPU compiler is skipped where there is none, which
    is a failure in CI."""
    if tpu_compiler and not (LIBTPU / "libtpu").is_dir():
        pytest.skip("no TPU compiler: make libtpu")
    return subprocess.run(
        rlexp_command(*arguments, *QUIET),
        capture_output=True,
        text=True,
        timeout=280,
        cwd=directory,
        env=environment(*([LIBTPU] if tpu_compiler else [])),
    )


def rows(directory: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_clock(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metric lines without what no two runs have in common: how long things took."""
    clock = ("wall_s", "time/", "throughput/")
    return [{k: v for k, v in line.items() if not k.startswith(clock)} for line in lines]


def saved(run_dir: Path) -> tuple[int, dict[str, np.ndarray]]:
    """The newest checkpoint: its update, and every leaf by its path. Reads what is there, with Orbax alone."""
    import orbax.checkpoint as ocp  # of the tests, only a few want it

    folder = store.checkpoints(run_dir.absolute())
    update = max(int(p.name) for p in folder.iterdir() if p.name.isdecimal())
    path = folder / str(update) / "run"
    handler = ocp.PyTreeCheckpointHandler()
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), dict(handler.metadata(path).tree))
    tree = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return update, {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same(ours: Path, theirs: Path) -> None:
    """Two runs ended alike, bit for bit."""
    (update, got), (wanted_update, wanted) = saved(ours), saved(theirs)
    assert update == wanted_update and wanted.keys() == got.keys()
    assert [k for k in wanted if wanted[k].tobytes() != got[k].tobytes()] == []
    assert without_clock(rows(ours)) == without_clock(rows(theirs))


_HELD_SAVE = """
import contextlib
import time
from pathlib import Path

from rlexp.storage import checksums
from rlexp.storage.checkpoint import *

write = checksums.write

def held(step, parts):
    if step.name.startswith("{update}."):
        with contextlib.suppress(FileExistsError):
            Path("{place}/saving").touch(exist_ok=False)
            while not Path("{place}/go_on").exists():
                time.sleep(0.01)
    write(step, parts)

checksums.write = held
"""


def hold_save(directory: Path, update: int) -> str:
    """Makes a checkpoint module, and gives its name: the first save of the update waits until there is a file `go_on`, once it
    has written all files and before their directory has its final name. Then there is a file `saving`. Of several processes
    one is held.
    """
    (directory / "held_save.py").write_text(_HELD_SAVE.format(update=update, place=directory))
    return "held_save"


def inner(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs that an equation contains: a loop's, a branch's, a function's."""
    if "levels" in equation.params:  # of rlexp.networks.multilinear
        evaluate = functools.partial(equation.primitive.impl, **equation.params)
        structs = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars)
        return [jax.make_jaxpr(evaluate)(*structs).jaxpr]
    return [
        p.jaxpr if isinstance(p, core.ClosedJaxpr) else p
        for parameter in equation.params.values()
        for p in (parameter if isinstance(parameter, tuple | list) else (parameter,))
        if isinstance(p, core.ClosedJaxpr | core.Jaxpr)
    ]


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All of them; of what contains others, the others: those of a loop once, of a function as often as it is called."""
    for equation in jaxpr.eqns:
        within = inner(equation)
        for jaxpr_ in within:
            yield from equations(jaxpr_)
        if not within:
            yield equation
