"""A tournament that goes on: pods whose entries are lost are entered again, and at the end it is told how far it has come."""

import dataclasses
import json
from pathlib import Path

import pytest

from rlexp.storage import rundir, store
from rlexp.sweep import leaderboard
from rlexp.sweep.leaderboard import best, place
from rlexp.sweep.lineage import GENERATION, PARENT
from rlexp.sweep.manifest import Manifest

from .tournaments import ENTROPY, LR, WORK, board, tournament_of


@pytest.fixture
def ended(tmp_path, monkeypatch) -> Path:
    """Four pods of the first age that have finished, as the sweep, their lines and their checkpoints have them."""
    manifest, metas = Manifest(tmp_path), {}
    for number, trial in enumerate(next(tournament_of(tmp_path, *WORK).batches)[:4]):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        rundir.write_json(run_dir / "environment.json", {"run_id": f"{number:08x}"})
        line = {"env_steps": 64, "eval/return_mean": number + 0.1, "eval/return_std": 0.5}
        (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        told = {GENERATION: 0, PARENT: number, f"population/{LR}": 1e-3, f"population/{ENTROPY}": 0.01}
        meta = {"told": [told], "env_steps": 64, "update": 2, "members": [{"run_id": f"{number:08x}"}]}
        metas[store.checkpoints(run_dir)] = meta
        manifest.add(number, trial, str(number))
        manifest.change([number], status="finished", objective=number + 0.1)
    monkeypatch.setattr("rlexp.storage.checkpoint.latest_meta", metas.get)
    return tmp_path


def test_a_pod_whose_entry_is_lost_is_entered_again_where_the_sweep_goes_on(ended, capsys):
    """Each of them, as often as it goes on; the best are kept."""
    next(tournament_of(ended, *WORK).batches)
    whole = board(ended)
    assert [entry["pod"] for entry in whole.values()] == [2, 3] and not whole["leaderboard/0/1/3.json"]["is_over"]
    gone, damaged = (ended / path for path in whole)
    gone.unlink()
    damaged.write_bytes(damaged.read_bytes()[:40])
    next(tournament_of(ended, *WORK).batches)
    assert board(ended) == whole
    assert {line.rpartition("; ")[2] for line in capsys.readouterr().out.splitlines()} == {"it is left out"}


def told_at_the_end(directory: Path, results: list[float | None], capsys: pytest.CaptureFixture[str]) -> str:
    batches = tournament_of(directory, *WORK).batches
    next(batches)
    with pytest.raises(StopIteration):
        batches.send(results)
    return capsys.readouterr().out


def test_the_best_is_who_leads_and_how_far_it_has_come_is_told(ended, capsys):
    """Job 3 has the highest mean and job 2 the highest lower end. Pods of two ages are lost."""
    line = {"env_steps": 64, "eval/return_mean": 3.1, "eval/return_std": 9.0}
    (ended / "3" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    results: list[float | None] = [0.1, 1.1, 2.1, 3.1, *[None] * 8]
    told = told_at_the_end(ended, results, capsys)
    assert told == "the tournament: the best pod is job 2 with 2.1, at 64 of 192 environment steps\n"
    for pod, mean, half in ((10, 5.0, 3.0), (11, 4.0, 1.0)):
        of_pod = {"pod": pod, "age": 3, "env_steps": 192, "mean": mean, "low": mean - half}
        leaderboard.enter(place(ended, 0, 3), dataclasses.replace(best(place(ended, 0, 1))[0], **of_pod), keep=2)
    told = told_at_the_end(ended, [*results[:10], 5.0, 4.0], capsys)
    assert told == "the tournament: the best of the last 4 pods is job 11 with 4\n"


def test_a_pod_that_is_not_what_the_sweep_was_told_of_is_not_entered_again(ended, capsys):
    """Somebody has gone on with one alone; another failed, one's lines are damaged, and one is of another sweep."""
    manifest = Manifest(ended)
    with (ended / "3" / "metrics.jsonl").open("a") as lines:
        lines.write('{"env_steps": 192, "eval/return_mean": 9.0, "eval/return_std": 0.0}\n')
    manifest.change([2], status="failed")
    (ended / "1" / "metrics.jsonl").write_text("[]\n[]\n")
    manifest.change([0], overrides='["seed=7"]')
    next(tournament_of(ended, *WORK).batches)
    assert not board(ended)
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith("job 1 has no entry in the leaderboard: ") and told.endswith("without it there is no score")
