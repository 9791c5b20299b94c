"""The loggers together: configuration, fan-out, failures, lazy imports, TensorBoard."""

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlexp import loggers
from rlexp.config import ConfigError, parse, schema
from rlexp.loggers import Logger, RunInfo, curve, fan_out, jsonl, never_fatal, tensorboard

ROOT = Path(__file__).resolve().parents[2]


@schema
class Holder:
    logger: Any


def configured(name: str, *overrides: str) -> loggers.Config:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        node = compose(overrides=[f"+logger={name}", *overrides])
    return parse(OmegaConf.to_container(node, resolve=True), Holder)[0].logger  # type: ignore[arg-type]


def info(folder: Path, start_env_steps: int = 0) -> RunInfo:
    return RunInfo(folder, "abcd1234", {"seed": 0}, 1000, start_env_steps, 0.0)


# --- configuration ---------------------------------------------------------------------------------------------------


def test_every_yaml_of_the_group_is_a_config():
    names = sorted(path.stem for path in (ROOT / "conf" / "logger").glob("*.yaml"))
    assert {"default", "quiet", "tensorboard", "offline"} <= set(names)
    for name in names:
        assert configured(name).module == "rlexp.loggers"


def test_the_options_change_what_they_say(monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    default, quiet = configured("default"), configured("quiet")
    assert (default.progress, default.curve, default.tensorboard, default.wandb.mode) == ("auto", True, False, "auto")
    assert (quiet.progress, quiet.curve, quiet.tensorboard, quiet.wandb.mode) == ("off", False, False, "disabled")
    assert configured("tensorboard").tensorboard
    assert configured("offline").wandb.mode == "offline"
    assert default.wandb.project == "rlexp"
    assert default.wandb.entity is None
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert configured("default").wandb.project == "mine"


def test_off_is_a_word_even_where_yaml_reads_it_as_false():
    assert configured("default", "logger.progress=off").progress == "off"
    assert configured("default", "logger.progress=false").progress == "off"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("logger.progress=bra", r"logger\.progress: 'bra' is not allowed; .*did you mean \"bar\""),
        ("logger.wandb.mode=ofline", r"logger\.wandb\.mode: 'ofline' is not allowed; .*did you mean \"offline\""),
        ("logger.every_env_steps=0", r"logger\.every_env_steps: 0 is not allowed"),
        ("logger.wandb.timeout_s=0", r"logger\.wandb\.timeout_s: 0 is not allowed"),
        ("+logger.wandb.projct=a", r"logger\.wandb\.projct: unknown key; did you mean \"project\""),
    ],
)
def test_bad_values_are_one_line(override, words):
    with pytest.raises(ConfigError, match=words) as caught:
        configured("default", override)
    assert "\n" not in str(caught.value)


# --- together --------------------------------------------------------------------------------------------------------


def recorder(name: str, calls: list, fail: str = "") -> Logger:
    def note(what: str):
        def call(*args):
            calls.append((name, what, *args))
            if what == fail:
                raise RuntimeError(f"{name} {what}")

        return call

    return Logger(*(note(what) for what in Logger._fields))


def test_fan_out_tells_all_in_order(tmp_path):
    calls: list = []
    both = fan_out([recorder("a", calls), recorder("b", calls)])
    both.log({"env_steps": 1})
    both.sync()
    both.checkpoint(tmp_path, 1)
    both.close({"status": "finished"})
    wanted: list[tuple] = [
        ("log", {"env_steps": 1}),
        ("sync",),
        ("checkpoint", tmp_path, 1),
        ("close", {"status": "finished"}),
    ]
    assert calls == [(name, *call) for call in wanted for name in "ab"]


def test_all_are_closed_even_if_one_fails():
    calls: list = []
    both = fan_out([recorder("a", calls, fail="close"), recorder("b", calls)])
    with pytest.raises(RuntimeError, match="a close"):
        both.close({})
    assert [name for name, *_ in calls] == ["a", "b"]


def test_never_fatal_warns_once_and_falls_silent():
    calls: list = []
    warnings: list[str] = []
    safe = never_fatal("TensorBoard", recorder("a", calls, fail="log"), warnings.append)
    safe.log({})
    safe.log({})
    safe.close({})
    assert len(calls) == 1
    assert warnings == ["TensorBoard stopped: a log; the run goes on, its metrics are in metrics.jsonl"]


def test_make_gives_a_logger_for_each_member_and_one_display(tmp_path, capsys):
    config = configured("quiet", "logger.curve=true", "logger.tensorboard=true", "logger.progress=plain")
    infos = [info(tmp_path / "a" / str(i))._replace(id=f"run{i}") for i in range(3)]  # the folders are made
    members, display = loggers.make(config, infos)
    assert len(members) == 3
    rows = [{"env_steps": 100, "wall_s": 1.0, "eval/return_mean": float(i), "eval/return_std": 0.0} for i in range(3)]
    for member, row in zip(members, rows, strict=True):
        member.log(row)
        member.sync()
    display.log(rows)
    for member in members:
        member.close({"status": "finished"})
    display.close()
    for i in range(3):
        assert sorted(x.name for x in infos[i].dir.iterdir()) == ["curve.png", "metrics.jsonl", "tensorboard"]
        assert jsonl.read(infos[i].dir / jsonl.NAME) == [rows[i]]
    assert capsys.readouterr().out.count("return 1.0 mean 2.0 best") == 1


def test_lines_of_runs_that_begin_anew_are_kept(tmp_path, capsys):
    """No checkpoint of them is left, so the lines may be all that there is."""
    infos = [info(tmp_path / str(i)) for i in range(3)]
    for i in (0, 2):
        infos[i].dir.mkdir()
        (infos[i].dir / jsonl.NAME).write_text(f'{{"env_steps": {i}')  # killed while it wrote
    for said in (1, 0):
        members, _ = loggers.make(configured("quiet"), infos)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == said
        for i in range(3):
            kept = [path.read_text() for path in infos[i].dir.glob("metrics.before-*.jsonl")]
            assert kept == ([] if i == 1 else [f'{{"env_steps": {i}'])
            assert jsonl.read(infos[i].dir / jsonl.NAME) == []
        assert all(str(*infos[0].dir.glob("*before*")) in line and "1 more run" in line for line in lines)
        for member in members:
            member.close({})


def test_only_the_record_can_stop_a_run(tmp_path, monkeypatch, capsys):
    config = configured("quiet", "logger.curve=true", "logger.tensorboard=true")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(curve, "draw", fail)
    monkeypatch.setattr(tensorboard, "make", lambda _: Logger(log=fail))
    (member,), _ = loggers.make(config, [info(tmp_path)])
    member.log({"env_steps": 1, "wall_s": 1.0})
    member.log({"env_steps": 2, "wall_s": 2.0})
    member.close({"status": "finished"})
    warnings = capsys.readouterr().err.splitlines()
    picture = f"warning: {tmp_path / 'curve.png'}"
    assert [line.split(" stopped: ")[0] for line in warnings] == ["warning: TensorBoard", picture]
    assert len(jsonl.read(tmp_path / jsonl.NAME)) == 2

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / jsonl.NAME).symlink_to("/dev/full")
    (member,), _ = loggers.make(config, [info(tmp_path / "full")])
    with pytest.raises(OSError, match="No space left on device"):
        member.log({"env_steps": 1, "wall_s": 1.0})


def test_nothing_heavy_is_imported_before_it_is_used():
    program = (
        "import sys, rlexp.loggers\n"
        "heavy = {'wandb', 'matplotlib', 'tensorboardX', 'rich', 'jax', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import tempfile, pathlib\n"
        "from rlexp.loggers import curve, jsonl\n"
        "folder = pathlib.Path(tempfile.mkdtemp())\n"
        "row = {'env_steps': 1, 'wall_s': 1.0, 'eval/return_mean': 1.0}\n"
        "jsonl.make(folder / jsonl.NAME, start_env_steps=0).log(row)\n"
        "assert curve.draw(folder)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"  # pyplot holds global state, and may open a window
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def events(folder: Path) -> list[Any]:
    from tensorboardX.proto import event_pb2

    out = []
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length, its checksum, the event, its checksum
            (size,) = struct.unpack_from("<Q", data, at)
            event: Any = event_pb2.Event()  # type: ignore[attr-defined]
            event.ParseFromString(data[at + 12 : at + 12 + size])
            out.append(event)
            at += size + 16
    return out


def test_tensorboard_has_a_scalar_for_each_metric(tmp_path):
    logger = tensorboard.make(info(tmp_path))
    logger.log({"env_steps": 100, "wall_s": 2.0, "loss/policy": 0.5, "train/return_mean": None})
    logger.log({"env_steps": 200, "wall_s": 4.0, "loss/policy": 0.25})
    logger.close({})
    header, first, second = events(tmp_path)
    assert header.file_version == "brain.Event:2"
    assert (first.step, second.step) == (100, 200)
    assert {v.tag: v.simple_value for v in first.summary.value} == {"wall_s": 2.0, "loss/policy": 0.5}


def test_tensorboard_forgets_what_was_rolled_back(tmp_path):
    tensorboard.make(info(tmp_path)).close({})
    tensorboard.make(info(tmp_path, start_env_steps=100)).close({})
    *_, last = events(tmp_path)
    assert last.session_log.status == last.session_log.START
    assert last.step == 101  # TensorBoard drops this step and later ones
    assert len(os.listdir(tmp_path / "tensorboard")) == 2


def test_tensorboard_that_is_not_installed_is_one_line(monkeypatch):
    config = configured("tensorboard")
    loggers.check(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"logger\.tensorboard: .*pip install '\.\[tensorboard\]'"):
        loggers.check(config)
