"""A Google Cloud Storage on this machine, for tests: `with object_store.serve() as (environment, url): …`.

It is gcp-storage-emulator in a process of its own, with what TensorStore and gcsfs rely on and the emulator lacks: the
generation of what is downloaded, preconditions, and moving. Nothing is kept on the disk.
"""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus

BUCKET = "runs"


@contextlib.contextmanager
def serve() -> Iterator[tuple[dict[str, str], str]]:
    """Yields the environment variables by which gcsfs and TensorStore find the server, and the URL of an empty bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, str(port)], stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10).close()
                break
            except OSError:
                assert process.poll() is None, "the store's process has ended"
                assert time.monotonic() < until
                time.sleep(0.05)
        yield environment(port), f"gs://{BUCKET}"
    finally:
        process.kill()
        process.wait()


def environment(port: int) -> dict[str, str]:
    """Of processes that are to use the server at this port."""
    return {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        "no_proxy": "127.0.0.1",
    }


def names(environment: dict[str, str]) -> list[str]:
    """All objects of the bucket, asked of the server without any library."""
    url = f"{environment['STORAGE_EMULATOR_HOST']}/storage/v1/b/{BUCKET}/o"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return sorted(item["name"] for item in json.load(answer).get("items", []))


def change(environment: dict[str, str], name: str, content: bytes | None) -> None:
    """Puts an object, or with None removes it, behind everybody's back."""
    quoted, host = urllib.parse.quote(name, safe=""), environment["STORAGE_EMULATOR_HOST"]
    if content is None:
        request = urllib.request.Request(f"{host}/storage/v1/b/{BUCKET}/o/{quoted}", method="DELETE")
    else:
        url = f"{host}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quoted}"
        request = urllib.request.Request(url, data=content, method="POST")
    urllib.request.urlopen(request, timeout=30).close()


def _run(port: int) -> None:
    """The server's process."""
    from gcp_storage_emulator import storage
    from gcp_storage_emulator.handlers import buckets, objects

    def guarded(handler, name_of):
        """The handler, behind ifGenerationMatch and ifGenerationNotMatch."""

        def handle(request, response, kept, *args, **kwargs):
            try:
                now = kept.get_file_obj(request.params["bucket_name"], name_of(request))["generation"]
            except storage.NotFound:
                now = "0"
            (wanted,) = request.query.get("ifGenerationMatch", [now])
            (unwanted,) = request.query.get("ifGenerationNotMatch", [None])
            if now == unwanted:
                response.status = HTTPStatus.NOT_MODIFIED
            elif now != wanted:
                response.status = HTTPStatus.PRECONDITION_FAILED
            else:
                handler(request, response, kept, *args, **kwargs)

        return handle

    def with_generation(request, response, kept, *args, **kwargs):
        download(request, response, kept, *args, **kwargs)
        with contextlib.suppress(storage.NotFound):
            found = kept.get_file_obj(request.params["bucket_name"], request.params["object_id"])
            response["x-goog-generation"] = found["generation"]

    download = objects.download
    objects.download = guarded(with_generation, lambda request: request.params["object_id"])
    objects.insert = guarded(objects.insert, lambda request: request.query.get("name", [""])[0])
    objects.delete = guarded(objects.delete, lambda request: request.params["object_id"])

    def move(request, response, kept, *args, **kwargs):
        bucket, name = request.params["bucket_name"], request.params["object_id"]
        try:
            response.json(objects._copy("", kept, bucket, name, bucket, request.params["dest_object_id"]))
            kept.delete_file(bucket, name)
        except storage.NotFound:
            response.status = HTTPStatus.NOT_FOUND

    def forbidden(request, response, *args, **kwargs):
        response.status = HTTPStatus.FORBIDDEN

    buckets.get = forbidden  # who may read and write objects may not, for that, look at the bucket
    storage.Storage._write_config_to_file = lambda self: None  # all of it, at each change
    from gcp_storage_emulator import server  # takes the handlers as they are now

    path = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)/moveTo/o/(?P<dest_object_id>.*[^/]+)$"
    server.HANDLERS = ((path, {"POST": move}), *server.HANDLERS)
    server.server.HTTPServer.request_queue_size = 128
    server.server.HTTPServer.handle_error = lambda *_: None  # who asked has gone, having heard enough elsewhere
    logging.disable()
    server.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET).run()


if __name__ == "__main__":
    # It goes when the test that started it goes, whatever that dies of.
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            sys.exit(1)
    _run(int(sys.argv[1]))
