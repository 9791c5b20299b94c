"""The command that measures environments: what is kept of one whose training fails."""

import json

import jax

from benchmarks import environments
from benchmarks.measure import Failed

PAGE = "| option | observation | actions | limit | ends by | CPU µs a step | random | PPO |\n| --- | --- |\n"


def test_a_training_that_fails_is_told_and_loses_no_number(monkeypatch, tmp_path, capsys):
    def fails(option):
        raise Failed("the training took longer than 3 s")

    for name in ("KEPT", "DOCS"):
        monkeypatch.setattr(environments, name, tmp_path / name)
    environments.DOCS.write_text(PAGE)
    environments.KEPT.write_text(json.dumps({"probe/recall": {"ppo": 0.5, "ends_by": "termination"}}))
    monkeypatch.setattr(environments, "_trained", fails)
    assert environments.main(["probe/recall"], print) == 1
    assert "probe/recall: not measured: the training took longer than 3 s" in capsys.readouterr().err
    kept = json.loads(environments.KEPT.read_text())["probe/recall"]
    assert kept["ppo"] == 0.5 and kept["us_a_step"] > 0.0
    assert "| `probe/recall` | [1] | 2 choices | 9 | termination |" in environments.DOCS.read_text()


def test_what_is_kept_has_the_day_and_the_machine(monkeypatch, tmp_path):
    for name in ("KEPT", "DOCS"):
        monkeypatch.setattr(environments, name, tmp_path / name)
    environments.DOCS.write_text(PAGE)
    monkeypatch.setattr(environments, "_trained", lambda option: 0.25)
    assert environments.main(["probe/recall", "--trained"], lambda _: None) == 0
    kept = json.loads(environments.KEPT.read_text())["probe/recall"]
    assert kept["ppo"] == 0.25 and "measured" not in kept
    assert set(kept["ppo_measured"]) == {"date", "cpu", "cores"}


def test_what_a_step_costs_has_the_cost_of_what_is_seen():
    """A compiler leaves out what nobody asks for."""
    seen = []
    env = environments.made("probe/delayed_reward")

    def looked_at(obs):
        seen.append(1)
        return obs

    def step(*given):
        state, row = env.step(*given)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), row.obs)
        return state, row._replace(obs=jax.pure_callback(looked_at, like, row.obs, vmap_method="sequential"))

    play = environments.random_play(env._replace(step=step, batch=None), num_envs=2, num_steps=5)
    jax.block_until_ready(play(jax.random.key(0)))
    assert len(seen) == 2 * 5
