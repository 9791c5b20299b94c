"""Shares of the slow tests: each test in exactly one, of equal cost, told where they are left out. And budgets, which are told."""

import datetime
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import budgets
import pytest
import rotation

TESTS = Path(rotation.__file__).parent
TODAY = datetime.date(2026, 1, 1)
SLOW = """
import pytest
pytestmark = pytest.mark.slow

@pytest.mark.parametrize("x", [1, 2])
def test_one(x): pass
def test_two(): pass
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A repository of two commits with eight files of slow tests, of which the table knows two, and eight of quick ones, of which
    the other table knows seven."""
    root = tmp_path_factory.mktemp("project")
    (root / "tests/house").mkdir(parents=True)
    (root / "pytest.ini").write_text(
        "[pytest]\npythonpath = tests\ntestpaths = tests\nmarkers =\n    slow: takes long\naddopts = --import-mode=importlib\n"
    )
    for name in ("rotation.py", "budgets.py"):
        shutil.copy(TESTS / name, root / "tests")
    (root / "tests/conftest.py").write_text('pytest_plugins = ["rotation", "budgets"]\n')
    (root / "tests/slow_costs.toml").write_text(
        '"tests/house/test_0.py" = 40\n"tests/house/test_1.py::test_one" = 30\n"tests/house/test_1.py" = 30\n'
    )
    for i in range(8):
        (root / f"tests/house/test_{i}.py").write_text(SLOW)
    (root / "tests/house/test_quick.py").write_text("def test_quick(): pass\n")
    for i in range(7):
        (root / f"tests/house/test_quick_{i}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (root / "tests/quick_costs.toml").write_text("".join(f'"tests/house/test_quick_{i}.py" = 20\n' for i in range(7)))
    (root / "CONTRIBUTING.md").write_text("| `tests/house` | 0 | 900 |\n")
    git(root, "init", "-q")
    for message in ("one", "two"):
        git(root, "add", "-A")
        git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", message)
    return root


def git(root: Path, *command: str) -> None:
    subprocess.run(["git", *command], cwd=root, check=True, capture_output=True)


def pytest_in(root: Path, *arguments: str, code: int = 0) -> str:
    plugins = ["-p", "no:cacheprovider", *(["-p", "xdist"] if "-n1" in arguments else [])]
    own = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those that are installed take longer than the tests
    command = [sys.executable, "-m", "pytest", *plugins, "-v", *arguments]
    done = subprocess.run(command, cwd=root, text=True, capture_output=True, env=own)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_each_test_is_in_one_share_and_what_is_left_out_is_told(project):
    ran, left = [], []
    for share in range(4):
        out = pytest_in(project, f"--share={share + 1}/4", *(["-n1"] if share == 1 else []))
        out, _, told = out.partition("left for another day")
        names = set(re.findall(r"(tests/\S+::\S+)", out)) - {"tests/house/test_quick.py::test_quick"}
        assert "tests/house/test_quick.py::test_quick" in out
        ran += names
        assert f"share {share + 1} of 4" in told and "make test-all" in told
        left += [name for name, _ in re.findall(r"^(tests/\S+)( \(2\))?$", told, re.MULTILINE)]
        assert f"{38 - len(names)} tests" in told
    slow = [(f"tests/house/test_{i}.py", test) for i in range(8) for test in ("test_one[1]", "test_one[2]", "test_two")]
    quick = [(f"tests/house/test_quick_{i}.py", test) for i in range(7) for test in ("test_one", "test_two")]
    assert sorted(ran) == sorted(f"{file}::{test}" for file, test in slow + quick)
    told_slow = {f"{file}::{test.partition('[')[0]}" for file, test in slow}
    assert sorted(left) == sorted(3 * [*told_slow, *{file for file, _ in quick}])
    for i in (0, 2, 3, 4, 5, 6, 7):  # what has no row of its own stays with its file
        shares = {rotation.share_of(name, rotation.read_costs(), 4) for name in ran if f"test_{i}.py" in name}
        assert len(shares) == 1


def test_what_takes_turns_comes_every_twelfth_time_and_all_of_it_where_all_is_asked_for(project):
    """Shares of slow tests may be many: a run of `make test` has one of at most twelve."""
    assert [rotation.quick_share(share, 24) for share in range(24)] == 2 * [(share, 12) for share in range(12)]
    run, _, told = pytest_in(project, "-m", "not slow", "--share=14/24", "--collect-only", "-qq").partition("left for")
    # The second of twelve shares, of which seven have a file.
    assert re.findall(r"test_quick_(\d)\.py::test_one", run) == ["1"]
    assert told.count("test_quick_") == 6 and "house/test_0" not in told  # slow ones were not asked for
    assert "39 tests collected" in pytest_in(project, "--share=1/1", "--collect-only", "-qq")


def test_the_turn_goes_on_with_each_commit(project, tmp_path):
    assert rotation.turn(project, TODAY) == (2, "commit number 2")
    out = pytest_in(project, "--share=auto", "--collect-only", "-q")
    choice = (
        f"share 3 of {rotation.SHARES} of the slow tests, 3 of {rotation.QUICK_SHARES} of the others that take turns"
    )
    assert f"{choice} (commit number 2)" in out
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{project}", "shallow")
    (tmp_path / "none").mkdir()
    for name, why in (("shallow", "a shallow clone"), ("none", "no git repository")):
        number, said = rotation.turn(tmp_path / name, TODAY)
        assert number == TODAY.toordinal() and said.startswith("by the day") and why in said
        assert rotation.turn(tmp_path / name, TODAY + datetime.timedelta(1))[0] == number + 1
    for wrong in ("5/4", "0/4", "4", "a/b"):
        assert f"--share={wrong}: wants auto" in pytest_in(project, f"--share={wrong}", code=4)


def test_what_is_new_moves_nothing_else_and_lands_somewhere():
    costs = {f"tests/a/test_{i}.py": 10.0 + i for i in range(9)}
    known = rotation.assign(costs, 4)
    load = [sum(costs[row] for row in costs if known[row] == share) for share in range(4)]
    assert max(load) - min(load) <= 18 and set(known.values()) == {0, 1, 2, 3}
    found = {rotation.share_of(f"tests/b/test_{i}.py::test_x[{i}]", costs, 4) for i in range(40)}
    assert found == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("table", "num_shares", "minutes"),
    [(rotation.SLOW_COSTS, rotation.SHARES, 10), (rotation.QUICK_COSTS, rotation.QUICK_SHARES, 2)],
    ids=["slow", "quick"],
)
def test_a_table_is_of_tests_that_are_there_and_its_shares_fit_into_ci(table, num_shares, minutes):
    """CI has two cores: minutes for a share of the slow tests, and of the others, of which many always run."""
    costs = rotation.read_costs(table)
    for row in costs:
        file, _, test = row.partition("::")
        assert f"def {test}(" in (TESTS.parent / file).read_text() if test else (TESTS.parent / file).is_file(), row
    shares = rotation.assign(costs, num_shares)
    load = [sum(cost for row, cost in costs.items() if shares[row] == k) for k in range(num_shares)]
    assert max(load) <= 1.15 * sum(load) / len(load)
    assert max(load) <= minutes * 60 * 2


def test_a_broken_budget_is_told_and_fails_nothing(project):
    used = {("a", False): 11.0, ("a", True): 5.0, ("b", False): 7.0, ("c", False): 1.0}
    text = "| Folder | `make test` | slow |\n|---|---|---|\n| `tests/a` | 10 | 20 |\n| `tests/b` | 8 | 0 |\n"
    assert budgets.broken(used, budgets.read_budgets(text)) == [
        "tests/a: tests took 11 s of CPU, the budget is 10 s",
        "tests/c has no budget in CONTRIBUTING.md; its tests took 1 s of CPU",
    ]
    table = budgets.read_budgets((TESTS.parent / "CONTRIBUTING.md").read_text())
    assert len(table) > 20 and set(table) <= {path.parent.name for path in TESTS.glob("*/test_*.py")}
    (project / "tests/house/test_busy.py").write_text("def test_busy(): sum(x * x for x in range(10**6))\n")
    try:
        out = pytest_in(project, "-n1", "-m", "not slow")
    finally:
        (project / "tests/house/test_busy.py").unlink()
    assert re.search(r"tests/house: tests took \d+ s of CPU, the budget is 0 s", out)
