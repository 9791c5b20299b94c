"""What `launcher=slurm` makes of its keys and of what Slurm says, without a Slurm. On a real one: tests/cluster."""

import dataclasses
import functools
import hashlib
import itertools
import json
import subprocess
import types
from typing import Any

import command_lines
import pytest
from command_lines import Line
from support import QUIET, environment, rlexp_command

import rlexp
from rlexp import compose
from rlexp.config import ConfigError, parse
from rlexp.sweep import worker
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.supervise import Why
from rlexp.sweep.worker import FOLDER, Task
from rlexp_launchers import slurm, slurm_queue, slurm_sbatch
from rlexp_launchers.slurm_queue import ENDED, Polite, Seen, Waiting, last_words, never, understood


def composed(*overrides: str) -> slurm.Config:
    node, _ = compose.compose_node(["launcher=slurm", *overrides])
    return parse(node["launcher"], slurm.Config)[0]


@functools.cache
def defaults() -> slurm.Config:
    return composed()


def told(config: slurm.Config | None = None, **values: Any) -> dict[str, Any]:
    config = dataclasses.replace(config or defaults(), **values)
    slurm_sbatch.check(config)
    return slurm_sbatch.parameters(config, 1)


def test_what_is_handed_on():
    assert told()["additional_parameters"] == {"requeue": True}
    given = told(
        comment="of the site", exclude="node7", gpus_per_task=2, cpus_per_gpu=3, mem_per_gpu="4GB", stderr_to_stdout=True,
        sbatch={"mail_type": "END", "exclusive": True},
    )  # fmt: skip
    for key, value in {
        "comment": "of the site", "exclude": "node7", "gpus_per_task": 2, "cpus_per_gpu": 3, "mem_per_gpu": "4GB",
        "stderr_to_stdout": True, "additional_parameters": {"requeue": True, "mail-type": "END", "exclusive": True},
    }.items():  # fmt: skip
        assert given[key] == value


def test_the_process_has_the_cores_that_are_asked_for(tmp_path):
    """From 22.05 on srun does not take over what sbatch was told."""
    from submitit.slurm.slurm import _make_sbatch_string

    lines = _make_sbatch_string("program", tmp_path, **told(cpus=4)).splitlines()
    (srun,) = [line for line in lines if line.startswith("srun ")]
    assert "#SBATCH --cpus-per-task=4" in lines and " --cpus-per-task=4 " in srun
    assert "cpus" not in _make_sbatch_string("program", tmp_path, **told())


def test_options_as_the_documentation_writes_them(tmp_path):
    assert told(composed("launcher.sbatch={exclude: node7}"))["exclude"] == "node7"
    assert told(sbatch={"mail-type": "END", "nice": 5})["additional_parameters"] == {
        "requeue": True, "mail-type": "END", "nice": 5,
    }  # fmt: skip
    site = tmp_path / "local"
    site.mkdir()
    (site / "slurm.yaml").write_text("comment: of the site\nsbatch: {exclusive: true, mail-type: END}\n")
    search = compose.search_path(str(tmp_path))
    given = told(composed(*search, "launcher.sbatch={exclude: node7}", "launcher.sbatch.exclusive=false"))
    assert (given["comment"], given["exclude"]) == ("of the site", "node7")
    assert given["additional_parameters"] == {"requeue": True, "mail-type": "END"}


@pytest.mark.parametrize(
    "option",
    [
        "job_name", "job-name", "--job-name", "job-nam", "output", "outp", "error", "array", "no-requeue", "time", "signal",
        "parsable", "wait", "ntasks", "clusters", "nodes", "cpus_per_task",
    ],
)  # fmt: skip
def test_what_the_launcher_sets_is_refused_with_the_key_to_use(option):
    said = rf"^launcher\.sbatch\.{option}: the launcher sets this itself; expected \S"
    with pytest.raises(ConfigError, match=said + ("*launcher.job_name" if "job" in option else "")):
        told(sbatch={option: "x"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mem": "1GB", "mem_per_cpu": "1GB"}, "mem_per_cpu: not beside launcher.mem;"),
        ({"mem": "1GB", "sbatch": {"mem-per-gpu": "1GB"}}, "mem_per_gpu: not beside launcher.mem;"),
        ({"gpus_per_task": 1, "cpus_per_gpu": 1, "cpus": 2}, "cpus_per_gpu: not beside launcher.cpus"),
        ({"gpus_per_task": 1, "gres": "gpu:1"}, "gpus_per_task: not beside gres"),
        ({"gpus_per_task": 1, "sbatch": {"gpus-per-node": 1}}, "gpus_per_task: not beside gpus_per_node"),
        ({"cpus_per_gpu": 1}, "cpus_per_gpu: goes with launcher.gpus_per_task"),
        ({"mem_per_gpu": "1GB"}, "mem_per_gpu: no GPUs are asked for"),
        ({"time": 2, "signal_delay_s": 120}, "signal_delay_s: 120 is not allowed with launcher.time=2"),
        ({"exclude": "n1", "sbatch": {"exclude": "n2"}}, "sbatch.exclude: launcher.exclude says this too"),
        ({"sbatch": {"nodelist": ["n1", "n2"]}}, "sbatch.nodelist: .* is not allowed; expected a text"),
        ({"sbatch": {"a b": 1}}, "sbatch.a b: this is not an option of sbatch"),
        ({"comment": "a\nb"}, "comment: .* expected a text of one line"),
        ({"job_name": "a b"}, "job_name: 'a b' is not allowed"),
        ({"job_name": "{host}"}, "job_name: '{host}' is not allowed"),
        ({"setup": ["if true; then"]}, "setup: bash does not understand 'if true; then'"),
    ],
)
def test_what_does_not_go_together(given, said):
    with pytest.raises(ConfigError, match=f"^launcher.{said}"):
        told(**given)


def test_names():
    name = defaults().job_name
    assert slurm_sbatch.title(name, "12-30-00-ab12", "0123ab") == "rlexp:12-30-00-ab12:0123ab"
    assert slurm_sbatch.title(name, "a b,'c'", "x") == "rlexp:a_b__c_:x"
    assert slurm_sbatch.title("mine", "sweep", "x") == "mine"


@pytest.mark.parametrize(
    ("setup", "code", "said"),
    [
        (["true", "export X=1"], 0, ""),
        (
            ["export X=1", "no_such_command here", "touch never"],
            127,
            "launcher.setup: exit code 127 of: no_such_command here",
        ),
        (["false"], 1, "launcher.setup: exit code 1 of: false"),
        (["module() { return 3; }", "module load 'x'"], 3, "launcher.setup: exit code 3 of: module load 'x'"),
        (["if false; then", "  touch never", "fi"], 0, ""),
        (["[ -e nowhere ] && . nowhere"], 0, ""),
        (["false || true", "# a comment", ""], 0, ""),
        (["echo 'false; true' > file", ". ./file"], 0, ""),
        (["cat > file <<EOF", "false", "EOF"], 0, ""),
        (["(exit 4)"], 4, "launcher.setup: exit code 4 of: (exit 4)"),
        (["printf '%s' \\", "  x; false"], 1, "launcher.setup: exit code 1 of: printf '%s' \\ x; false"),
    ],
)
def test_a_failing_line_of_setup_ends_the_job_and_is_named(tmp_path, setup, code, said):
    script = "\n".join([*slurm_sbatch.checked(setup), "false", "echo trained"])
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("trained" in done.stdout) == (code == 0) and not (tmp_path / "never").exists()
    if said:
        assert done.stderr.splitlines()[-1] == said
        (tmp_path / "log").write_text(done.stderr + "\nsrun: error: n1: task 0\n")
        assert last_words(tmp_path / "log") == f": {said}"


def test_only_a_person_cancels():
    assert [state for state, why in ENDED.items() if why is Why.ASKED] == ["CANCELLED"]
    assert {state for state, why in ENDED.items() if why is Why.LOST} >= {"TIMEOUT", "PREEMPTED", "NODE_FAIL"}
    assert ENDED["OUT_OF_MEMORY"] is Why.DIED  # as often as launcher.retries
    assert not ENDED.keys() & {"PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "CONFIGURING"}


def test_squeue_is_understood():
    said = "\n".join(
        [
            "11|10|0|TIMEOUT|2026-01-02T03:04:05|None|rlexp:sweep:a",  # of an array that had a name of its own before
            "12|10|1|PENDING|2026-01-02T03:04:05|Resources|rlexp:sweep:b",
            "13|10|2|RUNNING|2026-01-02T03:04:05|None|rlexp:other",
            "14|14|N/A|PENDING|2026-01-02T03:05:05|Priority|rlexp:sweep:1",  # a again, by a parent killed right then
            "15|15|N/A|RUNNING|2026-01-02T03:05:05|None|somebody's|own",
        ]
    )
    batches = {"rlexp:sweep:0": ["a", "b"], "rlexp:sweep:1": ["a"]}
    assert understood(said, batches, {"10": "rlexp:sweep:0"}) == {
        "a": Seen("14", "PENDING", "Priority", "2026-01-02 03:05:05"),
        "b": Seen("10_1", "PENDING", "Resources", "2026-01-02 03:04:05"),
    }


def test_an_sbatch_that_outlives_its_parent_is_waited_for(tmp_path, monkeypatch):
    """Killed between the name and the number: the pack is in the queue a moment later, and is not submitted again."""
    manifest, cluster = Manifest(tmp_path), slurm._Cluster(composed(), tmp_path, Manifest(tmp_path), {"a": 1, "b": 1})
    manifest.remember(slurm_queue.BATCH + "batch1", ["a"])
    slurm_queue.remember(manifest, "batch1", "10")
    manifest.remember(slurm_queue.BATCH + "batch2", ["b"])
    first = "10|10|N/A|RUNNING|2026-01-02T03:04:05|None|its own\n"
    answers, slept = [first, first, first + "11|11|N/A|PENDING|2026-01-02T03:04:05|None|batch2\n"], list[float]()
    monkeypatch.setattr(slurm_queue, "_said", lambda command: answers.pop(0) if len(answers) > 1 else answers[0])
    monkeypatch.setattr(slurm.time, "sleep", slept.append)
    assert cluster.attach() == {"a", "b"}
    assert len(slept) == 2


def test_accounting_knows_what_the_controller_has_forgotten(tmp_path, monkeypatch):
    manifest = Manifest(tmp_path)
    for number, packs in (("9", ["a"]), ("10", ["a", "b", "c"]), ("11", ["d"])):
        manifest.remember(slurm_queue.BATCH + f"batch{number}", packs)
        slurm_queue.remember(manifest, f"batch{number}", number)
    manifest.remember(slurm_queue.BATCH + "batch12", ["e"])  # killed before its number was known
    asked: list[str] = []

    def said(command):
        asked.append(command[4])
        return "9|COMPLETED\n10_0|CANCELLED by 1000\n10_1|TIMEOUT\n11|RUNNING\n"

    monkeypatch.setattr(slurm_queue, "_said", said)
    found = slurm_queue.forgotten(manifest, ["a", "b", "d", "e"])
    assert asked == ["--jobs=10_0,10_1,11"]
    assert {pack: (one.job, ENDED[one.state]) for pack, one in found.items()} == {
        "a": ("10_0", Why.ASKED), "b": ("10_1", Why.LOST), "d": ("11", Why.DIED), "e": ("?", Why.DIED),
    }  # fmt: skip
    monkeypatch.setattr(slurm_queue, "_said", lambda command: None)  # no accounting
    assert slurm_queue.forgotten(manifest, ["a"]) == {"a": Seen("10_0", slurm_queue.FORGOTTEN)}


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(time=1000.0)
    monkeypatch.setattr(slurm_queue.time, "monotonic", lambda: now.time)
    return now


def test_squeue_is_asked_ever_more_rarely(tmp_path, clock):
    (tmp_path / FOLDER).mkdir()
    task, polite, asked = Task(tmp_path, "pack", [0]), Polite(), []

    def pass_by(seconds: float) -> None:
        until = clock.time + seconds
        while clock.time < until:
            clock.time += 0.5
            if polite.due([task]):
                asked.append(clock.time)

    pass_by(3600)
    waits = [b - a for a, b in itertools.pairwise(asked)]
    assert waits[0] == 2 and waits == sorted(waits) and waits[-1] == 60 and len(asked) < 75
    task.journal.write_text("{}")  # a job has ended
    del asked[:]
    pass_by(10)
    assert len(asked) >= 2


def test_jobs_that_wait_are_told_of_when_that_changes_and_every_few_minutes(clock):
    waiting = Waiting("cancel it")
    a, b = Seen("10_0", "PENDING", "Resources", "03:04"), Seen("10_1", "PENDING", "Priority", "03:05")
    assert waiting.lines([a, b, Seen("10_2", "RUNNING")]) == [
        "Slurm job 10_0: PENDING, Resources, since 03:04",
        "Slurm job 10_1: PENDING, Priority, since 03:05",
    ]
    clock.time += 60
    assert waiting.lines([a, b]) == [] and waiting.lines([a]) == []
    clock.time += 60
    assert waiting.lines([a, b._replace(reason="Resources")]) == [
        "Slurm job 10_0, 10_1: PENDING, Resources, since 03:04"
    ]
    clock.time += 299
    assert waiting.lines([a, b._replace(reason="Resources")]) == []
    clock.time += 2
    assert len(waiting.lines([a, b._replace(reason="Resources")])) == 1
    (line,) = waiting.lines([Seen("10_3", "PENDING", "PartitionTimeLimit", "03:06")])
    assert "10_3: PENDING, PartitionTimeLimit, since 03:06; as it is it will not start: launcher.time is" in line
    assert line.endswith("; cancel it")
    many = [Seen(f"11_{i}", "PENDING", "Resources", "03:04") for i in range(1000)]
    assert waiting.lines(many) == ["Slurm job 11_0, 11_1, 11_2, 11_3 and 996 more: PENDING, Resources, since 03:04"]


@pytest.mark.parametrize(
    ("reasons", "starts"),
    [
        (
            "PartitionTimeLimit PartitionNodeLimit BadConstraints InvalidAccount InvalidQOS QOSNotAllowed AccountNotAllowed",
            False,
        ),
        (
            "QOSMaxWallDurationPerJobLimit AssocMaxWallDurationPerJobLimit QOSMaxCpuPerJobLimit AssocMaxNodePerJobLimit",
            False,
        ),
        ("QOSMaxGRESPerJob AssocMaxMemPerNode QOSMinGRES QOSMinCpuNotSatisfied AssocMaxCpuMinutesPerJobLimit", False),
        ("AssocGrpCPUMinutesLimit QOSGrpBillingMinutes AssocGrpWallLimit JobHeldUser JobHeldAdmin", False),
        ("DependencyNeverSatisfied ReservationDeleted DeadLine PartitionDown QOSTimeLimit MaxMemPerLimit", False),
        ("None Resources Priority Dependency BeginTime JobArrayTaskLimit Licenses NodeDown ReqNodeNotAvail", True),
        ("QOSGrpCpuLimit AssocGrpNodeLimit QOSMaxJobsPerUserLimit QOSMaxCpuPerUserLimit AssocMaxJobsLimit", True),
        ("AssocGrpCPURunMinutesLimit QOSGrpMemoryRunMinutes QOSJobLimit AssociationJobLimit Reservation", True),
    ],
)
def test_what_will_never_start(reasons, starts):
    for reason in reasons.split():
        assert (never(reason) is None) == starts, reason


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            ["-m", "hydra.sweep.dir=made", "seed=1,2", "launcher.sbatch={exclude: node7}"],
            ": slurm needs sbatch, which is not",
        ),
        (
            ["hydra.run.dir=made", "launcher.sbatch={job_name: x}"],
            ".sbatch.job_name: the launcher sets this itself; expected",
        ),
    ],
)
def test_refused_before_anything_is_made(tmp_path, line, said):
    """In a sweep a dict like the documentation's is understood too."""
    done = subprocess.run(
        rlexp_command(*line, "launcher=slurm", *QUIET),
        cwd=tmp_path,
        env=environment(PATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and done.stderr.startswith(f"rlexp: launcher{said}"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_what_is_submitted_and_not_waited_for_ends_nobody_s_process(tmp_path, monkeypatch):
    submitted: list[Task] = []
    monkeypatch.setattr(slurm, "_needs", lambda *programs: None)
    monkeypatch.setattr(slurm._Cluster, "attach", lambda self: set())
    monkeypatch.setattr(slurm._Cluster, "_submit", lambda self, tasks: submitted.extend(tasks))
    line = [*QUIET, "launcher=slurm", "launcher.detach=true"]
    run = rlexp.train(line, {"hydra.run.dir": tmp_path / "run"})
    sweep = rlexp.sweep(line, {"hydra.sweep.dir": tmp_path / "sweep"}, seed=[1, 2])
    assert [task.numbers for task in submitted] == [[0], [0, 1]]
    assert [one.status for one in (run, *sweep.runs)] == ["pending"] * 3
    assert command_lines.run(Line([*line, "hydra.run.dir=run"]), tmp_path).code == 0
    assert len(submitted) == 3


@pytest.fixture
def submitted(monkeypatch) -> list[Task]:
    """What Slurm has taken, of packs that train alone and are arrays of their own."""
    taken: list[Task] = []
    monkeypatch.setattr(slurm, "_ARRAY", 1)
    monkeypatch.setattr(slurm, "_needs", lambda *programs: None)
    monkeypatch.setattr(slurm._Cluster, "attach", lambda self: set())
    monkeypatch.setattr(slurm._Cluster, "_submit", lambda self, tasks: taken.extend(tasks))
    return taken


ALONE = ("launcher=slurm", "launcher.detach=true", "launcher.pack=off")


def test_what_is_submitted_in_part_is_told(tmp_path, monkeypatch, submitted):
    def submit(cluster, tasks):
        if len(submitted) == 2:
            raise ConfigError("launcher: sbatch refuses: AssocMaxSubmitJobLimit")
        submitted.extend(tasks)

    monkeypatch.setattr(slurm._Cluster, "_submit", submit)
    ended = command_lines.run(Line(["-m", *QUIET, *ALONE, "seed=1,2,3,4", "hydra.sweep.dir=sweep"]), tmp_path)
    assert ended.code == 1 and [task.numbers for task in submitted] == [[0], [1]]
    assert ended.err.endswith(
        "launcher: 2 of 4 packs were not submitted; this submits them when there is room, and waits: "
        f"python -m rlexp.sweep resume {tmp_path / 'work/sweep'}\n"
    )
    said = ended.out.splitlines()
    assert said[-2] == "launcher: sbatch refuses: AssocMaxSubmitJobLimit"
    assert said[-1].startswith("2 of 4 packs are submitted; look with: ")


def test_jobs_of_equal_overrides_are_packs_of_their_own(tmp_path, submitted):
    """And a sweep that an earlier version began has the names that it had."""
    place = {"hydra.sweep.dir": tmp_path / "sweep"}
    rlexp.sweep([*QUIET, *ALONE], place, seed=[1, 1])
    first = {task.name for task in submitted}
    assert len(first) == 2 and [worker.numbers(tmp_path / "sweep", task.name) for task in submitted] == [{0}, {1}]
    rlexp.sweep([*QUIET, *ALONE], place, seed=[1, 1])
    assert {task.name for task in submitted} == first and len(submitted) == 4
    manifest = Manifest(tmp_path / "sweep")
    manifest.drop("packs by number")
    rlexp.sweep([*QUIET, *ALONE], place, seed=[1, 1])
    text = json.dumps([manifest.jobs()[0].overrides])
    assert {task.name for task in submitted[4:]} == {hashlib.sha256(text.encode()).hexdigest()[:12]}


def test_a_run_that_is_gone_on_with_is_the_job_that_slurm_has(tmp_path, submitted):
    for more in ([], ["resume=auto"]):  # as `python -m rlexp.sweep resume` adds it
        rlexp.train([*QUIET, *ALONE, *more], {"hydra.run.dir": tmp_path / "run"})
    assert len(submitted) == 2 and len({task.name for task in submitted}) == 1


def test_packs_of_one_array_take_as_many_nodes(tmp_path, monkeypatch):
    """Profiles of one host and of several in one sweep."""
    submitted, tasks = [], [Task(tmp_path, name, []) for name in "abcde"]
    cluster = slurm._Cluster(composed(), tmp_path, Manifest(tmp_path), dict(zip("abcde", (1, 2, 1, 4, 2), strict=True)))
    monkeypatch.setattr(cluster, "_submit", lambda array: submitted.append("".join(task.name for task in array)))
    begun = cluster.start(tasks)
    assert submitted == ["ac", "be", "d"] and sorted(task.name for task in begun) == list("abcde")
