"""A store for the tests of this folder, in this process and in those that it starts."""

from collections.abc import Iterator

import object_store
import pytest

from rlexp.storage import store


@pytest.fixture(scope="session")
def server() -> Iterator[dict[str, str]]:
    """The environment of a server that runs until the tests are over; it is this process's too."""
    with object_store.serve() as (environment, _), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        store._filesystem.cache_clear()
        yield environment


@pytest.fixture
def root(server: dict[str, str], tmp_path, monkeypatch) -> str:
    """An output root of the test's own. The test runs in its own directory, below which working copies are."""
    monkeypatch.chdir(tmp_path)
    return f"gs://{object_store.BUCKET}/{tmp_path.name}"


@pytest.fixture
def names(server: dict[str, str], root: str):
    """names(): what the store has below the root."""
    prefix = root.removeprefix(f"gs://{object_store.BUCKET}/") + "/"
    return lambda: [n.removeprefix(prefix) for n in object_store.names(server) if n.startswith(prefix)]


@pytest.fixture
def change(server: dict[str, str], root: str):
    """change(name, content): puts an object below the root, or with None removes it."""
    prefix = root.removeprefix(f"gs://{object_store.BUCKET}/")
    return lambda name, content: object_store.change(server, f"{prefix}/{name}", content)
