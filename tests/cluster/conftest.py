"""What `launcher=tpu_vm` is tested in: a stand-in gcloud, and an object store that the tests of a file share."""

import object_store
import pytest

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
