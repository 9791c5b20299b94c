"""Chromium, for tests of pages."""

import shutil
import subprocess
from pathlib import Path

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --enable-unsafe-swiftshader --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --enable-logging=stderr "
    "--virtual-time-budget=10000 --window-size=1240,1000"
)


def in_chromium(page: Path | str, *more: str, profile: Path | None = None) -> tuple[str, list[str]]:
    """The page after its scripts ran, and all that it said on the console. In CI a missing browser is a failure."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium: apt install chromium")
    profile = (profile or Path(page).parent) / "chromium"
    profile.mkdir()
    done = subprocess.run(
        [
            browser,
            *FLAGS.split(),
            f"--user-data-dir={profile}",
            *more,
            page.as_uri() if isinstance(page, Path) else page,
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    console = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
    # WebGL without a GPU tells how fast it is; that is no matter of the page.
    return done.stdout, [line for line in console if "GL Driver Message (OpenGL, Performance" not in line]
