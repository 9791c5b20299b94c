"""A slice whose controller is gone ends by itself: scripts of bash on the workers of a stand-in for gcloud."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import gcloud_standin
import pytest

from rlexp_launchers import watchdog, worker_scripts
from rlexp_launchers.gcloud import Ask, Gcloud
from rlexp_launchers.watchdog import Watch

ASK = Ask("tpu-ubuntu2204-base", "spot", queued=False)
QUICK = Watch(silent_s=5, save_s=20, zone="us-central2-b", project="p", queued=False)


class World:
    """A slice with one worker, on which a program runs that takes a moment to save."""

    def __init__(self, standin: gcloud_standin.Gcloud):
        self.standin, self.gcloud = standin, Gcloud("p", "us-central2-b")
        self.saved = standin.root / "saved"

    def create(self, ask: Ask = ASK, **boot) -> None:
        self.gcloud.create("x", "v4-8", ask, **boot)
        while self.gcloud.describe("x", queued=ask.queued).said != "READY":
            pass

    def train(self) -> None:
        home = self.standin.root / "slices" / "x" / "worker-0" / "rlexp"
        (home / "code" / "c").mkdir(parents=True)
        (home / "env" / "e" / "bin").mkdir(parents=True)
        program = home / "env" / "e" / "bin" / "python"
        program.write_text(
            f'#!/bin/sh\ntrap "sleep 2; touch {self.saved}; exit 75" TERM\nwhile true; do sleep 0.1; done\n'
        )
        program.chmod(0o755)
        self.ssh(worker_scripts.start("job-1", "c", "e", []))

    def ssh(self, script: str) -> bytes:
        return self.gcloud.ssh("x", 0, script)

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.2)


@pytest.fixture
def world(tmp_path, monkeypatch):
    standin = gcloud_standin.Gcloud(tmp_path / "google")
    monkeypatch.setenv("PATH", f"{standin.root}/bin:/usr/local/bin:/usr/bin:/bin")
    yield World(standin)
    standin.clear()


@pytest.mark.slow
@pytest.mark.parametrize("queued", [True, False])
def test_without_a_heartbeat_it_saves_and_deletes_itself(world, queued):
    world.create(ASK._replace(queued=queued))
    world.ssh(watchdog.start(QUICK._replace(queued=queued), "x"))
    world.train()
    world.until(lambda: not world.standin.slices() and not world.standin.requests())
    assert world.saved.exists()
    assert world.standin.calls("delete", "tpu-vm" if not queued else "queued-resources")


@pytest.mark.slow
def test_who_asks_keeps_it(world):
    world.create()
    world.ssh(watchdog.start(QUICK, "x"))
    world.train()
    for _ in range(12):
        time.sleep(0.6)
        assert world.ssh(worker_scripts.look("job-1", None)) == b"runs\n"
    assert not world.saved.exists()


@pytest.mark.slow
def test_who_is_back_while_it_saves_finds_what_was_saved(world):
    world.create()
    world.ssh(watchdog.start(QUICK, "x"))
    world.train()
    log = world.standin.root / "slices" / "x" / "worker-0" / "rlexp" / "watchdog.log"
    world.until(log.read_text)  # it is being told to save
    world.until(lambda: world.ssh(worker_scripts.look("job-1", None)) == b"rc 75\n")
    time.sleep(2)
    assert world.saved.exists()
    assert world.standin.slices() == {"x": "READY"}


def test_there_is_one_and_other_numbers_make_another(world):
    world.create()
    file = world.standin.root / "slices" / "x" / "worker-0" / "rlexp" / "watchdog.pid"
    started = []
    for watch in (QUICK._replace(silent_s=600), QUICK._replace(silent_s=600), QUICK._replace(silent_s=900)):
        world.ssh(watchdog.start(watch, "x"))
        started.append(file.read_text())
    assert started[0] == started[1] != started[2]
    program = Path(f"/proc/{started[0].strip()}/cmdline")
    world.until(lambda: not program.exists() or not program.read_bytes())


@pytest.mark.slow
def test_one_that_nobody_has_ever_spoken_to_ends_too(world, monkeypatch, tmp_path):
    monkeypatch.setattr(watchdog, "_BOOT_S", 3)
    boot = tmp_path / "boot.sh"
    boot.write_text(watchdog.at_boot(QUICK, "x"))
    world.create(boot=boot)
    world.until(lambda: not world.standin.slices())


@pytest.mark.parametrize("queued", [True, False])
def test_where_gcloud_fails_it_asks_the_service_itself(tmp_path, queued):
    """The image may have no gcloud, or one that knows no account; a machine of Google's has a token of its own."""
    token = """'{"access_token":"tok","expires_in":1}'"""
    curl = f'case "$*" in *token) echo {token} ;; *DELETE*) echo "$@" >> {tmp_path}/asked ;; esac'
    tools = {"gcloud": "exit 1", "curl": curl}
    for name, does in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    watch = Watch(silent_s=1, save_s=1, zone="us-central2-b", project="p", queued=queued)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"}
    watching = subprocess.Popen(
        ["bash", "-c", watchdog.script(watch, "x")], env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        end = time.monotonic() + 60
        wanted = ["queuedResources/x?force=true"] * queued + ["nodes/x"]
        asked = tmp_path / "asked"
        while not asked.exists() or len(asked.read_text().splitlines()) < len(wanted):
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        os.killpg(watching.pid, signal.SIGKILL)
        watching.wait()
    url = "https://tpu.googleapis.com/v2/projects/p/locations/us-central2-b"
    lines = asked.read_text().splitlines()
    assert [line.split()[-1] for line in lines] == [f"{url}/{path}" for path in wanted]
    assert all("Authorization: Bearer tok" in line for line in lines)


def test_at_boot_it_waits_longer_for_the_first_word():
    said = [watchdog.script(QUICK, "x", at_boot=at_boot) for at_boot in (False, True)]
    assert [f"limit={watchdog._BOOT_S}" in text for text in said] == [False, True]
