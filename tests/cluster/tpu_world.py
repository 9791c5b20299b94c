"""What the tests of `launcher=tpu_vm` share: a laptop, slices that are real processes, and an object store on loopback."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from gcloud_standin import Gcloud
from support import environment, rlexp_command

from rlexp.sweep.manifest import Entry, Manifest

SMALL = (
    "env=probe/obs_action_reward",
    "algo.num_envs=4",
    "algo.num_steps=32",
    "algo.num_epochs=1",
    "algo.num_minibatches=1",
    "network.hidden=[8]",
    "eval.num_episodes=4",
    "eval.every_env_steps=3200",
    "checkpoint.every_updates=25",
    "checkpoint.keep_last=99",
    "logger=quiet",
)
HOSTS = {  # a virtual device for each host, so that the processes are many and the work is not
    "v4-8": ("hardware=v4-8", "hardware.emulate=true", "hardware.mesh.data=1"),
    "v4-16": ("hardware=v4-16", "hardware.emulate=true", "hardware.mesh.data=2"),
    "v4-32": ("hardware=v4-32", "hardware.emulate=true", "hardware.mesh.data=4"),
}
# In place of an environment of their own, workers get this one.
INSTALL = f"""
mkdir -p $VENV/bin
printf '#!/bin/sh\\nexec {sys.executable} "$@"\\n' > $VENV/bin/python
chmod +x $VENV/bin/python
date >> $HOME/installed
"""


class World:
    """A laptop with gcloud, in a directory of its own; slices; and a store."""

    def __init__(self, root: Path, variables: dict[str, str], url: str):
        self.gcloud, self.directory = Gcloud(root / "google"), root / "laptop"
        self.directory.mkdir()
        (self.directory / "install.sh").write_text(INSTALL)
        self.url = f"{url}/{root.name}"
        self._server = variables["STORAGE_EMULATOR_HOST"]
        self.env = environment(**variables) | {
            "PATH": f"{self.gcloud.root / 'bin'}:{os.environ['PATH']}",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "WANDB_API_KEY": "k" * 40,
            "WANDB_MODE": "disabled",
        }
        self._given = [*variables, "XLA_FLAGS", "WANDB_MODE", "WANDB_API_KEY"]

    def command(self, *arguments: str) -> list[str]:
        launcher = [
            "launcher=tpu_vm",
            "launcher.poll_s=1",
            "launcher.grace_s=2",
            f"launcher.install='sh {self.directory}/install.sh'",
            f"launcher.environment=[{','.join(self._given)}]",
            f"output_root={self.url}",
        ]
        many = ["-m"] if "-m" in arguments else []  # which argparse wants before what it is about
        return rlexp_command(*many, *SMALL, *launcher, *(argument for argument in arguments if argument != "-m"))

    def start(self, *arguments: str) -> subprocess.Popen:
        with (self.directory / "out").open("a") as out:
            return subprocess.Popen(
                self.command(*arguments), cwd=self.directory, env=self.env, stdout=out, stderr=subprocess.STDOUT
            )

    def run(self, *arguments: str, code: int = 0, stream: str | None = None) -> str:
        done = subprocess.run(
            self.command(*arguments), cwd=self.directory, env=self.env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, done.stdout + done.stderr
        return getattr(done, stream or ("stdout" if code != 2 else "stderr"))

    def said(self) -> str:
        return (self.directory / "out").read_text()

    def sweep(self, verb: str, directory: str) -> str:
        command = [sys.executable, "-m", "rlexp.sweep", verb, directory]
        done = subprocess.run(command, cwd=self.directory, env=self.env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def jobs(self, directory: str) -> dict[int, Entry]:
        path = self.directory / directory
        return {job.number: job for job in Manifest(path).jobs()} if (path / "sweep.sqlite").exists() else {}

    def job_of(self, task: str) -> str:
        """Directory of the one job of a pack."""
        (written,) = self.directory.glob(f"*/workers/{task}.json")
        return json.loads(written.read_text())["jobs"][0]["dir"]

    def objects(self, ending: str = "") -> list[str]:
        """Names in the store, below this world's own prefix."""
        bucket, _, prefix = self.url.removeprefix("gs://").partition("/")
        with urllib.request.urlopen(f"{self._server}/storage/v1/b/{bucket}/o?prefix={quote(prefix)}/") as answer:
            items = json.load(answer).get("items", [])
        return [item["name"].removeprefix(prefix + "/") for item in items if item["name"].endswith(ending)]

    def saved(self, run: str = "") -> list[int]:
        """Updates of the checkpoints that are there whole, of a run or of all."""
        found = [re.fullmatch(r"(.*)/checkpoints/(\d+)/commit_success.txt", name) for name in self.objects()]
        return [int(match[2]) for match in found if match and run in (match[1], "")]

    def content(self, name: str) -> str:
        bucket, _, prefix = self.url.removeprefix("gs://").partition("/")
        place = quote(f"{prefix}/{name}", safe="")
        with urllib.request.urlopen(f"{self._server}/storage/v1/b/{bucket}/o/{place}?alt=media") as answer:
            return answer.read().decode(errors="replace")

    def checkpoint(self, run: str) -> dict[str, str]:
        """{leaf: hash of its bytes} of a run's newest checkpoint in the store."""
        script = """
import hashlib, json, sys
import jax, numpy as np, orbax.checkpoint as ocp
from rlexp.storage import store
store.prepare()
from etils import epath
steps = [p for p in epath.Path(sys.argv[1]).iterdir() if p.name.isdecimal()]
path = max(steps, key=lambda p: int(p.name)) / "run"
handler = ocp.PyTreeCheckpointHandler()
plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), dict(handler.metadata(path).tree))
tree = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=plain))
leaves = jax.tree_util.tree_leaves_with_path(tree)
hashes = {jax.tree_util.keystr(p): hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for p, x in leaves}
print(json.dumps({"step": path.parent.name} | hashes))
"""
        command = [sys.executable, "-c", script, f"{self.url}/{run}/checkpoints"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def settles(self, condition: Callable[[], object], timeout_s: float = 120) -> None:
        """Without a process of ours."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, self.said()
            time.sleep(0.2)

    def until(self, condition: Callable[[], object], process: subprocess.Popen, timeout_s: float = 300) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.2)


def end(*processes: subprocess.Popen) -> None:
    """With kill -9."""
    for process in processes:
        process.kill()
        process.wait()
