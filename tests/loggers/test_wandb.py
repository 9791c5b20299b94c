"""W&B offline, read back from its files; online, against a stand-in on loopback; and every way to fail without harm."""

import dataclasses
import json
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import wandb_file
import wandb_standin

from rlexp import compose
from rlexp.config import Config, parse
from rlexp.loggers import RunInfo, wandb

KEY = wandb_standin.KEY
INFO = RunInfo(Path(), "member00", {}, total_env_steps=10, start_env_steps=0, start_wall_s=0.0)


def wandb_config() -> wandb.WandbConfig:
    return parse(compose.compose_node(["logger=offline"])[0], Config)[0].logger.wandb


def segments(child, member: int = 0) -> list[wandb_file.WandbFile]:
    files = sorted((child.root / str(member) / "wandb").glob("offline-run-*/*.wandb"))
    return [wandb_file.read(path) for path in files]


def steps(rows: list[dict]) -> list[int]:
    return [row["env_steps"] for row in rows]


# --- the thread ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["log", "close"])
def test_it_starts_with_the_first_work(what, monkeypatch, tmp_path):
    """Not before: its import would hold Python's lock while the program is traced."""
    started = threading.Event()
    monkeypatch.setattr(wandb, "_start", lambda *_, **__: started.set() or [])
    (logger,) = wandb.make(wandb_config(), [INFO._replace(dir=tmp_path)], note=print, warn=print)
    assert not started.wait(0.2)
    getattr(logger, what)({"env_steps": 1})
    assert started.wait(5)


def test_it_starts_in_time_even_if_the_first_chunk_is_long(monkeypatch, tmp_path):
    started = threading.Event()
    monkeypatch.setattr(wandb, "_start", lambda *_, **__: started.set() or [])
    monkeypatch.setattr(wandb, "_HEAD_START_S", 0.1)
    wandb.make(wandb_config(), [INFO._replace(dir=tmp_path)], note=print, warn=print)
    assert started.wait(5)


# --- offline ---------------------------------------------------------------------------------------------------------


def test_an_offline_run_holds_rows_config_summary_and_id(child):
    done = child.run()
    (run,) = segments(child)
    assert run.id == "member00"
    assert run.config["algo"] == {"hp": {"lr": 1e-3}}
    assert run.tags == ["a tag"]
    assert steps(run.rows) == [100, 200, 300, 400]
    assert [row["_step"] for row in run.rows] == [100, 200, 300, 400]
    assert run.rows[2]["loss/policy"] == 0.3
    assert "train/return_mean" not in run.rows[0]  # an empty count is left out
    assert ("*", "env_steps") in run.step_metrics
    assert run.summary["status"] == "finished"
    assert run.summary["objective"] == 7.5
    assert run.exit_code == 0
    # What the user is told: where it is, and nothing else from W&B.
    assert f"wandb sync {child.root}/0/wandb/offline-run-*" in done.stdout
    assert "warning" not in done.stderr
    assert [line for line in done.stdout.splitlines() if "andb" in line.lower()] == done.stdout.splitlines()[:1]
    assert done.stdout.endswith("closed\n")  # W&B's launcher takes longer to import than the end of a run should


def test_a_failed_run_is_marked_failed(child):
    child.run(status="failed")
    assert segments(child)[0].exit_code == 1


def test_sixteen_runs_at_once(child):
    child.run(members=16)
    for i in range(16):
        (run,) = segments(child, i)
        assert run.id == f"member{i:02}"
        assert run.config["seed"] == i
        assert [row["loss/policy"] for row in run.rows] == [i + 0.1, i + 0.2, i + 0.3, i + 0.4]
        assert run.exit_code == 0


@pytest.mark.slow
def test_a_killed_offline_run_is_whole_after_resume(child):
    """W&B loses the last rows of a killed process. The resumed run has all, and each once."""
    child.run(kill=True, end=400)
    child.run(start=200, end=600)
    (run,) = segments(child)  # what `wandb sync offline-run-*` takes: one segment, the old one is set aside
    assert run.id == "member00"
    assert steps(run.rows) == [100, 200, 300, 400, 500, 600]
    assert len(list((child.root / "0" / "wandb").glob("replaced-offline-run-*"))) == 1


@pytest.mark.slow
def test_after_a_sync_a_resumed_offline_run_holds_only_new_rows(child):
    """The server has the rows of the first segment: logged again, they would be doubled."""
    child.run(end=400)
    (file,) = (child.root / "0" / "wandb").glob("offline-run-*/*.wandb")
    file.with_name(file.name + ".synced").touch()  # as `wandb sync` does
    child.run(start=200, end=600)
    first, second = segments(child)
    assert first.id == second.id == "member00"
    assert steps(first.rows) == [100, 200, 300, 400]
    assert steps(second.rows) == [300, 400, 500, 600]


def test_the_environment_decides_for_auto_only(child):
    child.env["WANDB_MODE"] = "disabled"
    child.run(mode="auto")
    assert sorted(x.name for x in (child.root / "0").iterdir()) == ["metrics.jsonl"]
    child.run(mode="offline")
    assert len(segments(child)) == 1


@pytest.mark.slow
def test_a_checkpoint_becomes_an_artifact_when_asked(child, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "params").write_text("numbers")
    child.env["WANDB_DATA_DIR"] = str(tmp_path / "data")
    child.run(artifacts=False, checkpoint_at=200, checkpoint=folder)
    assert segments(child)[0].artifacts == []
    child.run(artifacts=True, checkpoint_at=200, checkpoint=folder)
    assert "checkpoint-member00" in segments(child)[-1].artifacts


def test_a_checkpoint_that_cannot_be_uploaded_is_one_warning(child, tmp_path):
    done = child.run(members=2, artifacts=True, checkpoint_at=200, checkpoint=tmp_path / "none")
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert done.stderr.startswith("warning: W&B run member00: ")
    assert steps(segments(child)[0].rows) == [100, 200, 300, 400]
    assert segments(child)[0].summary["status"] == "finished"


# --- online ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_online_run_holds_each_row_once_after_resumes(child, server):
    done = child.run(end=400)
    run = server.runs["member00"]
    assert f"W&B: {server.url}/" in done.stdout
    assert run.project == "rlexp"
    assert run.name == "member00"
    assert run.config["algo"]["value"] == {"hp": {"lr": 1e-3}}
    assert steps(run.history) == [100, 200, 300, 400]
    assert run.summary["objective"] == 7.5
    assert run.exit_code == 0

    child.run(start=200, end=600)  # makes 300 and 400 again: they are not doubled
    assert steps(run.history) == [100, 200, 300, 400, 500, 600]

    del run.lines[4:]  # say it was killed before 500 and 600 reached the server: they are not lost
    run.summary["_step"] = 400
    child.run(start=600, end=700)
    assert steps(run.history) == [100, 200, 300, 400, 500, 600, 700]


@pytest.mark.slow
def test_a_refused_start_leaves_no_run_that_a_server_could_have(child, server):
    """So the offline run of the next process holds all rows, as after a process that never tried."""
    server.refuse.set()
    child.run(kill=True, end=400)
    child.run(start=200, end=600)
    (run,) = segments(child)
    assert steps(run.rows) == [100, 200, 300, 400, 500, 600]
    assert len(list((child.root / "0/wandb").glob("refused-run-*"))) == 2 and server.runs == {}


@pytest.mark.slow
def test_an_offline_run_that_went_on_online_is_not_uploaded_again(child, server):
    child.run(mode="offline")
    child.run(start=200, end=600)
    history = server.runs["member00"].history
    assert steps(history) == [100, 200, 300, 400, 500, 600]
    assert list((child.root / "0/wandb").glob("offline-run-*")) == []  # what `wandb sync` is told to take


def test_sync_uploads_an_offline_run(child, server):
    child.run(mode="offline")
    assert server.runs == {}
    (folder,) = (child.root / "0" / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    subprocess.run(command, env=child.env, check=True, capture_output=True, timeout=60)
    assert steps(server.runs["member00"].history) == [100, 200, 300, 400]


def test_a_key_in_netrc_is_found(child, server):
    del child.env["WANDB_API_KEY"]
    host = server.url.removeprefix("http://")
    file = Path(child.env["HOME"]) / ".netrc"
    file.write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    file.chmod(stat.S_IRUSR | stat.S_IWUSR)
    child.run()
    assert steps(server.runs["member00"].history) == [100, 200, 300, 400]


def test_the_key_is_in_no_file_and_no_output(child, server, tmp_path):
    outputs = [child.run(end=200), child.run(start=200, end=400, mode="offline")]
    server.refuse.set()
    outputs.append(child.run(start=400, end=600))
    assert len(server.keys) == 1  # the key was used
    files = [x for x in tmp_path.rglob("*") if x.is_file()]
    assert any(x.name == "debug-internal.log" for x in files)
    for file in files:
        assert KEY.encode() not in file.read_bytes(), file
    for done in outputs:
        assert KEY not in done.stdout + done.stderr


# --- one run for a pack ----------------------------------------------------------------------------------------------


def the_pack(child) -> wandb_file.WandbFile:
    (file,) = (child.root / "wandb").glob("offline-run-*/*.wandb")
    return wandb_file.read(file)


def test_a_pack_can_be_one_run(child):
    done = child.run(members=3, runs="pack")
    run = the_pack(child)
    assert f"W&B: offline; upload with: wandb sync {child.root}/wandb/offline-run-*" in done.stdout
    assert [x for i in range(3) for x in (child.root / str(i)).glob("wandb*")] == []
    assert len(run.id) == 8
    assert run.config["seed"] == [0, 1, 2]  # in which they differ
    assert run.config["algo"] == {"hp": {"lr": 1e-3}}
    assert steps(run.rows) == [100, 200, 300, 400]
    row = {name: value for name, value in run.rows[1].items() if not name.startswith("_")}
    assert row == pytest.approx(
        {
            "env_steps": 200,
            "wall_s": 2.0,
            "pack/members": 3,
            "loss/policy": 1.2,
            "loss/policy/std": (2 / 3) ** 0.5,
            "eval/return_mean": 210.0,
            "eval/return_mean/std": 10 * (2 / 3) ** 0.5,
            "eval/return_mean/best": 220.0,
            "time/chunk_s": 2.0,
        }
    )
    assert run.summary["status"] == "finished"
    assert run.summary["objective"] == 8.5
    assert run.summary["objective/best"] == 9.5
    assert run.exit_code == 0
    lines = (child.root / "1" / "metrics.jsonl").read_text().splitlines()  # each member keeps its own
    assert [json.loads(line)["eval/return_mean"] for line in lines] == [110.0, 210.0, 310.0, 410.0]


def test_a_pack_of_one_is_a_run_as_ever(child):
    child.run(runs="pack")
    (run,) = segments(child)
    assert run.id == "member00"
    assert run.rows[0]["eval/return_mean"] == 100.0
    assert "eval/return_mean/std" not in run.rows[0]


def test_a_pack_goes_on_without_a_member_that_failed(child):
    child.run(members=3, runs="pack", failed=2)
    run = the_pack(child)
    assert steps(run.rows) == [100, 200, 300, 400]
    assert [row["eval/return_mean"] for row in run.rows] == [105.0, 205.0, 305.0, 405.0]
    assert [row["pack/members"] for row in run.rows] == [2] * 4
    assert (run.summary["status"], run.summary["pack/failed"]) == ("finished", 1)
    assert (run.summary["objective"], run.summary["objective/best"]) == (8.0, 8.5)
    assert run.exit_code == 0


def test_a_pack_fails_if_all_do(child):
    child.run(members=2, runs="pack", status="failed")
    run = the_pack(child)
    assert (run.summary["status"], run.exit_code) == ("failed", 1)
    assert "objective" not in run.summary


def test_a_killed_pack_is_whole_after_resume(child):
    child.run(members=2, runs="pack", kill=True)
    child.run(members=2, runs="pack", start=200, end=600)
    run = the_pack(child)  # one segment, the old one is set aside
    assert steps(run.rows) == [100, 200, 300, 400, 500, 600]
    assert [row["eval/return_mean"] for row in run.rows] == [105.0, 205.0, 305.0, 405.0, 505.0, 605.0]
    assert run.rows[0]["loss/policy/std"] == 0.5
    assert len(list((child.root / "wandb").glob("replaced-offline-run-*"))) == 1


@pytest.mark.slow
def test_an_online_pack_holds_each_row_once_after_resumes(child, server):
    child.run(members=2, runs="pack")
    ((run_id, run),) = server.runs.items()
    assert run.config["seed"]["value"] == [0, 1]
    assert steps(run.history) == [100, 200, 300, 400]
    child.run(members=2, runs="pack", start=200, end=600)
    assert list(server.runs) == [run_id]
    assert steps(run.history) == [100, 200, 300, 400, 500, 600]
    del run.lines[4:]  # killed before 500 and 600 reached the server
    run.summary["_step"] = 400
    child.run(members=2, runs="pack", start=600, end=700)
    assert steps(run.history) == [100, 200, 300, 400, 500, 600, 700]
    assert run.history[4]["eval/return_mean/best"] == 510.0


# --- trouble: one warning, and the run goes on -----------------------------------------------------------------------


def whole_offline(child, done, words: str) -> None:
    """The run went on: all rows are in metrics.jsonl and in an offline run, and one warning says why."""
    warnings = [line for line in done.stderr.splitlines() if line]
    assert len(warnings) == 1, done.stderr
    assert warnings[0].startswith("warning: W&B: ")
    assert words in warnings[0]
    assert warnings[0].endswith("; going on offline")
    assert steps(segments(child)[-1].rows) == [100, 200, 300, 400]
    lines = (child.root / "0" / "metrics.jsonl").read_text().splitlines()
    assert steps([json.loads(line) for line in lines]) == [100, 200, 300, 400]


def test_an_unreachable_server(child):
    child.env["WANDB_API_KEY"] = KEY
    whole_offline(child, child.run(), "http://127.0.0.1:9 cannot be reached")


def test_a_refused_key(child, server):
    server.refuse.set()
    whole_offline(child, child.run(members=2), "403")
    assert steps(segments(child, 1)[-1].rows) == [100, 200, 300, 400]


def test_a_malformed_key(child, server):
    child.env["WANDB_API_KEY"] = "tooshort"
    done = child.run()
    whole_offline(child, done, "API key")
    assert server.keys == set()


def test_no_key_is_a_warning_only_if_online_was_asked_for(child):
    whole_offline(child, child.run(mode="online"), "wandb login")
    (again,) = child.run(mode="auto").stderr.splitlines()
    assert "so the run begins anew" in again  # which is all that is said: nothing of W&B


@pytest.mark.slow
def test_a_server_that_goes_silent(child, server):
    server.silence.set()
    whole_offline(child, child.run(timeout_s=2.0), "context deadline exceeded")


@pytest.mark.slow
def test_a_server_that_dies_names_what_to_sync(child, server):
    server.silence_after_start.set()
    done = child.run(timeout_s=2.0)
    assert "upload later with: wandb sync" in done.stderr
    folder = Path(done.stderr.split("wandb sync ")[1].strip())
    (file,) = folder.glob("*.wandb")
    assert steps(wandb_file.read(file).rows) == [100, 200, 300, 400]


def test_wandb_not_installed(child, tmp_path):
    (tmp_path / "wandb.py").write_text("raise ImportError('no module named wandb')\n")
    child.env["PYTHONPATH"] = f"{tmp_path}:{child.env['PYTHONPATH']}"
    done = child.run()
    assert done.stderr == "warning: W&B is off: no module named wandb; the metrics are in metrics.jsonl\n"


# --- names -----------------------------------------------------------------------------------------------------------


def named(env: str = "CartPole-v1", algo: str = "rlexp.algos.ppo", **more: object) -> RunInfo:
    return INFO._replace(config={"env": {"name": env}, "algo": {"module": algo}, "seed": 3} | more)


@pytest.mark.parametrize(
    ("info", "name"),
    [
        (named(), "cartpole-ppo-s3"),
        (named("Breakout-MinAtar", "my.reinforce", run="train"), "breakout-minatar-reinforce-s3"),
        (named("My Game (hard)/v2", run="eval"), "my-game-hard-v2-ppo-s3-eval"),
        (named()._replace(dir=Path("sweep/7")), "cartpole-ppo-s3-job7"),
        (named(run="eval")._replace(dir=Path("sweep/12")), "cartpole-ppo-s3-job12-eval"),
        (named(seed=[0, 1]), "cartpole-ppo-s0-s1"),
        (named(seed=[0, 1])._replace(dir=Path("7")), "cartpole-ppo-s0-s1"),
        (named(seed=list(range(16))), "cartpole-ppo-16-seeds"),
        (INFO, "member00"),
    ],
)
def test_a_run_has_a_name_that_can_be_read(info, name):
    assert wandb.display_name(info) == name


def test_what_a_run_is_called_and_its_columns(tmp_path):
    """The id is in the configuration too; a name that was given is kept."""

    asked: list[dict] = []

    class Module:
        Settings = dict

        class Run:
            def define_metric(self, *_: object, **__: object) -> None: ...

        def init(self, **given: object) -> object:
            asked.append(given)
            return self.Run()

    node, _ = compose.compose_node(["seed=5", "env=gymnax/pendulum"])
    config = parse(node, Config)[0].logger.wandb
    info = RunInfo(tmp_path, "c0ffee42", node, 10, 0, 0.0)
    for each in (config, dataclasses.replace(config, name="mine")):
        wandb._init(Module(), "offline", each, info, None)
    first, second = asked
    assert (first["name"], first["id"], second["name"]) == ("pendulum-ppo-s5", "c0ffee42", "mine")
    columns = {name: first["config"][name] for name in ("run_id", "environment", "algorithm")}
    assert columns == {"run_id": "c0ffee42", "environment": "Pendulum-v1", "algorithm": "ppo"}
    assert {name: x for name, x in first["config"].items() if name not in columns} == node
