"""A full disk, in every file that is written: one line with a path. A link to /dev/full fails as one does, for everybody."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from support import QUIET, SMALL

from rlexp import __main__ as cli
from rlexp import compose
from rlexp.loggers import wandb
from rlexp.sweep import hydra_jobs
from rlexp.sweep.manifest import JobFailed


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """(file on the full disk, arguments) -> exit code, and what was said on stderr."""
    for module in (compose, hydra_jobs):  # Hydra's log would keep the streams of this test
        monkeypatch.setattr(module, "configure_log", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    def run(full: str, *arguments: str) -> tuple[object, list[str]]:
        path = tmp_path / full
        path.parent.mkdir(parents=True)
        path.symlink_to("/dev/full")
        compose.begin_another_run()
        monkeypatch.setattr(sys, "argv", ["rlexp", *SMALL, *QUIET, *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, capfd.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        (".hydra/config.yaml", 2, ".hydra"),
        (".hydra/overrides.yaml", 2, ".hydra"),
        ("config.part", 1, "config.yaml"),
        ("overrides.part", 1, "overrides.yaml"),
        ("environment.part", 1, "environment.json"),
    ],
)
def test_before_a_run(tmp_path, command, name, code, told):
    ended, said = command(f"run/{name}", "hydra.run.dir=run")
    assert ended == code and len(said) == 1
    assert "No space left on device" in said[0] and f"{tmp_path}/run/{told}'" in said[0]
    assert not [path for path in tmp_path.rglob("*.part") if not path.is_symlink()]


def test_a_sweeps_job_whose_hydra_files_cannot_be_written(tmp_path, monkeypatch):
    def run_job(**_):
        raise OSError(28, "No space left on device")  # as the system tells of a write: without a file

    monkeypatch.setattr(hydra_jobs, "run_job", run_job)
    monkeypatch.setattr(hydra_jobs, "configure_log", lambda *_: None)
    job = {"sweep": {"dir": str(tmp_path), "subdir": "3"}, "job": {"num": 3}, "overrides": {"task": []}}
    config = OmegaConf.create({"hydra": {**job, "hydra_logging": None, "verbose": False}})
    returned = hydra_jobs._run_job(SimpleNamespace(hydra_context=None, config=config), config, lambda _: None)
    with pytest.raises(JobFailed) as failed:
        _ = returned.return_value
    assert str(failed.value) == f"job 3: [Errno 28] cannot be written: No space left on device: '{tmp_path}/3/.hydra'"


class Full(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


def test_what_wandb_says_of_its_own_log(capfd, monkeypatch):
    """Nothing: it was a traceback a line, hundreds of lines for a sweep."""
    wandb._say_nothing_of_its_log()
    logger, handler = logging.getLogger("wandb"), logging.StreamHandler(Full())
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(handler)
    try:
        logging.getLogger("wandb.sdk").error("a line")
    finally:
        logger.removeHandler(handler)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "hydras",
    [
        (),
        ("hydra.launcher.pack=off",),
        ("hydra/launcher=basic",),
        ("hydra/sweeper=basic",),
        ("hydra/sweeper=basic", "hydra/launcher=basic"),
    ],
)
def test_hydras_own_report_of_a_failed_job_is_never_beside_ours(tmp_path, monkeypatch, capfd, hydras):
    def fails(*_, **__):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for module in (compose, hydra_jobs):  # Hydra's log would keep the streams of this test
        monkeypatch.setattr(module, "configure_log", lambda *_: None)
    monkeypatch.setattr("rlexp.sweep.packs.Programs.of", fails)
    monkeypatch.setattr("rlexp.session.train_pack", fails)
    line = ["-m", f"hydra.sweep.dir={tmp_path}/sweep", *SMALL, *QUIET, "seed=1,2", *hydras]
    monkeypatch.setattr(sys, "argv", ["rlexp", *line, "hydra/job_logging=disabled", "hydra/hydra_logging=disabled"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capfd.readouterr().err.splitlines()
    assert end.value.code == 1 and len(said) == 1, said
    assert said[0].startswith("rlexp: ") and "No space left on device" in said[0]
