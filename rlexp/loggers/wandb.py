"""Weights & Biases: one run per packed member, or one per pack, on by default, never fatal.

One daemon thread does everything that touches W&B: importing it, `init`, logging, uploading. The training loop only puts
work into a queue, so a slow or dead server cannot slow it down. The thread starts W&B with the first row, or after
`_HEAD_START_S`: its import would hold Python's lock for a second or two while the program is traced.

Rows are logged with `step=env_steps`, and W&B takes increasing steps only. So a resumed run may first log again what
metrics.jsonl holds: W&B takes the rows that it missed when the run was killed, and no row twice.
"""

import functools
import http.client
import logging
import netrc
import os
import queue
import re
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rlexp.config import Flag, Host, Positive, schema
from rlexp.loggers import jsonl, pack
from rlexp.loggers.base import Logger, Row, RunInfo, number
from rlexp.names import algorithm, environment, one_line
from rlexp.storage import store
from rlexp.storage.store import AnyPath

Mode = Literal["auto", "online", "offline", "disabled"]
Say = Callable[[str], None]
Action = Callable[[Any], None]  # what to do with a wandb.Run
Read = Callable[[RunInfo], list[Row]]  # the rows of a run so far

_CLOUD_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # names of one server: a key for either serves both
_ENV_MODES: dict[str, Mode] = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline"}
_ENV_MODES |= {"disabled": "disabled"}
_NO_KEY = "no API key (run `wandb login`, or set WANDB_API_KEY)"
_HEAD_START_S = 10.0  # with a warm compilation cache the first chunk is done by then
PROBE_S = 10.0
_OFFLINE_SLACK_S = 10.0  # what falling back to an offline run may take, once a server has not answered


@schema
class WandbConfig:
    """Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`, never from here."""

    runs: Host[Literal["each", "pack"]]
    """each: a run for every member of a pack; pack: one for all, with means over them, for sweeps of thousands."""
    mode: Host[Mode]
    """auto: what WANDB_MODE says, else online where a key is found, else offline, for `wandb sync` later."""
    project: Host[str]
    """Where runs go; made at need."""
    entity: Host[str | None]
    """Team or user; null is the key's default."""
    group: Host[str | None]
    """Groups runs in the UI, such as the seeds of one setting."""
    tags: Host[tuple[str, ...]]
    """Words to find runs by."""
    name: Host[str | None]
    """Display name; null makes one of environment, algorithm and seed, such as cartpole-ppo-s3."""
    notes: Host[str | None]
    """A longer text, shown with the run."""
    artifacts: Host[Flag]
    """Upload each checkpoint as an artifact."""
    timeout_s: Host[Positive]
    """Seconds that W&B may take to answer at the start, and to finish at the end; then it is left alone."""


def make(config: WandbConfig, infos: Sequence[RunInfo], *, note: Say, warn: Say) -> list[Logger]:
    """A Logger for each run. Returns at once; W&B starts in the background. Nothing here raises."""
    mode = _ENV_MODES.get(os.environ.get("WANDB_MODE", ""), "auto") if config.mode == "auto" else config.mode
    if mode == "disabled":
        return [Logger(log=lambda _: None) for _ in infos]
    if config.runs == "pack" and len(infos) > 1:
        (one,) = _make(mode, config, [pack.merged(infos)], lambda _: pack.history(infos), note=note, warn=warn)
        return pack.members(one, len(infos))
    return _make(mode, config, infos, lambda info: jsonl.read(info.dir / jsonl.NAME), note=note, warn=warn)


def _make(
    mode: Mode, config: WandbConfig, infos: Sequence[RunInfo], read: Read, *, note: Say, warn: Say
) -> list[Logger]:
    work: queue.SimpleQueue[tuple[int, Action] | None] = queue.SimpleQueue()
    runs: list[Any] = []  # of wandb.Run, filled by the thread
    wanted, done = threading.Event(), threading.Event()
    waiting = len(infos)  # members that are not closed yet

    def background() -> None:
        wanted.wait(_HEAD_START_S)
        try:
            runs.extend(_start(mode, config, infos, read, note=note, warn=warn))
            _serve(runs, work, warn)
        except Exception as error:  # wandb missing or broken
            warn(f"W&B is off: {public(error)}; the metrics are in metrics.jsonl")
        finally:
            done.set()

    thread = threading.Thread(target=background, name="wandb", daemon=True)
    thread.start()

    def member(i: int) -> Logger:
        def put(action: Action) -> None:
            if not done.is_set():  # nobody would take it from the queue
                work.put((i, action))
                wanted.set()

        def log(row: Row) -> None:
            put(lambda run: _log(run, row))

        def checkpoint(path: AnyPath, env_steps: int) -> None:
            if config.artifacts:
                put(lambda run: _upload(run, infos[i], path, env_steps))

        def video(path: Path, env_steps: int) -> None:
            put(lambda run: _film(run, path, env_steps))

        def close(summary: dict[str, Any]) -> None:
            nonlocal waiting
            put(lambda run: _summarise(run, summary))
            waiting -= 1
            if waiting:
                return  # runs are finished together, by the last one to close: the pack waits once, not once a member
            work.put(None)
            if not done.wait(config.timeout_s + _OFFLINE_SLACK_S):
                warn(_unfinished(runs, infos))

        return Logger(log=log, checkpoint=checkpoint, close=close, video=video)

    return [member(i) for i in range(len(infos))]


# --- in the background thread ----------------------------------------------------------------------------------------


def _start(mode: Mode, config: WandbConfig, infos: Sequence[RunInfo], read: Read, *, note: Say, warn: Say) -> list[Any]:
    """The runs, all online or all offline."""
    # W&B's reports on itself use the network even for an offline run, which then waits for it at its exit.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    _say_nothing_of_its_log()
    _look_for_no_inputs(wandb.Run)
    quiet = wandb.Settings(silent=True)
    settings = wandb.setup(quiet).settings
    trouble = "" if mode == "offline" else why_offline(settings, min(config.timeout_s, PROBE_S))
    many = f"{len(infos)} runs, " if len(infos) > 1 else ""
    for info in infos:
        _refused(info)  # by a process that was killed while it asked
    if mode != "offline" and not trouble:
        runs = []
        try:
            for info in infos:
                _ask(info)
                runs.append(_init(wandb, "online", config, info, read))
                if info.start_env_steps > 0:  # the server has all rows now: uploaded later, they would be doubled
                    _replace(info)
            note(f"W&B: {many}{runs[0].project_url if many else runs[0].url}")
            return runs
        except Exception as error:  # no such entity, no permission, a server that went silent
            trouble = public(error)
            # The service still holds the id of the run that it could not start: only a new service takes it again.
            wandb.teardown()
            wandb.setup(quiet)
            for info in infos:
                _refused(info)
    if trouble and (mode == "online" or trouble != _NO_KEY):  # without a key, offline is what `auto` promises
        warn(f"W&B: {trouble}; going on offline")
    runs = [_init(wandb, "offline", config, info, read if _set_aside(info) else None) for info in infos]
    place = infos[0].dir.parent / "*" if many else infos[0].dir
    note(f"W&B: {many}offline; upload with: wandb sync {place}/wandb/offline-run-*")
    return runs


@functools.cache  # once a process
def _say_nothing_of_its_log() -> None:
    """W&B keeps a log beside each run. On a full disk each of its lines would be a traceback on stderr."""
    logger = logging.getLogger("wandb")
    add = logger.addHandler

    def added(hdlr: logging.Handler) -> None:
        hdlr.handleError = lambda record: None
        add(hdlr)

    logger.addHandler = added


@functools.cache  # once a process
def _look_for_no_inputs(kind: Any) -> None:
    """At its first `init` W&B imports its launcher, a fifth of a second that the end of a short run waits for, and asks it for
    inputs that this process has staged. Where nobody has imported it, there are none.
    """
    if "wandb.sdk.launch" not in sys.modules:
        kind._detect_and_apply_job_inputs = lambda self: None


def _init(
    wandb: Any, mode: Literal["online", "offline"], config: WandbConfig, info: RunInfo, replay: Read | None
) -> Any:
    run = wandb.init(
        mode=mode,
        id=info.id,
        resume="allow",
        reinit="create_new",
        project=config.project,
        entity=config.entity,
        group=config.group,
        tags=config.tags or None,
        name=config.name or display_name(info),
        notes=config.notes,
        config=info.config
        | {"run_id": info.id, "environment": environment(info.config), "algorithm": algorithm(info.config)},
        dir=str(info.dir),
        save_code=False,
        settings=wandb.Settings(
            console="off",
            silent=True,
            symlink=False,
            x_disable_stats=True,
            x_save_requirements=False,  # environment.json has the versions
            init_timeout=config.timeout_s,
            finish_timeout=config.timeout_s,
            finish_timeout_raises=True,
        ),
    )
    _asking(info).unlink(missing_ok=True)
    run.define_metric("*", step_metric="env_steps")
    if replay and info.start_env_steps > 0:
        for row in replay(info):
            if row["env_steps"] <= info.start_env_steps:  # a later one is new, and comes by the queue
                _log(run, row)
    return run


def display_name(info: RunInfo) -> str:
    """cartpole-ppo-s3; of a sweep's job 7 cartpole-ppo-s3-job7, since others of its jobs may have that seed; of a pack
    cartpole-ppo-16-seeds; cartpole-ppo-s3-eval; where nothing is known, the id.
    """
    config = info.config
    short = re.sub(r"-v\d+$", "", environment(config)).lower()
    seed, run = config.get("seed"), config.get("run", "train")
    seeds = [f"s{s}" for s in dict.fromkeys(seed)] if isinstance(seed, list) else [] if seed is None else [f"s{seed}"]
    if len(seeds) > 3:
        seeds = [f"{len(seeds)}-seeds"]
    if not short or not algorithm(config):
        return info.id
    of_sweep = (
        not isinstance(seed, list) and info.dir.name.isdecimal()
    )  # hydra.sweep.subdir, unless somebody has set it
    ends = [*([f"job{info.dir.name}"] if of_sweep else []), *([] if run == "train" else [run])]
    return "-".join([*re.findall(r"[\w.]+", short), algorithm(config), *seeds, *ends])


def _set_aside(info: RunInfo) -> bool:
    """Makes way for an offline run that holds all rows. False where the server has rows already: they would be doubled.

    A killed process leaves an offline run without its last rows: W&B writes them every 15 seconds only.
    """
    if _folders(info, "run-*") or any(any(x.glob("*.synced")) for x in _folders(info, "*run-*")):
        return False
    _replace(info)
    return True


def _asking(info: RunInfo) -> Path:
    """There while a server is asked to take a run, with the folders that it had before: W&B makes one before it asks."""
    return info.dir / "wandb" / f".asking-{info.id}"


def _ask(info: RunInfo) -> None:
    (info.dir / "wandb").mkdir(exist_ok=True)
    _asking(info).write_text("\n".join(folder.name for folder in _folders(info, "run-*")))


def _refused(info: RunInfo) -> None:
    """Marks the folder of a run that no server has taken."""
    if _asking(info).exists():
        before = set(_asking(info).read_text().splitlines())
        for folder in _folders(info, "run-*"):
            if folder.name not in before:
                folder.rename(folder.with_name(f"refused-{folder.name}"))
        _asking(info).unlink()


def _replace(info: RunInfo) -> None:
    """Another run has the rows of its offline runs that were not uploaded."""
    for folder in _folders(info, "offline-run-*"):
        if not any(folder.glob("*.synced")):
            folder.rename(folder.with_name(f"replaced-{folder.name}"))


def _folders(info: RunInfo, kind: str) -> list[Path]:
    return [*(info.dir / "wandb").glob(f"{kind}-{info.id}*")]


def _log(run: Any, row: Row) -> None:
    plain = {name: number(value) for name, value in row.items()}
    run.log({n: value for n, value in plain.items() if value is not None}, step=int(row["env_steps"]), commit=True)


def _serve(runs: list[Any], work: queue.SimpleQueue, warn: Say) -> None:
    """Does the work in the order that it came; then finishes all runs at the same time."""
    warned: set[int] = set()
    for i, action in iter(work.get, None):
        try:
            action(runs[i])
        except Exception as error:  # an upload, say; what follows may well succeed
            if i not in warned:
                warn(f"W&B run {runs[i].id}: {public(error)}; its metrics are in metrics.jsonl")
            warned.add(i)
    threads = [threading.Thread(target=_finish, args=(run, warn), name="wandb-finish", daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _summarise(run: Any, summary: dict[str, Any]) -> None:
    run.summary.update({name: value for name, value in summary.items() if value is not None})


def _finish(run: Any, warn: Say) -> None:
    try:
        run.finish(exit_code=0 if run.summary.get("status") in ("finished", "stopped", "pruned", "waiting") else 1)
    except Exception as error:
        warn(f"W&B: {public(error)}; upload later with: wandb sync {run.settings.sync_dir}")


def _film(run: Any, path: Path, env_steps: int) -> None:
    import wandb

    film = wandb.Video(str(path), format=path.suffix[1:])  # type: ignore[arg-type]
    run.log({"eval/video": film, "env_steps": env_steps}, step=env_steps + 1)  # the row of this step is sent


def _upload(run: Any, info: RunInfo, path: AnyPath, env_steps: int) -> None:
    import wandb

    artifact = wandb.Artifact(f"checkpoint-{info.id}", type="checkpoint", metadata={"env_steps": env_steps})
    if store.is_remote(path):
        artifact.add_reference(str(path), checksum=False)  # where it is; W&B need not read it
    else:
        artifact.add_dir(str(path))
    run.log_artifact(artifact, aliases=["latest", f"env_steps-{env_steps}"])


# --- words and keys --------------------------------------------------------------------------------------------------


def why_offline(settings: Any, timeout_s: float) -> str:
    """Why an online run cannot be, as far as can be known quickly; empty if it can.

    W&B itself would ask for a missing key, which hangs a run whose terminal nobody watches, and would try a dead
    server for its whole time limit.
    """
    if not _has_key(settings.base_url, settings.api_key):
        return _NO_KEY
    try:
        urllib.request.urlopen(settings.base_url, timeout=timeout_s).close()
    except urllib.error.HTTPError:
        pass  # an answer is an answer
    except (OSError, http.client.HTTPException) as error:
        # W&B has its own certificates: what fails here may succeed there.
        if not (isinstance(error, urllib.error.URLError) and isinstance(error.reason, ssl.SSLError)):
            return f"{settings.base_url} cannot be reached ({one_line(error)})"
    return ""


def _has_key(base_url: str, configured: str | None) -> bool:
    """Whether W&B would find a key: in the environment, its settings, or netrc."""
    if configured or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return find_key(base_url) is not None


def find_key(base_url: str | None = None) -> str | None:
    """The key that `wandb login` has put into netrc, for machines that have no such file. It is for nobody's eyes."""
    host = urlsplit(base_url or os.environ.get("WANDB_BASE_URL") or f"https://{_CLOUD_HOSTS[0]}").netloc
    hosts = _CLOUD_HOSTS if host in _CLOUD_HOSTS else (host,)
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in map(os.path.expanduser, places):
        try:
            entries = netrc.netrc(place)
        except (OSError, netrc.NetrcParseError):
            continue
        for name in hosts:
            if key := (entries.authenticators(name) or ("", "", ""))[2]:
                return key
    return None


def public(error: BaseException) -> str:
    """An error in one line, without the key."""
    text = one_line(error)
    key = os.environ.get("WANDB_API_KEY")
    return text.replace(key, "***") if key else text


def _unfinished(runs: list[Any], infos: Sequence[RunInfo]) -> str:
    if not runs:
        return "W&B did not start in time; the metrics are in metrics.jsonl"
    place = runs[0].settings.sync_dir if len(runs) == 1 else infos[0].dir.parent / "*" / "wandb" / "*run-*"
    return f"W&B did not finish in time; upload later with: wandb sync {place}"
