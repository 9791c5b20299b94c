"""What is needed of Hydra that it does not offer. No other file imports `hydra._internal`, which any version may change.

It holds for Hydra 1.3.8 to 1.4.0rc3: `make test` and `make test-hydra14` run the tests of sweeps on one and on the other. A new
version of Hydra is tried there before pyproject.toml lets it in.

  Callbacks          a composed configuration is run here, by Hydra's `run_job`; its callbacks are called by Hydra's own main alone
  get_args_parser    `python -m rlexp` takes what any application of Hydra's takes; `hydra.main` would exit the process
  BasicSweeper       of sweepers only the abstract one is public; ours is Hydra's own grid, with batches that hear of results
  quick_jobs         `run_job` copies a configuration twice and writes YAML, most of its time for a job that is over
  failures_untold    a failed job's result cannot be asked for without a line of Hydra's on stderr, which ours is beside
  the loader         composing a job over that of another with the same settings, in milliseconds (`rlexp.sweep.compositions`)
"""

import contextlib
import copy
import io
import math
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra.core.hydra_config
import hydra.core.utils
from hydra._internal import config_loader_impl
from hydra._internal.callbacks import Callbacks as Callbacks
from hydra._internal.utils import create_config_search_path
from hydra._internal.utils import get_args_parser as get_args_parser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from rlexp import written
from rlexp.config import MOST_JOBS, ConfigError

if TYPE_CHECKING:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper as BasicSweeper
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf as BasicSweeperConf


def __getattr__(name: str) -> Any:
    """Classes of plugins, as they are now: looking for plugins, Hydra runs its modules anew, and makes of each a new one."""
    if name in ("BasicSweeper", "BasicSweeperConf"):
        from hydra._internal.core_plugins import basic_sweeper

        return getattr(basic_sweeper, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def grid(overrides: Sequence[Override]) -> list[list[str]]:
    """The jobs of Hydra's own sweeper, in its order: each value with each. Raises ConfigError for more than a sweep may have."""
    check_number(math.prod(_num_values(o) for o in overrides))
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    (jobs,) = BasicSweeper.split_arguments(list(overrides), None)
    return [list(job) for job in jobs]


def check_number(num_jobs: int) -> None:
    """Raises ConfigError. It is asked before jobs are made: so many more would take all memory."""
    if num_jobs > MOST_JOBS:
        raise ConfigError(f"-m: {num_jobs} jobs are not allowed; expected at most {MOST_JOBS} in a sweep")


def _num_values(override: Override) -> int:
    value = override.value()
    if isinstance(value, RangeSweep):
        assert value.start is not None and value.stop is not None
        if not value.step or not math.isfinite(value.stop - value.start):
            raise ConfigError(
                f"{override.input_line}: is not allowed; expected finite bounds, and a step that is not 0"
            )
        return max(0, math.ceil((value.stop - value.start) / value.step))
    return len(value.list) if isinstance(value, ChoiceSweep) else 1


def is_hydras_sweeper(plugin: Any) -> bool:
    """Whether it is `hydra/sweeper=basic` itself, and nothing that builds on it."""
    kind = type(plugin)
    return f"{kind.__module__}.{kind.__name__}" == "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@contextlib.contextmanager
def failures_untold() -> Iterator[None]:
    """While this holds, whoever asks for a failed job's result is raised what the job raised, and no more: Hydra's sweepers,
    launchers, callbacks and our own code. `rlexp.endings` says it, once."""
    hydras = vars(JobReturn)["return_value"]

    def result(returned: JobReturn) -> Any:
        with contextlib.redirect_stderr(io.StringIO()):
            return hydras.fget(returned)

    JobReturn.return_value = property(result, hydras.fset)
    try:
        yield
    finally:
        JobReturn.return_value = hydras


def copies(config: DictConfig, keys: Sequence[str] | None = None) -> Callable[[], DictConfig]:
    """Gives copies of a configuration as it is now, in a fifth of the time that `copy.deepcopy` takes, by pickling it once.

    Args:
      keys: those of its keys that copies are to have, which are then the root of nothing else, as `OmegaConf.masked_copy` has it.
    """
    own = vars(config)
    if not isinstance(own["_content"], dict):
        return lambda: copy.deepcopy(config)
    nodes = {key: node for key, node in own["_content"].items() if keys is None or key in keys}
    root = {"_metadata": own["_metadata"], "_flags_cache": own["_flags_cache"]} if keys is None else {}
    parents = [node._get_parent() for node in nodes.values()]
    try:
        for node in nodes.values():  # or all that the configuration is part of would be copied
            node._set_parent(None)
        whole = pickle.dumps((root, nodes), pickle.HIGHEST_PROTOCOL)
    except Exception:  # of a class that is no module's, which a user's own configuration may have
        whole = None
    finally:
        for node, parent in zip(nodes.values(), parents, strict=True):
            node._set_parent(parent)
    if whole is None:
        kept = copy.deepcopy(config) if keys is None else OmegaConf.masked_copy(config, list(keys))
        return lambda: copy.deepcopy(kept)

    def copied() -> DictConfig:
        made = DictConfig({})
        root, nodes = pickle.loads(whole)
        vars(made).update(root, _content=nodes, _parent=own["_parent"] if keys is None else None)
        for node in nodes.values():
            node._set_parent(made)
        return made

    return copied


def application(config: DictConfig) -> DictConfig:
    """A copy without Hydra's part, which is most of it."""
    return copies(config, [str(key) for key in config if key != "hydra"])()


class _Quick(OmegaConf):
    """For Hydra's own code, while `quick_jobs` holds."""

    @staticmethod
    def masked_copy(conf: DictConfig, keys: str | list[str]) -> DictConfig:
        return copies(conf, [keys] if isinstance(keys, str) else keys)()


def _copied(value: Any) -> Any:
    return copies(value)() if isinstance(value, DictConfig) else copy.deepcopy(value)


def _save(cfg: Any, filename: str, output_dir: Path) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / filename).write_text(written.yaml_of(cfg), encoding="utf-8")


@contextlib.contextmanager
def quick_jobs() -> Iterator[None]:
    """While this holds, `run_job` copies by `copies` and writes YAML by `rlexp.written`, which give what Hydra's own way gives."""
    quick = (
        (hydra.core.utils, "copy", types.SimpleNamespace(deepcopy=_copied)),
        (hydra.core.utils, "_save_config", _save),
        (hydra.core.hydra_config, "OmegaConf", _Quick),
    )
    before = [(module, name, getattr(module, name)) for module, name, _ in quick if hasattr(module, name)]
    for module, name, value in quick:
        if hasattr(module, name):
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def apply_values(overrides: Sequence[Override], config: DictConfig) -> None:
    """Puts the values of `key=value` into a composed configuration, as composing would."""
    config_loader_impl.ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)


def set_override_dirname(overrides: Sequence[Override], config: DictConfig) -> None:
    """`hydra.job.override_dirname` of these overrides. Hydra 1.4 has a resolver for it."""
    if dirname := vars(config_loader_impl).get("get_overrides_dirname"):
        how = config.hydra.job.config.override_dirname
        config.hydra.job.override_dirname = dirname(
            overrides=overrides, kv_sep=how.kv_sep, item_sep=how.item_sep, exclude_keys=how.exclude_keys
        )


def config_loader(directory: Path) -> Any:
    """Hydra's, over one folder of YAML."""
    return config_loader_impl.ConfigLoaderImpl(config_search_path=create_config_search_path(str(directory)))
