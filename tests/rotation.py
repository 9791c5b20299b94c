"""Which tests run today: `--share=K/N` keeps one share of N, `--share=auto` the one whose turn it is by the number of commits.

Of the slow tests, the shares are made from tests/slow_costs.toml, so that each costs about the same, and tests that share something
expensive stay together. What has no row there lands in a share by its name. Of the others, the files of tests/quick_costs.toml take
turns, in at most twelve shares, and what has no row always runs. All shares together are all tests; without `--share` all run.
"""

import datetime
import subprocess
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

SHARES = 24
QUICK_SHARES = 12
SLOW_COSTS = Path(__file__).with_name("slow_costs.toml")
QUICK_COSTS = Path(__file__).with_name("quick_costs.toml")
LEFT_OUT = pytest.StashKey[list[str]]()
CHOICE = pytest.StashKey[str]()


def group_of(nodeid: str, rows: Iterable[str]) -> str:
    """The row that a test belongs to: its own, or its file's; with neither, its file."""
    test = nodeid.partition("[")[0]
    file = nodeid.partition("::")[0]
    return test if test in set(rows) else file


def assign(costs: dict[str, float], num_shares: int) -> dict[str, int]:
    """The share of each row, from 0: the most expensive first, each to the share that has least. Depends on the table alone, so
    that a new test moves no other."""
    load = [0.0] * num_shares
    share = {}
    for row, cost in sorted(costs.items(), key=lambda item: (-item[1], item[0])):
        share[row] = load.index(min(load))
        load[share[row]] += cost
    return share


def share_of(nodeid: str, costs: dict[str, float], num_shares: int) -> int:
    """From 0. Without a row: by name, which stays the same whatever else comes and goes."""
    group = group_of(nodeid, costs)
    return assign(costs, num_shares).get(group, zlib.crc32(group.encode()) % num_shares)


def read_costs(table: Path = SLOW_COSTS) -> dict[str, float]:
    return tomllib.loads(table.read_text())


def _git(root: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def turn(root: Path, today: datetime.date) -> tuple[int, str]:
    """A number that goes on by one with each commit, and what it is; where the commits cannot be counted, with each day."""
    try:
        if _git(root, "rev-parse", "--is-shallow-repository") == "false":
            count = int(_git(root, "rev-list", "--count", "HEAD"))
            return count, f"commit number {count}"
        why = "a shallow clone cannot count its commits"
    except (OSError, subprocess.SubprocessError):
        why = "no git repository counts commits here"
    return today.toordinal(), f"by the day, since {why}"


def parse(option: str, root: Path) -> tuple[int, int, str]:
    """Share, from 0, how many there are, and why this one."""
    if option == "auto":
        number, why = turn(root, datetime.datetime.now(datetime.UTC).date())
        return number % SHARES, SHARES, why
    try:
        share, num_shares = map(int, option.split("/"))
    except ValueError:
        share, num_shares = 0, 0
    if not 1 <= share <= num_shares:
        raise pytest.UsageError(f"--share={option}: wants auto, or K/N with 1 <= K <= N, such as 2/{SHARES}")
    return share - 1, num_shares, "as asked"


def quick_share(share: int, num_shares: int) -> tuple[int, int]:
    """The share, from 0, of the files that take turns in `make test`, and how many there are."""
    num_quick = min(num_shares, QUICK_SHARES)
    return share % num_quick, num_quick


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", metavar="K/N", help="of tests that take turns, only this share, or `auto`: the one whose turn it is"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chosen once, here: workers are given the share itself."""
    if option := config.getoption("share"):
        share, num_shares, why = parse(option, config.rootpath)
        config.option.share = f"{share + 1}/{num_shares}"
        quick, num_quick = quick_share(share, num_shares)
        others = f"{quick + 1} of {num_quick} of the others that take turns"
        config.stash[CHOICE] = f"share {share + 1} of {num_shares} of the slow tests, {others} ({why})"
    config.stash[LEFT_OUT] = []


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.stash.get(CHOICE, None)


@pytest.hookimpl(trylast=True)  # after -m and -k: what they leave out is not ours to tell of
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (option := config.getoption("share")):
        return
    share, num_shares, _ = parse(option, config.rootpath)
    slow_costs = read_costs()
    quick, num_quick = quick_share(share, num_shares)
    turns = assign(read_costs(QUICK_COSTS), num_quick)

    def waits(item: pytest.Item) -> bool:
        if item.get_closest_marker("slow"):
            return share_of(item.nodeid, slow_costs, num_shares) != share
        return turns.get(item.nodeid.partition("::")[0], quick) != quick

    left = [item for item in items if waits(item)]
    config.stash[LEFT_OUT] = [
        item.nodeid.partition("[" if item.get_closest_marker("slow") else "::")[0] for item in left
    ]
    config.hook.pytest_deselected(items=left)
    out = set(left)
    items[:] = [item for item in items if item not in out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it left out: with workers, only they collect."""
    if output := getattr(session.config, "workeroutput", None):
        output["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    if left := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = left


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if not (left := config.stash[LEFT_OUT]):
        return
    terminalreporter.section("left for another day")
    terminalreporter.write_line(f"{len(left)} tests; this was {config.stash[CHOICE]}; `make test-all` runs all")
    for name, count in sorted(Counter(left).items()):
        terminalreporter.write_line(name + (f" ({count})" if count > 1 else ""))
