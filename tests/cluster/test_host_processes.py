"""Environments of the host in a run of several processes: each steps its part, and the update is that of all."""

import json

import jax
import pytest
import yaml
from support import build, rows

from rlexp.config import ConfigError
from rlexp.overrides import merge_overrides
from rlexp.training import host

from .together import SMALL, wait_for_checkpoint

OVER = tuple(
    merge_overrides(
        SMALL,
        [
            "algo.normalize_observations=false",
            "total_env_steps=1024",
            "eval.every_env_steps=256",
            "checkpoint.every_updates=4",
        ],
    )
)
KINDS = {
    "host": ["source=host"],
    "actors": ["source=actors", "algo.source.max_lag=0", "algo.source.num_actors=2"],
    "inference": ["source=inference", "algo.source.num_workers=2"],
}


@pytest.fixture
def seeded(tmp_path):
    """seeded(name): overrides for a run of that name, with the environment that notes its seeds in the folder `name`-seeds."""
    (tmp_path / "conf" / "env").mkdir(parents=True)

    def overrides(name: str, **more: int) -> list[str]:
        folder = tmp_path / f"{name}-seeds"
        folder.mkdir(exist_ok=True)
        node = {"module": "cluster.seeded", "folder": str(folder), **more}
        (tmp_path / "conf" / "env" / f"{name}.yaml").write_text(yaml.safe_dump(node))
        return [f"env={name}", f"hydra.searchpath=[file://{tmp_path / 'conf'}]", f"hydra.run.dir={tmp_path / name}"]

    return overrides


def seeds(tmp_path, name):
    """Of the first reset of each process that trained; evaluations have fewer environments."""
    found = [path.read_text().splitlines() for path in (tmp_path / f"{name}-seeds").iterdir()]
    of_training = [[line.split() for line in lines if len(line.split()) in (2, 4, 8)] for lines in found]
    return [lines for lines in of_training if lines]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "actors"])
def test_two_processes_step_the_environments_that_one_steps(kind, start, seeded, tmp_path):
    """What is counted, of episodes that follow from the seeds, is then the same in each line."""
    more = [*KINDS[kind], "eval.num_episodes=3", "algo.hp.lr=0.02", "algo.hp.max_grad_norm=1e6"]
    running = [start(n, *seeded(f"of{n}"), *more, over=OVER) for n in (1, 2)]
    for processes, number in zip(running, (1, 2), strict=True):
        assert processes.wait() == [0] * number, processes.said(0)
    alone, together = (rows(tmp_path / name) for name in ("of1", "of2"))
    assert len(alone) == len(together) > 4
    for one, other in zip(alone, together, strict=True):
        counted = [name for name in one if name.startswith(("train/return", "train/length", "agent_", "eval/", "env_"))]
        assert {name: one[name] for name in counted} == {name: other[name] for name in counted}
    if kind == "host":  # two actors have the environments in another order, and so other minibatches
        losses = [[line["loss/value"] for line in lines[1:]] for lines in (alone, together)]
        # Of the critic, to whom actions are nothing, and whose rows the gradients are of is all.
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert losses[0][-1] < 0.8 * losses[0][0]
    of_one, of_two = (
        sorted(seed for lines in seeds(tmp_path, name) for line in lines for seed in line) for name in ("of1", "of2")
    )
    assert of_one == of_two and len(set(of_one)) == 8
    assert len(seeds(tmp_path, "of2")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["algo=impala"], ["algo=dqn", "algo.source.prefill_env_steps=64"]], ids=["impala", "dqn"]
)
def test_workers_of_two_processes_serve_their_own(more, start, seeded, tmp_path):
    given = [x for x in OVER if not x.startswith(("algo.num_epochs", "algo.num_minibatches", "algo.normalize"))]
    processes = start(2, *seeded("run"), *more, *KINDS["inference"], over=tuple(given))
    assert processes.wait() == [0, 0], processes.said(0) + processes.said(1)
    last = rows(tmp_path / "run")[-1]
    assert last["env_steps"] >= 1024 and 0.6 < last["agent_steps"] / last["env_steps"] < 1
    for index in range(2):
        assert len([*(tmp_path / "run" / "workers" / str(index)).glob("*.log")]) == 2
    reset = [line for lines in seeds(tmp_path, "run") for line in lines if len(line) == 2]
    assert len(reset) == 4 and len({seed for line in reset for seed in line}) == 8


@pytest.mark.slow
def test_environments_that_open_late_in_one_process_are_waited_for(start, seeded, tmp_path):
    """Gloo's devices have 30 s to meet for the first time."""
    processes = start(2, *seeded("run", late_s=35), *KINDS["host"], "total_env_steps=128", over=OVER)
    assert processes.wait() == [0, 0], processes.said(0)
    assert rows(tmp_path / "run")[-1]["env_steps"] == 128


@pytest.mark.slow
def test_an_error_of_the_environments_of_one_process_ends_both(start, seeded):
    """The other one waits in the update of all by then."""
    given = [*KINDS["actors"], "total_env_steps=100000", "eval.every_env_steps=null", "checkpoint=off"]
    processes = start(2, *seeded("run", breaks_after=100), *given, over=OVER)
    codes = processes.wait(150)
    assert 0 not in codes, processes.said(0)
    assert "RuntimeError: the game crashed" in processes.said(1), processes.said(1)


@pytest.mark.slow
def test_two_processes_are_killed_and_resumed_and_one_opens_what_they_saved(start, tmp_path):
    """CartPole, which one process goes on with where it was: of two nothing is kept of the environments, and so it is said."""
    given = ["env=gymnasium/cartpole", f"hydra.run.dir={tmp_path / 'run'}"]
    first = start(2, *given, "total_env_steps=100000", over=OVER)
    wait_for_checkpoint(tmp_path / "run", 8, first)
    first.running[1].kill()
    assert first.wait()[0] == 1
    reached = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit())
    again = start(2, f"resume={tmp_path / 'run'}", f"total_env_steps={64 * (reached + 20)}", over=())
    assert again.wait() == [0, 0], again.said(0)
    assert "they begin new episodes" in again.said(0)
    alone = start(1, f"resume={tmp_path / 'run'}", f"total_env_steps={64 * (reached + 40)}", over=())
    assert alone.wait() == [0] and "they begin new episodes" in alone.said(0), alone.said(0)
    both = start(2, f"resume={tmp_path / 'run'}", f"total_env_steps={64 * (reached + 60)}", over=())
    assert both.wait() == [0, 0], both.said(0)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] == 64 * (reached + 60)


def test_what_several_processes_cannot_do_is_said(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"hardware\.mesh\.data: 1 is no multiple of the 2 processes, each of which steps"
    ):
        host.check(build("env=gymnasium/cartpole"))
    apart = [
        "algo=dqn",
        "algo.source.error_buffer=4000",
        "algo.source.min_size=500",
        "hardware.mesh.data=2",
        "shards=2",
    ]
    with pytest.raises(ConfigError, match=r"algo\.source\.num_devices: 1 is not allowed with 2 processes"):
        host.check(build("env=gymnasium/cartpole", "source=actors", "algo.source.num_devices=1", *apart[3:]))
    with pytest.raises(ConfigError, match=r"algo\.source\.error_buffer: it is not allowed with 2 processes"):
        host.check(build("env=gymnasium/cartpole", "source=actors", *apart))
    with pytest.raises(
        ConfigError, match=r"num_actors: 4 does not divide algo\.num_envs 12 of 2 processes; the nearest .* is 3"
    ):
        build("env=gymnasium/cartpole", "source=actors", "algo.num_envs=12", "algo.source.num_actors=4")
