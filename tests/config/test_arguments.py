"""Words of a command line that are malformed: told with the word in it, and not in the words of Hydra's grammar."""

import contextlib
import functools
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlexp import compose, runs
from rlexp.config import Config, ConfigError, parse
from rlexp.overrides import override_group

HYDRAS = re.compile(
    r"NoViableAlt|mismatched|extraneous|viable|expecting \{|defaults list|multirun|in struct|append to your|andatory|"
    r"Config group override|force-add|Config\(|See https|override \+\+|merging|Cannot merge|"
    r"invalid literal|out of range|\n"
)


def told(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(compose.compose_node(words)[0], Config)
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("algo.hp.lr=1e-3,2e-3", "algo.hp.lr=1e-3,2e-3: several values are a sweep, which -m makes; "),
        ("~algo", "~algo: a run has one; expected algo=NAME for another: apg, "),
        ("~source", "~source: a run has one; "),
        ("=3", "=3: there is no key in it; "),
        ("env@env=gymnax/pendulum", "env@env=gymnax/pendulum: that is where it is; expected env=gymnax/pendulum"),
        ("env=wrapped env@env.iner=gymnax/catch", "env@env.iner=gymnax/catch: no env is chosen at env.iner; did you mean "),
        ("+algo=dqn", "+algo=dqn: one is chosen already, and this takes its place; expected algo=dqn"),
        ("~algo.hp.lrr", '~algo.hp.lrr: there is no such key; did you mean "algo.hp.lr"?'),
        ("hydra.sweep.dirr=a", 'hydra.sweep.dirr=a: Hydra has no such key; did you mean "hydra.sweep.dir"?'),
        ("hydra/launcher=nope", "hydra/launcher=nope: there is no such option. Allowed: basic, rlexp"),
        ("algo.hp.lr=interval(1)", "algo.hp.lr=interval(1): this cannot be read as key=value (TypeError while evaluating "),
        ("algo.hp.lr=1,", "algo.hp.lr=1,: this cannot be read as key=value (beside a comma a value is missing; expected algo."),
        ("seed=1,,2", "seed=1,,2: this cannot be read as key=value (beside a comma a value is missing; expected seed=1,2)"),
        ("seed=${:eval.num_episodes}", "seed: what stands in ${…} cannot be read"),
        ("network.hidden=[8,'${:x}']", "network.hidden.1: what stands in ${…} cannot be read"),
        ("++env.more={a:['a-${:b}']}", "env.more.a.0: what stands in ${…} cannot be read"),
        ("output_root='${:x}'", "output_root: what stands in ${…} cannot be read"),
        ("hardware.num_envs='${:x}'", "hardware.num_envs: what stands in ${…} cannot be read"),
        ("seed=${total_env_steps} total_env_steps='${:x}'", "total_env_steps: what stands in ${…} cannot be read"),
        ("hydra.sweep.subdir='${:x}'", "hydra.sweep.subdir: what stands in ${…} cannot be read"),
        ("algo==ppo", "algo==ppo: this cannot be read as key=value (one = stands between them; expected algo=ppo)"),
        ("env=craftax env.foo=1", "env.id: it has no value; expected env.id=…, or env= one of craftax/classic, craftax/full"),
        ("env=wrapped env@env.inner=craftax", "env.inner.id: it has no value; expected env.inner.id=…, or env@env.inner= "),
        ("env=wrapped env@env.inner=managed rewards=brax", "rewards=brax: env=managed is chosen at env.inner; expected rewards@"),
        ("env=managed env.inner.params.progress=0.5", "env.inner.params.progress: nothing reads it, since env=managed has "),
        ("env=managed env.observations.x=3", "env.observations.x=3: 'x' is not allowed; env.observations is a list, of entries 0"),
        ("env=driving/mixed env.scenarios.9=curve", "env.scenarios.9=curve: '9' is not allowed; env.scenarios is a list, of"),
        ("env=managed env.rewards=[] env.rewards.0.weight=1", "env.rewards.0.weight=1: '0' is not allowed; env.rewards is an em"),
        ("env=managed env.rewards.0=[]", "env.rewards.0=[]: a list is not allowed; expected a node, {function: …}"),
        ("env.foo=1 env.params=[1]", "env.params=[1]: a list is not allowed; expected a node, {gravity: …}"),
        ("env=wrapped env@env.inner=gymnax/catsh", 'env@env.inner=gymnax/catsh: there is no such option; did you mean "gymnax/'),
        ("hardware.num_envs=[]", "hardware.num_envs: [] is not allowed; expected a valid integer"),
        ("hardware.chips=[1]", "hardware.chips: [1] is not allowed; expected a valid integer"),
        ("hardware.tpu.nme=1", "hardware.tpu.nme: unknown key. Allowed: chip_config, chips_per_host, generation, topology"),
        ("hardware={cips:1}", 'hardware.cips: unknown key; did you mean "chips"?'),
        ("algo.source.module.0=[]", "algo.source.module: {'0': []} is not the name of a Python module"),
        ("algo.source.hp.gamma=1", "algo.source.hp.gamma: source=rollout, which counts here, has no such key; it is one of"),
    ],
)  # fmt: skip
def test_a_word(words, line):
    assert told(*words.split()).startswith(line)


def test_what_a_world_reads_of_its_own_is_taken():
    node, _ = compose.compose_node(["env=managed", "env.inner.params.density=0.25"])
    assert node["env"]["inner"]["params"]["density"] == 0.25


@functools.cache
def places() -> list[str]:
    """Of all that a run with lists has, nodes and entries too."""

    def below(node, path):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield f"{path}{key}"
            if isinstance(value, dict | list):
                yield from below(value, f"{path}{key}.")

    return list(below(compose.compose_node(["env=managed"])[0], ""))


# Each composes many lists, some of them five times.
@settings(max_examples=int(os.environ.get("RLEXP_WORDS", "60")) // 5)
@given(st.data())
def test_any_value_at_any_place(data):
    place = data.draw(st.sampled_from(places()))
    key = data.draw(st.sampled_from([place, *(f"{place}.{x}" for x in ("0", "99", "x"))]))
    word = f"{key}={data.draw(st.sampled_from(['[]', '[1]', '{a:1}', '{}', '3', 'x', 'null']))}"
    try:
        parse(compose.compose_node(["env=managed", word])[0], Config)
    except ConfigError as error:
        line = str(error)
        assert HYDRAS.search(line) is None, (word, line)
        assert key.split(".")[0] in line, (word, line)


SOUND = (
    "algo=dqn",
    "algo.hp.lr=1e-3",
    "env=gymnax/pendulum",
    "env@env=[gymnax/catch]",
    "network.hidden=[64,64]",
    "logger.wandb.name='a b'",
    "hydra.run.dir=here",
    "seed=${eval.num_episodes}",
    "logger.wandb.name='${:eval.num_episodes}'",
    "~between",
    "+seed=3",
)


@st.composite
def odd_words(draw: st.DrawFn) -> str:
    """A sound one with a sign or two that are too many, too few, or others."""
    word = draw(st.sampled_from(SOUND))
    for _ in range(draw(st.integers(1, 2))):
        place, sign = draw(st.integers(0, len(word))), draw(st.sampled_from([*"=+~@./,:;'\"[]{}()$\\# a3", ""]))
        word = word[:place] + sign + word[place + draw(st.integers(0, 1)) :]
    return word


@settings(max_examples=8)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=6))
@example("café")
@example("jörg")
def test_a_text_from_python_and_a_folder_of_files_have_any_letters(text):
    (word,) = runs.words([{"logger.wandb.project": text}], {})
    assert compose.compose_node([word])[0]["logger"]["wandb"]["project"] == text
    with tempfile.TemporaryDirectory() as place, contextlib.suppress(OSError):
        folder = Path(place) / text.replace("/", "_").replace(".", "_")
        (folder / "env").mkdir(parents=True)
        (folder / "env/own.yaml").write_text((compose.CONF_DIR / "env/gymnax/cartpole.yaml").read_text())
        assert compose.compose_node([*compose.search_path(str(folder)), "env=own"])[0]["env"]["name"] == "CartPole-v1"


@settings(max_examples=int(os.environ.get("RLEXP_WORDS", "60")))
@given(odd_words())
def test_any_word(word):
    try:
        parse(compose.compose_node([word])[0], Config)
    except ConfigError as error:
        line = str(error)
        assert HYDRAS.search(line) is None, line
        assert word.strip() in line or re.split(r"[./]", override_group(word).strip())[0] in line
