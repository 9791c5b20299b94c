"""A stand-in gcloud and an object store, in which `launcher=tpu_vm` is tested; and runs of several processes."""

import object_store
import pytest

from .together import starting
from .tpu_world import World


@pytest.fixture(scope="module")
def bucket():
    with object_store.serve() as (variables, url):
        yield variables, url


@pytest.fixture
def world(tmp_path, bucket):
    made = World(tmp_path, *bucket)
    yield made
    made.gcloud.clear()


@pytest.fixture
def start(tmp_path):
    """See `starting`."""
    yield from starting(tmp_path)
