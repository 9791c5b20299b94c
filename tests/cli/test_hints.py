"""What is told to be typed next can be typed: a shell and Hydra read it as it was meant."""

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from rlexp import hints
from rlexp.compose import compose_node

PLACES = ["/outputs/2026-11-20/12-00-00-c0ffee42", "/a b/it's $HOME/[1]", "/x,y/{z}/lr=1", "/back\\slash/é", "/1"]


@pytest.mark.parametrize("place", PLACES)
def test_the_next_commands_of_a_run(place):
    head, evaluate, longer = hints.after_run(Path(place), total_env_steps=1000, saved=True)
    assert head == f"finished: {place}"
    for line, wanted in ((evaluate, {"run": "eval"}), (longer, {"total_env_steps": 2000})):
        program, m, name, *words = shlex.split(line.split(":", 1)[1])
        assert (program, m, name) == ("python", "-m", "rlexp")
        found = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(words)}
        assert {key: str(value) for key, value in found.items()} == {
            key: str(value) for key, value in ({"resume": place} | wanted).items()
        }


def test_what_was_recorded_is_learnt_from_in_its_environment():
    """However that was chosen. A recipe's other settings are those of another algorithm."""
    given = ["algo=sac", "env=wrapped", "env@env.inner=gymnax/acrobot", "env.frame_stack=2", "seed=3", "resume=x"]
    words = shlex.split(hints.learn_from("/a b/it's-v0", given))
    node = compose_node(words[3:])[0]
    assert words[:3] == ["python", "-m", "rlexp"]
    assert (node["env"]["inner"]["name"], node["env"]["frame_stack"], node["seed"]) == ("Acrobot-v1", 2, 0)
    assert (node["algo"]["module"], node["algo"]["source"]["path"]) == ("rlexp.algos.bc", "/a b/it's-v0")
    of_recipe = hints.learn_from("/a-v0", ["experiment=driving/ppo", "seed=3"])
    assert of_recipe == (
        "python -m rlexp algo=bc source=dataset algo.source.path=/a-v0, with the env of experiment=driving/ppo"
    )


def test_a_plain_directory_is_typed_plainly():
    assert hints.resume(Path(PLACES[0])) == f"resume={PLACES[0]}"


def test_what_was_not_saved_cannot_be_evaluated():
    assert hints.after_run(Path("/a"), total_env_steps=1000, saved=False) == ["finished: /a"]


def test_the_next_commands_of_a_sweep():
    where = Path("/a b")
    lines = hints.after_sweep(where, ["finished", "failed", "stopped", "finished"], results=True)
    assert lines[0] == "2 finished, 1 failed, 1 stopped: /a b"
    words = [shlex.split(line.split(":", 1)[1]) for line in lines[1:]]
    assert words == [["python", "-m", "rlexp.sweep", verb, "/a b"] for verb in ("report", "resume", "retry")]
    assert hints.after_sweep(where, ["finished"], results=False) == ["1 finished: /a b"]
    assert hints.after_sweep(where, ["finished", "pruned"], results=False) == ["1 finished, 1 pruned: /a b"]
