"""`python -m benchmarks same`: what counts as a difference, and what is only new. The runs themselves are not repeated here."""

import subprocess

import pytest

from benchmarks import __main__ as cli
from benchmarks import same
from benchmarks.measure import Failed

LINE = {"env_steps": 128, "wall_s": 1.0, "time/chunk_s": 0.1, "loss/policy": 0.5, "train/return_mean": None}


def test_clocks_and_what_is_new_are_no_differences():
    ours = [{"env_steps": 0, "eval/return_mean": 1.0}, LINE | {"wall_s": 2.0, "time/chunk_s": 9.0, "agent_steps": 120}]
    assert same.compare_lines([LINE], ours) == ([], ["a line at 0", "agent_steps"])


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ([LINE | {"loss/policy": 0.5 + 1e-16 * 2}], "loss/policy at 128 differs"),
        ([LINE | {"train/return_mean": 0.0}], "train/return_mean at 128 differs"),
        ([{k: v for k, v in LINE.items() if k != "loss/policy"}], "loss/policy at 128 differs"),
        ([], "the line at 128 is gone"),
    ],
)
def test_the_last_bit_counts(ours, told):
    assert same.compare_lines([LINE], ours)[0] == [told]


def test_every_algorithm_and_precision_is_compared_in_every_way():
    names = [case.name for case in same.cases()]
    assert len(names) == len(set(names)) and len(names) >= 12
    for algo in same.ALGORITHMS:
        assert any(name.startswith(f"two processes, {algo}") for name in names)
        assert any(name.startswith(f"cut and resumed, {algo}") for name in names)


def test_what_is_no_commit_is_told(capsys):
    assert cli.main(["same", "no-such-commit"]) == 1
    assert capsys.readouterr().err == "same: 'no-such-commit' is no commit\n"
    with pytest.raises(Failed):
        same.checkout("also-none")


def test_a_command_that_fails_is_told_by_its_last_line():
    process = subprocess.Popen(
        ["sh", "-c", "echo one; echo two; exit 3"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with pytest.raises(Failed, match="the job ended with exit code 3: two"):
        same._finish(process, ["the job"])
