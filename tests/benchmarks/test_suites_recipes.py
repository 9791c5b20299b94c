"""The recipes of suites: the page, the recipes' own lines and what is kept of their scores agree."""

import json
from pathlib import Path

import pytest
import yaml
from suites import need

from benchmarks import recipes, suites_recipes
from benchmarks.measure import Failed
from rlexp import compose, experiment

KEPT = recipes.read(suites_recipes.KEPT)
GOLDEN = Path(__file__).parents[1] / "config" / "golden"
SCORE = {"algo": "pqn", "asked_steps": 1000, "env_steps": 1024, "seconds": 9, "machine": "1 cores, a CPU"}
ROW = {"score": SCORE | {"settings": "0", "seeds": [0, 1], "mean": 0.5, "worst": 0.25}, "random": 0.125}


def test_recipes_are_those_of_suites_alone():
    assert {"navix/empty_5x5", "navix/door_key_5x5"} < set(suites_recipes.names())
    assert not any(name.startswith(("gymnax/", "driving/")) for name in suites_recipes.names())
    assert set(KEPT) <= set(suites_recipes.names())


def test_the_page_says_what_is_kept():
    page = suites_recipes.DOCS.read_text()
    assert suites_recipes.with_table(page, KEPT) == page
    assert suites_recipes.with_table(page, KEPT | {"navix/empty_5x5": ROW}) != page


@pytest.mark.parametrize("name", KEPT)
def test_a_recipe_says_what_is_kept(name):
    lines = (suites_recipes.CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert recipes.expectation(KEPT[name]) in lines


@pytest.mark.parametrize("name", [name for name in KEPT if "score" in KEPT[name]])
def test_a_score_is_of_the_recipe_as_it_is(name):
    score = KEPT[name]["score"]
    assert score["settings"] == recipes.fingerprint((GOLDEN / f"{name}.yaml").read_text()), "score it again"
    assert score["seeds"] == list(suites_recipes.seeds(name, len(score["returns"])))
    assert max(score["seeds"]) < 100  # which chose the settings
    assert {key: score[key] for key in ("mean", "iqm", "worst")} == pytest.approx(recipes.spread(score["returns"]))


def test_a_row_says_what_was_measured_and_nothing_else():
    told = dict(zip(suites_recipes.HEAD, suites_recipes.cells("navix/empty_5x5", ROW), strict=True))
    assert told.pop("recipe") == "`navix/empty_5x5`"
    assert list(told.values()) == ["PQN", "1,024", "0.125", "**0.5**", "0.25", "2", "9"]
    assert suites_recipes.cells("navix/empty_5x5", {})[1:] == ["", "", "", "", "", "not scored", ""]
    assert recipes.expectation(ROW) == (
        "# Expect: a return of 0.5, mean of 2 fresh seeds (worst 0.25; random actions 0.125); "
        "all of them took 9 s on one busy core, as one pack."
    )


def test_what_is_scored_already_is_not_scored_again(tmp_path, monkeypatch):
    """Unless more seeds are asked for, or the recipe is another by now."""
    name, trained = "navix/empty_5x5", []

    def scored(name, node, seeds):
        trained.append((name, seeds))
        settings = recipes.fingerprint(yaml.safe_dump(node))
        return ROW["score"] | {"settings": settings, "seeds": list(seeds)}

    page = f"| {' | '.join(suites_recipes.HEAD)} |\n| --- |\n\nthe end\n"
    files = {"page.md": page, f"conf/env/{name}.yaml": "", "conf/env/navix.yaml": ""}
    files[f"conf/experiment/{name}.yaml"] = "# Expect: nothing yet.\n"
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    changes = {"scored": scored, "random_return": lambda env: 0.125, "KEPT": tmp_path / "kept.json"}
    for attribute, value in (changes | {"CONF": tmp_path / "conf", "DOCS": tmp_path / "page.md"}).items():
        monkeypatch.setattr(suites_recipes, attribute, value)
    run = lambda *more: suites_recipes.main([name, *more], lambda _: None)  # noqa: E731
    assert [run("--seeds=2"), run("--seeds=2"), run("--seeds=1"), run("--seeds=3")] == [0] * 4
    assert trained == [(name, range(2)), (name, range(3))]
    assert run() == 0 and len(trained) == 2  # three are enough where no number is given
    assert "| **0.5** |" in (tmp_path / "page.md").read_text()
    assert "mean of 3 fresh seeds" in (tmp_path / f"conf/experiment/{name}.yaml").read_text()
    changed = {"total_env_steps": 7, "env": {}}
    monkeypatch.setattr(suites_recipes, "settings", lambda name: changed)
    assert run("--seeds=2") == 0 and trained[2:] == [(name, range(2))]
    assert run() == 0 and trained[3:] == [(name, range(5))]
    monkeypatch.setattr(suites_recipes, "FIRST_SEED", {name: 3})
    assert run("--again") == 0 and trained.pop() == (name, range(3, 8))
    monkeypatch.setattr(suites_recipes, "of_runs", lambda name, runs, machine: ROW["score"])
    assert run("--runs=elsewhere", "--machine=an H100", "--again") == 0 and len(trained) == 4
    with pytest.raises(SystemExit):
        suites_recipes.main(["navix/nothing"], print)


@pytest.mark.slow
@pytest.mark.parametrize("name", suites_recipes.names())
def test_every_recipe_builds(name):
    need(name.partition("/")[0])
    experiment.build(compose.compose_node([f"experiment={name}", "compilation_cache=null"])[0])


def test_runs_that_were_made_elsewhere_are_a_score(tmp_path):
    name, node = "navix/empty_5x5", suites_recipes.settings("navix/empty_5x5")
    for seed, objective in ((3, 0.5), (4, 1.0)):
        place = tmp_path / "runs" / str(seed)
        place.mkdir(parents=True)
        (place / "config.yaml").write_text(yaml.safe_dump(node | {"seed": seed, "run": "train"}))
        (place / "metrics.jsonl").write_text('{"wall_s": 1.0}\n{"wall_s": 40.4}\n')
        (place / "summary.json").write_text(json.dumps({"objective": objective, "env_steps": 512, "compile_s": 2.0}))
    found = suites_recipes.of_runs(name, tmp_path / "runs", "an H100")
    assert (found["mean"], found["worst"], found["seeds"], found["seconds"]) == (0.75, 0.5, [3, 4], 42)
    assert suites_recipes.current("score", {"score": found}, node)
    assert "42 s on an H100, as one pack" in suites_recipes.with_expectation("# Expect: x\n", {"score": found})
    (tmp_path / "runs" / "3" / "metrics.jsonl").write_text('{"wall_s": 50.0}\n')  # each by itself
    apart = {"score": suites_recipes.of_runs(name, tmp_path / "runs", "an H100")}
    assert suites_recipes.with_expectation("# Expect: x\n", apart).endswith("; each took at most 52 s on an H100.\n")
    (tmp_path / "runs" / "4" / "config.yaml").write_text(yaml.safe_dump(node | {"seed": 4, "total_env_steps": 7}))
    with pytest.raises(Failed, match=r"other settings than navix/empty_5x5 has: total_env_steps$"):
        suites_recipes.of_runs(name, tmp_path / "runs", "an H100")
    with pytest.raises(Failed, match="no finished run"):
        suites_recipes.of_runs(name, tmp_path, "an H100")
