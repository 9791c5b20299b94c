"""`--serve`: the page of runs, kept fresh while they train, on the loopback alone and for who has the token.

A browser gets the table first, made of what the last look below the roots found; curves and details of a run are read when it asks
for them, and again only when their files have changed. Only aiohttp's own requests are answered here: nothing is ever written.
"""

import asyncio
import contextlib
import errno
import gzip
import hashlib
import html
import json
import logging
import os
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rlexp.config import ConfigError
from rlexp.loggers import jsonl
from rlexp.names import plain
from rlexp.report import details, explorer
from rlexp.report.found import Finder, Run, stamp_of
from rlexp.sweep import markup, report

PORT = 8050
_EVERY_S = 5  # that a page asks for what is new
_AT_LEAST_S = 1.0  # between two looks below the roots, however many pages ask
_MAX_CURVES = 50_000  # in memory
_HOSTS = (
    "127.0.0.1",
    "localhost",
    "[::1]",
)  # also at the other end of a forwarded port; any other name is somebody's trick
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the token is in an address
    "X-Content-Type-Options": "nosniff",
}


class Board:
    """What is known of the runs. Its methods are called from any thread."""

    def __init__(self, roots: Sequence[str]):
        """Looks below the roots. Raises ConfigError for a root that is none."""
        self.finder = Finder(roots)
        self._lock = threading.Lock()  # of what is known of runs
        self._rendering = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._looked = -_AT_LEAST_S
        self._curves: dict[tuple[str, str], tuple[object, details.Metrics]] = {}
        self._report: tuple[object, str] = (None, "")
        self.runs()

    def runs(self) -> list[Run]:
        """All of them, as they were a second ago or later."""
        with self._lock:
            if time.monotonic() - self._looked >= _AT_LEAST_S:
                self._runs = {run.id: run for run in self.finder.runs()}
                self._looked = time.monotonic()
            return list(self._runs.values())

    def index(self) -> dict[str, Any]:
        """The table as it is now."""
        return explorer.index(self.runs(), self.finder.roots)

    def first(self) -> dict[str, Any]:
        """The table as it was when somebody last looked: who comes in waits for no disk, and asks for what is new in a moment."""
        return explorer.index(list(self._runs.values()), self.finder.roots)

    def shown(self, ids: Sequence[str]) -> dict[str, Any]:
        """{id: what is shown of a run}."""
        return {run.id: explorer.detail(run, address) for run in self._those(ids)}

    def curves(self, metric: str, ids: Sequence[str]) -> dict[str, Any]:
        """Those of a metric, and the names of all metrics that these runs have."""
        found = {run.id: self._metrics(run, metric) for run in self._those(ids)}
        return {
            "curves": {run: one.curves.get(metric) for run, one in found.items()},
            "names": sorted({name for one in found.values() for name in one.names}),
        }

    def media(self, run_id: str, name: str) -> Path | None:
        """A picture or a video, of those that are shown."""
        return next(
            (run.directory / name for run in self._those([run_id]) if name in details.media(run.directory)), None
        )

    def report(self) -> str:
        """The whole page, as `python -m rlexp.report` writes it."""
        with self._rendering:  # once for all who ask; of many runs it takes long, and no other page waits for it
            runs = self.runs()
            stamp = tuple(runs)
            if self._report[0] != stamp:
                self._report = stamp, report.rendered(self.finder, runs, address)
            return self._report[1]

    def _those(self, ids: Sequence[str]) -> list[Run]:
        return [self._runs[one] for one in ids if one in self._runs]

    def _metrics(self, run: Run, metric: str) -> details.Metrics:
        stamp = stamp_of(run.directory / jsonl.NAME)
        known = self._curves.get((run.id, metric))
        if known is None or known[0] != stamp:
            if len(self._curves) >= _MAX_CURVES:
                self._curves.clear()
            known = self._curves[run.id, metric] = stamp, details.metrics(run.directory, [metric])
        return known[1]


def address(run: Run, name: str) -> str:
    """Where a page asks for a picture."""
    return f"media/{run.id}/{urllib.parse.quote(os.fsencode(name), safe='')}"


def bound(port: int) -> socket.socket:
    """A socket on the loopback. Raises ConfigError where the port cannot be had."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen()  # two may be bound alike until one listens
    except (OSError, OverflowError) as error:
        listening.close()
        why = "is in use" if getattr(error, "errno", None) == errno.EADDRINUSE else f"cannot be had ({error})"
        raise ConfigError(f"--port: {port} {why}; give another one, or 0 for any that is free") from error
    return listening


def serve(roots: Sequence[str], port: int) -> None:
    """Until a signal ends it. Raises ConfigError for bad input."""
    try:
        from aiohttp import http_exceptions, web
    except ImportError:
        raise ConfigError("--serve: it needs aiohttp; pip install 'rlexp[serve]' brings it") from None

    def is_told(record: logging.LogRecord) -> bool:
        """What is no HTTP is told to who sent it alone: anybody on the machine could fill this terminal."""
        return not (record.exc_info and isinstance(record.exc_info[1], http_exceptions.HttpProcessingError))

    logging.getLogger("aiohttp.server").addFilter(is_told)
    with contextlib.closing(bound(port)) as listening:
        board, token, port = Board(roots), secrets.token_urlsafe(24), listening.getsockname()[1]
        print(f"http://127.0.0.1:{port}/?token={token}")
        print(
            f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}; Ctrl-C ends it", flush=True
        )
        web.run_app(application(board, token), sock=listening, print=lambda *_: None, access_log=None)


def application(board: Board, token: str) -> Any:
    """The server itself."""
    from aiohttp import web

    # Browsers keep those of all ports of a host together, and two servers may be forwarded that have the same port where they are.
    cookie = f"rlexp-{hashlib.sha256(token.encode()).hexdigest()[:12]}"
    plotly: list[bytes] = []

    @web.middleware
    async def guarded(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        host = request.host.rpartition(":")[0] if request.host[-1:].isdigit() and ":" in request.host else request.host
        shown = request.query.get("token") if request.path == "/" else None
        given = shown or request.cookies.get(cookie, "")
        if host not in _HOSTS or not secrets.compare_digest(plain(given).encode(), token.encode()):
            return web.Response(status=403, text="403: give the whole address that was printed, with its token\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="405: there is nothing to change here\n")
        if shown:
            answer: web.StreamResponse = web.Response(status=303, headers={"Location": "/"})
            answer.set_cookie(cookie, token, httponly=True, samesite="Lax", path="/")
            return answer
        answer = await handler(request)
        answer.headers.update({name: value for name, value in _HEADERS.items() if name not in answer.headers})
        return answer

    def as_json(request: web.Request, data: object) -> web.Response:
        text = json.dumps(data, allow_nan=False)
        etag = hashlib.sha256(text.encode()).hexdigest()[:32]
        headers = {"ETag": f'"{etag}"'}
        if any(known.value == etag for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        answer = web.Response(text=text, content_type="application/json", headers=headers)
        answer.enable_compression()
        return answer

    def ids(request: web.Request) -> list[str]:
        return request.query.get("runs", "").split(",")

    async def page(request: web.Request) -> web.Response:
        index = await asyncio.to_thread(board.first)
        answer = web.Response(text=live_page(board, index), content_type="text/html")
        answer.enable_compression()
        return answer

    async def script(request: web.Request) -> web.Response:
        if not plotly:
            plotly.append(await asyncio.to_thread(lambda: gzip.compress(markup.get_plotlyjs().encode(), 6)))
        headers = {"Content-Encoding": "gzip", "Cache-Control": "private, max-age=86400"}
        return web.Response(body=plotly[0], content_type="text/javascript", charset="utf-8", headers=headers)

    async def runs(request: web.Request) -> web.Response:
        return as_json(request, await asyncio.to_thread(board.index))

    async def of_runs(request: web.Request) -> web.Response:
        return as_json(request, await asyncio.to_thread(board.shown, ids(request)))

    async def curves(request: web.Request) -> web.Response:
        return as_json(request, await asyncio.to_thread(board.curves, request.query.get("metric", ""), ids(request)))

    async def media(request: web.Request) -> web.StreamResponse:
        # What was matched was made text, which the name of a file need not be.
        name = os.fsdecode(urllib.parse.unquote_to_bytes(request.rel_url.raw_path.rpartition("/")[2]))
        if (path := await asyncio.to_thread(board.media, request.match_info["run"], name)) is None:
            raise web.HTTPNotFound
        return web.FileResponse(path, headers={"Content-Type": details.MEDIA[path.suffix]})

    async def whole(request: web.Request) -> web.Response:
        text = await asyncio.to_thread(board.report)
        answer = web.Response(text=text, content_type="text/html")
        answer.enable_compression()
        return answer

    app = web.Application(middlewares=[guarded])
    app.add_routes(
        [
            web.get("/", page),
            web.get("/plotly.js", script),
            web.get("/runs.json", runs),
            web.get("/details", of_runs),
            web.get("/curves", curves),
            web.get("/media/{run}/{name}", media),
            web.get("/report", whole),
        ]
    )
    return app


def live_page(board: Board, index: dict[str, Any]) -> str:
    """The table and what stands below it, which asks for its data."""
    where = explorer.title(board.finder.roots)
    places = html.escape(", ".join(plain(root) for root in board.finder.roots))
    head = f"""<header>
<h1>{where}</h1>
<p class="muted">{places} · looked at every {_EVERY_S} s · <a href="report">the whole report, as of now</a></p>
</header>
"""
    return markup.document(where, head + explorer.section(index | {"live": _EVERY_S}), "", plotly="plotly.js")
