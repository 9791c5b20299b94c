"""What is said to gcloud, and how its answers are read. The commands are held against the program itself, without a login."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rlexp_launchers import worker_scripts
from rlexp_launchers.answers import Means, State, last_line
from rlexp_launchers.gcloud import Ask, Gcloud, GcloudError

FLAGS = [
    "--network=n",
    "--subnetwork=s",
    "--service-account=a@b",
    "--labels=rlexp-sweep=1,team=rl",
    "--tags=a,b",
    "--internal-ips",
]
BOOT = Path(__file__)


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """gcloud as one who never logged in."""
    if shutil.which("gcloud") is None:
        pytest.skip("there is no gcloud here")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CORE_CHECK_GCE_METADATA", "false")
    return Gcloud("p", "us-central2-b")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "call",
    [
        *(
            lambda gcloud, queued=queued, kind=kind: gcloud.create(
                "x", "v4-8", Ask("r", kind, queued, FLAGS, 2.5), boot=BOOT
            )
            for queued in (True, False)
            for kind in ("spot", "on_demand", "reserved")
        ),
        lambda gcloud: gcloud.describe("x", queued=False),
        lambda gcloud: gcloud._ask(["queued-resources", "describe", "x"], dict),
        lambda gcloud: gcloud.delete("x", queued=True),
        lambda gcloud: gcloud.delete("x", queued=False),
        lambda gcloud: gcloud.ssh("x", 1, "ls\ntrue", environment=["A=b"]),
    ],
)
def test_gcloud_understands_each_command(nobody, call):
    """It reads the arguments, and then refuses for want of a login. What it does not understand it refuses before."""
    with pytest.raises(GcloudError, match="active account selected"):
        call(nobody)


@pytest.mark.timeout(60)
def test_gcloud_understands_a_copy(nobody, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(GcloudError, match="active account selected"):
        nobody.copy(tmp_path / "file", "x", 1, "file")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", "two"),
        ('ERROR: (x) {\n  "code": 8,\n  "message": "There is no \\"room\\"."\n}\n', 'There is no "room".'),
        ("SSH: Attempting to connect to worker 0...\nno such file\n", "no such file"),
        ("no such file\nERROR: (x) [/usr/bin/ssh] exited with return code [255].\n", "no such file"),
        (
            "ERROR: (x) [/usr/bin/ssh] exited with return code [255].",
            "ERROR: (x) [/usr/bin/ssh] exited with return code [255].",
        ),
        (
            "ERROR: (x) NOT_FOUND: Resource n was not found\n- '@type': y\n  resourceName: n\n",
            "ERROR: (x) NOT_FOUND: Resource n was not found",
        ),
        ("", ""),
    ],
)
def test_the_last_line_that_says_something(text, expected):
    assert last_line(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There is no more capacity in the zone", Means.ROOM),
        ('{"code": 8, "message": "There is no more capacity in the zone \\"us-central2-b\\""}', Means.ROOM),
        ("RESOURCE_EXHAUSTED: Quota limit 'X' has been exceeded.", Means.QUOTA),
        ("Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute'", Means.PASSING),
        ("NOT_FOUND: Resource x was not found", Means.GONE),
        ("ERROR: NOT_FOUND: Resource x was not found\n  resourceName: x", Means.GONE),
        ("bash: line 1: gcloud: command not found", Means.PASSING),
        ("NOT_FOUND: Location mars is not found or access is unauthorized.", Means.FATAL),
        ("ALREADY_EXISTS: Resource x already exists.", Means.TAKEN),
        ("ERROR: gcloud crashed (ConnectionError): HTTPSConnectionPool\ngcloud info --run-diagnostics", Means.PASSING),
        (
            "There was a problem refreshing your current auth tokens: Max retries exceeded\n gcloud auth login",
            Means.PASSING,
        ),
        ("There was a problem refreshing your current auth tokens: ('invalid_grant: Bad Request'", Means.FATAL),
        ("You do not currently have an active account selected.", Means.FATAL),
        ("INVALID_ARGUMENT: Runtime version is not valid", Means.FATAL),
        ("PERMISSION_DENIED: Permission 'tpu.nodes.create' denied", Means.FATAL),
        ("ERROR: (gcloud.compute.tpus.tpu-vm.create) unrecognized arguments: --x", Means.FATAL),
        ("HttpError accessing <https://tpu.googleapis.com>: response: <{'status': '503'}>", Means.PASSING),
        ("ABORTED: the operation was aborted", Means.PASSING),
        ("something that nobody has ever seen", Means.PASSING),
        ("", Means.PASSING),
    ],
)
def test_one_table_says_what_is_meant(text, expected):
    assert GcloudError(text).means is expected


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """A gcloud that says what it is told to: (standard output, standard error, exit code)."""

    def make(output: bytes, said: str, code: int) -> Gcloud:
        (tmp_path / "output").write_bytes(output)
        (tmp_path / "said").write_text(said)
        program = tmp_path / "gcloud"
        program.write_text(f"#!/bin/sh\ncat {tmp_path}/output; cat {tmp_path}/said >&2; exit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return Gcloud("p", "z")

    return make


def test_what_is_not_there_is_gone(answers):
    gcloud = answers(b"", "ERROR: (x) NOT_FOUND: Resource 'n' was not found\n- '@type': y\n  resourceName: n\n", 1)
    assert gcloud.describe("n", queued=True).state == State.GONE
    gcloud.delete("n", queued=True)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("READY", State.READY),
        ("CREATING", State.WAITING),
        ("DELETING", State.WAITING),
        ("PREEMPTED", State.BAD),
        ("TERMINATED", State.BAD),
        ("STOPPED", State.BAD),
        *(
            (state, State.MOVING)
            for state in ("REPAIRING", "RESTARTING", "REIMAGING", "STARTING", "STOPPING", "UNKNOWN", "NEW")
        ),
    ],
)
def test_states(answers, state, expected):
    seen = answers(f'{{"state": "{state}", "networkEndpoints": [{{"ipAddress": "10.0.0.2"}}]}}'.encode(), "", 0)
    assert seen.describe("n", queued=False)[:3] == (expected, state, ["10.0.0.2"])


def test_a_request_says_why_it_failed_and_whose_it_is(answers, monkeypatch):
    why = {"state": "FAILED", "failedData": {"error": {"message": "no such runtime"}}}
    about = {"state": why, "tpu": {"nodeSpec": [{"node": {"labels": {"a": "b"}}}]}}
    gcloud = answers(json.dumps(about).encode(), "", 0)
    ask = gcloud._ask
    monkeypatch.setattr(gcloud, "_ask", lambda command, read: None if command[0] == "tpu-vm" else ask(command, read))
    assert gcloud.describe("n", queued=True) == (State.FAILED, "no such runtime", [], {"a": "b"})


@pytest.mark.parametrize(
    "output", [b'{"state": "REA', b"", b"[]", b"[" * 9999, b"\xff", b'{"state": 1}', b'{"state": "READY", "labels": 1}']
)
def test_an_answer_that_cannot_be_read_may_pass(answers, output):
    with pytest.raises(GcloudError, match="cannot be read") as told:
        answers(output, "", 0).describe("n", queued=False)
    assert told.value.means is Means.PASSING


def test_a_deletion_tries_the_slice_too_where_its_request_resists(answers, tmp_path):
    gcloud = answers(b"", "", 0)
    (tmp_path / "gcloud").write_text(f'#!/bin/sh\necho "$3 $4" >> {tmp_path}/asked; [ "$3" = tpu-vm ] || exit 1\n')
    with pytest.raises(GcloudError):
        gcloud.delete("n", queued=True)
    assert (tmp_path / "asked").read_text() == "queued-resources delete\ntpu-vm delete\n"


def test_output_is_bytes_as_they_are(answers):
    assert answers(b"\xf0\x9f\r\n", "", 0).ssh("n", 0, "x") == b"\xf0\x9f\r\n"


@pytest.mark.slow
def test_a_call_that_takes_too_long_takes_its_own_processes_along(answers, tmp_path):
    gcloud = answers(b"", "", 0)
    (tmp_path / "gcloud").write_text(f"#!/bin/sh\n(sleep 2; touch {tmp_path}/late) & wait\n")
    with pytest.raises(GcloudError, match="timed out") as told:
        gcloud._call(["tpu-vm", "ssh"], seconds=1)
    assert told.value.means is Means.PASSING
    time.sleep(2.5)
    assert not (tmp_path / "late").exists()


def test_a_dry_run_prints_names_only(capsys):
    Gcloud("p", "z", dry_run=True).ssh("x", 0, "ls", environment=["KEY=secret"])
    said = capsys.readouterr().out
    assert said.startswith("gcloud compute tpus tpu-vm ssh x --worker=0 --command=ls")
    assert "KEY=***" in said
    assert "secret" not in said


def bash(home, script, given=""):
    done = subprocess.run(["bash", "-c", script], cwd=home, input=given, capture_output=True, text=True, timeout=60)
    return done.stdout


def test_a_start_is_found_again_and_ends_as_its_program_does(tmp_path):
    (tmp_path / "rlexp" / "code" / "c").mkdir(parents=True)
    (tmp_path / "rlexp" / "env" / "e" / "bin").mkdir(parents=True)
    program = tmp_path / "rlexp" / "env" / "e" / "bin" / "python"
    program.write_text(
        '#!/bin/sh\ntrap "exit 75" TERM\necho "$KEY in $PWD"; ls "$RLEXP_START"\nwhile true; do sleep 0.1; done\n'
    )
    program.chmod(0o755)
    start = worker_scripts.start("job-1", "c", "e", ["-m", "x"])
    bash(tmp_path, start, "KEY=a b\n")
    pid = (tmp_path / "rlexp" / "jobs" / "job-1" / "pid").read_text()
    bash(tmp_path, start, "KEY=other\n")
    assert (tmp_path / "rlexp" / "jobs" / "job-1" / "pid").read_text() == pid
    state, log = "", ""
    while not log:
        state, _, log = bash(tmp_path, worker_scripts.look("job-1", 0)).partition("\n")
    assert state == "runs"
    assert log.startswith(f"a b in {tmp_path}/rlexp/code/c\n")
    assert bash(tmp_path, worker_scripts.look("job-1", 4)).startswith("runs\n" + log[4:])
    bash(tmp_path, worker_scripts.end("job-1", "CONT"))
    assert not (tmp_path / "rlexp" / "jobs" / "job-1" / "asked").exists()  # which only a person's word leaves
    bash(tmp_path, worker_scripts.end("job-1", "TERM", asked=True))
    assert (tmp_path / "rlexp" / "jobs" / "job-1" / "asked").exists()
    while state == "runs":
        state = bash(tmp_path, worker_scripts.look("job-1", None)).strip()
    assert state == "rc 75"
    assert bash(tmp_path, worker_scripts.look("job-2", None)).strip() == "none"
    bash(tmp_path, worker_scripts.start("job-2", "c", "e", []))
    bash(tmp_path, worker_scripts.end("job-2", "KILL"))
    while (state := bash(tmp_path, worker_scripts.look("job-2", None)).strip()) == "runs":
        pass
    assert state == "dead"
