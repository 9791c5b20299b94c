"""`python -m rlexp.report --serve`: who gets in, what is read when, and that a page in a browser stays fresh."""

import asyncio
import hashlib
import http.client
import json
import logging
import os
import socket
import sqlite3
import threading
import urllib.parse
from collections import Counter
from contextlib import closing, contextmanager

import pytest
from browser import in_chromium
from made_up_sweep import made_up
from many_runs import a_picture, alone, some

from rlexp.commands import ls
from rlexp.report import details, serve
from rlexp.report.__main__ import main
from rlexp.report.serve import Board, application, bound
from rlexp.sweep import report

TOKEN, COOKIE = "the-token", "rlexp-{}".format(hashlib.sha256(b"the-token").hexdigest()[:12])


@contextmanager
def served(*roots, token=TOKEN):
    """The port of a server that runs in a thread of this process."""
    from aiohttp import web

    listening, loop = bound(0), asyncio.new_event_loop()
    port = listening.getsockname()[1]
    runner = web.AppRunner(application(Board([str(root) for root in roots]), token), access_log=None)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.SockSite(runner, listening).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def asked(port, path, *, cookie=True, host="localhost:1234", method="GET", **headers):
    """(status, headers, body); the host is that of the other end of a forwarded port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    if cookie:
        headers["Cookie"] = f"{COOKIE}={TOKEN}"
    connection.request(method, path, headers={"Host": host, **{k.replace("_", "-"): v for k, v in headers.items()}})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.headers), body


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return some(tmp_path_factory.mktemp("r") / "all")


def test_who_gets_in(root):
    with served(root) as port:
        paths = (
            "/",
            "/runs.json",
            "/plotly.js",
            "/report",
            "/details?runs=x",
            "/curves?metric=x&runs=y",
            "/media/a/b",
            "/no",
        )
        for path in paths:
            assert asked(port, path, cookie=False)[0] == 403, path
            assert asked(port, path, cookie=False, Cookie=f"{COOKIE}=wrong; rlexp-1={TOKEN}")[0] == 403
            assert (
                asked(port, path, host="evil.example:8050")[0] == 403
            )  # a name that somebody has pointed at this machine
        assert asked(port, "/?token=wrong", cookie=False)[0] == 403
        assert asked(port, f"/runs.json?token={TOKEN}", cookie=False)[0] == 403
        status, headers, _ = asked(port, f"/?token={TOKEN}", cookie=False)
        assert (status, headers["Location"]) == (303, "/")
        assert headers["Set-Cookie"] == f"{COOKIE}={TOKEN}; HttpOnly; Path=/; SameSite=Lax"
        for host in (f"127.0.0.1:{port}", "localhost:9", "localhost", "[::1]:8050"):
            assert asked(port, "/", host=host)[0] == 200
        assert asked(port, "/runs.json", method="POST")[0] == 405
        _, headers, _ = asked(port, "/")
        assert (
            "connect-src 'self'" in headers["Content-Security-Policy"]
            and headers["X-Content-Type-Options"] == "nosniff"
        )


def test_two_servers_do_not_log_each_other_out(root):
    """A browser keeps one cookie of each name for all ports of a host, and two machines' servers may have the same port."""
    jar: dict[str, str] = {}
    with served(root, token="of-a") as a, served(root, token="of-b") as b:
        for port, token in ((a, "of-a"), (b, "of-b")):
            _, headers, _ = asked(port, f"/?token={token}", cookie=False)
            name, _, value = headers["Set-Cookie"].partition(";")[0].partition("=")
            assert name != f"rlexp-{port}"
            jar[name] = value
        kept = "; ".join(f"{name}={value}" for name, value in jar.items())
        assert [asked(port, "/runs.json", cookie=False, Cookie=kept)[0] for port in (a, b)] == [200, 200]


def test_it_listens_on_the_loopback_alone():
    listening = bound(0)
    assert listening.getsockname()[0] == "127.0.0.1"
    listening.close()


def test_pictures_and_nothing_else(root, tmp_path):
    (root / "outputs/one/secret.png").symlink_to("/etc/passwd")
    with served(root) as port:
        runs = {row["name"]: row["id"] for row in json.loads(asked(port, "/runs.json")[2])["runs"]}
        own, one = runs["outputs/eval"], runs["outputs/one"]
        found = json.loads(asked(port, f"/details?runs={own}")[2])[own]["media"]
        assert [(m["name"], m["video"], m["at"]) for m in found] == [
            ("video.mp4", True, f"media/{own}/video.mp4"),
            ("curve.png", False, f"media/{own}/curve.png"),
        ]
        status, headers, body = asked(port, f"/media/{own}/curve.png")
        assert (status, headers["Content-Type"]) == (200, "image/png") and body.startswith(b"\x89PNG")
        assert asked(port, f"/media/{own}/video.mp4", Range="bytes=3-5")[2] == b"fil"
        for path in (
            f"{own}/config.yaml",
            f"{own}/..%2fone%2fconfig.yaml",
            f"{own}/%2e%2e",
            f"{one}/secret.png",
            "x/curve.png",
        ):
            assert asked(port, f"/media/{path}")[0] == 404, path


@pytest.mark.parametrize("name", ["x\udcff.png", "\u00e9 %41+.png", "a#b?c&.png", "%ff.png"])
def test_a_picture_has_any_name(name, tmp_path):
    """It is had by the address that is listed, and its sweep may lie in a folder of any name."""
    directory = made_up(tmp_path / "nu\udcff", [("a=1", 1.0)])
    (directory / "0/environment.json").write_text("{}")
    (directory / "0" / name).write_bytes(a_picture())
    with served(tmp_path) as port:
        (row,) = json.loads(asked(port, "/runs.json")[2])["runs"]
        (found,) = json.loads(asked(port, f"/details?runs={row['id']}")[2])[row["id"]]["media"]
        assert asked(port, f"/{found['at']}")[::2] == (200, a_picture())
        assert asked(port, "/")[0] == asked(port, "/report")[0] == 200


@pytest.mark.parametrize("value", ["\xff", "\xc3\x28", "\xed\xa0\x80", TOKEN + "\xff"])
def test_a_cookie_of_any_bytes_is_refused(root, value):
    with served(root) as port:
        assert asked(port, "/", cookie=False, Cookie=f"{COOKIE}={value}")[0] == 403
        assert asked(port, f"/?token={urllib.parse.quote(value, encoding='latin-1')}", cookie=False)[0] == 403


def test_no_page_waits_for_the_whole_report(root, monkeypatch):
    """Which takes long of many runs. Who asks for it meanwhile gets that one."""
    board, begun, goes_on, made = Board([str(root)]), threading.Event(), threading.Event(), []

    def rendered(*_):
        begun.set()
        assert goes_on.wait(20)
        made.append(1)
        return "it"

    monkeypatch.setattr(report, "rendered", rendered)
    pages: list[str] = []
    askers = [threading.Thread(target=lambda: pages.append(board.report()), daemon=True) for _ in range(2)]
    for asker in askers:
        asker.start()
    assert begun.wait(20)
    other = threading.Thread(target=board.runs, daemon=True)
    other.start()
    other.join(5)
    waits = other.is_alive()
    goes_on.set()
    for thread in (*askers, other):
        thread.join(20)
    assert not waits and pages == ["it", "it"] and len(made) == 1


def test_what_is_no_http_leaves_no_traceback(root, monkeypatch, caplog):
    """Anybody on the machine can send it."""
    from aiohttp import web

    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "filters", [])
    monkeypatch.setattr(web, "run_app", lambda *_, **__: None)
    serve.serve([str(root)], 0)
    with served(root) as port, socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall("GET /?token=%ff%00\u00e9 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.0 400")
        assert asked(port, "/runs.json")[0] == 200 and not caplog.text
        monkeypatch.setattr(Board, "index", lambda _: 1 / 0)
        assert asked(port, "/runs.json")[0] == 500 and "ZeroDivisionError" in caplog.text  # our own errors are told


def test_the_whole_report_is_the_written_one(root):
    with served(root) as port:
        status, _, body = asked(port, "/report")
    assert status == 200 and b"Best configuration" in body and b'id="curves-0"' in body
    assert not (root / "report.html").exists() and not (root / "report").exists()


class Reads(Counter):
    """How often files of which name were read."""

    def __init__(self, monkeypatch):
        super().__init__()
        read, lines = ls._read, details.jsonl.read

        def counted_read(folder, name):
            self[name] += 1
            return read(folder, name)

        def counted_lines(path):
            self["metrics.jsonl"] += 1
            return lines(path)

        monkeypatch.setattr(ls, "_read", counted_read)
        monkeypatch.setattr(details.jsonl, "read", counted_lines)


def test_of_a_thousand_runs_only_what_is_asked_for_is_read(tmp_path, monkeypatch):
    """The first view reads no metrics and, once the folders were looked through, no file; a run that goes on is read alone."""
    made_up(tmp_path / "sweep", [])
    jobs = [(i, json.dumps([f"algo.hp.lr={i // 4}", f"seed={i % 4}"]), str(i)) for i in range(960)]
    with closing(sqlite3.connect(tmp_path / "sweep/sweep.sqlite")) as manifest, manifest:
        what = "insert into jobs values (?, ?, '', ?, '', 'pending', 0, null, null, null, 0)"
        manifest.executemany(what, jobs)
    folders = [alone(tmp_path / f"o/{i}", [f"seed={i}"], 1.0) for i in range(40)]
    reads = Reads(monkeypatch)
    monkeypatch.setattr(serve, "_AT_LEAST_S", 0.0)
    board = Board([str(tmp_path)])
    assert reads == dict.fromkeys(("environment.json", "config.yaml", "summary.json"), 40)
    reads.clear()
    with monkeypatch.context() as patch:
        patch.setattr(board.finder, "runs", None)  # nor does it look below the roots
        serve.live_page(board, board.first())
    index = board.index()
    assert len(index["runs"]) == len(board.first()["runs"]) == 1000 and not reads
    ids = [row["id"] for row in index["runs"] if row["name"].startswith("o/")]
    for _ in range(2):
        assert board.curves("eval/return_mean", ids)["curves"][ids[0]] == [[100, 200], [0.5, 1.0]]
        assert reads == {"metrics.jsonl": 40}
    reads.clear()
    with (folders[3] / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 300, "eval/return_mean": 9.0}\n')
    (folders[3] / "summary.json").write_text('{"status": "finished", "objective": 9.0, "env_steps": 300}')
    (row,) = [row for row in board.index()["runs"] if row["objective"] == 9.0]
    assert board.curves("eval/return_mean", ids)["curves"][row["id"]] == [[100, 200, 300], [0.5, 1.0, 9.0]]
    assert reads == dict.fromkeys(("environment.json", "config.yaml", "summary.json", "metrics.jsonl"), 1)


def test_what_is_known_already_is_not_sent_again(root):
    with served(root) as port:
        _, headers, _ = asked(port, "/runs.json")
        assert asked(port, "/runs.json", If_None_Match=headers["ETag"])[::2] == (304, b"")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["nowhere", "--serve", "--port", "0"], "report: 'nowhere' is no folder"),
        (
            [".", "--serve", "--port", "{taken}"],
            "--port: {taken} is in use; give another one, or 0 for any that is free",
        ),
        ([".", "--serve", "--port", "70000"], "--port: 70000 cannot be had"),
        ([".", "--serve", "--out", "x"], "--out is of a page that is written"),
        ([".", "--port", "1"], "--port of one that is served"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, given, told):
    monkeypatch.chdir(tmp_path)
    listening = bound(0)
    taken = str(listening.getsockname()[1])
    try:
        code = main([x.replace("{taken}", taken) for x in given])
    except SystemExit as end:
        code = end.code
    listening.close()
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and os.listdir(tmp_path) == []
    (line,) = said.err.splitlines()
    assert told.replace("{taken}", taken) in line


# --- in a browser ------------------------------------------------------------------------------------------------------


def test_in_a_browser_it_stays_fresh(root, tmp_path, monkeypatch):
    """A run goes on while its page is open: the table and the curve go on too."""
    monkeypatch.setattr(serve, "_EVERY_S", 1)
    monkeypatch.setattr(serve, "_AT_LEAST_S", 0.0)
    seen = []
    as_it_is = serve.Board.curves

    def and_then(board, metric, ids):
        found = as_it_is(board, metric, ids)
        seen.append(len(ids))
        if len(seen) == 1:  # the page has its first curves now
            with (root / "outputs/two/metrics.jsonl").open("a") as file:
                file.write('{"env_steps": 900, "wall_s": 1, "eval/return_mean": 77.0}\n')
        return found

    monkeypatch.setattr(serve.Board, "curves", and_then)
    with served(root) as port:
        # Time goes by as fast as the page has nothing to wait for, so it is real time that ends this.
        dom, console = in_chromium(
            f"http://127.0.0.1:{port}/?token={TOKEN}", "--dump-dom", "--timeout=8000", profile=tmp_path
        )
    assert [line for line in console if "Refused" in line or "rror" in line] == []
    assert seen[0] == 11 and 1 in seen[1:]  # all of them once, then the one that went on
    assert ">77<" in dom and ">900<" in dom and "as of " in dom


def test_in_a_browser_runs_that_come_later_make_groups(tmp_path, monkeypatch):
    """The page is opened while there is one run, from which no other differs."""
    monkeypatch.setattr(serve, "_EVERY_S", 1)
    monkeypatch.setattr(serve, "_AT_LEAST_S", 0.0)
    alone(tmp_path / "r/0", ["algo.hp.lr=0.125"], 1.0)
    as_it_is = serve.Board.curves

    def and_then(board, metric, ids):
        if not (tmp_path / "r/1").exists():
            alone(tmp_path / "r/1", ["algo.hp.lr=0.25"], 2.0)
        return as_it_is(board, metric, ids)

    monkeypatch.setattr(serve.Board, "curves", and_then)
    with served(tmp_path / "r") as port:
        dom, console = in_chromium(
            f"http://127.0.0.1:{port}/?token={TOKEN}", "--dump-dom", "--timeout=5000", profile=tmp_path
        )
    assert [line for line in console if "Refused" in line or "rror" in line] == []
    assert ">lr=0.125<" in dom and ">lr=0.25<" in dom
