"""A tournament of pods: each goes on from a leader with all that it has; killed anywhere, it ends as if nothing had been."""

import dataclasses
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from support import StopAfter, assert_same, build, rows, saved

from rlexp import loading
from rlexp.config import ConfigError
from rlexp.storage import checkpoint, rundir, store
from rlexp.sweep import inherit, leaderboard, packs, pods
from rlexp.sweep.leaderboard import best, place
from rlexp.sweep.lineage import GENERATION, PARENT, populations, shown
from rlexp.sweep.manifest import Manifest
from rlexp.sweep.packing import Job
from rlexp.sweep.results import gather
from rlexp.training.between import Between, Origin
from rlexp.training.layout import layout_of
from rlexp.training.loop import Member
from rlexp.training.program import trace

from .searches import Killed, jobs, search, value_of
from .tournaments import ENTROPY, LINE, LR, WORK, board, packs_of, tournament_of, train, train_pack


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A pack of four pods in each of three ages."""
    directory = tmp_path_factory.mktemp("undisturbed")
    assert [(job.status, job.error) for job in train(directory).jobs()] == [("finished", None)] * 12
    return directory


# --- what a pod begins with ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pods_go_on_from_the_leaders_of_the_age_before(undisturbed):
    for pod in range(12):
        lines = [line for line in rows(undisturbed / str(pod)) if line["env_steps"]]
        age = pod // 4
        assert [line["env_steps"] for line in lines] == [64 * (age + 1)]
        assert {line[GENERATION] for line in lines} == {age}
        (parent,) = {int(line[PARENT]) for line in lines}
        if not age:
            assert parent == pod
            continue
        leaders = best(place(undisturbed, 0, age))
        assert len(leaders) == 2 and parent in [one.pod for one in leaders]
        # It has its leader's settings, or some near them, within their bounds.
        (before,) = {line[f"population/{LR}"] for line in rows(undisturbed / str(parent)) if line["env_steps"]}
        lr, entropy = lines[0][f"population/{LR}"], lines[0][f"population/{ENTROPY}"]
        assert any(lr == pytest.approx(x) for x in (before, 0.8 * before, 1.2 * before, 1e-4, 1e-2))
        assert 0 <= entropy <= 0.05
    finished = {job.number: job.objective for job in Manifest(undisturbed).jobs()}
    for path, entry in board(undisturbed).items():
        assert entry["mean"] == finished[entry["pod"]] and entry["low"] <= entry["mean"] <= entry["high"], path
        assert entry["is_over"] == (entry["age"] == 3)
    assert len(board(undisturbed)) == 6


def leaves(run: Any) -> dict[str, np.ndarray]:
    """By path; of keys their data."""

    def data(x: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return {jax.tree_util.keystr(path): data(x) for path, x in jax.tree_util.tree_leaves_with_path(run)}


@pytest.mark.slow
def test_a_pod_has_all_that_its_leader_has_but_keys_and_settings(undisturbed, tmp_path, monkeypatch):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    begun: list[Any] = []
    pack = packs_of(tmp_path)[1]
    for job in pack:
        shutil.rmtree(job.dir)
    Manifest(tmp_path).change([job.number for job in pack], status="pending")
    put = checkpoint.put
    monkeypatch.setattr(checkpoint, "put", lambda *given: (begun.append(given), put(*given)))
    train_pack(pack, tmp_path, stop=StopAfter(0))
    (_, _, update, run, meta, _), *_ = begun
    assert update == 2 and [told[GENERATION] for told in meta["told"]] == [1] * 4
    whole, keys = leaves(run), 0
    for i in range(4):
        parent = int(meta["told"][i][PARENT])
        _, theirs = saved(tmp_path / str(parent))
        for path, x in whole.items():
            if "key" in path:
                keys += 1
                assert x[i].tobytes() != theirs[_as_saved(path, theirs)][0].tobytes()
            elif f"'{LR.rpartition('.')[2]}'" in path:
                assert float(x[i]) == np.float32(meta["told"][i][f"population/{LR}"])
            elif "entropy_coef" in path:
                assert float(x[i]) == np.float32(meta["told"][i][f"population/{ENTROPY}"])
            else:
                assert x[i].tobytes() == theirs[_as_saved(path, theirs)][0].tobytes(), path
    assert keys >= 8


def _as_saved(path: str, theirs: dict[str, np.ndarray]) -> str:
    """A path of a Run, as Orbax has it: mappings alone."""
    names = re.findall(r"\.(\w+)|\['(\w+)'\]|\[(\d+)\]", path)
    wanted = "".join(f"[{c}]" if c else f"['{a or b}']" for a, b, c in names)
    assert wanted in theirs, (path, sorted(theirs)[:5])
    return wanted


@pytest.mark.slow
def test_a_pod_is_opened_with_the_settings_that_it_has(undisturbed):
    pod = next(
        pod
        for pod in range(4, 12)
        if rows(undisturbed / str(pod))[-1][f"population/{LR}"]
        != rundir.read_yaml(undisturbed / str(pod) / "config.yaml")["algo"]["hp"]["lr"]
    )
    last = rows(undisturbed / str(pod))[-1]
    agent = loading.load(undisturbed / str(pod))
    assert float(agent.state.hp["lr"]) == np.float32(last[f"population/{LR}"])
    assert agent.env_steps == last["env_steps"]


@pytest.mark.slow
def test_the_report_has_the_tree(undisturbed):
    (found,) = populations(undisturbed, Manifest(undisturbed).jobs())
    assert found.pods == 4 and found.num_generations == 3 and found.keys == [ENTROPY, LR]
    assert found.best is not None and found.best >= 8
    line = found.ancestry(found.best)
    assert [s.begin for s in line] == [0, 64, 128] and [s.end for s in line] == [64, 128, 192]
    assert [found.lane(s.member) for s in line] == [s.member % 4 for s in line]
    (configuration,) = gather(undisturbed).configurations
    assert len(configuration.objectives) == 4 and len(configuration.jobs) == 12
    assert shown(Manifest(undisturbed).jobs()[5].overrides) == ["seed=5"]


# --- killed ----------------------------------------------------------------------------------------------------------------


# (a module, what is killed there, at which of its calls, whether after it)
PLACES = [
    pytest.param(packs.inherit, "begin", 1, False, id="before a pack takes from its leaders"),
    pytest.param(packs.inherit, "begin", 1, True, id="after that"),
    pytest.param(packs, "train_pack", 1, True, id="before its pods are entered"),
    pytest.param(leaderboard, "enter", 5, False, id="between two pods of a pack"),
    pytest.param(leaderboard, "enter", 7, True, id="before the sweep is told"),
    pytest.param(rundir, "write_json", None, False, id="before a file of the leaderboard is written"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name", "count", "after"), PLACES)
def test_a_killed_tournament_ends_as_an_undisturbed_one(module, name, count, after, undisturbed, tmp_path, monkeypatch):
    real, calls = getattr(module, name), iter(range(10_000))

    def killed(*given: Any, **more: Any) -> Any:
        if count is None:
            die = given[0].parent.parent.parent.name == leaderboard.FOLDER and next(calls) == 4
        else:
            die = next(calls) == count
        if die and not after:
            raise Killed
        out = real(*given, **more)
        if die:
            raise Killed
        return out

    with monkeypatch.context() as patch:
        patch.setattr(module, name, killed)
        with pytest.raises(Killed):
            train(tmp_path)
    train(tmp_path)
    _assert_same(tmp_path, undisturbed)


def _assert_same(ours: Path, theirs: Path) -> None:
    ended = [[(job.status, job.objective) for job in Manifest(one).jobs()] for one in (ours, theirs)]
    assert ended[0] == ended[1]
    for pod in range(12):
        assert_same(ours / str(pod), theirs / str(pod))
    entries = [{path: {**one, "run_id": ""} for path, one in board(x).items()} for x in (ours, theirs)]
    assert entries[0] == entries[1]


@pytest.mark.slow
def test_four_devices_make_the_same_choices(undisturbed, tmp_path):
    """Killed on the way too. Training rounds otherwise where members are spread."""
    four, (first, second, last) = "hardware.pack_devices=4", packs_of(tmp_path, "hardware.pack_devices=4")
    train(tmp_path, four, order=lambda found: found[:1])
    train_pack(second, tmp_path, stop=StopAfter(0))
    assert {job.status for job in Manifest(tmp_path).jobs()[4:8]} == {"stopped"}
    train(tmp_path, four)
    assert [job.status for job in Manifest(tmp_path).jobs()] == ["finished"] * 12
    for job in (*first, *second, *last):
        lines = zip(rows(job.dir), rows(undisturbed / job.dir.name), strict=True)
        for ours, theirs in lines:
            exact = [name for name in theirs if name.startswith(("population/", "eval/", "env_steps"))]
            assert [ours[name] for name in exact] == [theirs[name] for name in exact]


def test_lines_of_a_life_that_is_given_up_are_set_aside(tmp_path, monkeypatch):
    """A pack had begun anew, and was killed before it saved; now a leader is there. A member that went on alone keeps its lines."""
    one, lines = build(*WORK), '{"env_steps": 32, "wall_s": 0.1}\n'
    pack = [Job(i, (), one.node, one.config, one.modules, tmp_path / str(i)) for i in range(3)]
    for job in pack:
        job.dir.mkdir()
        (job.dir / "metrics.jsonl").write_text(lines)
    members, traced = [Member(one, job.dir, "") for job in pack], trace([one], layout_of([one]))
    leader = Origin(tmp_path / "leader", 2, {}, {})
    meta = {"update": 2, "env_steps": 64, "wall_s": 1.0, "agent_steps": None}
    monkeypatch.setattr(inherit.between, "of", lambda *_: [Between(origins=lambda *_: [leader] * 3)])
    monkeypatch.setattr(inherit, "_restored", lambda *_: SimpleNamespace(run={}, meta=meta))
    monkeypatch.setattr(inherit, "_own", lambda *_: {"x": np.zeros(1)})
    there: list[list[bool]] = []

    def killed(*_: Any) -> None:
        there.append([(job.dir / "metrics.jsonl").exists() for job in pack])
        raise Killed

    monkeypatch.setattr(checkpoint, "put", killed)
    for _ in range(2):
        with pytest.raises(Killed):
            inherit.begin(pack, members, traced, tmp_path, tmp_path / "pack", lost={2})
    assert there == [[False, False, True]] * 2
    assert [[path.read_text() for path in job.dir.glob("metrics.before-*")] for job in pack] == [[lines], [lines], []]


# --- nobody waits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_pod_stalls_nobody(tmp_path):
    """Of the two packs of the first age one is the last to come: the others begin anew, or from what is there."""
    manifest = train(
        tmp_path, "sweeper.batch=2", order=lambda found: [found[2], found[0], found[4], found[3], found[5], found[1]]
    )
    assert [job.status for job in manifest.jobs()] == ["finished"] * 12
    generations = [int(rows(tmp_path / str(pod))[-1][GENERATION]) for pod in range(12)]
    # 4 and 5 found nobody; 8 and 9 nobody but those of the first age.
    assert generations == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    (found,) = populations(tmp_path, manifest.jobs())
    assert found.num_generations == 3 and len(found.stretches) == 12


@pytest.mark.slow
def test_one_that_failed_is_no_leader_and_stops_nobody(tmp_path, monkeypatch):
    first, *_ = packs_of(tmp_path)
    enter = leaderboard.enter

    def full(folder: Path, entry: leaderboard.Entry, *, keep: int) -> None:
        if entry.pod == 1:
            raise OSError(28, "No space left on device", str(folder))
        enter(folder, entry, keep=keep)

    with monkeypatch.context() as patch:
        patch.setattr(pods.leaderboard, "enter", full)
        manifest = train(tmp_path)
    assert [job.status for job in manifest.jobs()] == ["finished", "failed", *["finished"] * 10]
    assert "No space left" in str(manifest.jobs()[1].error) and not list(tmp_path.glob("leaderboard/0/1/1.json"))
    # Tried again it has nothing to train.
    before = rows(tmp_path / "1")
    manifest.change([1], status="pending", error=None)
    train_pack(first, tmp_path)
    assert [job.status for job in manifest.jobs()] == ["finished"] * 12 and rows(tmp_path / "1") == before
    ranked = [one.pod for one in best(place(tmp_path, 0, 1))]
    assert len(ranked) == 2 and manifest.jobs()[1].objective == before[-1]["eval/return_mean"]


@pytest.mark.slow
def test_nobody_goes_on_from_one_with_which_somebody_has_gone_on_alone(undisturbed, tmp_path, capsys):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    leader, other = best(place(tmp_path, 0, 1))
    child, folder = store.checkpoints(tmp_path / "4"), store.checkpoints(tmp_path / leader.dir)
    shutil.copytree(child / "4", folder / "4")
    found = pods._leaders(_config(tmp_path), tmp_path, 1)
    assert [one.pod for one in found] == [other.pod]
    assert "it is not what was entered in the leaderboard" in capsys.readouterr().out


def _config(directory: Path) -> pods.Config:
    between = packs_of(directory)[0][0].config.between
    assert isinstance(between, pods.Config)
    return between


# --- the command line --------------------------------------------------------------------------------------------------------

SEARCH = (
    *LINE,
    "sweeper.batch=2",
    "algo.hp.lr=tag(log, interval(1e-4, 1e-2))",
    "eval.every_env_steps=1000",
    "total_env_steps=2500",
)


def test_each_value_of_the_command_line_has_a_tournament_with_seeds_of_its_own(tmp_path, capsys):
    line = (*SEARCH, "seed=0,2", "algo.num_envs=64")
    search(tmp_path, *line, objective=lambda job: value_of(job, "seed"))
    found = jobs(tmp_path)
    assert [value_of(job.overrides, "seed") for job in found] == [*range(12), *range(24, 36)]
    assert [value_of(job.overrides, "between.number") for job in found] == [0] * 12 + [1] * 12
    assert [value_of(job.overrides, "between.pack") for job in found][:12] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert {value_of(job.overrides, "between.pod_steps") for job in found} == {1000}
    told = capsys.readouterr().out
    assert "the tournament of seed=2: the best of the last 4 pods is job 23 with 35" in told
    again = [job.overrides for job in found]
    search(tmp_path, *line, objective=lambda job: math.nan)
    assert [job.overrides for job in jobs(tmp_path)] == again and {job.attempt for job in jobs(tmp_path)} == {1}


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            ["sweeper.space={algo: {num_epochs: {low: 1, high: 4}}}"],
            r"sweeper\.space\.algo\.num_epochs: it shapes the program.*algo\.hp\.lr",
        ),
        (["sweeper.population=1"], r"sweeper\.population: 1 is not allowed; expected at least 2"),
        (["sweeper.leaders=5"], r"sweeper\.leaders: 5 is not allowed; expected at most sweeper\.population 4"),
        (["run=plan"], r"run: plan has no pods"),
        (["between=population"], r"between: pods are what acts"),
        (["eval.every_env_steps=null"], r"eval\.every_env_steps: null is not allowed with sweeper=tournament"),
        (["eval.every_env_steps=1e6"], r"eval\.every_env_steps: 1000000 is not allowed; expected less than total_env"),
        (["sweeper.pod_steps=500k"], r"sweeper\.pod_steps: 500000 is not allowed; expected less than total_env_steps"),
        (["seed=4_000_000_000"], r"seed: 4000000000 is not allowed; expected less than .* seed \* 40 pods on"),
        (["sweeper.explored=1.5"], r"sweeper\.explored: 1\.5 is not allowed"),
        (["sweeper.explore=perturbed"], r'sweeper\.explore: .*did you mean "perturb"'),
    ],
)
def test_a_tournament_that_cannot_be_is_told_in_a_line(more, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        tournament_of(tmp_path, *more)


def test_nothing_is_left_of_what_was_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"sweeper\.space: empty; .*allowed: .*algo\.hp\.lr, "):
        search(tmp_path / "sweep", *LINE)
    with pytest.raises(ConfigError, match=r"sweeper\.space\.algo\.num_epochs: it shapes the program"):
        search(tmp_path / "sweep", *SEARCH, "algo.num_epochs=interval(1, 4)")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_leaderboard_of_another_sweep_is_told_and_left_alone(undisturbed, tmp_path):
    place = tmp_path / "sweep"
    shutil.copytree(undisturbed / leaderboard.FOLDER, place / leaderboard.FOLDER)
    before = board(place)
    with pytest.raises(ConfigError, match=r"which is none of this sweep's: a leaderboard of another sweep"):
        search(place, *SEARCH)
    assert board(place) == before and [path.name for path in place.iterdir()] == [leaderboard.FOLDER]
    tournament_of(undisturbed, *WORK)  # its own is no other


@pytest.mark.parametrize(
    ("population", "given", "leaders"), [(2, "null", 1), (7, "null", 3), (16, "null", 8), (7, 5, 5)]
)
def test_leaders_are_half_of_the_population_where_nothing_is_said(population, given, leaders, tmp_path):
    more = (f"sweeper.population={population}", f"sweeper.leaders={given}")
    trials = next(tournament_of(tmp_path, *WORK, *more).batches)
    assert {value_of(trial, "between.leaders") for trial in trials} == {leaders}


def test_first_settings_are_within_their_bounds_as_the_program_has_them(tmp_path):
    space = "sweeper.space={algo: {hp: {gamma: {low: 0.9, high: 0.99, step: 0.09}}}}"
    gammas = {value_of(trial, "algo.hp.gamma") for trial in next(tournament_of(tmp_path, *WORK, space).batches)}
    assert len(gammas) == 2 and all(0.9 <= float(np.float32(x)) <= 0.99 for x in gammas)


@pytest.mark.parametrize(
    ("steps", "more", "told"),
    [
        (16, (), r"sweeper\.pod_steps: 16 is not allowed; expected at least 32, the environment steps of an update"),
        (100, (), r"sweeper\.pod_steps: 100 .*multiple of eval\.every_env_steps 64.*the nearest is 128"),
        (6400, (), r"sweeper\.pod_steps: 6400 is not allowed; expected less than total_env_steps 192"),
        (64, ("eval.num_episodes=1",), r"eval\.num_episodes: 1 is not allowed with sweeper=tournament"),
        (64, ("checkpoint.enabled=false",), r"checkpoint\.enabled: false is not allowed with sweeper=tournament"),
        (64, ("eval.every_env_steps=null",), r"eval\.every_env_steps: null is not allowed with sweeper=tournament"),
    ],
)
def test_pods_that_cannot_be_are_told_in_a_line(steps, more, told):
    one = build(*WORK, *more, "between=pods", f"between.pod_steps={steps}")
    assert isinstance(one.config.between, pods.Config)
    hook = pods.make(one.config.between)
    with pytest.raises(ConfigError, match=told):
        hook.check(one, 4)
    alone = one._replace(config=dataclasses.replace(one.config, resume="somewhere"))
    hook.check(alone, 1)  # it is gone on with alone
