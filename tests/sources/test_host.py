"""Environments of the host, through the same program and the same loop as compiled ones."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from envs import test_gymnasium
from sources import counting
from support import QUIET, SMALL, StopAfter, assert_same, build, rows, saved, without_clock

import rlexp
from rlexp import compose, experiment
from rlexp.config import ConfigError
from rlexp.envs import gymnasium as adapter
from rlexp.envs import host as host_environment
from rlexp.machine.stop import Stop
from rlexp.modes import plan
from rlexp.sources import host as source_of_host
from rlexp.sources import rollout
from rlexp.sources.base import is_host
from rlexp.storage import rundir
from rlexp.training import loop, metrics, pace, program
from rlexp.training.loop import Member, Resume, layout_of, train_pack
from rlexp.training.parts import FORGOTTEN, REMEMBERED
from rlexp.training.player import Player
from rlexp.training.shares import Shares
from rlexp.types import AGENT_STEPS

CARTPOLE = (*SMALL, "env=gymnasium/cartpole", "total_env_steps=256", "eval.every_env_steps=128")


def toy(*overrides: str, **env) -> experiment.Experiment:
    node, _ = compose.compose_node([*QUIET, *SMALL, "source=host", *overrides])
    node["env"] = {"module": counting.__name__, **env}
    return experiment.build(node)


def train(directory: Path, lead: experiment.Experiment, resume: Path | None = None, stop: Stop | None = None) -> dict:
    directory.mkdir(exist_ok=True)
    started = Resume(resume, "all") if resume else None
    (summary,) = train_pack([Member(lead, directory, "00000000")], stop=stop or Stop(), resume=started)
    return summary


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    before, folder = Path.cwd(), tmp_path_factory.mktemp("host")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def trained(place):
    return rlexp.train([*QUIET, *CARTPOLE], {"hydra.run.dir": "first"})


# --- what it collects --------------------------------------------------------------------------------------------------


def test_trajectories_are_those_of_the_environment_stepped_by_hand():
    """Over several calls, in which both kinds of end fall on every row; with the actions that the source took."""
    num_envs, num_steps, limit = 3, 7, 11
    env = adapter.make(test_gymnasium.config(limit=limit))
    seeds = []

    def opening(num):
        opened = env.open(num)

        def step(action):  # some environments pay for a reset, or make an array of what is left over
            after = opened.step(action)
            return after._replace(reward=np.where(after.first, 7, after.reward).astype(np.float32))

        return opened._replace(reset=lambda given: seeds.extend(map(int, given)) or opened.reset(given), step=step)

    built = build("env=gymnasium/cartpole")
    source = source_of_host.make(
        source_of_host.Config(module=""),
        env=env._replace(open=opening),
        algorithm=built.algorithm,
        num_envs=num_envs,
        num_steps=num_steps,
        num_shards=1,
    )
    policy = built.algorithm.policy(built.algorithm.init(jax.random.key(1), jax.tree.map(jnp.float32, built.hp)), True)
    data = source.init(jax.random.key(0), policy)
    games = [gymnasium.make("CartPole-v1", max_episode_steps=limit) for _ in range(num_envs)]
    now, kinds = None, set()
    for _ in range(12):
        expected = source.shapes(policy)
        data, batch, metrics = source.next(data, policy)
        described = jax.tree.map(lambda x: (np.shape(x), x.dtype), (batch, metrics))
        assert described == jax.tree.map(lambda x: (x.shape, x.dtype), expected[1:])
        now = now or [(game.reset(seed=seed)[0], True, False, 0.0) for game, seed in zip(games, seeds, strict=True)]
        got = jax.tree.map(lambda x: x[0], batch.trajectory)
        ended, decided = [], 0
        for t in range(num_steps):
            for b, game in enumerate(games):
                obs, first, over, played = now[b]
                np.testing.assert_array_equal(got.obs[t, b], obs)
                assert got.first[t, b] == first
                if over:
                    assert (got.valid[t, b], got.reward[t, b], got.discount[t, b]) == (0, 0, 1)
                    now[b] = (game.reset()[0], True, False, 0.0)
                    continue
                obs, reward, terminated, truncated, _ = game.step(int(got.action[t, b]))
                decided += 1
                assert (got.valid[t, b], got.reward[t, b]) == (1, reward)
                assert got.discount[t, b] == (0 if terminated else 1)
                now[b] = (obs, False, terminated or truncated, played + reward)
                if terminated or truncated:
                    ended.append(played + reward)
                    kinds.add(terminated)
        for b in range(num_envs):  # row T has the observation after the last transition
            np.testing.assert_array_equal(got.obs[num_steps, b], now[b][0])
            assert got.first[num_steps, b] == now[b][1]
        assert (metrics["train/return_mean"].sum, metrics["train/return_mean"].count) == (sum(ended), len(ended))
        assert metrics["train/length_mean"].sum == sum(ended)
        assert metrics[AGENT_STEPS] == (decided, num_steps * num_envs)
    assert kinds == {True, False}
    source.close()
    source.close()


@pytest.mark.slow
def test_the_numbers_of_an_environment_are_logged(tmp_path):
    """In bfloat16 too."""
    train(
        tmp_path,
        toy(
            "precision=bf16",
            "total_env_steps=128",
            "eval.every_env_steps=64",
            "logger=default",
            "logger.wandb.mode=disabled",
        ),
    )
    for row in rows(tmp_path)[1:]:
        assert row["env/paid"] == 2 * row["train/return_mean"] and row["train/length_mean"] == 1
        assert row["eval/env/paid"] == 2 * row["eval/return_mean"] and row["eval/length_mean"] == 1


def test_before_an_episodes_last_step_its_own_numbers_may_be_none():
    lead, found = toy(), []
    env = lead.env_of(lead.settings)
    state = jax.jit(lead.algorithm.init)(jax.random.key(0), {name: np.float32(x) for name, x in lead.hp.items()})

    def opening(num):
        opened = env.open(num)

        def step(action):
            after = opened.step(action)
            return after._replace(info={"paid": np.where(after.last, after.info["paid"], np.float32("nan"))})

        return opened._replace(step=step)

    for own in (env, env._replace(open=opening)):
        of = source_of_host.collector(own, lead.algorithm, num_envs=3, num_steps=8)
        _, keys, seeds = of.split(jax.random.key(0))
        world = of.open(seeds)
        found.append(of.collect(world, lead.algorithm.policy(state, True), keys[:8])[1])
        world.envs.close()
    assert found[0] == found[1] and found[1]["env/paid"].count == 12


# --- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_seed_twice_is_the_same_run(trained):
    assert trained.status == "finished"
    again = rlexp.train([*QUIET, *CARTPOLE], {"hydra.run.dir": "again"})
    assert_same(again.dir, trained.dir)
    assert all("eval/return_mean" in row for row in rows(trained.dir))


@pytest.mark.slow
def test_an_evaluation_can_be_repeated(trained):
    evaluated = rlexp.train(QUIET, run="eval", resume=str(trained.dir))
    assert evaluated.objective == trained.objective
    agent = rlexp.load(trained.dir)
    episodes = agent.evaluate(jax.random.key(0), num_episodes=3)
    assert episodes.episode_return.shape == (3,) and (episodes.episode_return == episodes.length).all()


@pytest.mark.slow
def test_an_evaluation_closes_its_environments(trained, monkeypatch):
    closed, close = [], Player.close
    monkeypatch.setattr(Player, "close", lambda self: (closed.append(self), close(self))[1])
    assert float(rlexp.load(trained.dir).last_evaluation().episode_return.mean()) == trained.objective
    assert len(closed) == 1


@pytest.mark.slow
def test_a_resumed_run_has_all_but_the_environments(tmp_path):
    """With an environment that remembers nothing: parameters, counters, keys and metric lines are those of a run in one go."""
    half, whole = toy("total_env_steps=320", "algo.anneal_lr=false"), toy("algo.anneal_lr=false")
    train(tmp_path / "whole", whole)
    train(tmp_path / "cut", half)
    train(tmp_path / "cut", whole, resume=tmp_path / "cut")
    (update, ours), (_, theirs) = saved(tmp_path / "cut"), saved(tmp_path / "whole")
    assert update == 10 and any("key" in name and "data" in name for name in ours)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    common = {row["env_steps"]: row for row in without_clock(rows(tmp_path / "whole"))}
    lines = [row for row in without_clock(rows(tmp_path / "cut")) if row["env_steps"] in (256, 640)]
    assert lines[0] == common[256] and lines[-1]["eval/return_mean"] == common[640]["eval/return_mean"]


def test_a_stop_is_heard_after_each_update(tmp_path, monkeypatch):
    """A chunk may take hours where environments are slow. It loses nothing: the run that goes on is the undisturbed one."""
    monkeypatch.setattr(pace, "PART_S", 0.0)
    lead = toy("total_env_steps=256", "eval.every_env_steps=null")
    cut = train(tmp_path / "cut", lead, stop=StopAfter(2))
    assert (cut["status"], cut["env_steps"]) == ("stopped", 2 * lead.env_steps_per_update)
    train(tmp_path / "cut", lead, resume=tmp_path / "cut")
    train(tmp_path / "whole", lead)
    (update, ours), (_, theirs) = saved(tmp_path / "cut"), saved(tmp_path / "whole")
    assert update == lead.total_updates and ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []


def test_a_line_has_the_time_of_its_own_chunk(trained):
    """Nothing is under way while a chunk is reported, so that it is when it ends: lines of compiled environments come one later."""
    lead = build("env=gymnasium/cartpole", "algo.num_steps=16", "network.hidden=[8]")
    compiled = program.trace([lead], layout_of([lead])).compile()
    reported = []

    class Heard(loop.Reports):
        def __init__(self):
            self._waiting, self._watch = None, ThreadPoolExecutor(1)

        def finish(self):
            if self._waiting is not None:
                reported.append(self._waiting[0].update)
            self._waiting = None

    run, counted = compiled.chunk(compiled.init(), 1)
    reports = Heard()
    reports.hand_in(metrics.Chunk(1, 1, counted, compiled.evaluate(run, 1)))
    compiled.close()
    assert reported == [1]
    reports.hand_in(metrics.Chunk(2, 1, jax.tree.map(jnp.asarray, counted), None))
    assert reported == [1]
    assert [row["time/chunk_s"] > 1e-3 for row in rows(trained.dir)[1:]] == [True, True]
    for row in rows(trained.dir)[1:]:
        assert sum(row[f"time/{name}_share"] for name in Shares.NAMES) == pytest.approx(1, abs=1e-5)
        assert row["time/waiting_share"] == 0 < row["time/acting_share"]


def test_a_resumed_run_says_what_it_has_not(trained, capfd):
    go_on = rlexp.train("logger.progress=plain", resume=trained.dir, total_env_steps=384, config_dir=None)
    assert go_on.summary["resumed_from"] == 256 and go_on.summary["env_steps"] == 384
    assert REMEMBERED in (said := "".join(capfd.readouterr())) and FORGOTTEN not in said
    given = ["env=gymnasium", "env.id=Acrobot-v1", "env.max_episode_steps=5", "total_env_steps=256"]
    rlexp.train([*QUIET, *SMALL, *given], {"hydra.run.dir": "acrobot"})
    rlexp.train("logger.progress=plain", resume="acrobot", total_env_steps=384, config_dir=None)
    assert FORGOTTEN in (said := "".join(capfd.readouterr())) and REMEMBERED not in said


def test_a_memory_on_the_host_can_be_filled_anew():
    """Where a source says how; the policy that does it acts on one device."""
    heard = []

    def of(*args, **kwargs):
        made = made_by(*args, **kwargs)
        return made._replace(refill=lambda key, policy, calls: heard.append(calls) or made.init(key, policy))

    lead = toy()
    made_by = lead.source_of
    traced = program.trace([lead._replace(source_of=of)], layout_of([lead]))
    run = traced.compile().init()
    filled, again = traced.refill(run._replace(data=()), 7), traced.refill(run, 8)
    assert heard == [7, 8]
    keys = [jax.random.key_data(x.data.key).tolist() for x in (run, filled, again)]
    assert len(set(map(str, keys))) == 3


@pytest.mark.slow
def test_any_number_of_devices():
    """The same environments and actions on one and on four devices, whatever the shards; the learning is equal but for rounding."""
    found = {}
    for num_devices in (1, 4):
        overrides = (f"hardware.mesh.data={num_devices}", "shards=4", "algo.num_envs=8")
        lead = build("env=gymnasium/cartpole", "algo.num_steps=16", "network.hidden=[8]", *overrides)
        compiled = program.trace([lead], layout_of([lead])).compile()
        run, metrics = compiled.chunk(compiled.init(), 1)
        compiled.close()
        assert jax.tree.leaves(run.state)[0].sharding.num_devices == num_devices
        found[num_devices] = jax.device_get((run.state.params, metrics))
    (one, counted), (four, counted_by_four) = found[1], found[4]
    assert counted["train/return_mean"] == counted_by_four["train/return_mean"]
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


# --- beginning and end -------------------------------------------------------------------------------------------------


def test_everything_is_closed_at_the_end(tmp_path):
    counting.opened.clear()
    train(tmp_path / "a", toy("total_env_steps=64", "checkpoint=off"))
    assert counting.opened == []
    with pytest.raises(RuntimeError, match="the game crashed"):
        train(tmp_path / "b", toy("total_env_steps=128", "checkpoint=off", breaks_after=20))
    assert counting.opened == []


@pytest.mark.parametrize("source", ["host", "actors", "inference"])
@pytest.mark.parametrize(
    ("how", "said"),
    [("error", "RuntimeError: no display"), ("exit", "SystemExit: 3"), ("film", "RuntimeError: no display")],
)
def test_environments_that_fail_as_they_are_closed_are_told_once_and_lose_nothing(source, how, said, capsys):
    """Whoever steps them: those of training, of evaluations and of videos are opened by what the experiment has."""
    lead = toy(f"source={source}", "algo.num_envs=4", breaks_at_close="exit" if how == "exit" else "error")
    env = lead.env_of(lead.settings)
    for _ in range(2):
        (env.film() if how == "film" else env.open(2)).close()
    assert counting.opened == []
    assert capsys.readouterr().err == f"warning: an environment of Counting failed as it was closed ({said})\n"


def test_a_run_whose_environments_fail_as_they_are_closed_has_finished(tmp_path):
    summary = train(tmp_path, toy("total_env_steps=64", "checkpoint=off", breaks_at_close="error"))
    assert summary["status"] == "finished" and counting.opened == []


def test_environments_that_never_close_are_left(capsys, monkeypatch):
    monkeypatch.setattr(host_environment, "CLOSE_S", 0.1)
    lead = toy(breaks_at_close="hang")
    lead.env_of(lead.settings).open(2).close()
    said = "warning: an environment of Counting failed as it was closed (it has not ended within 0.1 s)\n"
    assert capsys.readouterr().err == said
    counting.hangs.set()


def test_init_begins_anew():
    lead = toy()
    compiled = program.trace([lead], layout_of([lead])).compile()
    twice = []
    for _ in range(2):
        run, metrics = compiled.chunk(compiled.init(), 1)
        twice.append(jax.device_get((run.state.params, *without_clock([metrics]))))
    compiled.close()
    for x, y in zip(*map(jax.tree.leaves, twice), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_source_hears_what_its_samples_were_worth():
    lead, heard = toy(), []
    made, update = lead.source_of(lead.settings), lead.algorithm.update

    def next_with_ids(data, policy):
        data, batch, metrics = made.next(data, policy)
        return data, batch._replace(ids=np.arange(4)[None]), metrics

    def shapes(policy):
        data, batch, metrics = made.shapes(policy)
        return data, batch._replace(ids=jax.ShapeDtypeStruct((1, 4), np.int32)), metrics

    def judged(state, batch):
        state, found = update(state, batch)
        return state, found._replace(priority=10.0 * batch.ids.astype(jnp.float32))

    def feedback(data, ids, priority):
        heard.append((ids.tolist(), priority.tolist()))
        return data._replace(key=jax.random.key(7))

    source = made._replace(next=next_with_ids, shapes=shapes, feedback=feedback)
    algorithm = lead.algorithm._replace(update=judged)
    lead = lead._replace(source_of=lambda settings: source, algorithm=algorithm)
    compiled = program.trace([lead], layout_of([lead])).compile()
    run, _ = compiled.chunk(compiled.init(), 2)
    compiled.close()
    assert heard == [([[0, 1, 2, 3]], [[0, 10, 20, 30]])] * 2
    assert jax.random.key_data(run.data.key[0]).tolist() == jax.random.key_data(jax.random.key(7)).tolist()


# --- sweeps, modes, refusals -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_jobs_of_a_sweep_train_alone(place):
    rlexp.sweep([*QUIET, *CARTPOLE, "total_env_steps=128"], seed=[1, 2], **{"hydra.sweep.dir": "sweep"})
    jobs = [place / "sweep" / str(number) for number in range(2)]
    assert [rundir.read_json(job / "summary.json")["status"] for job in jobs] == ["finished", "finished"]
    (update, one), (_, two) = map(saved, jobs)
    assert update == 2 and one.keys() == two.keys()
    assert any((one[name] != two[name]).any() for name in one)


@pytest.mark.slow
def test_a_sweep_over_several_workers(place):
    """Each in a process of its own; the numbers of a job are those of the same run alone."""
    given = [*QUIET, *CARTPOLE, "total_env_steps=128"]
    rlexp.sweep(given, seed=[1, 2, 3], **{"hydra.sweep.dir": "several", "launcher.workers": 2})
    jobs = [place / "several" / str(number) for number in range(3)]
    assert [rundir.read_json(job / "summary.json")["status"] for job in jobs] == ["finished"] * 3
    assert_same(rlexp.train(given, {"hydra.run.dir": "alone"}, seed=2).dir, jobs[1])


def test_members_are_refused():
    members = [build("env=gymnasium/cartpole", f"seed={seed}") for seed in range(2)]
    with pytest.raises(
        ConfigError, match=r"launcher\.pack: 2 members cannot share .* runs? on the host; each trains alone"
    ):
        program.trace(members, layout_of(members))


@pytest.mark.slow
def test_a_profile_has_the_shares_of_the_time(place, capsys):
    overrides = (*QUIET, *CARTPOLE, "source=actors", "eval.num_episodes=1")
    profiled = rlexp.train(overrides, {"hydra.run.dir": "profiled"}, run="profile")
    report = rundir.read_json(profiled.dir / "profile.json")
    assert sorted(report["shares"]) == ["acting", "copying", "learning", "waiting"]
    assert sum(report["shares"].values()) == pytest.approx(1, abs=0.2)  # medians
    assert report["shares"][report["bound_by"]] == max(report["shares"].values())
    assert report["env_steps_per_second"] > 0 and "learning" in capsys.readouterr().out


@pytest.mark.parametrize("run", ["check"])
def test_modes_that_take_a_compiled_program_apart_say_so(run, tmp_path):
    with pytest.raises(ConfigError, match=rf"run: {run} .*; allowed: train\|eval\|plan"):
        rlexp.train([*QUIET, *CARTPOLE], {"hydra.run.dir": tmp_path / "run"}, run=run)
    assert not (tmp_path / "run").exists()


def test_a_plan_is_of_the_learning():
    lead = build("env=gymnasium/cartpole", "algo.num_steps=16", "network.hidden=[8]", "run=plan", "hardware=gpu")
    lead = lead._replace(config=build("run=plan").config)
    report, costs, _ = plan.plan(lead)
    assert report["fits"] and report["flops_per_env_step"] > 0 and costs is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("env=gymnasium/cartpole source=rollout", r"rollout steps compiled .* runs on the host; expected source=host"),
        ("source=host", r"host steps environments of the host, and CartPole-v1 of rlexp\.envs\.gymnax is compiled"),
        (
            "env=gymnasium/cartpole algo=dqn source=replay",
            r"replay steps compiled .* runs on the host; expected source=host",
        ),
        ("source=replay", r"algo\.source: ppo learns from what was just played"),
        ("source=hots", r'source=hots: there is no such option; did you mean "host"\?'),
    ],
)
def test_a_source_that_does_not_fit(line, said):
    with pytest.raises(ConfigError, match=said) as told:
        build(*line.split())
    assert "\n" not in str(told.value)


def test_a_source_has_to_say_by_its_type_where_it_runs(monkeypatch):
    assert is_host(source_of_host) and not is_host(rollout)
    monkeypatch.setattr(experiment, "is_host", lambda module: False)
    monkeypatch.setattr(experiment, "_check_place", lambda *_: None)
    with pytest.raises(ConfigError, match=r"host\.make gives a HostSource; its return type has to say so"):
        build("env=gymnasium/cartpole")


@pytest.mark.parametrize("given", [["algo=ppo"], ["algo=impala"], ["algo=bc", "algo.source.path=x"]])
def test_a_memory_that_nobody_would_learn_from_is_refused(given):
    with pytest.raises(
        ConfigError, match=r"^replay=50k: algo=\w+ learns from what rlexp\.sources\.\w+ gives as it comes"
    ):
        compose.compose_node([*given, "replay=50k"])
    with pytest.raises(ConfigError, match=r"^replay=50k: source=replay is a memory itself, .* try source=replay_50k"):
        compose.compose_node(["algo=dqn", "replay=50k"])
    for more in (["source=replay_50k"], ["env=gymnasium/cartpole"], ["env=gymnasium/cartpole", "source=inference"]):
        assert compose.compose_node(["algo=dqn", "replay=50k", *more])[0]["algo"]["source"]["capacity"] == 51_200


def test_a_source_in_the_file_of_an_algorithm(tmp_path):
    """It counts, as ever; where another one is asked for, that is told, and not ignored."""
    (tmp_path / "algo").mkdir()
    file = (compose.CONF_DIR / "algo" / "ppo.yaml").read_text().split("\n\n", 1)[1]
    (tmp_path / "algo" / "mine.yaml").write_text(f"{file}source:\n  module: sources.mine\n")
    given = [*compose.search_path(str(tmp_path)), "algo=mine"]
    assert compose.compose_node(given)[0]["algo"]["source"] == {"module": "sources.mine"}
    with pytest.raises(
        ConfigError, match=r"source=host: the file of algo=mine has a source of its own, sources\.mine, which"
    ):
        compose.compose_node([*given, "source=host"])
    node, _ = compose.compose_node([*given, "source=host", "algo.source.module=rlexp.sources.host"])
    assert node["algo"]["source"]["module"] == "rlexp.sources.host"


# --- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_solves_cartpole(seed, place):
    ended = rlexp.train(
        "logger=quiet",
        "env=gymnasium/cartpole",
        f"seed={seed}",
        "algo.num_envs=16",
        "algo.num_steps=64",
        "algo.hp.lr=1e-3",
        total_env_steps=250_000,
        **{
            "eval.every_env_steps": None,
            "eval.num_episodes": 64,
            "checkpoint.enabled": False,
            "hydra.run.dir": f"bar{seed}",
        },
    )
    assert ended.objective >= 475
