"""The W&B group of a sweep: no other has it, and all of the sweep has it."""

import os
from types import SimpleNamespace

import pytest

from rlexp.sweep.hydra_jobs import named_group
from rlexp.sweep.manifest import Manifest


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)


def remembered(directory, launcher=None) -> str:
    """The group, as a batch finds it and its manifest remembers it."""
    directory.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("WANDB_RUN_GROUP")
    with named_group(launcher or SimpleNamespace(wandb_group=None), directory) as group:
        assert os.environ["WANDB_RUN_GROUP"] == group
        Manifest(directory).remember("wandb_group", group)
    assert os.environ.get("WANDB_RUN_GROUP") == before  # the next sweep of this process is another one
    return group


def test_sweeps_of_one_name_do_not_share_a_group(tmp_path):
    """In one process, one after the other, and in two at the same time."""
    found = [remembered(tmp_path / name / "sweep") for name in "abc"]
    assert len(set(found)) == 3 and all(x.startswith("sweep-") for x in found)


def test_a_batch_and_a_resumed_sweep_keep_it(tmp_path):
    first = remembered(tmp_path / "sweep")
    assert remembered(tmp_path / "sweep") == first


def test_before_there_is_a_manifest_too(tmp_path):
    """A batch that was refused has made none, and launcher.pack=off never does."""
    launcher = SimpleNamespace(wandb_group=None)
    found = set()
    for _ in range(2):
        with named_group(launcher, tmp_path / "sweep") as group:
            found.add(group)
    assert len(found) == 1


def test_it_is_let_go_whatever_happens(tmp_path):
    with pytest.raises(KeyError), named_group(SimpleNamespace(wandb_group=None), tmp_path):
        raise KeyError
    assert "WANDB_RUN_GROUP" not in os.environ


def test_what_the_user_says_counts(tmp_path, monkeypatch):
    remembered(tmp_path / "other")
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    assert remembered(tmp_path / "sweep") == "mine"
