"""A directory of any name: what is saved there can be opened, or it is refused before anything is written."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlexp.config import ConfigError
from rlexp.storage import checkpoint, rundir
from rlexp.storage.checkpoint import opening

# What shells, globs, URLs and file systems treat in ways of their own, and then anything that can be a file's name.
_SPECIAL = st.text(alphabet="ab[]*?!{}()-~$%&#:;,.+='\" \t\n|<>^@", min_size=1, max_size=12)
_ANY = st.text(alphabet=st.characters(exclude_characters="/\0\\", exclude_categories=["Cs"]), min_size=1, max_size=40)


def saved(tools, folder: Path, seed: int) -> None:
    run = {"a": jnp.arange(3.0) + seed, "key": jax.random.split(jax.random.key(seed), 2)}
    checkpointer = checkpoint.make(tools.config(), folder)
    checkpointer.save(1, run, {}, None)
    checkpointer.close()
    restored = checkpoint.restore(folder, tools.abstract(run), warn=tools.never)
    assert restored is not None and tools.same(restored.run, run)


@settings(max_examples=10)
@given(st.one_of(_SPECIAL, _ANY).filter(lambda name: name not in (".", "..", "a") and len(os.fsencode(name)) < 256))
@example("network.hidden=[8]")
@example("[!a]")
@example("**")
def test_what_is_saved_can_be_opened(tmp_path_factory, tools, name):
    place = tmp_path_factory.mktemp("place")
    saved(tools, place / "a" / "checkpoints", 1)  # what a pattern may find instead
    saved(tools, place / name / "checkpoints", 2)
    assert {found.name for found in place.iterdir()} == {"a", name}


@pytest.mark.parametrize("name", ["a\\b", "\\", b"\xff".decode(errors="surrogateescape"), "x/" * 1900])
def test_a_name_that_cannot_hold_checkpoints_is_refused_before_anything_is_written(tmp_path, tools, name):
    with pytest.raises(OSError, match="no checkpoint can be written to"):
        checkpoint.make(tools.config(), tmp_path / name / "checkpoints")
    with pytest.raises(ConfigError, match="cannot hold a run"):
        rundir.create(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_what_is_saved_to_a_new_place_is_opened_once(tmp_path, tools, monkeypatch):
    """Whatever the fault: here what is read is not what was written."""
    run = tools.build_run(1)
    other = {key: leaf + 1 for key, leaf in _read(tmp_path / "whole", tools, run).items()}
    monkeypatch.setattr(opening, "read_on_host", lambda step, at: other)
    checkpointer = checkpoint.make(tools.config(), tmp_path / "new")
    with pytest.raises(OSError, match=r"new: what was saved cannot be opened again: state.params"):
        checkpointer.save(1, run, {}, None)
    checkpointer.close()
    again = checkpoint.make(tools.config(), tmp_path / "whole")  # which has been opened
    again.save(2, run, {}, None)
    again.close()


def test_arrays_that_are_missing_are_told_at_the_first_save(tmp_path, tools, monkeypatch):
    monkeypatch.setattr(opening, "saved_leaves", lambda step, at=(): {})
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    with pytest.raises(OSError, match=r"cannot be opened again: state.* is missing there"):
        checkpointer.save(1, tools.build_run(1), {}, None)
    checkpointer.close()


def _read(folder: Path, tools, run):
    checkpointer = checkpoint.make(tools.config(), folder)
    checkpointer.save(1, run, {}, None)
    checkpointer.close()
    return opening.read_on_host(folder / "1", ())
