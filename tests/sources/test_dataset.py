"""From a run to a data set, and from a data set to a run: through the same command line and the same loop as any."""

import json
import os
import shutil
from pathlib import Path

import h5py
import jax
import minari
import numpy as np
import pytest
from support import QUIET, SMALL, StopAfter, assert_same, build, fingerprint, rows, train

import rlexp
from rlexp.config import ConfigError
from rlexp.recorded import reading, windows
from rlexp.sources import dataset, host, rollout
from rlexp.sources.base import environments
from rlexp.storage import rundir
from rlexp.training import loop, program
from rlexp.training.loop import Resume, layout_of
from rlexp.training.parts import learn_from

EPISODES = 24
BC = ("algo=bc", "algo.source.batch_size=8", "network.hidden=[8]", "eval.num_episodes=2", "total_env_steps=20")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run, `run`, and data of it in both formats, as a user has."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("offline")
    os.chdir(folder)
    rlexp.train([*QUIET, *SMALL, "total_env_steps=64", "eval.at_start=false"], {"hydra.run.dir": "run"})
    for kind in ("hdf5", "arrow"):
        recorded(kind, f"{kind}/cartpole-v0")
    yield folder
    os.chdir(before)


def recorded(kind: str, path: str, *more: str):
    line = [*QUIET, "run=record", "resume=run", f"record.format={kind}", f"record.path={path}", *more]
    run_dir = f"recording-{len(list(Path.cwd().glob('recording-*')))}"
    return rlexp.train(line, {"record.num_episodes": EPISODES, "hydra.run.dir": run_dir})


def bc(*overrides: str, kind: str = "hdf5", place: Path | None = None) -> list[str]:
    return [*BC, f"algo.source.path={(place or Path.cwd()) / kind / 'cartpole-v0'}", *overrides]


# --- run=record --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_recorded_as_minari_knows_it(place, monkeypatch, capsys):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(place / "hdf5"))
    data = minari.load_dataset("cartpole-v0")
    about = data.storage.metadata
    run_id = rundir.id_of(place / "run")
    assert (about["rlexp_env"], about["rlexp_seed"], about["rlexp_run"]) == ("CartPole-v1", 0, run_id)
    assert (data.total_episodes, data.observation_space.shape, data.action_space.n) == (EPISODES, (4,), 2)
    seeds = [known["seed"] for known in data.storage.get_episode_metadata(range(EPISODES))]
    assert len(set(seeds)) == EPISODES
    env = build().env_of(build().settings)
    for i in (0, EPISODES - 1):  # the second one of another lot
        first = jax.jit(env.reset)(jax.random.key(seeds[i]))[1].obs
        np.testing.assert_allclose(data[i].observations[0], first, atol=1e-6)
        state, length = jax.jit(env.reset)(jax.random.key(seeds[i]))[0], len(data[i].actions)
        for t in range(length):
            state, timestep = jax.jit(env.step)(state, jax.numpy.int32(data[i].actions[t]))
            np.testing.assert_allclose(data[i].observations[t + 1], timestep.obs, atol=1e-4)
            assert timestep.last == (t == length - 1) == data[i].terminations[t]
    arrow = reading.opened("arrow/cartpole-v0")
    assert arrow.lengths.tolist() == [len(episode.actions) for episode in data]
    for i in range(EPISODES):
        np.testing.assert_array_equal(arrow.read(i).observations, data[i].observations)


@pytest.fixture(scope="module")
def greedy(place):
    """Another data set, `greedy-v0`."""
    return recorded("hdf5", "greedy-v0", "record.mode=greedy")


@pytest.mark.slow
def test_a_greedy_record_is_another_and_nothing_is_overwritten(greedy):
    done, data = greedy, reading.opened("greedy-v0")
    assert done.objective == pytest.approx(np.mean(data.lengths))
    assert done.summary["status"] == "finished" and done.summary["env_steps"] == 64
    data.close()
    with pytest.raises(ConfigError, match=r"record\.path: 'greedy-v0' is there already"):
        recorded("hdf5", "greedy-v0")
    with pytest.raises(ConfigError, match=r"resume: null is not allowed with run=record"):
        rlexp.train([*QUIET, "run=record", "record.path=other-v0"], {"hydra.run.dir": "second"})
    assert not Path("second").exists() and not Path("other-v0").exists() and not Path("recording-3").exists()


# --- learning from it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "kind"),
    [
        ("algo=bc", "hdf5"),
        pytest.param("algo=bc", "arrow", marks=pytest.mark.slow),
        pytest.param("algo=iql", "hdf5", marks=pytest.mark.slow),
        pytest.param("algo=decision_transformer", "hdf5", marks=pytest.mark.slow),
    ],
)
def test_resumed_it_is_the_run_that_never_stopped(algo, kind, place, tmp_path):
    """In the middle of an epoch, with the reading in pools; to the bit."""
    given = bc(
        f"algo.source.memory_bytes={2000 if kind == 'hdf5' else '1G'}",
        "eval.every_env_steps=5",
        "algo.hp.lr=0.02",
        kind=kind,
    )
    given[given.index("algo=bc")] = algo
    train(tmp_path / "whole", *given)
    train(tmp_path / "cut", *given, stop=StopAfter(3))
    assert rundir.read_json(tmp_path / "cut/0/summary.json")["status"] == "stopped"
    train(tmp_path / "cut", *given, resume=Resume(tmp_path / "cut/0", "all"))
    assert_same(tmp_path / "cut/0", tmp_path / "whole/0")
    lines = rows(tmp_path / "whole/0")
    assert [line["env_steps"] for line in lines] == [0, 5, 10, 15, 20]
    assert all(line["train/epoch"] > 0 for line in lines[1:])


def first_windows(lead, num_processes: int, num_batches: int = 12) -> np.ndarray:
    """Observations [num_batches, batch_size, ...] where the windows begin, of all processes, side by side."""
    parts = []
    for index in range(num_processes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: num_processes)
            patch.setattr(jax, "process_index", lambda index=index: index)
            source = lead.source_of(lead.settings)
        data, rows = source.init(jax.random.key(0), ()), []
        for _ in range(num_batches):
            data, batch, _ = source.next(data, ())
            rows.append(batch.trajectory.obs[0, 0])
        source.close()
        parts.append(np.stack(rows))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("memory_bytes", [8000, "1G"])
def test_the_order_is_the_same_on_any_number_of_processes(memory_bytes, place):
    lead = build(*bc("shards=4", f"algo.source.memory_bytes={memory_bytes}"))
    alone = first_windows(lead, 1)
    for num_processes in (2, 4):
        np.testing.assert_array_equal(first_windows(lead, num_processes), alone)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_each_transition_weighs_the_same_whatever_its_shard_holds(num_shards, place):
    """A shard of fewer transitions gives as many windows, so each of them comes more often."""
    lead = build(*bc(f"shards={num_shards}"))
    source, data = lead.source_of(lead.settings), reading.opened(str(place / "hdf5" / "cartpole-v0"))
    _, batch, _ = source.next(source.init(jax.random.key(0), ()), ())
    source.close()
    sizes = np.array([data.lengths[mine].sum() for mine in windows.deal(data.lengths, num_shards)])
    data.close()
    of_shards = batch.weight.reshape(num_shards, -1)
    assert batch.weight.shape == (1, 8) and batch.weight.dtype == np.float32 and (of_shards == of_shards[:, :1]).all()
    assert len(set(sizes)) > 1 or num_shards == 1
    np.testing.assert_allclose(of_shards[:, 0] / sizes, num_shards / sizes.sum(), rtol=1e-6)
    assert num_shards > 1 or (batch.weight == 1.0).all()


@pytest.mark.parametrize(
    "changed", ["algo.source.memory_bytes=8000", "shards=4", "seed=1", "algo.source.batch_size=16"]
)
def test_what_the_order_is_made_of_is_kept_by_a_resumed_run(changed):
    before, after = fingerprint(*BC), fingerprint(*BC, changed)
    assert {key for key in before if before[key] != after[key]} == {changed.partition("=")[0]}


@pytest.mark.slow
def test_another_data_set_than_before_is_refused(greedy, tmp_path):
    train(tmp_path, *bc(), stop=StopAfter(1))
    with pytest.raises(OSError, match="not the data set that this run has learnt from so far"):
        train(tmp_path, *bc(), "total_env_steps=30", "algo.source.path=greedy-v0", resume=Resume(tmp_path / "0", "all"))


@pytest.mark.slow
def test_any_number_of_devices(place):
    """The same windows on one and on four devices; the learning is equal but for rounding. The shards see their own episodes."""
    found = {}
    for num_devices in (1, 4):
        lead = build(*bc(f"hardware.mesh.data={num_devices}", "shards=4"))
        compiled = program.trace([lead], layout_of([lead])).compile()
        run, metrics = compiled.chunk(compiled.begin()[0], 3)
        episodes = compiled.evaluate(run, 3)
        compiled.close()
        assert jax.tree.leaves(run.state)[0].sharding.num_devices == num_devices
        metrics = {name: x for name, x in metrics.items() if not name.startswith("time/")}
        found[num_devices] = jax.device_get((run.state.params, metrics)), jax.device_get(episodes.length)
        source = lead.source_of(lead.settings)
        _, batch, _ = source.next(source.init(jax.random.key(0), ()), ())
        source.close()
        found[num_devices] += (batch.trajectory.obs,)
    np.testing.assert_array_equal(found[1][2], found[4][2])
    for x, y in zip(jax.tree.leaves(found[1][0]), jax.tree.leaves(found[4][0]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.slow
def test_a_decision_transformer_split_over_a_mesh_of_two_axes_trains_as_on_one_device(place):
    """In the layout of its recipe: kernels over `model` by its rules, windows over `data`, rematerialised, accumulated."""
    recipe = ("experiment=decision_transformer_25m", "hardware=cpu", "precision=f32", "shards=2")
    small = ("network.hidden=[8]", "algo.units=16", "algo.layers=2", "algo.heads=4", "algo.context_length=4")
    sizes = ("algo.source.batch_size=16", "algo.hp.warmup_updates=2", "eval.num_episodes=4")
    path = f"algo.source.path={place / 'hdf5' / 'cartpole-v0'}"
    leaves = {}
    for axis, columns in ((1, 16), (2, 8)):
        mesh = (f"hardware.mesh.data={axis}", f"hardware.mesh.model={axis}")
        lead = build(*recipe, *small, *sizes, *mesh, path)
        assert lead.config.algo.remat and lead.config.algo.gradient_accumulation == 4
        compiled = program.trace([lead], layout_of([lead])).compile()
        untrained = compiled.begin()[0]
        before = [np.asarray(x) for x in jax.tree.leaves(untrained.state.params)]
        run, _ = compiled.chunk(untrained, 3)
        compiled.close()
        (kernel,) = (
            x
            for path, x in jax.tree.leaves_with_path(run.state.params)
            if jax.tree_util.keystr(path, simple=True, separator="/").endswith("layer_1/query/kernel")
        )
        assert {shard.data.shape[-1] for shard in kernel.addressable_shards} == {columns}
        leaves[axis] = [np.asarray(x) for x in jax.tree.leaves(run.state.params)]
        assert max(np.abs(x - y).max() for x, y in zip(before, leaves[axis], strict=True)) > 1e-4
    for x, y in zip(leaves[1], leaves[2], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_and_a_network_with_a_memory(place, tmp_path):
    given = bc("precision=bf16", "network=gru", "network.units=4", "algo.sequence_length=5", "eval.num_episodes=1")
    (summary,) = train(tmp_path, *(x for x in given if x != "network.hidden=[8]"))
    assert summary["status"] == "finished" and summary["env_steps"] == 20


def test_environments_of_the_host_are_played_between(place, tmp_path):
    """What a data set is learnt for may be an environment of either kind."""
    (summary,) = train(tmp_path, *bc("env=gymnasium/cartpole", "source=dataset"))
    assert summary["objective"] > 0
    assert environments(dataset) != environments(host) != environments(rollout)


def test_what_is_counted_are_updates(place):
    lead = build(*bc())
    assert (lead.clock, lead.total_env_steps, lead.env_steps_per_update) == ("updates", 20, 1)
    assert build().clock == "environment steps"
    assert loop._notices(lead, {"env_steps": 7, "total_updates": 20}) == ["resumed at 7 updates"]


def test_a_network_with_a_memory_learns_from_data_that_have_none(place):
    """R2D2's windows come with what acting remembered, and nothing is, of what others played."""
    more = ("algo=r2d2", "source=dataset", "algo.num_updates=1", "algo.burn_in=2", "algo.sequence_length=4")
    lead = build(*more, f"algo.source.path={place / 'hdf5' / 'cartpole-v0'}", "algo.source.batch_size=8")
    source = lead.source_of(lead.settings)
    _, batch, _ = source.next(source.init(jax.random.key(0), ()), ())
    source.close()
    state = jax.eval_shape(lead.algorithm.init, jax.random.key(0), jax.tree.map(np.float32, lead.hp))
    learnt, _ = jax.eval_shape(lambda state, batch: learn_from(lead, state, batch), state, batch)
    assert jax.tree.structure(learnt) == jax.tree.structure(state)


# --- bad input ---------------------------------------------------------------------------------------------------------


BUILT = [
    (
        "algo=bc source=rollout",
        r"algo\.source: bc learns from recorded data, and rlexp\.sources\.rollout gives what was just",
    ),
    ("algo=bc source=replay", r"algo\.source: bc learns from recorded data, and rlexp\.sources\.replay gives samples"),
    ("algo=bc algo.source.batch_size=6 shards=4", r"algo\.source\.batch_size: 6 cannot .*the nearest that fits is 4"),
    ("algo=pqn source=dataset", r"algo\.source: pqn learns from what was just played, .* gives recorded data"),
    (
        "algo=dqn source=dataset",
        r"algo\.num_updates or algo\.source\.num_updates: 12 is not allowed with source=dataset",
    ),
]


@pytest.mark.parametrize(("line", "said"), BUILT)
def test_an_algorithm_that_does_not_fit_the_source(line, said):
    with pytest.raises(ConfigError, match=said) as told:
        build(*line.split())
    assert "\n" not in str(told.value)


TOO_LONG = (
    r"has no episode of more than \d+ transitions, and windows are to have 501; .*algo\.context_length.* at most \d+$"
)
PREPARED = [
    ("algo.source.path=null", r"path: null is allowed with run=plan only"),
    (
        "algo.source.path=hdf5/cartpole-v1",
        r"no data set of Minari's in 'hdf5/cartpole-v1'.*; there are hdf5/cartpole-v0$",
    ),
    ("env=gymnax/acrobot", r"has observations Box.*\(4,\).*, and Acrobot-v1 has float32\[6\]"),
    ("shards=64 algo.source.batch_size=64", r"has 24 episodes, too few for shards=64"),
    ("shards=24 algo.source.batch_size=24 algo.source.path=emptied", r"has 23 episodes, too few for shards=24"),
    *((line, TOO_LONG) for line in ("algo.sequence_length=501", "algo=decision_transformer algo.context_length=501")),
    ("algo.source.path=broken", r"path: .*broken.*cannot be read, it may be cut short"),
    (
        "algo=ppo source=dataset algo.source.sequence_length=4",
        r"ppo learns from what was just played, .* recorded data",
    ),
    ("run=check", r"run: check compares .*, and this data comes from the host"),
]


def emptied(path: Path) -> None:
    """A copy of the data whose first episode has no transition."""
    shutil.copytree("hdf5/cartpole-v0", path)
    with h5py.File(path / "data/main_data.hdf5", "a") as file:
        gone = file["episode_0/rewards"].shape[0]  # type: ignore[union-attr]
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            kept = file[f"episode_0/{name}"][: int(name == "observations")]  # type: ignore[index]
            del file[f"episode_0/{name}"]
            file[f"episode_0/{name}"] = kept
    known = json.loads((path / "data/metadata.json").read_text())
    known["total_steps"] -= gone
    (path / "data/metadata.json").write_text(json.dumps(known))


@pytest.mark.parametrize(("line", "said"), PREPARED)
def test_data_that_cannot_be_learnt_from_is_told_before_anything_is_made(line, said, place):
    """By the command, in one line, with exit code 2: a ConfigError before there is a run directory."""
    if "broken" in line:
        Path("broken/data").mkdir(parents=True)
        for name in ("metadata.json", "main_data.hdf5"):
            whole = Path("hdf5/cartpole-v0/data", name).read_bytes()
            Path("broken/data", name).write_bytes(whole if name.endswith("json") else whole[: len(whole) // 2])
    if "emptied" in line:
        emptied(Path("emptied"))
    given = ["algo.source.path=hdf5/cartpole-v0"] if "algo=" in line else bc()
    with pytest.raises(ConfigError, match=said) as told:
        rlexp.train([*QUIET, *given, *line.split()], {"hydra.run.dir": "refused"})
    assert "\n" not in str(told.value)
    assert not Path("refused").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], r"algo\.source\.sequence_length: null, and the algorithm does not say"),
        (["algo.source.sequence_length=4"], r"learns from what it notes as it acts \(log_prob\)"),
    ],
)
def test_one_that_says_nothing_of_its_sources_is_held_to_what_they_have(given, said, place, monkeypatch):
    """As an algorithm of one's own may."""
    monkeypatch.delattr("rlexp.algos.ppo.LEARNS_FROM")
    line = [*QUIET, "algo=ppo", "source=dataset", "algo.source.path=hdf5/cartpole-v0", *given]
    with pytest.raises(ConfigError, match=said):
        rlexp.train(line, {"hydra.run.dir": "refused"})


def test_a_plan_needs_no_data():
    lead = build("algo=bc")
    assert lead.config.algo.source.path is None
    assert program.trace([lead], layout_of([lead])).lower_chunk().as_text()
