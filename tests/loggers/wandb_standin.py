"""A stand-in for the W&B server on loopback: it takes runs, their history and files, and answers resume requests."""

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

KEY = "0123456789abcdef" * 2 + "5ec2e7aa"  # 40 characters, the shape of a real key


class Run:
    """What the server knows of one run."""

    def __init__(self) -> None:
        self.project = ""
        self.name = ""
        self.config: dict[str, Any] = {}
        self.tags: list[str] = []
        self.group: str | None = None
        self.notes: str | None = None
        self.history: list[dict] = []
        self.lines: list[str] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.started = False
        self.files: set[str] = set()


class Server(NamedTuple):
    url: str
    runs: dict[str, Run]
    keys: set[str]  # the authorization headers seen
    refuse: threading.Event  # set: answer 403, as for a wrong key
    silence: threading.Event  # set: take requests to the API, and never answer
    silence_after_start: threading.Event  # set: the same, once a run has started


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    runs: dict[str, Run] = {}
    keys: set[str] = set()
    refuse, silence, silence_after_start, closing = (threading.Event() for _ in range(4))
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

        def body(self) -> bytes:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

        def answer(self, value: Any, code: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer({})

        def do_PUT(self) -> None:
            self.body()
            run_id, name = self.path.split("/", 3)[2:]
            with lock:
                runs[run_id].files.add(name)
            self.answer({})

        def do_POST(self) -> None:
            data = self.body()
            keys.add(self.headers.get("Authorization", ""))
            if refuse.is_set():
                return self.answer({"errors": [{"message": "permission denied"}]}, 403)
            if silence.is_set() or (silence_after_start.is_set() and any(run.started for run in runs.values())):
                closing.wait()
            with lock:
                if self.path == "/graphql":
                    request = json.loads(data)
                    reply = _graphql(runs, request["query"], request.get("variables"), server_url)
                    return self.answer({"data": reply})
                if self.path.endswith("/file_stream"):
                    _stream(runs[self.path.split("/")[-2]], json.loads(data))
            return self.answer({})

    class Listener(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            del request, client_address  # a client that hangs up is no fault

    server = Listener(("127.0.0.1", 0), Handler)
    server_url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield Server(server_url, runs, keys, refuse, silence, silence_after_start)
    finally:
        closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _graphql(runs: dict[str, Run], query: str, variables: Any, url: str) -> dict[str, Any]:
    if "upsertBucket" in query:
        run = runs.setdefault(variables["name"], Run())
        run.started = True
        run.project = variables["project"] or run.project
        run.name = variables["displayName"] or run.name
        run.config = json.loads(variables["config"]) if variables.get("config") else run.config
        run.tags = variables["tags"] or run.tags
        run.group = variables["groupName"] or run.group
        run.notes = variables["notes"] or run.notes
        return {"upsertBucket": {"bucket": _bucket(variables["name"], run), "inserted": not run.lines}}
    if "RunResumeStatus" in query:
        run = runs.get(variables["name"])
        bucket = None if run is None else _bucket(variables["name"], run)
        entity = {"id": "e", "name": "someone"}
        return {"model": {"id": "p", "name": variables["project"], "entity": entity, "bucket": bucket}}
    if "createRunFiles" in query:
        files = [{"name": f, "uploadUrl": f"{url}/put/{variables['run']}/{f}"} for f in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
    return {}


def _bucket(run_id: str, run: Run) -> dict[str, Any]:
    entity = {"id": "e", "name": "someone"}
    return {
        "id": f"storage-{run_id}",
        "name": run_id,
        "displayName": run.name,
        "description": "",
        "sweepName": None,
        "project": {"id": "p", "name": run.project, "entity": entity},
        "config": json.dumps(run.config),
        "summaryMetrics": json.dumps(run.summary),
        "tags": run.tags,
        "notes": run.notes,
        "wandbConfig": json.dumps({"t": 1}) if run.lines else None,
        "logLineCount": 0,
        "eventsLineCount": 0,
        "eventsTail": "[]",
        "historyLineCount": len(run.lines),
        "historyTail": json.dumps(run.lines[-1:]),
    }


def _stream(run: Run, message: dict[str, Any]) -> None:
    for name, part in (message.get("files") or {}).items():
        if name == "wandb-history.jsonl":
            del run.lines[part["offset"] :]
            run.lines += part["content"]
            run.history = [json.loads(line) for line in run.lines]
        if name == "wandb-summary.json":
            run.summary = json.loads(part["content"][-1])
    if message.get("complete"):
        run.exit_code = message["exitcode"]
