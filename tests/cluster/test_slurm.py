"""`launcher=slurm` on a real Slurm of two nodes, which is made for these tests: what happens to jobs there, happens here."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import wandb_file
from slurm_cluster import Cluster, of_jobs
from support import assert_same, environment, hold_save, rlexp_command, rows

from rlexp.sweep import optuna as optuna_sweeper
from rlexp.sweep.manifest import Entry, Manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = (
    "algo.num_steps=16",
    "algo.num_minibatches=1",
    "network.hidden=[8]",
    "eval.num_episodes=2",
    "logger=quiet",
    "compilation_cache=null",
)
LONG = (  # 60,000 updates of one pack: longer than Slurm takes to give up a node
    "total_env_steps=3840000",
    "eval.every_env_steps=384000",
    "checkpoint.every_updates=3000",
    "seed=1,2",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if not all(shutil.which(p, path=os.environ["PATH"] + ":/usr/sbin") for p in ("slurmctld", "slurmd", "munged")):
        pytest.skip("Slurm is not installed; on Debian: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("only root can start a Slurm of its own")
    running = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


class Sweeps:
    """Command lines in a directory, on the cluster."""

    def __init__(self, directory: Path, cluster: Cluster):
        self.directory, self.cluster = directory, cluster
        self.started: list[subprocess.Popen] = []
        self.env = environment() | cluster.env | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

    def start(self, *arguments: str) -> subprocess.Popen:
        with (self.directory / "out").open("a") as out:
            process = subprocess.Popen(
                rlexp_command(*arguments), cwd=self.directory, env=self.env, stdout=out, stderr=subprocess.STDOUT
            )
        self.started.append(process)
        return process

    def run(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        assert process.wait(400) == code, self.said()
        return self.said()

    def said(self) -> str:
        logs = "".join(f"== {log}\n{log.read_text()[-2000:]}" for log in self.directory.glob("*/slurm/*.err"))
        return (self.directory / "out").read_text() + logs

    def jobs(self, where: str = "sweep") -> list[Entry]:
        return Manifest(self.directory / where).jobs()

    def in_slurm(self, states: str = "running") -> dict[str, str]:
        """{job id: node} of what is in such a state."""
        out = self.cluster(
            "squeue", "--noheader", "--array", f"--states={states}", "--partition=main,soft", "--format=%i %N"
        )
        return dict(line.split(maxsplit=1) if " " in line.strip() else (line.strip(), "") for line in out.splitlines())

    def newest(self, where: str = "sweep/packs/*") -> list[int]:
        """The update of the newest checkpoint of each pack."""
        found: dict[Path, int] = {}
        for path in self.directory.glob(f"{where}/checkpoints/[0-9]*"):
            if path.name.isdigit():
                found[path.parent] = max(int(path.name), found.get(path.parent, 0))
        return list(found.values())

    def starts(self) -> int:
        """How often a worker has begun to train."""
        return sum(path.read_text().count("[true") for path in self.directory.glob("*/workers/*.jsonl"))

    def hold_save(self, update: int) -> str:
        """The name of a checkpoint module, see support.hold_save, that command lines from here on can import."""
        self.env["PYTHONPATH"] += os.pathsep + str(self.directory)
        return hold_save(self.directory, update)

    def wait(self, holds, what: str) -> None:
        try:
            self.cluster.wait_until(holds, what, timeout_s=200)
        except TimeoutError as error:
            raise AssertionError(self.said()) from error

    def soon(self) -> None:
        """A requeued job waits for two minutes, if nobody says otherwise."""
        for job in self.in_slurm("pending"):
            self.cluster("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)


@pytest.fixture
def sweeps(tmp_path, cluster):
    here = Sweeps(tmp_path, cluster)
    yield here
    for process in here.started:  # after a failure; else they are gone
        process.kill()
        process.wait()
    cluster("scancel", "--user=root", check=False)
    cluster.wait_until(lambda: not cluster("squeue", "--noheader").strip(), "the queue to be empty", timeout_s=120)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cluster) -> Path:
    """The pack of LONG, in one process."""
    sweeps = Sweeps(tmp_path_factory.mktemp("undisturbed"), cluster)
    sweeps.run("-m", "hydra.sweep.dir=sweep", *SMALL, *LONG, "algo.num_epochs=1")
    return sweeps.directory / "sweep"


def assert_nothing_lost(sweeps: Sweeps, undisturbed: Path) -> None:
    assert [e.status for e in sweeps.jobs()[:2]] == ["finished"] * 2, sweeps.said()
    assert sweeps.in_slurm("pending,running") == {}
    for number in (0, 1):
        assert_same(sweeps.directory / f"sweep/{number}", undisturbed / str(number))


def test_jobs_of_another_cluster_here_are_not_taken_for_its_own(tmp_path, cluster):
    """Tests that run side by side have one each, with nodes of the same names."""
    another = Cluster(tmp_path / "another")
    try:
        another.start()
        found = []
        for one in (cluster, another):
            one("sbatch", "--nodelist=n1", "--output=/dev/null", "--wrap=srun sleep 600")
            one.wait_until(lambda one=one: len(of_jobs("n1", one.env)) > 3, "the job and its step to run")
            found.append(of_jobs("n1", one.env))
        assert found[0].isdisjoint(found[1])
    finally:
        cluster("scancel", "--user=root")
        another.stop()


def test_a_sweep_and_what_it_tells(sweeps, cluster):
    """Why jobs wait, by names that a reader of squeue understands; results as they come; a failure with its reason; and a
    secret that only the workers see."""
    sweeps.env["WANDB_API_KEY"] = secret = "0123456789abcdef" * 2 + "5ec4e7f1"
    key_seen = sweeps.directory / "key"
    cluster("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    parent = sweeps.start(
        "-m", "hydra.sweep.dir=sweep", *SMALL, "total_env_steps=6400", "launcher=slurm", "launcher.cpus=2",
        "launcher.sbatch={exclude: n1}", "algo.num_epochs=1,2", "algo.hp.lr=1e-3,1e30",
        f"launcher.setup=['printenv WANDB_API_KEY | wc -c > {key_seen}']",
    )  # fmt: skip
    sweeps.wait(lambda: re.search(r"Slurm job \d+_0, \d+_1: PENDING, \w+, since 2", sweeps.said()), "it to wait")
    names = cluster("squeue", "--noheader", "--array", "--partition=main", "--format=%j").split()
    assert sorted(names) == sorted({f"rlexp:sweep:{entry.pack}" for entry in sweeps.jobs()})
    cluster("scancel", "--name=wrap")
    assert parent.wait(400) == 1, sweeps.said()
    said = sweeps.said()
    assert [e.status for e in sweeps.jobs()] == ["finished", "failed"] * 2
    assert said.count(": finished: ") == 2 and said.count(": failed: Diverged: ") == 2
    assert sorted(e.attempt for e in sweeps.jobs()) == [1] * 4
    known = cluster(
        "squeue", "--noheader", "--array", "--states=all", "--partition=main", "--format=%j %N"
    ).splitlines()
    assert {f"rlexp:sweep:{entry.pack} n2" for entry in sweeps.jobs()} <= set(known)  # which named themselves too
    assert key_seen.read_text().strip() == str(len(secret) + 1)
    written = [path for path in sweeps.directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert written == []


def test_what_never_starts_and_what_fails_at_once(sweeps, cluster):
    """A job beyond its partition's limit, which a person cancels; and one whose setup fails, as often as it may."""
    parent = sweeps.start(
        "-m",
        "hydra.sweep.dir=sweep",
        *SMALL,
        "seed=1,2",
        "launcher=slurm",
        "launcher.partition=short",
        "launcher.time=3",
    )
    told = r"Slurm job \d+: PENDING, PartitionTimeLimit, since .*; as it is it will not start: launcher.time is"
    sweeps.wait(lambda: re.search(told, sweeps.said()), "it to wait for ever")
    cluster("scancel", "--partition=short", "--user=root")
    assert parent.wait(200) == 0, sweeps.said()
    assert [(e.status, e.attempt) for e in sweeps.jobs()] == [("stopped", 0)] * 2
    said = sweeps.run(
        "-m", "hydra.sweep.dir=broken", *SMALL, "seed=1,2", "launcher=slurm", "launcher.retries=1",
        "launcher.setup=['true', 'no_such_module load cuda']", code=1,
    )  # fmt: skip
    assert [(e.status, e.attempt) for e in sweeps.jobs("broken")] == [("failed", 0)] * 2
    for entry in sweeps.jobs("broken"):
        assert "FAILED: launcher.setup: exit code 127 of: no_such_module load cuda; its log is" in str(entry.error)
    assert said.count("; it goes on") == 1


def test_the_parent_is_killed_and_a_pack_is_told_that_its_time_is_over(sweeps, cluster, undisturbed):
    line = ("-m", "hydra.sweep.dir=sweep", *SMALL, "algo.num_epochs=1,2", *LONG, "launcher=slurm")
    parent = sweeps.start(*line)
    sweeps.wait(lambda: len(sweeps.newest()) == 2, "both packs to save")
    parent.kill()
    parent.wait()
    first = sorted(sweeps.in_slurm())[0]
    cluster("scancel", "--signal=USR2", first)  # as Slurm does before a job's time is over
    sweeps.wait(lambda: first in sweeps.in_slurm("pending"), "the pack to be requeued")

    parent = sweeps.start(*line)
    sweeps.wait(lambda: "of this sweep wait or run in Slurm already" in sweeps.said(), "the parent to find them")
    sweeps.soon()
    assert parent.wait(400) == 0, sweeps.said()
    assert [e.status for e in sweeps.jobs()] == ["finished"] * 4 and sweeps.starts() == 3
    assert sorted(e.attempt for e in sweeps.jobs()) == [1, 1, 2, 2]
    assert_nothing_lost(sweeps, undisturbed)


def test_the_time_is_over_and_wandb_runs_go_on(sweeps, cluster):
    """Slurm itself says so, in time, and once too late. What the job asks of Slurm is what the launcher was told, here or in
    conf/local of a site."""
    site = sweeps.directory / "site"
    (site / "local").mkdir(parents=True)
    (site / "local/slurm.yaml").write_text("account: chess\nconstraint: fast\nsbatch: {comment: of the site}\n")
    parent = sweeps.start(
        "-m", f"--config-dir={site}", "hydra.sweep.dir=sweep", *SMALL, *LONG[1:], "total_env_steps=3840000000",
        "algo.num_epochs=1", "logger.wandb.mode=offline", "launcher=slurm", "launcher.time=60", "launcher.signal_delay_s=20",
        "launcher.gres=gpu:1", "launcher.mem=1GB", "launcher.cpus=2", "launcher.qos=high", "launcher.exclude=n2",
    )  # fmt: skip
    sweeps.wait(lambda: sweeps.in_slurm(), "it to run")
    (job,) = sweeps.in_slurm()
    asked = cluster("scontrol", "show", "job", "--oneliner", job)
    for word in ("Account=chess", "Features=fast", "Comment=of the site", "TimeLimit=01:00:00", "Requeue=1", "ExcNodeList=n2",
                 "gpu:1", "MinMemoryNode=1G", "CPUs/Task=2", "Partition=main"):  # fmt: skip
        assert word in asked
    for left_s in (25, 1):  # Slurm looks at its clock now and then: the second time it ends the job at once
        sweeps.wait(lambda: len(sweeps.newest()) == 1, "it to save")
        cluster("scontrol", "update", f"jobid={job}", f"EndTime=now+{left_s}")
        sweeps.wait(lambda: job in sweeps.in_slurm("pending"), "its time to be over")
        (reached,) = sweeps.newest()
        sweeps.wait(lambda reached=reached: sweeps.soon() or max(sweeps.newest()) > reached, "it to go on")
    assert "DUE TO TIME LIMIT" in sweeps.said()
    cluster("scancel", job)
    assert parent.wait(200) == 0, sweeps.said()
    assert [(e.status, e.attempt) for e in sweeps.jobs()] == [("stopped", 3)] * 2
    for entry in sweeps.jobs():
        run_dir = sweeps.directory / f"sweep/{entry.dir}"
        assert json.loads((run_dir / "summary.json").read_text())["resumed_from"] == 64 * reached
        (file,) = run_dir.glob(f"wandb/offline-run-*-{entry.run_id}/*.wandb")  # which holds what the one before it held
        assert [row["env_steps"] for row in wandb_file.read(file).rows] == [row["env_steps"] for row in rows(run_dir)]


def test_a_worker_is_killed(sweeps, cluster, undisturbed):
    """By Slurm, when its time is over and it is still saving; then by kill -9, which fails its Slurm job. The parent submits the
    pack again, which goes on from its checkpoint."""
    module = sweeps.hold_save(3000)
    line = ("-m", "hydra.sweep.dir=sweep", *SMALL, *LONG, "launcher=slurm", "algo.num_epochs=1")
    parent = sweeps.start(*line, f"checkpoint.module={module}")
    sweeps.wait((sweeps.directory / "saving").exists, "it to save")
    (first,) = sweeps.in_slurm()
    cluster("scontrol", "update", f"jobid={first}", "EndTime=now+1")
    sweeps.wait(lambda: f"its process ended as Slurm job {first}: TIMEOUT" in sweeps.said(), "Slurm to kill it")
    (sweeps.directory / "go_on").touch()
    sweeps.wait(lambda: len(sweeps.newest()) == 1, "it to save")
    subprocess.run(["pkill", "-KILL", "-f", f"submitit.core._submit {sweeps.directory}"], check=True)
    assert parent.wait(400) == 0, sweeps.said()
    assert [(e.status, e.attempt) for e in sweeps.jobs()] == [("finished", 3)] * 2
    assert len(list(sweeps.directory.glob("sweep/slurm/*_log.out"))) == 3
    resumed_from = json.loads((sweeps.directory / "sweep/0/summary.json").read_text())["resumed_from"]
    assert resumed_from and resumed_from % (64 * 3000) == 0
    assert_nothing_lost(sweeps, undisturbed)


def test_a_node_is_given_up(sweeps, cluster, undisturbed):
    """kill -9 of its slurmd: Slurm requeues what ran there, which still runs. The second waits for the first."""
    parent = sweeps.start("-m", "hydra.sweep.dir=sweep", *SMALL, *LONG, "launcher=slurm", "algo.num_epochs=1")
    sweeps.wait(lambda: len(sweeps.newest()) == 1, "it to save")
    ((job, node),) = sweeps.in_slurm().items()
    cluster.kill_node(node)
    try:
        sweeps.wait(lambda: job in sweeps.in_slurm("pending"), "Slurm to give the node up")
        sweeps.wait(lambda: sweeps.soon() or job in sweeps.in_slurm(), "the other node to take it")
    finally:
        cluster.start_node(node)
    assert parent.wait(400) == 0, sweeps.said()
    assert_nothing_lost(sweeps, undisturbed)


def test_urgent_jobs_preempt_within_a_save(sweeps, cluster, undisturbed):
    module = sweeps.hold_save(3000)
    parent = sweeps.start(
        "-m",
        "hydra.sweep.dir=sweep",
        *SMALL,
        *LONG,
        "launcher=slurm",
        "algo.num_epochs=1",
        f"checkpoint.module={module}",
    )
    sweeps.wait((sweeps.directory / "saving").exists, "it to save")
    (job,) = sweeps.in_slurm()
    cluster("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    told = "PreemptTime=None"
    sweeps.wait(lambda: told not in cluster("scontrol", "show", "job", "--oneliner", job), "it to be told to make room")
    assert sweeps.newest() == []
    (sweeps.directory / "go_on").touch()
    sweeps.wait(lambda: job in sweeps.in_slurm("pending"), "it to make room")
    assert min(sweeps.newest()) >= 3000
    sweeps.wait(lambda: sweeps.soon() or job in sweeps.in_slurm(), "it to run again")
    assert parent.wait(400) == 0, sweeps.said()
    assert sweeps.starts() == 2
    assert_nothing_lost(sweeps, undisturbed)


def test_slurm_ends_jobs_for_good(sweeps, cluster, undisturbed):
    """PREEMPTED in a partition that cancels, NODE_FAIL where a job may not be requeued: the parent submits the pack again."""
    parent = sweeps.start(
        "-m", "hydra.sweep.dir=sweep", *SMALL, *LONG, "algo.num_epochs=1", "launcher=slurm", "launcher.partition=soft"
    )
    sweeps.wait(lambda: len(sweeps.newest()) == 1, "it to save")
    (first,) = sweeps.in_slurm()
    cluster("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    sweeps.wait(lambda: f"its process ended as Slurm job {first}: PREEMPTED" in sweeps.said(), "it to be preempted")
    (reached,) = sweeps.newest()
    sweeps.wait(lambda: max(sweeps.newest()) > reached, "it to go on")
    ((second, node),) = sweeps.in_slurm().items()
    assert second != first
    cluster("scontrol", "update", f"jobid={second}", "Requeue=0")
    cluster.kill_node(node)
    try:
        sweeps.wait(
            lambda: f"its process ended as Slurm job {second}: NODE_FAIL" in sweeps.said(), "the node to be lost"
        )
    finally:
        cluster.start_node(node)
    assert parent.wait(400) == 0, sweeps.said()
    assert sweeps.starts() == 3
    assert_nothing_lost(sweeps, undisturbed)


def test_scancel_saves_and_ends_and_the_same_line_goes_on(sweeps, cluster, undisturbed):
    line = ("-m", "hydra.sweep.dir=sweep", *SMALL, *LONG, "launcher=slurm", "algo.num_epochs=1")
    parent = sweeps.start(*line)
    sweeps.wait(lambda: len(sweeps.newest()) == 1, "it to save")
    cluster("scancel", *sweeps.in_slurm())
    assert parent.wait(200) == 0, sweeps.said()
    assert [e.status for e in sweeps.jobs()] == ["stopped"] * 2
    assert sweeps.in_slurm("pending,running") == {}
    sweeps.run(*line)
    assert_nothing_lost(sweeps, undisturbed)


def test_one_job_over_two_nodes(sweeps, cluster):
    """Without -m. Two processes find each other, are told that their time is over, and go on bit for bit."""
    mesh = ("hardware.emulate=true", "hardware.mesh.data=2", "algo.num_envs=8", "checkpoint.every_updates=50")
    line = (*SMALL, *mesh, "total_env_steps=51200", "launcher=slurm", "launcher.nodes=2")
    parent = sweeps.start("hydra.run.dir=run", *line)
    sweeps.wait(lambda: max(sweeps.newest("run"), default=0) >= 50, "a checkpoint")
    (job,) = sweeps.in_slurm()
    cluster("scancel", "--signal=USR2", job)
    sweeps.wait(lambda: job in sweeps.in_slurm("pending"), "it to be requeued")
    sweeps.soon()
    assert parent.wait(300) == 0, sweeps.said()
    summary = json.loads((sweeps.directory / "run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["resumed_from"] >= 6400
    started = json.loads((sweeps.directory / "run/environment.json").read_text())
    assert len(started["devices"]) == 2 and len(started["starts"]) == 2
    sweeps.run("hydra.run.dir=undisturbed", *line)
    assert_same(sweeps.directory / "run", sweeps.directory / "undisturbed")


def test_detach_status_cancel(sweeps, cluster):
    sweeps.run(
        "-m", "hydra.sweep.dir=sweep", *SMALL, *LONG, "algo.num_epochs=1", "launcher=slurm", "launcher.detach=true"
    )
    sweeps.wait(lambda: len(sweeps.newest()) == 1, "a checkpoint")

    def sweep(verb: str) -> str:
        command = [*rlexp_command()[:2], "rlexp.sweep", verb, "sweep"]
        done = subprocess.run(
            command, cwd=sweeps.directory, env=sweeps.env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "running" in sweep("status")
    sweep("cancel")
    assert sweeps.in_slurm("pending,running,completing") == {}
    assert [e.status for e in sweeps.jobs()] == ["stopped"] * 2
    assert "2 finished" in sweep("resume") + sweep("status")


def test_bad_input(sweeps):
    said = sweeps.run("hydra.run.dir=run", *SMALL, "launcher=slurm", "launcher.partition=nowhere", code=2)
    assert "rlexp: launcher: sbatch refuses: " in said and "invalid partition" in said.lower()
    assert not (sweeps.directory / "run").exists()


def test_a_tournament_is_tasks_of_an_array(sweeps):
    """Pods on two nodes, which share a disk with the leaderboard; those that train are killed once."""
    parent = sweeps.start(
        "-m", "hydra.sweep.dir=sweep", *SMALL, "launcher=slurm", "launcher.cpus=2", "sweeper=tournament", "sweeper.population=3",
        "sweeper.batch=1", "sweeper.leaders=1", "algo.hp.lr=tag(log, interval(1e-4, 1e-2))", "total_env_steps=384000",
        "eval.every_env_steps=128000", "checkpoint.every_updates=500",
    )  # fmt: skip
    sweeps.wait(lambda: list(sweeps.directory.glob("sweep/leaderboard/0/1/*.json")), "a pod to end")
    subprocess.run(["pkill", "-KILL", "-f", f"submitit.core._submit {sweeps.directory}"], check=False)
    assert parent.wait(400) == 0, sweeps.said()
    assert [e.status for e in sweeps.jobs()] == ["finished"] * 9
    board = [int(path.parent.name) for path in sweeps.directory.glob("sweep/leaderboard/0/*/*.json")]
    ages = [1 + rows(sweeps.directory / f"sweep/{e.dir}")[-1]["population/generation"] for e in sweeps.jobs()]
    assert ages[:3] == [1, 1, 1] and max(ages) > 1 and sorted(board) == sorted(set(ages))


def test_optuna_asks_whenever_a_task_is_free(sweeps):
    """One of two tasks is held while all others come and go at its side, and the parent dies in between: nothing is asked, or
    trained, twice."""
    module = sweeps.hold_save(3000)
    line = (
        "-m", "hydra.sweep.dir=sweep", *SMALL, "launcher=slurm", "launcher.cpus=2", "launcher.array_parallelism=2",
        "sweeper=optuna", "sweeper.batch=async", "sweeper.num_trials=5", "algo.hp.lr=tag(log, interval(1e-4, 1e-2))",
        "algo.num_epochs=1", "total_env_steps=640000", "checkpoint.every_updates=3000", f"checkpoint.module={module}",
    )  # fmt: skip

    def finished() -> int:
        return sum(entry.status == "finished" for entry in sweeps.jobs())

    parent = sweeps.start(*line)
    sweeps.wait((sweeps.directory / "saving").exists, "a task to save, which is held")
    sweeps.wait(lambda: finished() >= 2, "others to end")
    parent.kill()
    parent.wait()
    parent = sweeps.start(*line)
    sweeps.wait(lambda: finished() == 4, "all others to end")
    sweeps.wait(lambda: len(sweeps.in_slurm()) == 1, "their jobs to be gone")
    (sweeps.directory / "go_on").touch()
    assert parent.wait(400) == 0, sweeps.said()
    assert [(e.status, e.attempt) for e in sweeps.jobs()] == [("finished", 1)] * 5
    import optuna

    storage = optuna_sweeper.storage(sweeps.directory / "sweep")
    trials = optuna.load_study(study_name="rlexp", storage=storage).trials
    assert [(t.state.name, t.value) for t in trials] == [("COMPLETE", e.objective) for e in sweeps.jobs()]
