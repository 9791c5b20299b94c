"""What resets cost: the page has what was measured, and who waits is counted."""

import json
import os

from benchmarks import resets
from benchmarks.measure import ROOT

DOCS, KEPT = ROOT / "docs" / "environments.md", ROOT / "benchmarks" / "results"


def test_the_page_has_what_was_measured():
    """`UPDATE_GOLDEN=1` writes the page anew."""
    for part, cases in resets.CASES.items():
        kept = json.loads((KEPT / f"{part}.json").read_text())
        assert kept["settings"] == json.loads(json.dumps([case._asdict() for case in cases]))
        every = {resets._name(case, num_envs): case.sides for case in cases for num_envs in case.num_envs}
        assert list(kept["samples"]) == list(every)
        for name, sides in kept["samples"].items():
            assert tuple(sides) == every[name] and all(len(of_side) >= 5 for of_side in sides.values())
    page = resets.with_table(DOCS.read_text(), KEPT)
    if os.environ.get("UPDATE_GOLDEN"):
        DOCS.write_text(page)
    assert DOCS.read_text() == page


def test_who_waits_is_counted():
    """CartPole at random ends every 22 steps or so: with 2 resets a step, 256 environments wait for most of the time."""
    case = resets.Case("gymnax/cartpole", (256,), 256 * 64, 256 * 64)
    waits = {}
    for side, kind in resets.SIDES.items():
        ask = resets._played(case, 256, kind, quick=False)
        ask(0)
        waits[side] = ask(1)[resets.WAITS]
    assert waits.pop("`2`") > 0.5
    assert waits.pop("`share`") > waits.pop("`auto`") == waits.pop("each resets itself") == 0.0
