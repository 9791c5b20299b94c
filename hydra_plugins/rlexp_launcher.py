"""Hydra 1.3 finds plugins only in this namespace, and imports this file at each start: all else is in `rlexp.sweep`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher

from rlexp.hydra_internals import BasicSweeper, BasicSweeperConf


@dataclass
class RlexpLauncherConf:
    """`hydra/launcher=rlexp`. What users set is in the group `launcher`."""

    _target_: str = "hydra_plugins.rlexp_launcher.RlexpLauncher"
    pack: str | None = None  # off: one job after the other, as Hydra's own launcher; null: what launcher.pack says


class RlexpLauncher(Launcher):
    """Packs the jobs of a sweep, and runs the packs."""

    def __init__(self, pack: str | None = None) -> None:
        self.pack = pack
        self.wandb_group: str | None = None  # of the sweep, once a batch has been launched
        self.stopped = False  # in a batch before its jobs were over: what comes after it is for whoever goes on
        self._made: tuple[Any, Any, Any] | None = (
            None  # a module of the group `launcher`, its settings, and what it made
        )

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Called once by the sweeper."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def made(self, module: Any, settings: Any) -> Any:
        """What `make` of a launcher's module gives: once a sweep, so that a batch has the programs of the one before."""
        if self._made is None or self._made[:2] != (module, settings):
            self._made = module, settings, module.make(settings)
        return self._made[2]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
        """Runs a batch of jobs, and gives Hydra's JobReturn of each."""
        from rlexp.sweep.hydra_jobs import launch

        return launch(self, job_overrides, initial_job_idx)

    def roll(self, packs: Any) -> Sequence[Any]:
        """The same of jobs that `packs` gives as slots become free, see `rlexp.sweep.trials`."""
        from rlexp.sweep.hydra_jobs import roll

        return roll(self, packs)


ConfigStore.instance().store(group="hydra/launcher", name="rlexp", node=RlexpLauncherConf, provider="rlexp")


@dataclass
class RlexpSweeperConf(BasicSweeperConf):
    """`hydra/sweeper=rlexp`."""

    _target_: str = "hydra_plugins.rlexp_launcher.RlexpSweeper"


class RlexpSweeper(BasicSweeper):
    """Runs what the group `sweeper` chooses: the grid, or trials of a search space."""

    def sweep(self, arguments: list[str]) -> Any:
        """Called once by Hydra; gives the JobReturns, batch by batch."""
        from rlexp.sweep.hydra_sweep import sweep

        launcher = self.launcher
        return sweep(self, arguments, has_manifest=isinstance(launcher, RlexpLauncher) and launcher.pack != "off")


ConfigStore.instance().store(group="hydra/sweeper", name="rlexp", node=RlexpSweeperConf, provider="rlexp")
