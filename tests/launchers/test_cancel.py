"""What `cancel` waits for, of slices whose command is gone."""

import pytest

from rlexp.config import ConfigError
from rlexp.storage import store
from rlexp.sweep.manifest import Manifest
from rlexp_launchers import tpu_vm
from rlexp_launchers.slices import FACT


@pytest.mark.parametrize("url", [None, "gs://there", "gs://gone"])
def test_a_store_that_is_gone_is_not_waited_for(tmp_path, monkeypatch, capsys, url):
    """What trains cannot save; it would try for all of launcher.save_s while its slice costs."""
    waited, deleted = [], []

    def reach(url):
        if url == "gs://gone":
            raise ConfigError("gs://gone: it cannot be reached")

    monkeypatch.setattr(store, "url_of", lambda directory: url)
    monkeypatch.setattr(store, "reach", reach)
    monkeypatch.setattr(tpu_vm, "save", lambda gcloud, name, fact, clock, *, asked: waited.append(fact["save_s"]))
    monkeypatch.setattr(tpu_vm, "delete", lambda gcloud, name, fact, clock: deleted.append(name))
    manifest = Manifest(tmp_path)
    common = {
        "task": "t",
        "job": "j",
        "kind": ["v4-8", 1],
        "since": None,
        "orphan_s": None,
        "zone": "z",
        "project": "p",
    }
    for name, save_s in (("a", 300.0), ("b", 5.0)):
        manifest.remember(FACT + name, {**common, "queued": False, "save_s": save_s})
    tpu_vm.cancel(manifest)
    assert sorted(waited) == ([5.0, 30.0] if url == "gs://gone" else [5.0, 300.0])
    assert sorted(deleted) == ["a", "b"] and not manifest.recall_all(FACT)
    assert ("30 seconds to save" in capsys.readouterr().out) == (url == "gs://gone")
