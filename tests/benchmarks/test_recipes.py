"""The recipes of gymnax's environments: the page, the recipes' own lines and what is kept of their scores agree."""

import json
import re
from pathlib import Path

import pytest
import yaml

from benchmarks import recipes
from benchmarks.spaces import SEARCHES, Search
from rlexp import compose, experiment

KEPT = recipes.read(recipes.KEPT)
GOLDEN = Path(__file__).parents[1] / "config" / "golden" / "gymnax"
ROW = {
    "score": {
        "settings": "0",
        "algo": "pqn",
        "asked_steps": 1000,
        "env_steps": 1024,
        "seeds": [1000, 1001],
        "returns": [-100.0, -120.0],
        "mean": -110.0,
        "iqm": -110.0,
        "worst": -120.0,
        "seconds": 9,
    },
    "random": -200.0,
}


def test_every_environment_has_a_recipe_and_a_search():
    assert recipes.names() == sorted(path.stem for path in recipes.RECIPES.glob("*.yaml")) == sorted(SEARCHES)
    assert len(recipes.names()) == 26


def test_the_page_says_what_is_kept():
    page = recipes.DOCS.read_text()
    assert recipes.with_table(page, KEPT) == page
    assert recipes.with_table(page, KEPT | {"catch": ROW}) != page


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_says_what_is_kept(name):
    assert recipes.expectation(KEPT.get(name, {})) in (recipes.RECIPES / f"{name}.yaml").read_text().splitlines()


@pytest.mark.parametrize("name", [name for name in KEPT if "score" in KEPT[name]])
def test_a_score_is_of_the_recipe_as_it_is_and_of_fresh_seeds(name):
    score = KEPT[name]["score"]
    assert score["settings"] == recipes.fingerprint((GOLDEN / f"{name}.yaml").read_text()), "score it again"
    assert len(set(score["seeds"])) == len(score["returns"]) >= 8
    assert not set(score["seeds"]) & set(range(SEARCHES[name].seeds))
    assert {key: score[key] for key in ("mean", "iqm", "worst")} == pytest.approx(recipes.spread(score["returns"]))


def test_what_is_scored_already_is_not_scored_again():
    node = {"total_env_steps": 1000}
    row = {"score": ROW["score"] | {"settings": recipes.fingerprint(yaml.safe_dump(node))}, "random": 0.0}
    assert recipes.current("score", row, node) and recipes.current("random", row, node)
    assert not recipes.current("score", row, node | {"algo": "another"})
    assert not recipes.current("default", row, node)
    assert not recipes.current("default", {"default": {"asked_steps": 999}}, node)


def test_a_row_says_what_was_measured_and_nothing_else():
    told = dict(zip(recipes.HEAD, recipes.cells("catch", ROW), strict=True))
    assert (told["learns by"], told["steps"], told["mean"], told["worst"]) == ("PQN", "1,024", "**-110.0**", "-120.0")
    assert (told["random"], told["seeds"], told["defaults"], told["Rejax"]) == ("-200.0", "2", "", "")
    assert recipes.cells("catch", {})[1:9] == ["", "", "", "", "", "", "", "not scored"]


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_is_of_traced_settings_that_the_recipe_has(name):
    golden = yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())
    keys = re.findall(r"(?:space\.|^)(algo\.hp\.\w+)", "\n".join(SEARCHES[name].space), re.MULTILINE)
    assert len(keys) == len(SEARCHES[name].space)
    assert {key.removeprefix("algo.hp.") for key in keys} <= set(golden["algo"]["hp"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipes.names() if name != "mnist_bandit"])  # which is downloaded
def test_every_recipe_builds(name):
    experiment.build(compose.compose_node([f"experiment=gymnax/{name}", "compilation_cache=null"])[0])


@pytest.mark.slow
def test_an_environment_is_searched_and_scored(tmp_path, monkeypatch, capsys):
    for name in ("KEPT", "DOCS", "RECIPES", "BENCH"):
        monkeypatch.setattr(recipes, name, tmp_path / name)
    (tmp_path / "DOCS").write_text(f"| {' | '.join(recipes.HEAD)} |\n| --- |\n\nthe end\n")
    (tmp_path / "RECIPES").mkdir()
    for name in recipes.names():
        (tmp_path / "RECIPES" / f"{name}.yaml").write_text(f"{recipes.UNMEASURED}\n")
    monkeypatch.setattr(recipes, "SEEDS", range(1000, 1002))
    few = Search(SEARCHES["catch"].space, trials=2, more=("total_env_steps=2_000",))
    monkeypatch.setattr(recipes, "SEARCHES", SEARCHES | {"catch": few})
    said = []
    assert recipes.main(["catch", "--search", "--score", "--random"], said.append) == 0, capsys.readouterr().err
    kept = json.loads((tmp_path / "KEPT").read_text())["catch"]
    assert kept["search"]["trials"] == 2 and set(kept["search"]["best"][0]["settings"]) >= {"algo.hp.lr"}
    assert kept["random"] < 0 < kept["score"]["mean"] and kept["score"]["seeds"] == [1000, 1001]
    assert "`catch` | PPO" in (tmp_path / "DOCS").read_text()
    assert recipes.expectation(kept) in (tmp_path / "RECIPES/catch.yaml").read_text()
    before = len(said)
    assert recipes.main(["catch", "--search", "--score", "--random"], said.append) == 0
    assert len(said) == before  # nothing is measured twice
