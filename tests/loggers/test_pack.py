"""A pack's rows, checkpoints and end as those of one run."""

from pathlib import Path

import pytest

from rlexp.loggers import Logger, RunInfo, jsonl, pack


class Told:
    """A Logger that remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def logger(self) -> Logger:
        tell = lambda what: lambda *args: self.calls.append((what, *args))  # noqa: E731
        return Logger(tell("log"), tell("checkpoint"), tell("close"), tell("sync"))


def row(step: int, value: float | None) -> dict:
    return {"env_steps": step, "wall_s": 1.0, "loss/value": value}


def info(folder: Path, i: int, **config: object) -> RunInfo:
    return RunInfo(folder / str(i), f"id{i}", {"seed": 1} | config, 1000, 0, 0.0)


def test_a_row_is_of_those_that_have_a_number():
    assert pack.merge([row(1, 2.0), row(1, None), row(1, 4.0)]) == {
        "env_steps": 1,
        "wall_s": 1.0,
        "pack/members": 3,
        "loss/value": 3.0,
        "loss/value/std": 1.0,
    }
    assert "loss/value" not in pack.merge([row(1, None), row(1, None)])


def test_a_step_is_told_when_all_have_come():
    told = Told()
    first, second = pack.members(told.logger(), 2)
    first.log(row(1, 1.0))
    assert told.calls == []
    second.log(row(1, 3.0))
    assert [call[1]["loss/value"] for call in told.calls] == [2.0]


def test_a_step_that_is_not_whole_is_told_with_the_next_or_before_a_checkpoint():
    told = Told()
    first, _ = pack.members(told.logger(), 2)  # the other one failed
    first.log(row(1, 1.0))
    first.log(row(2, 2.0))
    assert [call[1]["env_steps"] for call in told.calls] == [1]
    first.sync()
    assert [call[1]["env_steps"] for call in told.calls] == [1, 2]


def test_the_best_members_checkpoint_is_told_before_the_end():
    told = Told()
    loggers = pack.members(told.logger(), 4)
    for i, logger in enumerate(loggers):
        logger.checkpoint(Path(str(i)), 100)
    endings = [("finished", 1.0), ("finished", 3.0), ("failed", 9.0), ("finished", None)]
    for logger, (status, objective) in zip(loggers, endings, strict=True):
        assert told.calls == []
        logger.close({"status": status, "objective": objective, "env_steps": 100})
    assert [call[0] for call in told.calls] == ["checkpoint", "close"]
    assert told.calls[0] == ("checkpoint", Path("1"), 100)
    summary = told.calls[1][1]
    assert summary["objective"] == 2.0
    assert summary["objective/best"] == 3.0
    assert (summary["status"], summary["pack/members"], summary["pack/failed"]) == ("finished", 3, 1)


def test_a_pack_in_which_all_failed_has_no_checkpoint_and_says_why():
    told = Told()
    loggers = pack.members(told.logger(), 2)
    for logger in loggers:
        logger.checkpoint(Path("there"), 100)
        logger.close({"status": "failed", "objective": 1.0, "error": "why"})
    ((what, summary),) = told.calls
    assert what == "close"
    assert (summary["status"], summary["error"], summary["objective"]) == ("failed", "why", None)


def test_what_differs_is_a_list_and_the_rest_is_as_it_was(tmp_path):
    infos = [info(tmp_path, i, algo={"hp": {"lr": i / 10, "gamma": 0.9}, "empty": {}}) for i in range(3)]
    one = pack.merged(infos)
    assert one.config == {"seed": 1, "algo": {"hp": {"lr": [0.0, 0.1, 0.2], "gamma": 0.9}, "empty": {}}}
    assert infos[0].config["algo"]["hp"]["lr"] == 0.0  # theirs are not touched
    assert one.dir == tmp_path


def test_the_id_follows_from_the_members(tmp_path):
    infos = [info(tmp_path, i) for i in range(3)]
    one = pack.merged(infos)
    assert len(one.id) == 8
    assert pack.merged(infos[::-1]).id == one.id
    assert pack.merged(infos[:2]).id != one.id


@pytest.mark.parametrize("reverse", [False, True])
def test_the_history_is_what_was_told(tmp_path, reverse):
    """Also of a step at which a member was out already, whichever it was."""
    infos = [info(tmp_path, i) for i in range(2)][:: -1 if reverse else 1]
    told = Told()
    together = pack.members(told.logger(), 2)
    for one in infos:
        one.dir.mkdir()
    records = [jsonl.make(one.dir / jsonl.NAME, start_env_steps=0) for one in infos]
    for step in (1, 2, 3):
        for i, (record, logger) in enumerate(zip(records, together, strict=True)):
            if i == 0 or step < 2:
                record.log(row(step, 0.1 * step + i))
                logger.log(row(step, 0.1 * step + i))
    together[0].sync()
    assert pack.history(infos) == [call[1] for call in told.calls]
    assert [line["pack/members"] for line in pack.history(infos)] == [2, 1, 1]
    for record in records:
        record.close({})
