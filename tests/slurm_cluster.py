"""A real Slurm of two nodes on this machine, for tests: slurmctld, two slurmd, munged. No systemd, no accounting.

Needs Debian's slurm-wlm and munge, and root. `python tests/slurm_cluster.py DIR` starts one, to play with.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdTimeout=5
KillWait=30
InactiveLimit=0
GresTypes=gpu
NodeName=DEFAULT CPUs=4 RealMemory=4000 Gres=gpu:2 Feature=fast
NodeName=n[1-2] NodeHostname=localhost NodeAddr=localhost Port=[{ports[1]}-{ports[2]}]
PartitionName=main Nodes=n[1-2] Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=soft Nodes=n[1-2] State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=0
PartitionName=short Nodes=n[1-2] State=UP PriorityTier=1 MaxTime=1
PartitionName=urgent Nodes=n[1-2] State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """Runs from `start` to `stop`. Its commands need `env`."""

    def __init__(self, root: Path):
        self.root, self._daemons = root, dict[str, subprocess.Popen]()
        for folder in ("state", "spool-n1", "spool-n2"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "slurm.conf").write_text(CONF.format(root=root, ports=_free_ports()))
        # Devices that are there, and that nobody opens: Slurm only counts them.
        (root / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/null,/dev/zero\n")
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.env = {"SLURM_CONF": str(root / "slurm.conf")}

    def start(self) -> None:
        """Returns when both nodes are there."""
        self._start_munge()
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self.start_node(node)
        self.wait_until(
            lambda: self("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * 2, "the nodes to be idle"
        )

    def __call__(self, *command: str, check: bool = True) -> str:
        """Output of a command such as squeue."""
        done = subprocess.run(
            command, env=os.environ | self.env, capture_output=True, text=True, timeout=60, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}")
        return done.stdout

    def start_node(self, node: str) -> None:
        """Its slurmd."""
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """kill -9 of its slurmd and of all that it started."""
        daemon = self._daemons[node]
        daemon.kill()
        daemon.wait()
        for process in of_jobs(node, self.env):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def wait_until(self, holds, what: str, timeout_s: float = 60) -> None:
        """Polls; says what did not come."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                if holds():
                    return
            except RuntimeError:
                pass
            if time.monotonic() > until:
                logs = "".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in self.root.glob("*.log"))
                raise TimeoutError(f"waited {timeout_s} s for {what}\n{logs}")
            time.sleep(0.2)

    def stop(self) -> None:
        """Everything that it started, jobs too."""
        self("scancel", "--full", "-u", "root", "--signal=KILL", check=False)
        for name in ("n1", "n2", "slurmctld", "munge"):
            if daemon := self._daemons.get(name):
                daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start_munge(self) -> None:
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start(
            "munge", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.root}/munge.socket",
            f"--pid-file={self.root}/munge.pid", f"--log-file={self.root}/munged.log", f"--seed-file={self.root}/munge.seed",
        )  # fmt: skip
        self.wait_until((self.root / "munge.socket").exists, "munged")

    def _start(self, name: str, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        if path is None:
            raise RuntimeError(f"{program} is not installed; on Debian: apt-get install slurm-wlm munge")
        log = (self.root / f"{name}.out").open("ab")
        self._daemons[name] = subprocess.Popen(
            [path, *arguments], env=os.environ | self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        log.close()


def of_jobs(node: str, of_cluster: dict[str, str]) -> set[int]:
    """The processes of jobs on a node, and Slurm's own that watch over them: what its slurmd leaves behind.

    `of_cluster` is what the cluster's commands have in their environment: another one on this machine has a node of that name.
    """
    wanted = {f"{name}={value}".encode() for name, value in {"SLURMD_NODENAME": node, **of_cluster}.items()}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                found.add(int(entry.name))
                if b"slurmstepd" in Path("/proc", parent, "cmdline").read_bytes():
                    found.add(int(parent))
    return found


def _free_ports() -> list[int]:
    """Three, of which the last two follow each other."""
    while True:
        with socket.socket() as a, socket.socket() as b, socket.socket() as c:
            a.bind(("", 0))
            b.bind(("", 0))
            port = b.getsockname()[1]
            try:
                c.bind(("", port + 1))
            except OSError:
                continue
            return [a.getsockname()[1], port, port + 1]


if __name__ == "__main__":
    cluster = Cluster(Path(sys.argv[1]).absolute())
    cluster.start()
    print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}", flush=True)
    try:
        signal.pause()
    finally:
        cluster.stop()
