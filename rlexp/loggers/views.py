"""What W&B shows of many runs: a report, and a saved view of the project's workspace, made of a list of panels.

Both are found again on the server by their names, so nothing has to be remembered, and a process that was killed leaves none
that is made a second time. All that is drawn is of W&B's own library, wandb-workspaces.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlexp.config import ConfigError
from rlexp.loggers.wandb import PROBE_S, public, why_offline

NOTES = "Notes"  # the heading in a report, below which all is the user's
_ANSWER_S = 20  # that the server may take for one answer
_MAX_LINES = 20  # in a panel of the workspace; more are a tangle


class Account(NamedTuple):
    """A project on a server that has answered."""

    api: Any  # wandb.Api
    entity: str
    project: str


def check_installed() -> None:
    """Raises ConfigError."""
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError("dashboard: it needs wandb-workspaces; pip install 'rlexp[dashboard]' brings it")


def connect(entity: str | None, project: str) -> Account:
    """In bounded time.

    Args:
      entity: None: that of the key.
    Raises:
      ConfigError: there is no key, or the server does not answer or refuses it.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # as for a run, see `rlexp.loggers.wandb`
    os.environ.setdefault("WANDB_HTTP_TIMEOUT", str(_ANSWER_S))  # read as it is imported
    os.environ["WANDB_SILENT"] = "true"  # what was saved is said by us
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if why := why_offline(settings, PROBE_S):
        raise ConfigError(f"dashboard: W&B: {why}")
    with _told(settings.base_url):
        api = wandb.Api()
        if not (entity := entity or api.default_entity):
            raise ConfigError("dashboard: the key has no entity of its own; set WANDB_ENTITY")
        return Account(api, entity, project)


def save_report(account: Account, title: str, description: str, blocks: Sequence[Any]) -> str:
    """Its address. The report of this title in the project is the same one; what stands there below `NOTES` is kept.

    Raises:
      ConfigError: the server does not take it.
    """
    from wandb_workspaces.reports.v2 import interface as wr

    with _told(account.api.settings["base_url"]):
        reports = account.api.reports(f"{account.entity}/{account.project}")
        known = next((report for report in reports if report.display_name == title), None)
        report: Any
        if known is None:
            report = wr.Report(project=account.project, entity=account.entity, title=title)
            own = [wr.P("What is written below this heading stays when the dashboard is made again.")]
        else:
            report = wr.Report.from_url(known.url)
            own = _below_notes(report.blocks)
        report.description = description
        report.width = "fluid"
        report.blocks = [*blocks, wr.H2(NOTES), *own]
        return _address(report.save().url)


def _below_notes(blocks: Sequence[Any]) -> list[Any]:
    from wandb_workspaces.reports.v2 import interface as wr

    heads = [i for i, block in enumerate(blocks) if isinstance(block, wr.H2) and block.text == NOTES]
    return list(blocks[heads[0] + 1 :]) if heads else []


def save_workspace(account: Account, title: str, sections: Sequence[Any], runs: dict[str, Any]) -> str:
    """Its address. The one of this title is the same one, which keeps sections that others have put into it, and its settings.

    Args:
      runs: which are shown, and how: arguments of `RunsetSettings`.
    Raises:
      ConfigError: the server does not take it.
    """
    import wandb_workspaces.workspaces as ws

    slug = hashlib.sha256(title.encode()).hexdigest()[:11]  # of the length that W&B's own have
    with _told(account.api.settings["base_url"]):
        project = account.api.project(account.project, account.entity).url.removesuffix("/workspace")
        try:
            view = ws.Workspace.from_url(f"{project}?nw={slug}")
        except ValueError as error:
            if not re.search("Workspace .* not found", str(error)):
                raise
            settings = ws.WorkspaceSettings(x_axis="env_steps", max_runs=_MAX_LINES)
            view = ws.Workspace(account.entity, account.project, _plain(title), settings=settings)
            view._internal_name = f"nw-{slug}-v"
        ours = {section.name for section in sections}
        view.sections = [*sections, *(section for section in view.sections if section.name not in ours)]
        for name, value in runs.items():
            setattr(view.runset_settings, name, value)
        return _address(view.save().url)


def _address(url: str) -> str:
    """As a terminal opens it: projects may have blanks."""
    return url.replace(" ", "%20")


def _plain(title: str) -> str:
    """W&B allows no symbols in the name of a workspace."""
    return re.sub(r"[^\w .,:;()/-]", "-", title)


@contextlib.contextmanager
def _told(base_url: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # W&B has many kinds, and its library adds those of wrong answers
        raise ConfigError(f"dashboard: W&B at {base_url}: {public(error)}") from error
