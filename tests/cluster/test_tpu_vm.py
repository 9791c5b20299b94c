"""`launcher=tpu_vm` against a stand-in gcloud, whose workers are real processes, and a real object store on loopback."""

import json
import shutil
import signal
import subprocess
import time

import pytest

from rlexp.sweep.manifest import Manifest

from .tpu_world import HOSTS, INSTALL, World, end


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_job_on_four_hosts_resumes_exactly(world):
    world.run(*HOSTS["v4-32"], "total_env_steps=12800", "hydra.run.dir=calm")
    assert len(world.gcloud.calls("ssh", "--worker=3")) > 2
    process = world.start(*HOSTS["v4-32"], "total_env_steps=12800", "hydra.run.dir=stormy")

    def saved() -> int:
        return len(world.saved("stormy"))

    try:
        world.until(lambda: saved() > 0, process)
        (name,) = world.gcloud.slices()
        assert [len(x) > 0 for x in world.gcloud.workers(name)] == [True] * 4
        before = saved()
        world.gcloud.kill_worker(name, 2)
        world.until(lambda: not any(world.gcloud.training(name, i) for i in range(4)), process)  # so it is with all
        world.until(lambda: saved() > before, process)
        world.gcloud.preempt(name)
        assert process.wait(300) == 0, world.said()
    finally:
        end(process)
    assert "was preempted (PREEMPTED)" in world.said()
    assert len(json.loads(world.content("stormy/environment.json"))["starts"]) == 3
    assert json.loads(world.content("stormy/summary.json"))["resumed_from"] > 0
    assert json.loads((world.directory / "stormy" / "summary.json").read_text())["status"] == "finished"
    assert world.checkpoint("stormy") == world.checkpoint("calm")
    assert world.gcloud.slices() == {}
    assert world.gcloud.requests() == []


def one_that_trains(world: World, seen: dict[str, int], process: subprocess.Popen) -> tuple[str, str]:
    """A slice, and the job on it that has saved more than `seen`, {pack: checkpoints}, which is brought up to date."""
    found = []

    def look() -> list[tuple[str, str]]:
        facts = Manifest(world.directory / "sweep").recall_all("tpu slice ")
        for name, state in world.gcloud.slices().items():
            task = facts.get(name, {}).get("task")
            if state != "READY" or not task or not world.gcloud.training(name, 0):
                continue
            saved = len(world.saved(f"sweep/{world.job_of(task)}"))
            if seen.get(task, 0) < saved <= 4:  # of 8: it does not end before it is hit
                seen[task] = saved
                found.append((name, world.job_of(task)))
        return found

    world.until((world.directory / "sweep" / "sweep.sqlite").exists, process)
    world.until(look, process)
    return found[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_loses_nothing(world):
    line = ("-m", "seed=range(0,8)", *HOSTS["v4-8"], "launcher.pack=off", "launcher.pool=2", "hydra.sweep.dir=sweep")
    line += ("total_env_steps=25600",)
    seen: dict[str, int] = {}
    hit: list[int] = []  # jobs

    def one() -> str:
        name, job = one_that_trains(world, seen, process)
        hit.append(int(job))
        return name

    process = world.start(*line)
    ways = [("PREEMPTED", 0), ("TERMINATED", 1), ("STOPPED", 0), ("PREEMPTED", 1), ("REPAIRING", 0)]
    try:
        for number, (state, tells_after_s) in enumerate(ways):
            world.gcloud.preempt(one(), state=state, tells_after_s=tells_after_s)
            if number == 1:
                one_that_trains(world, seen, process)
                end(process)
                before = world.gcloud.slices()
                time.sleep(3)
                assert world.gcloud.slices() == before  # what runs goes on without the controller
                process = world.start(*line)
            if number == 3:
                world.gcloud.kill_worker(one(), 0)
        assert process.wait(600) == 0, world.said()
    finally:
        end(process)
    jobs = world.jobs("sweep")
    assert [job.status for job in jobs.values()] == ["finished"] * 8
    starts = [len(json.loads(world.content(f"sweep/{i}/environment.json"))["starts"]) for i in range(8)]
    assert sum(starts) == sum(job.attempt for job in jobs.values()) == 8 + 5 + 1
    told = [
        line for name in world.objects(".jsonl") if "/workers/" in name for line in world.content(name).splitlines()
    ]
    assert sum('"finished"' in line for line in told) == 8  # nothing was run to its end twice
    changes = [change for line in told for change in json.loads(line or "[0, {}]")[1].items()]
    for i in range(8):
        run_ids = {values["run_id"] for number, values in changes if number == str(i) and "run_id" in values}
        assert len(run_ids) == 1  # in W&B too it is the same run
        steps = [json.loads(line)["env_steps"] for line in world.content(f"sweep/{i}/metrics.jsonl").splitlines()]
        assert steps == list(range(0, 25601, 3200))
        resumed_from = json.loads(world.content(f"sweep/{i}/summary.json"))["resumed_from"]
        assert (resumed_from or 0) > 0 if i in hit else resumed_from is None
    assert world.gcloud.slices() == {}
    assert world.gcloud.requests() == []
    assert len(world.gcloud.calls("create")) == 2 + 5  # a slice is made again only when it was lost
    assert "k" * 40 not in json.dumps(world.gcloud.calls())
    assert not [path for path in world.directory.rglob("*") if path.is_file() and b"k" * 40 in path.read_bytes()]
    assert not [name for name in world.objects() if "/checkpoints/" not in name and "k" * 40 in world.content(name)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_a_killed_controller_left_is_found_and_cancelled(world):
    line = ("-m", "seed=1,2", *HOSTS["v4-8"], "total_env_steps=3200000", "hydra.sweep.dir=sweep")
    process = world.start(*line)
    try:
        world.until(world.saved, process)
    finally:
        end(process)
    (name,) = world.gcloud.slices()
    said = world.sweep("cancel", "sweep")
    assert f"{name} is deleted" in said
    assert world.gcloud.slices() == {}
    assert [job.status for job in world.jobs("sweep").values()] == ["stopped"] * 2
    rows = [json.loads(line) for line in world.content("sweep/0/metrics.jsonl").splitlines()]
    assert rows[-1]["env_steps"] == 128 * max(world.saved())  # it saved when it was told to end


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_are_set_up_once_and_cleaned_before_each_start(world):
    """Two jobs, one after the other on one slice, whose chips somebody holds."""
    (world.directory / "install.sh").write_text(f"sleep 3\n{INSTALL}")
    line = ("-m", "seed=1,2", "launcher.pack=off", *HOSTS["v4-8"], "total_env_steps=3200", "hydra.sweep.dir=sweep")
    process, others = world.start(*line), []
    try:
        world.until(world.gcloud.slices, process)
        (name,) = world.gcloud.slices()
        home = world.gcloud.root / "slices" / name / "worker-0"
        for device in ("accel0", "null"):
            (home / "dev" / device).touch()
            with (home / "dev" / device).open() as held:
                others.append(subprocess.Popen(["sleep", "600"], stdin=held))
        (home / "tmp" / "libtpu_lockfile").touch()
        world.until(lambda: world.gcloud.training(name, 0), process)
        assert others[0].wait(10) == -signal.SIGKILL
        assert others[1].poll() is None
        assert not (home / "tmp" / "libtpu_lockfile").exists()
        (home / "tmp" / "libtpu_lockfile").touch()
        world.until(lambda: not (home / "tmp" / "libtpu_lockfile").exists(), process)  # before the second start
        assert (home / "installed").read_text().count("\n") == 1
        assert process.wait(200) == 0, world.said()
    finally:
        end(process, *others)
    assert len(world.gcloud.calls("scp")) == 1
    assert len(world.gcloud.calls("create")) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_budgets_are_apart(world):
    """A worker that fails is started again so often, and then the job has failed; that costs no preemption."""
    process = world.start(
        *HOSTS["v4-8"], "total_env_steps=3200000", "launcher.retries=1", "launcher.preemptions=0", "hydra.run.dir=run"
    )
    try:
        for _ in range(2):
            world.until(lambda: [name for name in world.gcloud.slices() if world.gcloud.training(name, 0)], process)
            (name,) = world.gcloud.slices()
            world.gcloud.kill_worker(name, 0)
            world.until(lambda name=name: not world.gcloud.training(name, 0), process)
        assert process.wait(120) == 1, world.said()
    finally:
        end(process)
    assert "failed: its process ended with exit code 137 on worker 0" in world.said()
    assert "preempted" not in world.said()
    assert world.gcloud.slices() == {}
    process = world.start(*HOSTS["v4-8"], "total_env_steps=3200000", "launcher.preemptions=0", "hydra.run.dir=other")
    try:
        world.until(lambda: [name for name in world.gcloud.slices() if world.gcloud.training(name, 0)], process)
        (name,) = world.gcloud.slices()
        world.gcloud.preempt(name, tells_after_s=1)
        assert process.wait(120) == 1, world.said()
    finally:
        end(process)
    assert "was preempted 1 times (launcher.preemptions)" in world.said()
    assert world.gcloud.slices() == {}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arguments", "script", "expected"),
    [
        ((), {"account": ""}, "launcher: gcloud has no login; gcloud auth login makes one"),
        (
            (),
            {"project": ""},
            "launcher.project: null, and gcloud has none; name it, or set it with gcloud config set project",
        ),
        (
            (),
            {"quota": 0},
            "Quota limit 'TPUV4sPerProjectPerZone' has been exceeded. (launcher.zone, launcher.provisioning",
        ),
        (
            ("launcher.zone=mars-north1-a",),
            {},
            "Location mars-north1-a is not found or access is unauthorized. (launcher.zone",
        ),
        (("launcher.runtime_version=tpu-v9",), {}, "Runtime version tpu-v9 is not valid. (launcher.runtime_version"),
        (
            ("launcher.name=theirs",),
            {},
            "the name theirs-0 is in use, by a slice that is not of this sweep (launcher.name",
        ),
        (("output_root=outputs",), {}, "output_root: 'outputs' is a directory, which TPU VMs do not share"),
        (
            ("hardware=cpu", "hardware.emulate=false"),
            {},
            "hardware: launcher=tpu_vm needs a TPU profile, such as hardware=v4-8",
        ),
        (("launcher.pools=2",), {}, "launcher.pools"),
        (
            ("launcher.labels={team: RL}",),
            {},
            "launcher.labels: 'RL' is not allowed; expected up to 63 lower-case letters",
        ),
        (
            ("launcher.orphan_minutes=0.01",),
            {},
            "launcher.orphan_minutes: 0.01 is not allowed; expected null, or at least 0.1",
        ),
    ],
    ids=["login", "project", "quota", "zone", "runtime", "name", "output_root", "hardware", "key", "label", "orphan"],
)
def test_bad_input_is_one_line(world, arguments, script, expected):
    theirs = world.gcloud.root / "slices" / "theirs-0"
    theirs.mkdir()
    (theirs / "node.json").write_text('{"state": "READY"}')
    world.gcloud.script(**script)
    said = world.run(*HOSTS["v4-8"], "hydra.run.dir=run", *arguments, code=2)
    (line,) = said.splitlines()
    assert expected in line
    assert not (world.directory / "run").exists()
    assert list(world.gcloud.slices()) == ["theirs-0"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_without_gcloud(world):
    (world.directory / "bin").mkdir()
    (world.directory / "bin" / "git").symlink_to(str(shutil.which("git")))
    world.env["PATH"] = str(world.directory / "bin")
    said = world.run(*HOSTS["v4-8"], "hydra.run.dir=run", code=2)
    assert said.startswith("rlexp: launcher: tpu_vm needs gcloud, which is not on PATH")
    said = world.run(*HOSTS["v4-32"], "hydra.run.dir=run", "launcher.dry_run=true")
    commands = [line for line in said.splitlines() if line.startswith("gcloud ")]
    for words in ("queued-resources create", "tpu-vm describe", "tpu-vm scp", "--worker=3", "queued-resources delete"):
        assert any(words in command for command in commands)
    assert "WANDB_API_KEY=***" in said
    assert "k" * 40 not in said
    said = world.run(
        "-m", "seed=1,2", *HOSTS["v4-8"], "launcher.pack=off", "hydra.sweep.dir=sweep", "launcher.dry_run=true"
    )
    assert sum("setsid nohup" in line and "jobs/" in line for line in said.splitlines()) == 2  # a start of each
    assert {path.name for path in world.directory.iterdir()} == {"bin", "install.sh"}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_no_room_is_waited_for(world):
    stderr = 'ERROR: (gcloud.compute.tpus.tpu-vm.create) {\n  "code": 8,\n  "message": "There is no more capacity in the zone."\n}'
    world.gcloud.script(fail=[{"match": "tpu-vm create", "times": 2, "stderr": stderr}])
    world.start(*HOSTS["v4-8"], "launcher.queued=false", "total_env_steps=3200", "hydra.run.dir=run").wait(150)
    assert "There is no more capacity in the zone.; waiting" in world.said()
    assert len(world.gcloud.calls("tpu-vm", "create")) == 3
    assert json.loads(world.content("run/summary.json"))["status"] == "finished"
    assert world.gcloud.slices() == {}
