"""The command that measures environments: what is kept of one whose training fails."""

import json

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
