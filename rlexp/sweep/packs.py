"""Trains one pack of a sweep's jobs, whatever becomes of it: finished, stopped, failed in part, or too large and halved."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rlexp import endings, session
from rlexp import experiment as experiments
from rlexp.config import ConfigError
from rlexp.experiment import Experiment
from rlexp.machine import distributed
from rlexp.machine.stop import Stop
from rlexp.sameness import pack_key
from rlexp.storage import rundir, store
from rlexp.sweep import inherit
from rlexp.sweep.journal import Record
from rlexp.sweep.leavers import Left, leavers
from rlexp.sweep.manifest import OVER
from rlexp.sweep.packing import PACKS, Job, name, slots, without_slots, words
from rlexp.sweep.refilling import WAITING, Heard, Search
from rlexp.training.layout import layout_of
from rlexp.training.loop import Diverged, FoundLate, Member, Resume, train_pack
from rlexp.training.program import Traced, trace
from rlexp.training.saves import ENDED_IN, NARROWED


class Programs:
    """The programs of the pack that trained last: with pack=off, or max_pack, the next one often has the same. Of one that was
    narrowed, those for each number of members."""

    def __init__(self) -> None:
        self._key = ""
        self._traced: dict[int, Traced] = {}

    def of(self, pack: Sequence[Job], built: Sequence[Experiment]) -> Traced:
        """Raises ConfigError where the devices are not there."""
        # What acts between chunks is no part of them: populations of one sweep share their programs.
        key = pack_key(pack[0].node | {"between": None})
        if key != self._key:
            self._key, self._traced = key, {}
        known = self._traced.get(len(pack))
        self._traced[len(pack)] = known.with_members(built) if known else trace(built, layout_of(built))
        return self._traced[len(pack)]


def train(pack: Sequence[Job], sweep_dir: Path, record: Record, *, stop: Stop, programs: Programs) -> None:
    """Trains the jobs; the record and each job's summary.json say how each of them ended."""
    if slots(pack[0]):
        _refilled(pack, sweep_dir, record, stop=stop, programs=programs)
    else:
        _train(pack, sweep_dir / PACKS / name(pack), sweep_dir, record, stop=stop, programs=programs)


def _train(
    pack: Sequence[Job],
    folder: Path,
    sweep_dir: Path,
    record: Record,
    *,
    stop: Stop,
    programs: Programs,
    again: bool = True,
    waited: bool = False,
    failed: bool = False,
    done_with: Callable[[Path], None] | None = None,
) -> None:
    """As one program.

    Args:
      folder: of its checkpoints.
      again: counts an attempt.
      waited: whether the jobs go on from where other packs have left them.
      failed: whether that is where they have failed. None of them has gone its own way.
      done_with: is given the folder once nobody needs it any more; None: it is removed.
    """
    if rest := _narrowed(pack, folder):
        _go_on_narrower(pack, rest, sweep_dir, record, stop=stop, programs=programs)
        return
    lost: dict[int, str] = {}  # member -> why its directory cannot be used, or is left alone
    left: dict[int, Left] = {}  # members that have gone on alone, of which more is known than the pack knows
    try:
        home = pack[0].dir if len(pack) == 1 else folder
        first = _on_as_many_devices(pack[0], home)
        lead = session.prepare(first.node, first.config, first.modules, None, num_members=len(pack), pack=len(pack))
        built = [lead, *(experiments.alike(lead, job.node, (job.config, job.modules)) for job in pack[1:])]
        left = {} if failed and _saved(pack[0], home) is None else leavers(pack, built, folder)
        if len(left) == len(pack):
            _each_alone(pack, left, sweep_dir, record, stop=stop, programs=programs)
            return
        lost |= {i: one.words for i, one in left.items()}
        with contextlib.ExitStack() as held:
            run_ids = _open_all(pack, held, lost)
            members = [
                Member(experiment, job.dir, run_ids.get(i, ""))
                for i, (job, experiment) in enumerate(zip(pack, built, strict=True))
            ]
            started = {"pack": folder.name, "status": "running", "error": None}
            record.settle({pack[i].number: started | {"run_id": run_id} for i, run_id in run_ids.items()}, again=again)
            if distributed.is_lead():
                store.push(*(pack[i].dir for i in run_ids))
            traced = programs.of(pack, built)
            inherit.begin(pack, members, traced, sweep_dir, home, lost=lost)
            if waited:
                inherit.go_on(pack, members, traced, home, lost=lost)
            resume = Resume(home, "all") if store.checkpoints(home).is_dir() else None
            narrower = _narrower(pack, sweep_dir)
            summaries = train_pack(
                members, stop=stop, resume=resume, directory=home, traced=traced, lost=lost, narrower=narrower
            )
    except (Exception, SystemExit) as error:  # a failed job is a failed job, whatever a module raises: the others go on
        too_large = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
        # Of what it has learnt halves would know nothing, and where something acts on all members they would be another thing.
        whole = pack[0].config.between is not None or _saved(pack[0], folder) is not None
        if too_large and len(pack) > 1 and not whole:
            _remove(folder)
            print(f"{len(pack)} jobs in one program need too much memory; they are trained in two halves", flush=True)
            for half in (pack[: len(pack) // 2], pack[len(pack) // 2 :]):
                _train(half, sweep_dir / PACKS / name(half), sweep_dir, record, stop=stop, programs=programs)
            return
        if not isinstance(error, ConfigError | OSError | Diverged | FoundLate) and jax.process_count() > 1:
            raise  # most likely another process died; whoever started this one starts it again
        trained = {i: job for i, job in enumerate(pack) if i not in left}
        ended = {i: _had_left(job, folder) for i, job in trained.items() if slots(job)}
        record.settle({job.number: ended.get(i) or _failed(job, error, lost.get(i)) for i, job in trained.items()})
    else:
        rest = [job for job, summary in zip(pack, summaries, strict=True) if summary["status"] == "stopped"]
        narrowed = bool(rest) and _has_narrowed(rest, sweep_dir, folder)
        ended = {i: one for i, one in enumerate(zip(pack, summaries, strict=True)) if i not in left}
        outcomes = {job.number: _outcome(s) for job, s in ended.values() if not (narrowed and job in rest)}
        entered = inherit.enter(pack, outcomes, sweep_dir)
        record.settle(entered)
        if narrowed:
            rundir.write_json(folder / _NARROWED, [job.number for job in rest])
            _go_on_narrower(pack, rest, sweep_dir, record, stop=stop, programs=programs, again=False)
        if entered == outcomes and all(summary["status"] in (*OVER, WAITING) for summary in summaries):
            # Each has its own part of it; one that was lost begins again if it is retried.
            (done_with or _remove)(folder)
    _each_alone(pack, left, sweep_dir, record, stop=stop, programs=programs)


# --- a pack whose slots are refilled --------------------------------------------------------------------------------------


def _refilled(pack: Sequence[Job], sweep_dir: Path, record: Record, *, stop: Stop, programs: Programs) -> None:
    """Stretch after stretch."""
    folder = sweep_dir / PACKS / name(pack)
    search = Search(pack, folder)
    if known := search.outcomes():
        # It may have been killed before it said so, or before it had removed what it had kept.
        record.settle(search.settled())
        for past in search.past():
            if all(known[number]["status"] != "failed" for number in past.jobs):
                _remove(search.place(past))
    while (stretch := search.next()) and stop.reason is None:
        jobs = search.of(stretch)
        heard, spent = Heard(record, folder.name), list[Path]()
        own = search.place(stretch)
        print(f"{words(jobs)}{f', from rung {stretch.passed} on' * bool(stretch.passed)}", flush=True)
        first = search.waits(stretch) and not _has_begun(jobs, own)  # one more stretch of the same attempt
        how = {"waited": search.goes_on(stretch), "failed": search.is_tried_again(stretch), "again": not first}
        _train(jobs, own, sweep_dir, heard, stop=stop, programs=programs, done_with=spent.append, **how)
        if heard.was_stopped:
            break
        try:
            search.over(stretch, heard.outcomes)
        except OSError as error:  # it comes again, and goes on from what it has
            record.settle({job.number: _failed(job, error, None) for job in jobs})
            raise
        record.settle(heard.outcomes)
        for one in spent:
            _remove(one)
    if left := search.left():
        record.settle({number: {"status": "stopped"} for number in left})
    elif all(outcome["status"] != "failed" for outcome in search.outcomes().values()):
        _remove(folder)


def _has_begun(jobs: Sequence[Job], folder: Path) -> bool:
    """Whether trials that waited have trained on, as far as checkpoints tell."""
    if len(jobs) > 1:
        return store.checkpoints(folder).is_dir()
    meta = _saved(jobs[0], jobs[0].dir)
    return meta is not None and not inherit.is_waiting(meta)


# --- a pack of which few are left ---------------------------------------------------------------------------------------

_NARROWED = (
    "narrowed.json"  # in its directory: the numbers of the jobs that go on, once the checkpoint of these is there
)


def _home(pack: Sequence[Job], sweep_dir: Path) -> Path:
    """Where a pack keeps its checkpoints."""
    return pack[0].dir if len(pack) == 1 else sweep_dir / PACKS / name(pack)


def _narrower(pack: Sequence[Job], sweep_dir: Path) -> Callable[[Sequence[int]], Path] | None:
    """For `train_pack`. A worker in a cloud brings along what its own pack has in the store, and nothing of another one."""
    if len(pack) == 1 or slots(pack[0]) or not pack[0].config.checkpoint.enabled or store.url_of(sweep_dir):
        return None
    return lambda going: _home([pack[i] for i in going], sweep_dir)


def _has_narrowed(rest: Sequence[Job], sweep_dir: Path, folder: Path) -> bool:
    """Whether the pack ended because few of it are left, and not because it was stopped."""
    checkpoint = experiments.load_module(rest[0].modules["checkpoint"], "checkpoint")
    own = checkpoint.own_meta(store.checkpoints(_home(rest, sweep_dir)))
    return own is not None and own.get(NARROWED) == folder.name


def _narrowed(pack: Sequence[Job], folder: Path) -> list[Job]:
    """Those that have gone on as a smaller pack."""
    numbers = rundir.read_json(folder / _NARROWED) or []
    return [job for job in pack if job.number in numbers]


def _go_on_narrower(
    pack: Sequence[Job],
    rest: Sequence[Job],
    sweep_dir: Path,
    record: Record,
    *,
    stop: Stop,
    programs: Programs,
    again: bool = True,
) -> None:
    """Trains those that are left. The others are over, though a killed process may not have recorded it."""
    there = {job.number for job in rest}
    ended = {job.number: rundir.read_json(job.dir / "summary.json") for job in pack if job.number not in there}
    record.settle(
        {number: _outcome(summary) for number, summary in ended.items() if summary and summary["status"] in OVER}
    )
    if stop.reason is not None:
        record.settle({number: {"status": "stopped"} for number in there})
        return
    own = sweep_dir / PACKS / name(rest)
    _train(rest, own, sweep_dir, record, stop=stop, programs=programs, again=again)
    if stop.reason is None:
        _remove(sweep_dir / PACKS / name(pack))


def _each_alone(
    pack: Sequence[Job],
    left: Mapping[int, Left],
    sweep_dir: Path,
    record: Record,
    *,
    stop: Stop,
    programs: Programs,
) -> None:
    """Each of those that have left their pack goes on from where it is, if that is not its end."""
    for i, one in left.items():
        if one.is_over:
            print(f"job {pack[i].number} ({pack[i].dir}): {one.words}", flush=True)
            finished = {pack[i].number: {"status": "finished", "objective": one.objective, "error": None}}
            outcome = inherit.enter([pack[i]], finished, sweep_dir)[pack[i].number]
        elif stop.reason is not None:
            outcome = {"status": "stopped"}
        else:
            print(f"job {pack[i].number} ({pack[i].dir}): {one.words}; it goes on from there", flush=True)
            # It is none of those any more that wait for each other.
            alone = [without_slots(pack[i])]
            _train(alone, sweep_dir / PACKS / name(alone), sweep_dir, record, stop=stop, programs=programs)
            continue
        record.settle({pack[i].number: outcome})


def _failed(job: Job, error: BaseException, lost: str | None) -> dict[str, Any]:
    """What is recorded of it. The traceback of what nobody foresaw is put into its directory."""
    if lost is None:
        with contextlib.suppress(ConfigError, OSError):
            rundir.create(job.dir)
    text, _ = endings.words(error, run_dir=job.dir) if lost is None else (lost, 1)
    return {"status": "failed", "error": text}


def _had_left(job: Job, folder: Path) -> dict[str, Any] | None:
    """How it had left a pack that failed then: others are compared with it by that, and it has all that it needs to go on."""
    with contextlib.suppress(OSError):
        own = experiments.load_module(job.modules["checkpoint"], "checkpoint").own_meta(store.checkpoints(job.dir))
        if own is not None and own.get(ENDED_IN) == folder.name:
            status, *_ = own["ended"]["0"]
            return {"status": status, "objective": own["objectives"][0], "error": None}
    return None


def _saved(job: Job, home: Path) -> dict[str, Any] | None:
    """The meta of the newest checkpoint, where there is one."""
    return experiments.load_module(job.modules["checkpoint"], "checkpoint").latest_meta(store.checkpoints(home))


def _on_as_many_devices(job: Job, home: Path) -> Job:
    """A pack on one CPU goes on over as many virtual devices as before, however many cores are here: others round otherwise."""
    meta = _saved(job, home)
    if meta is None or "pack_devices" not in meta:
        return job
    node = job.node | {"hardware": job.node["hardware"] | {"pack_devices": meta["pack_devices"]}}
    hardware = experiments.parse(node, experiments.Config)[0].hardware
    return job._replace(node=node, config=dataclasses.replace(job.config, hardware=hardware))


def run_alone(job: Job, record: Record) -> None:
    """A job that does not train, or starts from another run's checkpoint: as `python -m rlexp` runs it."""
    try:
        config, resume_dir, node = job.config, job.resume_dir, job.node
        if config.run == "train" and _saved(job, job.dir) is not None:  # it was interrupted, and goes on
            resume_dir, node = job.dir, node | {"checkpoint": node["checkpoint"] | {"restore": "all"}}
            config, _ = experiments.parse(node, experiments.Config)
        experiment = session.prepare(node, config, job.modules, resume_dir)
        with contextlib.ExitStack() as held:
            run_id = _opened(job, held)
            record.settle({job.number: {"status": "running", "error": None, "run_id": run_id}}, again=True)
            objective = session.run(experiment, job.dir, resume_dir, job.overrides)
    except (Exception, SystemExit) as error:
        known = ConfigError | session.CheckFailed | OSError | Diverged | FoundLate
        if not isinstance(error, known) and jax.process_count() > 1:
            raise
        record.settle({job.number: _failed(job, error, None)})
        return
    summary = rundir.read_json(job.dir / "summary.json") or {"status": "finished"}
    record.settle({job.number: {"status": summary["status"], "objective": objective}})


def unfinished(pack: Sequence[Job], sweep_dir: Path, over: Collection[int]) -> Sequence[Job]:
    """Those that are to be trained: all of a pack that was interrupted, since its checkpoint is of all, and of one whose slots are
    refilled; else what is not over."""
    waiting = [job for job in pack if job.number not in over]
    whole = slots(pack[0]) or store.checkpoints(sweep_dir / PACKS / name(pack)).is_dir()
    return pack if waiting and whole else waiting


def remove_all(sweep_dir: Path) -> None:
    """What packs kept: each job of the sweep has finished, and has its own part of it."""
    for folder in (sweep_dir / PACKS).glob("*"):
        _remove(folder)


def _remove(folder: Path) -> None:
    """What a pack kept. In a store nothing else but checkpoints."""
    if store.url_of(folder):
        store.remove(store.checkpoints(folder))
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _open_all(pack: Sequence[Job], held: contextlib.ExitStack, lost: dict[int, str]) -> dict[int, str]:
    """{member: run id} of those that are not lost; more of which the directory cannot be used get into `lost`. Raises where
    none can be."""
    run_ids = {}
    for i, job in enumerate(pack):
        if i in lost:
            continue
        try:
            run_ids[i] = _opened(job, held)
        except (ConfigError, OSError) as error:
            lost[i] = session.remedy(error)
            if len(lost) == len(pack):
                raise
    return run_ids


def _opened(job: Job, held: contextlib.ExitStack) -> str:
    """Makes, locks and describes the run directory, in the lead of several processes; the run's id."""
    lead = distributed.is_lead()
    if lead:
        rundir.create(job.dir)
        held.enter_context(rundir.lock(job.dir))
    run_id = distributed.share(rundir.id_of(job.dir) if lead else "")
    if lead:
        rundir.describe(job.dir, run_id=run_id, node=job.node, overrides=job.overrides, devices=jax.devices())
    return run_id


def _outcome(summary: dict[str, Any]) -> dict[str, Any]:
    return {"status": summary["status"], "objective": summary["objective"], "error": summary.get("error")}
