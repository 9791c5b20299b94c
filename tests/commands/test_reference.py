"""docs/reference.md and what completion knows are what the schema says."""

from pathlib import Path

from rlexp.commands import reference

ROOT = Path(__file__).resolve().parents[2]


def test_both_are_current(capsys):
    """`make reference` writes them anew."""
    assert (ROOT / "docs/reference.md").read_text() == reference.page()
    reference.main(["--keys"])
    assert (ROOT / "rlexp/commands/keys.json").read_text() == capsys.readouterr().out


def test_every_kind_of_type_and_bound_is_told():
    rows = reference.page().splitlines()
    for row in (
        "| `seed` | whole number ≥ 0, < 2^32 | `0` | Seed of everything",
        "| `algo.hp.gamma` | number ≥ 0, ≤ 1 | `0.99` | *Traced.* Discount",
        "| `eval.mode` | `greedy`, `sampled` | `greedy` | *Host.*",
        "| `network.hidden` | list of whole number ≥ 1, < 2^31 | `[64, 64]` | Units",
        "| `env.info` | {name: `last`, `mean`, `max`, `sum`} | `{}` |",
        "| `network.shared_trunk` | `true`, `false` | `false` |",
        "| `algo.source.capacity` | whole number ≥ 1, < 2^31",
        "| `debug.nans` | `true`, `false` | `false` |",
    ):
        assert [line for line in rows if line.startswith(row)], row
    assert not [line for line in rows if line.startswith("| `") and line.endswith("|  |")]  # each has a doc
