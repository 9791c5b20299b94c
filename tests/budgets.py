"""What each folder of tests costs, in CPU seconds of its tests and of the processes that they start and await, against the budget
that CONTRIBUTING.md gives it. CPU seconds, since wall time is that of whatever else runs on a machine. A run that breaks a
budget is told, and passes: what a machine is slow at is no mistake of a test.

`--costs=FILE` writes what each test took: CPU seconds, seconds, name; the most expensive first. Then rows for
tests/slow_costs.toml, of the slow tests that ran, and what each folder used.
"""

import re
import resource
from collections import defaultdict
from pathlib import Path

import pytest
import rotation

ROW = re.compile(r"^\| `tests/(\S+)` +\| +(\d+) +\| +(\d+) +\|$", re.MULTILINE)


def read_budgets(text: str) -> dict[str, tuple[int, int]]:
    """Of each folder: CPU seconds in `make test`, and of its slow tests."""
    return {folder: (int(quick), int(slow)) for folder, quick, slow in ROW.findall(text)}


def cpu_s() -> float:
    """Of this process and of its children that have ended."""
    usage = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usage)


def broken(used: dict[tuple[str, bool], float], budgets: dict[str, tuple[int, int]]) -> list[str]:
    """One line for each budget that was not kept. `used` is by folder, and by whether the tests are slow."""
    lines = []
    for (folder, slow), seconds in sorted(used.items()):
        kind = "slow tests" if slow else "tests"
        if folder not in budgets:
            lines.append(f"tests/{folder} has no budget in CONTRIBUTING.md; its {kind} took {seconds:.0f} s of CPU")
        elif seconds > (budget := budgets[folder][slow]):
            lines.append(f"tests/{folder}: {kind} took {seconds:.0f} s of CPU, the budget is {budget} s")
    return lines


class Meter:
    """Counts where tests run; sums up where the summary is written."""

    def __init__(self) -> None:
        self._mark = cpu_s()
        self.tests: dict[str, list] = defaultdict(lambda: [0.0, 0.0, False])

    def pytest_runtest_logstart(self) -> None:
        self._mark = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = cpu_s()
        report.cpu_s, self._mark = now - self._mark, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[report.nodeid]
        test[0] += getattr(report, "cpu_s", 0.0)  # none, where a worker died
        test[1] += report.duration
        test[2] = "slow" in report.keywords

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter, config: pytest.Config) -> None:
        used: dict[tuple[str, bool], float] = defaultdict(float)
        for nodeid, (cpu, _, slow) in self.tests.items():
            used[Path(nodeid.partition("::")[0]).parent.name, slow] += cpu
        contributing = config.rootpath / "CONTRIBUTING.md"
        if contributing.exists() and (lines := broken(used, read_budgets(contributing.read_text()))):
            terminalreporter.section("budgets broken")
            for line in lines:
                terminalreporter.write_line(line)
        if path := config.getoption("costs"):
            Path(path).write_text("\n".join(self._costs(used)) + "\n")

    def _costs(self, used: dict[tuple[str, bool], float]) -> list[str]:
        ordered = sorted(self.tests.items(), key=lambda item: -item[1][0])
        rows: dict[str, float] = defaultdict(float)
        for nodeid, (cpu, seconds, slow) in self.tests.items():
            if slow:  # one that waits keeps a worker from other work as well
                rows[rotation.group_of(nodeid, rotation.read_costs())] += max(cpu, seconds)
        return [
            *(f"{cpu:8.1f} {seconds:8.1f} {nodeid}" for nodeid, (cpu, seconds, _) in ordered),
            *(f'"{row}" = {cost:.0f}' for row, cost in sorted(rows.items())),
            *(f"tests/{folder}{' slow' * slow}: {cpu:.0f} s of CPU" for (folder, slow), cpu in sorted(used.items())),
        ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write what each test took: CPU seconds, seconds, name")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Meter(), "meter")
