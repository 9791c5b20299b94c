"""`sweeper=optuna sweeper.batch=async`: a free slot asks at once. With a launcher that trains nothing and has one slow job."""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support import QUIET, environment, processes, rlexp_command

from rlexp import compose
from rlexp.config import ConfigError
from rlexp.sweep import supervise
from rlexp.sweep.hydra_sweep import sweep
from rlexp.sweep.journal import Journal
from rlexp.sweep.launcher import run_packs
from rlexp.sweep.manifest import OVER, Manifest

from .searches import FIXED, LR, Killed, Plugin, dying, jobs, log_lr, search, study

SLOTS = 3


class Slots(Plugin):
    """Three jobs at once. Of those that run the one with the highest number ends first: job 0 is very slow."""

    events: list[tuple[str, int]]

    def roll(self, packs: Callable[[Any], list[list[int]]]) -> list[Any]:
        self.events = []
        manifest = Manifest(self.directory)

        def prepare(given: Mapping[int, Sequence[str]], per_pack: int) -> list[list[int]]:
            for overrides in given.values():
                self.checked(overrides)
            for number, overrides in given.items():
                manifest.add(number, [o for o in overrides if not o.startswith("sweeper")])
            numbers = list(given)
            self.batches += [(number, per_pack) for number in numbers[::per_pack]]
            return [numbers[i : i + per_pack] for i in range(0, len(numbers), per_pack)]

        def left(pack: list[int]) -> list[int]:
            return [number for number in pack if manifest.jobs()[number].status not in OVER]

        waiting = [rest for pack in packs(prepare) if (rest := left(pack))]
        waiting += packs(prepare)
        running: list[list[int]] = []
        while waiting or running:
            while waiting and len(running) < SLOTS:
                running.append(waiting.pop(0))
                self.events += [("starts", number) for number in running[-1]]
                manifest.change(running[-1], again=True, status="running")
                self.die()
            ending = max(running)
            running.remove(ending)
            for number in ending:
                value = self.objective(manifest.jobs()[number].overrides)
                manifest.change([number], status="failed" if value is None else "finished", objective=value)
                self.events.append(("ends", number))
            waiting += packs(prepare)
        return []


def rolled(directory: Path, *arguments: str, die: Callable[[], None] = lambda: None, **given: Any) -> Slots:
    compose.register_resolvers()
    plugin = Slots(directory, given.pop("objective", log_lr), die)
    plugin.checked = given.pop("checked", plugin.checked)
    line = ("sweeper=optuna", "sweeper.batch=async", f"launcher.workers={SLOTS}", *arguments)
    sweep(plugin, [*FIXED, *line], has_manifest=True)
    return plugin


# TPE learns from the eleventh trial on.
SPACE = (LR, "algo.hp.gamma=interval(0.9, 1)", "sweeper.num_trials=14")
FEW = (LR, "sweeper.num_trials=5")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Slots]:
    directory = tmp_path_factory.mktemp("undisturbed")
    return directory, rolled(directory, *SPACE)


def test_a_slow_job_holds_nobody_up(tmp_path):
    directory, plugin = tmp_path, rolled(tmp_path, *FEW)
    events, running = plugin.events, 0
    assert events[-1] == ("ends", 0)  # all others were asked for, and ended, while it trained
    assert [number for what, number in events if what == "starts"] == list(range(5))
    for what, _ in events:
        running += 1 if what == "starts" else -1
        assert running <= SLOTS
    # Nothing is asked before there is a slot for it: each start but the first three comes right after an end.
    starts = [i for i, (what, _) in enumerate(events) if what == "starts"]
    assert starts[:SLOTS] == [0, 1, 2] and all(events[i - 1][0] == "ends" for i in starts[SLOTS:])
    trials = study(directory).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 5
    assert [trial.value for trial in trials] == [job.objective for job in jobs(directory)]
    # Optuna's own clock: the last one was asked while the first still ran.
    assert max(trial.datetime_start for trial in trials) < trials[0].datetime_complete


# Where a sweep may die: after so many questions, starts of jobs, answers.
@pytest.mark.slow
@pytest.mark.parametrize("where", ["ask 2", "ask 5", "ask 12", "tell 1", "tell 8", "tell 13", "job 1", "job 12"])
def test_killed_anywhere_it_makes_the_same_choices_again(where, undisturbed, tmp_path):
    with dying(where) as die:
        rolled(tmp_path, *SPACE, die=die)
    rolled(tmp_path, *SPACE)
    assert [job.overrides for job in jobs(tmp_path)] == [job.overrides for job in jobs(undisturbed[0])]
    assert [job.status for job in jobs(tmp_path)] == ["finished"] * 14
    assert [trial.state.name for trial in study(tmp_path).trials] == ["COMPLETE"] * 14
    # What ran when it died is started again; nothing that had ended is.
    assert sum(job.attempt for job in jobs(tmp_path)) <= 14 + SLOTS


@pytest.mark.slow
def test_a_trial_that_was_not_asked_for_in_full_is_no_trial(tmp_path, monkeypatch):
    import optuna

    real, calls = optuna.trial.Trial._suggest, []

    def dying(self, name, distribution):
        calls.append(name)
        if len(calls) == 10:  # the second parameter of trial 4
            raise Killed
        return real(self, name, distribution)

    monkeypatch.setattr(optuna.trial.Trial, "_suggest", dying)
    with pytest.raises(Killed):
        rolled(tmp_path, *SPACE)
    rolled(tmp_path, *SPACE)
    assert [job.status for job in jobs(tmp_path)] == ["finished"] * 14
    assert [t.state.name for t in study(tmp_path).trials].count("COMPLETE") == 14


@pytest.mark.slow
def test_a_slot_takes_the_jobs_of_a_pack(tmp_path):
    """Two trials of two seeds each fill one."""
    plugin = rolled(tmp_path, LR, "sweeper.num_trials=9", "seed=1,2", "launcher.max_pack=4")
    assert plugin.batches == [(number, 4) for number in range(0, 36, 4)][: len(plugin.batches)]
    assert len(jobs(tmp_path)) == 18 and len(study(tmp_path).trials) == 9
    assert [number for what, number in plugin.events if what == "starts"] == list(range(18))
    assert plugin.events[-1] == ("ends", 3)
    # More of them, in the same place; and in batches after that: nothing is done twice.
    rolled(tmp_path, LR, "sweeper.num_trials=11", "seed=1,2", "launcher.max_pack=4")
    batches = (
        "sweeper=optuna",
        f"launcher.workers={SLOTS}",
        LR,
        "sweeper.num_trials=12",
        "seed=1,2",
        "launcher.max_pack=4",
    )
    search(tmp_path, *batches)
    assert [job.attempt for job in jobs(tmp_path)] == [1] * 24 and len(study(tmp_path).trials) == 12


@pytest.mark.slow
def test_a_draw_that_is_no_valid_run_is_drawn_anew(tmp_path, capsys):
    """16 environments times 16 steps: 3 minibatches divide nothing. Others ran when it was drawn, and go on."""
    line = ("+sweeper.space.algo.num_minibatches.choices=[2,3]", "algo.num_envs=16", "algo.num_steps=16")

    def checked(overrides: Sequence[str]) -> None:
        if "algo.num_minibatches=3" in overrides:
            raise ConfigError("algo.num_minibatches: 3 does not divide")

    plugin = rolled(tmp_path, *line, "sweeper.num_trials=8", checked=checked, objective=lambda overrides: 1.0)
    assert "drawn anew: algo.num_minibatches=3: " in capsys.readouterr().out
    assert [number for what, number in plugin.events if what == "starts"] == list(range(8))
    assert all("algo.num_minibatches=2" in job.overrides for job in jobs(tmp_path))
    states = [trial.state.name for trial in study(tmp_path).trials]
    assert states.count("COMPLETE") == 8 and states.count("PRUNED") == len(states) - 8 > 0


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("sweeper.pruner=median", "eval.every_env_steps=1024"), "sweeper.batch: async knows no batches"),
        (("sweeper.batch=asynk",), "sweeper.batch: 'asynk' is not allowed"),
    ],
)
def test_bad_input(tmp_path, arguments, wanted):
    with pytest.raises(ConfigError, match=wanted):
        rolled(tmp_path / "s", LR, *arguments)
    assert not (tmp_path / "s").exists()


class Backend:
    """Two places. The pack of job 0 ends last."""

    def __init__(self) -> None:
        self.running: dict[str, Journal] = {}
        self.events: list[tuple[str, int]] = []

    def start(self, waiting):
        begun = waiting[: 2 - len(self.running)]
        for task in begun:
            self.running[task.name] = Journal(task.journal)
            self.running[task.name].settle({n: {"status": "running"} for n in task.numbers}, again=True)
            self.events.append(("starts", task.numbers[0]))
        return begun

    def ended(self, running):
        last = max((task for task in running if task.name in self.running), key=lambda task: task.numbers)
        journal = self.running.pop(last.name)
        journal.settle({n: {"status": "finished", "objective": 1.0} for n in last.numbers})
        journal.close()
        self.events.append(("ends", last.numbers[0]))
        return {last.name: supervise.Ended("ended")}

    def stop(self):
        return True


def test_packs_come_as_others_end(tmp_path, monkeypatch):
    """In `run_packs`, as all launchers have it."""
    from rlexp.sweep.packing import Job
    from rlexp.sweep.worker import FOLDER

    from .test_launcher import config, some

    monkeypatch.setattr(supervise, "_POLL_S", 0)
    (tmp_path / FOLDER).mkdir()
    built, manifest, backend = some(), Manifest(tmp_path), Backend()
    made = [Job(i, (f"seed={i}",), built.node, built.config, built.modules, tmp_path / str(i)) for i in range(5)]
    for job in made:
        manifest.add(job.number, job.overrides, str(job.number))
    given = [made[:1], made[1:2]]

    def more():
        """One for each that is over."""
        wanted = 2 + sum(entry.status in OVER for entry in manifest.jobs())
        fresh = [[job] for job in made[len(given) : wanted]]
        given.extend(fresh)
        return fresh

    place = lambda tasks: nullcontext(backend)  # noqa: E731
    run_packs(given[:2], set(), tmp_path, manifest, config=config(), backend=place, more=more)
    assert backend.events == [
        *[("starts", 0), ("starts", 1), ("ends", 1), ("starts", 2), ("ends", 2)],
        *[("starts", 3), ("ends", 3), ("starts", 4), ("ends", 4), ("ends", 0)],
    ]
    assert [entry.status for entry in manifest.jobs()] == ["finished"] * 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_workers_that_train(tmp_path):
    """One is held; all other trials are asked for, train and end meanwhile. Then the parent dies, and the sweep goes on."""
    small = (
        "env=probe/action_reward",
        "algo.num_steps=16",
        "network.hidden=[8]",
        "eval.num_episodes=2",
        "total_env_steps=1280",
    )
    search_ = (
        "sweeper=optuna",
        "sweeper.batch=async",
        LR,
        "sweeper.num_trials=4",
        "launcher.workers=2",
        "launcher.retries=0",
    )
    command = rlexp_command("-m", *search_, *small, *QUIET, "hydra.sweep.dir=sweep")
    directory = tmp_path / "sweep"

    def status() -> list[str]:
        return [job.status for job in Manifest(directory).jobs()] if (directory / "sweep.sqlite").exists() else []

    def wait(until: Callable[[], Any]) -> Any:
        limit = time.monotonic() + 250
        while not (found := until()):
            assert time.monotonic() < limit, (status(), (tmp_path / "out").read_text())
            time.sleep(0.02)
        return found

    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    held = None
    try:
        name = wait(lambda: [p.stem for p in directory.glob("workers/*.json") if '"number": 0' in p.read_text()])[0]
        (held,) = wait(lambda: processes("rlexp.sweep.worker", name))
        subprocess.run(["kill", "-STOP", str(held)], check=True)
        wait(lambda: status()[1:] == ["finished"] * 3)
        assert status()[0] in ("pending", "running")
        process.kill()
        process.wait()
    finally:
        process.kill()
        if held:
            subprocess.run(["kill", f"-{signal.SIGKILL}", str(held)], check=False)
    again = rlexp_command("-m", *search_, *small, *QUIET, "hydra.sweep.dir=sweep")
    done = subprocess.run(again, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and status() == ["finished"] * 4, done.stdout + done.stderr
    assert [job.attempt for job in Manifest(directory).jobs()][1:] == [1] * 3
    assert [trial.state.name for trial in study(directory).trials] == ["COMPLETE"] * 4
