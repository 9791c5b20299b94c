"""A sweep that hands over its jobs batch by batch, with the training left out."""

import sys

import pytest
from support import QUIET, SMALL

from rlexp import __main__ as cli
from rlexp import compose
from rlexp.overrides import quoted
from rlexp.sweep import hydra_jobs, packs
from rlexp.sweep.manifest import Manifest

from .searches import LR


@pytest.mark.slow
def test_a_batch_has_the_program_of_the_one_before(tmp_path, monkeypatch):
    """Whatever the sweeper asks for, if only data of the program differ."""
    traced, trained, trace = [], [], packs.trace

    def train_pack(members, *, traced, **how):
        trained.append(traced)
        return [{"status": "finished", "objective": float(i)} for i in range(len(members))]

    for module in (compose, hydra_jobs):  # Hydra's log would keep the streams of this test
        monkeypatch.setattr(module, "configure_log", lambda *_: None)
    monkeypatch.setattr(packs, "trace", lambda *given: (traced.append(given), trace(*given))[1])
    monkeypatch.setattr(packs, "train_pack", train_pack)
    search = ["sweeper=optuna", LR, "sweeper.num_trials=4", "sweeper.batch=2"]
    line = ["-m", *search, *SMALL, *QUIET, quoted("hydra.sweep.dir", str(tmp_path / "sweep"))]
    monkeypatch.setattr(sys, "argv", ["rlexp", *line])
    cli.main()
    jobs = Manifest(tmp_path / "sweep").jobs()
    assert [job.status for job in jobs] == ["finished"] * 4 and len({job.pack for job in jobs}) == 2
    assert len(trained) == 2 and len(traced) == 1
