"""A large model of recorded data, planned for a pod slice: no data is needed, and no TPU."""

import json

import pytest
from support import command_line

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_decision_transformer_of_25_million_parameters_on_a_mesh_of_two_axes(tmp_path):
    """Split four ways by layers and four ways by windows, recomputed and in parts."""
    done = command_line(
        tmp_path, "experiment=decision_transformer_25m", "run=plan", "hydra.run.dir=run", tpu_compiler=True
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert plan["fits"] and 0 < plan["total_bytes"] < 2**30
    # All of parameters and Adam's moments is 12 bytes a parameter; a chip has a quarter of the layers.
    assert plan["argument_bytes"] < 12 * 25e6 / 3
    assert {"all-reduce"} <= {each["op"] for each in plan["collectives"]}
