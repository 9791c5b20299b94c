"""Opening a directory for writing costs nothing; Orbax is imported when the devices have work, or at the first save."""

import dataclasses

from rlexp.storage.checkpoint import saving


def test_orbax_comes_with_the_first_save_or_when_asked(tmp_path, tools, monkeypatch):
    asked, real = [], saving.orbax
    monkeypatch.setattr(saving, "orbax", lambda: (asked.append(1), real())[1])
    unused = saving.make(tools.config(), tmp_path / "unused")
    unused.wait()
    unused.close()
    saver = saving.make(tools.config(), tmp_path / "used")
    assert not asked and (tmp_path / "used").is_dir()
    saver.ready()
    assert len(asked) == 1
    saver.ready()
    assert len(asked) == 1
    saver.close()
    saving.make(dataclasses.replace(tools.config(), enabled=False), tmp_path / "off").ready()
    assert len(asked) == 1
