"""`python -m benchmarks [part] [part] ...`: measures, prints tables, writes JSON; all parts by default.

`python -m benchmarks same BASE` measures nothing: it holds this tree against another commit, bit for bit.
`python -m benchmarks environments [OPTION ...]` makes the table of docs/environments.md, `python -m benchmarks gymnax [ENV ...]`
that of docs/gymnax.md, `python -m benchmarks suites_recipes [SUITE/NAME ...]` that of other suites' recipes.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks import (
    batch,
    cleanrl,
    costs,
    devices,
    driving,
    environments,
    gpu,
    halving,
    host,
    inference,
    lag,
    overhead,
    population,
    recipes,
    rejax,
    replay,
    resets,
    roofline,
    same,
    scaling,
    schedules,
    sources,
    startup,
    suites,
    suites_recipes,
    sweep,
    trunk,
)
from benchmarks.measure import BENCH, Failed

# part -> (what measures it, rounds). Rejax's, batch's and sources' rounds are also their seeds; lag has its own.
PARTS = {
    "rejax": (rejax.measure, 8),
    "overhead": (overhead.measure, 5),
    "startup": (startup.measure, 7),
    "costs": (costs.measure, 5),
    "costs_packed": (costs.measure_packed, 5),
    "devices": (devices.measure, 5),
    "scaling": (scaling.measure, 1),
    "sweep": (sweep.measure, 5),
    "population": (population.measure, 5),
    "halving": (halving.measure, 5),
    "schedules": (schedules.measure, 10),
    "batch": (batch.measure, 8),
    "batch_wide": (batch.measure_wide, 5),
    "driving": (driving.measure, 5),
    **{f"driving_{name}": (partial(driving.measure, recipe=name), 3) for name in driving.RECIPES if name != "ppo"},
    "replay": (replay.measure, 5),
    "rejax_replay": (rejax.measure_replay, 5),
    "host": (host.measure, 5),
    "inference": (inference.measure, 5),
    "cleanrl": (cleanrl.measure, 5),
    "sources": (sources.measure, 8),
    "lag": (lag.measure, 1),
    "gpu": (gpu.measure, 8),
    "roofline": (roofline.measure, 5),
    **{part: (partial(resets.measure, part=part), 5) for part in resets.CASES},
    "suites": (suites.measure, 5),
    **{f"suites_{key}": (partial(suites.measure, tasks=(key,)), 5) for key in suites.TASKS},
    "trunk": (trunk.measure, 5),
}
# Another part measures the same and more, or they take an hour.
_BY_NAME_ALONE = (
    "costs_packed",
    *(part for part in resets.CASES if part != "resets"),
    *(f"driving_{name}" for name in driving.RECIPES if name != "ppo"),
    *(f"suites_{key}" for key in suites.TASKS),
)
RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 where a part could not be measured. A bound that is missed is told, and is no failure."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["same"]:
        return same.main(given[1:], _say)
    if given[:1] == ["environments"]:
        return environments.main(given[1:], _say)
    if given[:1] == ["gymnax"]:
        return recipes.main(given[1:], _say)
    if given[:1] == ["suites_recipes"]:
        return suites_recipes.main(given[1:], _say)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, help="samples of each side; at least 5 for numbers that are kept")
    parser.add_argument(
        "--quick", action="store_true", help="tiny work, 1 round: tries the benchmarks, measures nothing"
    )
    parser.add_argument("--out", type=Path, help="folder of the result files (benchmarks/results)")
    chosen = parser.parse_args(given)
    unknown = [part for part in chosen.parts if part not in PARTS]
    if unknown:
        parser.error(f"no such part: {unknown[0]}; allowed: {', '.join(PARTS)}")
    if chosen.rounds is not None and chosen.rounds < 1:
        parser.error(f"--rounds: {chosen.rounds} is not at least 1")
    out = chosen.out or (BENCH / "quick" if chosen.quick else RESULTS)
    failed = False
    for part in chosen.parts or [part for part in PARTS if part not in _BY_NAME_ALONE]:
        measure, rounds = PARTS[part]
        rounds = chosen.rounds or (1 if chosen.quick else rounds)
        began = time.perf_counter()
        _say(f"{part}: {rounds} rounds")
        try:
            measure(out, rounds=rounds, quick=chosen.quick, say=_say)
        except Failed as error:
            failed = True
            print(f"{part}: not measured: {error}", file=sys.stderr)
        _say(f"{part}: {time.perf_counter() - began:.0f} s")
    return int(failed)


def _say(text: str) -> None:
    """Progress goes to stderr, so that stdout has the tables only."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
