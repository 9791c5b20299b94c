"""The W&B group of a sweep: no other has it, and all of the sweep has it."""

import os

import pytest

from rlexp.sweep import hydra_jobs
from rlexp.sweep.manifest import Manifest


@pytest.fixture(autouse=True)
def as_in_a_fresh_process(monkeypatch):
    def forget() -> None:
        monkeypatch.setattr(hydra_jobs, "_group", None)
        monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)

    monkeypatch.setenv("WANDB_RUN_GROUP", "")  # so that it is as it was, in the end
    forget()
    return forget


def remembered(directory) -> str:
    """The group, as a launch finds it and its manifest remembers it."""
    directory.mkdir(parents=True, exist_ok=True)
    group = hydra_jobs._name_group(directory)
    assert os.environ["WANDB_RUN_GROUP"] == group
    Manifest(directory).remember("wandb_group", group)
    return group


def test_sweeps_of_one_name_do_not_share_a_group(tmp_path, as_in_a_fresh_process):
    """In one process, one after the other, and in two at the same time."""
    first, second = (remembered(tmp_path / name / "sweep") for name in "ab")
    as_in_a_fresh_process()
    third = remembered(tmp_path / "c/sweep")
    assert len({first, second, third}) == 3 and all(x.startswith("sweep-") for x in (first, second, third))


def test_a_batch_and_a_resumed_sweep_keep_it(tmp_path, as_in_a_fresh_process):
    first = remembered(tmp_path / "sweep")
    assert remembered(tmp_path / "sweep") == first
    as_in_a_fresh_process()
    assert remembered(tmp_path / "sweep") == first


def test_before_there_is_a_manifest_too(tmp_path):
    """A batch that was refused has made none."""
    (tmp_path / "sweep").mkdir()
    assert hydra_jobs._name_group(tmp_path / "sweep") == hydra_jobs._name_group(tmp_path / "sweep")


def test_what_the_user_says_counts(tmp_path, monkeypatch):
    remembered(tmp_path / "other")
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    assert remembered(tmp_path / "sweep") == "mine"
