"""A sweep with a launcher that trains nothing: a job's objective is computed from its overrides."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus

from rlexp import compose
from rlexp.overrides import quoted
from rlexp.sweep import optuna as optuna_sweeper
from rlexp.sweep.hydra_sweep import sweep
from rlexp.sweep.manifest import Entry, JobFailed, Manifest

LR = "algo.hp.lr=tag(log, interval(1e-5, 1e-2))"
FIXED = ("env=probe/action_reward", "compilation_cache=null", "logger=quiet")
OPTIONS = {"network": ["cnn", "mlp", "mlp_layernorm"]}


class Killed(BaseException):
    """The process dies here."""


@contextlib.contextmanager
def dying(where: str) -> Iterator[Callable[[], None]]:
    """The process dies after so many questions, answers or notes to Optuna, as in `ask 5`, or calls of what is given, `job 5`."""
    import optuna

    what, count = where.split()
    calls = itertools.count(1)

    def die(of: str = "job") -> None:
        if of == what and next(calls) == int(count):
            raise Killed

    def and_die(real: Callable[..., Any], of: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = real(*args, **kwargs)
            die(of)
            return out

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, of in (("ask", "ask"), ("tell", "tell"), ("set_user_attr", "note")):
            patch.setattr(optuna.study.Study, name, and_die(getattr(optuna.study.Study, name), of))
        with pytest.raises(Killed):
            yield die


def value_of(overrides: Sequence[str], key: str) -> float:
    return float(next(o for o in overrides if o.startswith(f"{key}=")).split("=")[1])


def log_lr(overrides: Sequence[str]) -> float:
    """Best at 1e-3."""
    return -abs(math.log10(value_of(overrides, "algo.hp.lr")) + 3)


class Plugin:
    """Hydra's sweeper as it is after setup, with a launcher that keeps a manifest as ours does."""

    def __init__(self, directory: Path, objective: Callable[[Sequence[str]], float | None], die: Callable[[], None]):
        GlobalHydra.instance().clear()
        with compose.either_hydra():
            initialize_config_dir(str(compose.CONF_DIR), version_base="1.3", job_name="rlexp")
        given = [quoted("hydra.sweep.dir", str(directory))]
        self.config = hydra_compose("config", given, return_hydra_config=True)
        self.hydra_context = SimpleNamespace(config_loader=GlobalHydra.instance().config_loader())
        self.params: dict[str, str] = {}
        self.max_batch_size = None
        self.launcher = self
        self.directory, self.objective, self.die = directory, objective, die
        self.batches: list[tuple[int, int]] = []  # first job, number of jobs
        self.checked: Callable[[Sequence[str]], None] = lambda overrides: None

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        for overrides in jobs:
            self.checked(overrides)
        self.batches.append((initial_job_idx, len(jobs)))
        manifest, returned = Manifest(self.directory), []
        for number, overrides in enumerate(jobs, initial_job_idx):
            entry = manifest.add(number, [o for o in overrides if not o.startswith("sweeper")])
            if entry.status != "finished":
                manifest.change([number], again=True, status="running")
                self.die()
                value = self.objective(overrides)
                manifest.change([number], status="failed" if value is None else "finished", objective=value)
            returned.append(_returned(manifest.jobs()[number]))
        return returned


def _returned(entry: Entry) -> JobReturn:
    returned = JobReturn(status=JobStatus.FAILED if entry.status == "failed" else JobStatus.COMPLETED)
    returned.return_value = JobFailed(f"job {entry.number}") if entry.status == "failed" else entry.objective
    return returned


def search(
    directory: Path,
    *arguments: str,
    objective: Callable[[Sequence[str]], float | None] = log_lr,
    die: Callable[[], None] = lambda: None,
    checked: Callable[[Sequence[str]], None] = lambda overrides: None,
    has_manifest: bool = True,
) -> Plugin:
    """`python -m rlexp -m …` with `hydra.sweep.dir`, but for the training."""
    compose.register_resolvers()
    plugin = Plugin(directory, objective, die)
    plugin.checked = checked
    sweep(plugin, [*FIXED, *arguments], has_manifest=has_manifest)
    return plugin


def jobs(directory: Path) -> list[Entry]:
    return Manifest(directory).jobs()


def chosen(directory: Path, key: str = "algo.hp.lr") -> list[float]:
    return [value_of(job.overrides, key) for job in jobs(directory)]


def study(directory: Path) -> Any:
    import optuna

    return optuna.load_study(study_name="rlexp", storage=optuna_sweeper.storage(directory))
