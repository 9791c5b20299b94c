"""The page of a sweep in a browser: it draws, text stays text, and it fits a telephone."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from browser import in_chromium
from made_up_sweep import made_up

from rlexp.sweep import report

# Reads the page as it was drawn, and writes what it saw into the page.
PROBE = """<script>
window.addEventListener("load", () => setTimeout(() => {
  const all = (where, what) => [...document.querySelectorAll("#" + where + " " + what)];
  const size = (x) => { const box = x.getBoundingClientRect(); return [box.width, box.height]; };
  const ink = (canvas) => {
    const copy = document.createElement("canvas").getContext("2d");
    [copy.canvas.width, copy.canvas.height] = [canvas.width, canvas.height];
    copy.drawImage(canvas, 0, 0);
    const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
    let count = 0;
    for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
    return count;
  };
  // Pairs of words that lie over each other, as far as they can be seen in what scrolls.
  const overlaps = () => {
    const words = [];
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const parent = node.parentElement;
      if (!node.textContent.trim() || parent.closest("script, style, title")) continue;
      if (!parent.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const frame = parent.closest(".scroll, .plot")?.getBoundingClientRect();
      for (const box of range.getClientRects()) {
        const right = Math.min(box.right, frame?.right ?? Infinity), left = Math.max(box.left, frame?.left ?? -Infinity);
        const bottom = Math.min(box.bottom, frame?.bottom ?? Infinity), top = Math.max(box.top, frame?.top ?? -Infinity);
        if (right - left > 2 && bottom - top > 2) words.push({ node, text: node.textContent, left, right, top, bottom });
      }
    }
    const found = [];
    words.forEach((a, i) => words.slice(i + 1).forEach((b) => {
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const sticky = a.node.parentElement.closest("th") !== b.node.parentElement.closest("th");
      if (a.node !== b.node && width > 1 && height > 4 && !sticky) found.push([a.text, b.text]);
    }));
    return found;
  };
  const seen = {
    plots: [...document.querySelectorAll(".plotly-graph-div")].map((x) => [x.id, ...size(x)]),
    lines: all("curves-0", ".trace:not(:has(.js-fill)) path.js-line").map(size),
    bands: all("curves-0", ".trace path.js-fill").map(size),
    legend: all("curves-0", ".legendtext").map((x) => x.textContent),
    axes: all("parallel-0", ".axis-title").map((x) => x.textContent),
    ticks: all("parallel-0", ".axis .tick text").map((x) => x.textContent),
    ink: all("parallel-0", "canvas").map(ink),
    bars: all("importance-0", ".bars .point path").map(size),
    buttons: [...document.querySelectorAll(".modebar-btn")].map((x) => x.dataset.title),
    fetched: performance.getEntriesByType("resource").map((x) => x.name).filter((x) => !x.startsWith("data:")),
    width: innerWidth,
    tooWide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    overlaps: overlaps(),
    dots: [...document.querySelectorAll("circle.seed")].length,
    injected: document.querySelectorAll("img, b, main script[src]").length,
    text: document.querySelector("main").innerText,
  };
  const keep = (text) => {
    const element = document.createElement("script");
    element.type = "application/json"; element.id = "seen";
    element.textContent = text;
    document.body.append(element);
  };
  const text = encodeURIComponent(JSON.stringify(seen));
  parent === window ? keep(text) : parent.postMessage(text, "*");
}, 3000));
</script>
</body>"""


def probed(directory: Path, *, width: int | None = None) -> tuple[dict[str, Any], list[str]]:
    copy = directory / "probed.html"
    text = (directory / "report.html").read_text()
    assert text.count("</body>") == 1
    copy.write_text(text.replace("</body>", PROBE))
    if width is not None:  # a window cannot be as narrow as a telephone
        inside, copy = copy.name, directory / "framed.html"
        listen = """addEventListener("message", (message) => {
            document.body.append(Object.assign(document.createElement("script"),
                { type: "application/json", id: "seen", textContent: message.data }));
        });"""
        frame = f'<iframe src="{inside}" style="border: 0; width: {width}px; height: 900px"></iframe>'
        copy.write_text(f"<!DOCTYPE html><body><script>{listen}</script>{frame}</body>")
    dom, console = in_chromium(copy, "--dump-dom")
    found = re.search(r'<script type="application/json" id="seen">(.*?)</script>', dom)
    assert found, console or dom[-2000:]
    from urllib.parse import unquote

    return json.loads(unquote(found[1])), console


def test_in_a_browser_it_draws(tmp_path):
    lines = [
        (f"algo.hp.lr={lr} algo={algo} seed={seed}", 10.0 * i + seed + (algo == "pqn"))
        for i, lr in enumerate(("0.0001", "0.001", "0.01"))
        for algo in ("ppo", "pqn")
        for seed in range(4)
    ]
    directory = made_up(tmp_path / "s", lines)
    report.write(directory)
    seen, console = probed(directory)
    assert console == [] and seen["fetched"] == []
    assert [name for name, *_ in seen["plots"]] == ["curves-0", "parallel-0", "importance-0"]
    assert all(width > 800 and height > 100 for _, width, height in seen["plots"])
    assert len(seen["lines"]) == len(seen["bands"]) == 6
    assert all(width > 400 and height > 5 for width, height in seen["lines"] + seen["bands"])
    assert seen["legend"][0] == "1. lr=0.01, algo=pqn" and len(seen["legend"]) == 6
    assert seen["axes"] == ["lr", "algo", "return"]
    assert {"0.0001", "0.001", "0.01", "ppo", "pqn"} <= set(seen["ticks"])
    assert max(seen["ink"]) > 2000  # 24 lines across the page
    assert len(seen["bars"]) == 2 and max(width for width, _ in seen["bars"]) > 200
    assert seen["buttons"] and not [title for title in seen["buttons"] if re.search("(?i)cloud|share|plotly", title)]
    assert "python -m rlexp -m algo.hp.lr=0.01 algo=pqn 'seed=range(0,4)'" in seen["text"]


@pytest.mark.slow
def test_in_a_browser_text_stays_text(tmp_path):
    """What a user wrote is shown letter by letter: no markup of it is read, by the page or by Plotly."""
    evil = "</script><img src=x onerror=oops()><b>&lt;"
    jobs = [(f"{shlex.quote(f'tag={evil}{i}')} seed={s}", 5.0 * i + s) for i in range(2) for s in range(3)]
    jobs.append((shlex.quote(f"tag={evil}3"), f"Error: {evil}"))
    directory = made_up(tmp_path / "s", jobs, command=["-m", f"tag={evil}"], env=f"Env {evil}")
    report.write(directory)
    seen, console = probed(directory)
    assert console == [] and seen["fetched"] == [] and seen["injected"] == 0
    assert f"Env {evil}" in seen["text"] and f"Error: {evil}" in seen["text"] and f"{evil}1" in seen["text"]
    assert len(seen["lines"]) == 2
    names = [f"{rank}. tag={evil}{i}" for rank, i in ((1, 1), (2, 0))]
    assert seen["legend"] == [f"{name[:19]}…{name[-20:]}" for name in names]
    assert [tick for tick in seen["ticks"] if "…" in tick] == [f"{evil[:19]}…{evil[-19:]}{i}" for i in (0, 1)]


@pytest.mark.slow
def test_in_a_browser_as_narrow_as_a_telephone_nothing_overlaps(tmp_path):
    """420 pixels: nothing is wider than the page, but what scrolls in its place, and no word lies over another."""
    long = "a_rather_long_note_of_a_user"
    jobs = [
        (
            f"algo.hp.lr={lr} algo={algo} network.hidden=[{n},{n}] logger.wandb.notes={long}_{n} seed={seed}",
            9.0 * n + i + seed,
        )
        for i, lr in enumerate(("0.0001", "0.001", "0.01"))
        for algo in ("ppo", "pqn")
        for n in (8, 64)
        for seed in range(4)
    ]
    jobs.append(
        (
            f"algo.hp.lr=1e38 algo=ppo network.hidden=[8,8] logger.wandb.notes={long}_8 seed=0",
            f"Diverged: {long}/{long}",
        )
    )
    directory = made_up(tmp_path / f"{long}_{long}", jobs)
    report.write(directory)
    seen, console = probed(directory, width=420)
    assert console == [] and seen["width"] == 420
    assert seen["tooWide"] == 0 and seen["overlaps"] == []
    assert len(seen["legend"]) == 13 - 1 and len(seen["lines"]) == 6
    assert all(width > 150 and height > 5 for width, height in seen["lines"])
    assert seen["dots"] == 48


def test_the_test_would_hear_of_an_error(tmp_path):
    file = tmp_path / "page.html"
    file.write_text("<body><p>there</p><script>undefined_function()</script></body>")
    dom, console = in_chromium(file, "--dump-dom")
    assert "<p>there</p>" in dom
    assert len(console) == 1 and "undefined_function is not defined" in console[0]
