"""The same training on 1, 4, 8 and 32 virtual devices; and a checkpoint of 4 goes on on 1, 2 and 8. Real processes."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import environment, rlexp_command, saved

pytestmark = pytest.mark.slow

SETTINGS = (
    "env=gymnax/cartpole",
    "algo.num_envs=32",
    "algo.num_steps=16",
    "algo.normalize_observations=true",
    "algo.anneal_lr=false",
    "hardware.emulate=true",
    "eval.num_episodes=4",
    "logger=quiet",
)
UPDATE = 32 * 16  # environment steps


def run(cwd: Path, *overrides: str, code: int = 0) -> str:
    command = rlexp_command(*SETTINGS, *overrides)
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def params(run_dir: Path) -> dict[str, np.ndarray]:
    found = {path: leaf for path, leaf in saved(run_dir)[1].items() if path.startswith("['state']['params']")}
    assert len(found) == 12
    return found


def assert_close(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for path in wanted:
        np.testing.assert_allclose(got[path], wanted[path], rtol=0, atol=1e-5, err_msg=path)


def test_any_number_of_devices_trains_alike(tmp_path):
    for devices in (1, 4, 8, 32):
        run(
            tmp_path,
            "shards=32",
            f"hardware.mesh.data={devices}",
            f"total_env_steps={20 * UPDATE}",
            f"hydra.run.dir={devices}",
        )
    for devices in (4, 8, 32):
        assert_close(params(tmp_path / str(devices)), params(tmp_path / "1"))
    # and the same again is the same to the bit
    run(tmp_path, "shards=32", "hardware.mesh.data=4", f"total_env_steps={20 * UPDATE}", "hydra.run.dir=again")
    again, first = saved(tmp_path / "again")[1], saved(tmp_path / "4")[1]
    assert [k for k in first if first[k].tobytes() != again[k].tobytes()] == []


def test_a_checkpoint_of_four_devices_goes_on_on_one_two_and_eight(tmp_path):
    """As if nothing had happened: the end is that of four devices all the way."""
    run(tmp_path, "shards=8", "hardware.mesh.data=4", f"total_env_steps={20 * UPDATE}", "hydra.run.dir=whole")
    whole = params(tmp_path / "whole")
    for devices in (1, 2, 8):
        where = tmp_path / f"on{devices}"
        run(tmp_path, "shards=8", "hardware.mesh.data=4", f"total_env_steps={10 * UPDATE}", f"hydra.run.dir={where}")
        run(tmp_path, f"resume={where}", f"hardware.mesh.data={devices}", f"total_env_steps={20 * UPDATE}")
        assert json.loads((where / "summary.json").read_text())["resumed_from"] == 10 * UPDATE
        assert_close(params(where), whole)
    told = run(tmp_path, f"resume={where}", "hardware.mesh.data=3", f"total_env_steps={30 * UPDATE}", code=2)
    assert told == "rlexp: hardware.mesh.data: 3 does not divide the 8 shards of the checkpoint; allowed: 1|2|4|8\n"
