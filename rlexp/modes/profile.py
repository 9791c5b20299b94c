"""`run=profile`: where the time of a run goes. Chunks of the real program are timed, then a few are traced.

Two kinds of numbers, which need not agree to the last digit:
  clocks  compilation, a chunk, one evaluation, the host's work between chunks; rollout and update, each compiled apart; the
          environment alone, and with inference
  trace   what the devices did inside whole chunks: collectives, copies to the host, the most expensive operations
"""

import contextlib
import itertools
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions, StepTraceAnnotation

from rlexp.experiment import Experiment
from rlexp.loggers import jsonl
from rlexp.modes import three_way
from rlexp.modes.compilation import no_compilation_cache
from rlexp.storage import rundir, store
from rlexp.training import program
from rlexp.training.evaluate import episode_means
from rlexp.training.layout import Layout, layout_of, over_members
from rlexp.training.members import Member
from rlexp.training.metrics import mean
from rlexp.training.program import Program, Run, Traced, collect_once, learn_once
from rlexp.training.saves import Resume, learnt, with_memory
from rlexp.training.shares import Shares
from rlexp.types import Batch, PyTree, Settings, Shared

_REPETITIONS = 5
_CHUNK_S, _MAX_UPDATES = 0.2, 64  # a timed chunk takes about so long, and has at most so many updates
_TRACED_CHUNKS = 3
_TRACED_CHUNK_S = 0.02  # shorter, since the trace of a CPU grows by some 100 MB a second
_TOP = 10


def profile_run(member: Member, resume_dir: Path | None) -> None:
    """Profiles a fresh run, or one that goes on from a checkpoint. Prints a table; leaves profile.json and profile/.

    Raises:
      ConfigError: the devices or the checkpoint do not fit.
      OSError: the run directory cannot be written.
    """
    lead = member.experiment
    layout = layout_of([lead])
    traced = program.trace([lead], layout)
    print(f"compiling {lead.config.algo.module} for {lead.spec.name}; this can take a minute", flush=True)
    with no_compilation_cache():
        compiled = traced.compile()
    with contextlib.ExitStack() as closing:
        closing.callback(compiled.close)
        compiled.at(member.dir)
        run, update = _start(lead, traced, compiled, resume_dir)
        folder, device = member.dir / "profile", layout.mesh.devices.flat[0]
        folder.mkdir(exist_ok=True)

        if lead.on_host:
            run, report = _host_clocks(lead, layout, compiled, run, update or 0)
        else:
            run, report = _clocks(lead, layout, traced, compiled, run, update or 0, folder / jsonl.NAME)
        num_updates = max(1, round(_TRACED_CHUNK_S / report["seconds_per_update"]["chunk"]))
        file = _trace(folder, compiled, run, num_updates)
        trace = ProfileData.from_file(str(file))
        num_device_updates = _TRACED_CHUNKS * num_updates * len(layout.mesh.local_devices)
        report = {
            "algo": lead.config.algo.module,
            "env": lead.spec.name,
            "devices": {"platform": device.platform, "kind": device.device_kind, "num": layout.mesh.size},
            "compile_s": compiled.compile_s,
            **report,
            "trace": {
                "chunks": _TRACED_CHUNKS,
                "updates_per_chunk": num_updates,
                "file": str(file.relative_to(member.dir)),
            }
            | summarise(trace, origins(compiled.executable.as_text() or ""), num_device_updates=num_device_updates),
        }
        rundir.write_json(member.dir / "profile.json", report)
        steps = None if update is None else lead.env_steps(update)
        summary = rundir.summary(env_steps=steps or 0, compile_s=compiled.compile_s, resumed_from=steps)
        rundir.write_json(member.dir / "summary.json", summary)
    (_print_shares if lead.on_host else _print)(report, member.dir)


def _start(lead: Experiment, traced: Traced, compiled: Program, resume_dir: Path | None) -> tuple[Run, int | None]:
    """The run to profile, and the update that it goes on from, if it does."""
    if resume_dir is None:
        return compiled.init(), None
    checkpoint, what, where = lead.part("checkpoint"), lead.config.checkpoint.restore, store.checkpoints(resume_dir)
    if what == "all":
        found = checkpoint.restore(where, traced.abstract_run, warn=warnings.warn, settings=traced.settings())
        return (with_memory(found, traced), found.update) if found else (compiled.init(), None)
    return compiled.init(learnt(Resume(resume_dir, what), lead, warnings.warn)), None


# --- clocks ----------------------------------------------------------------------------------------------------------


def halves(lead: Experiment, layout: Layout, traced: Traced) -> tuple[Any, Any]:
    """An update in two programs: (state, data, settings, shared) -> (data, batch, metrics); (run, batch, shared) -> (run, metrics).

    Donated as in the chunk, so that no replay is copied; and what is shared is an argument, as there, and no constant.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, traced.abstract_run)

    def collect_all(state: PyTree, data: PyTree, settings: Settings, shared: Shared) -> Any:
        return over_members(layout, lambda r: collect_once(lead, layout, r, shared))(Run(state, data, settings))

    def learn_all(run: Run, batch: Batch, shared: Shared) -> Any:
        return over_members(layout, lambda r, b: learn_once(lead, layout, r, b, shared))(run, batch)

    options = layout.compiler_options
    rollout = jax.jit(
        collect_all, donate_argnums=1, out_shardings=(shardings.data, None, None), compiler_options=options
    )
    return rollout, jax.jit(learn_all, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)


def _clocks(
    lead: Experiment, layout: Layout, traced: Traced, compiled: Program, run: Run, update: int, lines: Path
) -> tuple[Run, dict[str, Any]]:
    """Medians over repetitions in which the parts take turns. `lines` takes the metric lines, and is removed."""
    rollout, learn = halves(lead, layout, traced)
    shared = jax.device_put(lead.shared, layout.replicated)

    def apart(run: Run, num_updates: int) -> tuple[Run, float, float]:
        rollout_s = update_s = 0.0
        for _ in range(num_updates):
            seconds, (data, batch, _) = _timed(rollout, *run, shared)
            rollout_s += seconds
            seconds, (run, _) = _timed(learn, run._replace(data=data), batch, shared)
            update_s += seconds
        return run, rollout_s, update_s

    run, *_ = apart(run, 1)  # compiles
    _, (run, _) = _timed(compiled.chunk, run, 1)
    seconds, (run, _) = _timed(compiled.chunk, run, 1)
    num_updates = min(_MAX_UPDATES, max(1, round(_CHUNK_S / seconds)))
    logger = jsonl.make(lines, start_env_steps=0)
    rounds, fetched = [], []
    for _ in range(_REPETITIONS):
        chunk_s, (run, metrics) = _timed(compiled.chunk, run, num_updates)
        evaluation_s, episodes = _timed(compiled.evaluate, run, update)
        # The trainer's tail: fetch, divide, write.
        fetch_s, (metrics, episodes) = _timed(jax.device_get, (metrics, episodes))
        began = time.perf_counter()
        values = episode_means(episodes) | {name: mean(metric) for name, metric in metrics.items()}
        logger.log({"env_steps": 0, "wall_s": began} | {name: float(x[0]) for name, x in values.items()})
        write_s = time.perf_counter() - began
        run, rollout_s, update_s = apart(run, num_updates)
        rounds.append((chunk_s, rollout_s, update_s, evaluation_s, fetch_s, write_s))
        fetched = jax.tree.leaves((metrics, episodes))
    logger.close({})
    lines.unlink()
    chunk_s, rollout_s, update_s, evaluation_s, fetch_s, write_s = map(median, zip(*rounds, strict=True))
    parts = {"chunk": chunk_s, "rollout": rollout_s, "update": update_s}
    training = lead.env_steps_per_update * num_updates / chunk_s
    return run, {
        "repetitions": _REPETITIONS,
        "updates_per_chunk": num_updates,
        "env_steps_per_update": lead.env_steps_per_update,
        "env_steps_per_second": training,
        "three_way": _three_way(lead, layout, run, shared, training) if lead.steps_environments else None,
        "seconds_per_update": {name: seconds / num_updates for name, seconds in parts.items()},
        "evaluation": {"seconds": evaluation_s, "episodes": lead.config.eval.num_episodes},
        "host_per_chunk": {"fetch_s": fetch_s, "write_s": write_s},
        "fetched_per_chunk": {"arrays": len(fetched), "bytes": sum(x.nbytes for x in fetched)},
    }


def _three_way(lead: Experiment, layout: Layout, run: Run, shared: Shared, training: float) -> dict[str, Any]:
    """Medians again; acting and stepping take turns, the first round compiles. `training`: environment steps a second."""
    parts = three_way.programs(lead, layout)
    worlds, turns = parts.begin(run, shared), list[three_way.Turn]()
    for i in range(_REPETITIONS + 1):
        acting_s, (later, (actions, _, first)) = _timed(parts.act, run, shared, worlds, jax.random.key(i))
        step_s, _ = _timed(parts.step, run, shared, worlds[:2], actions)
        turns.append(three_way.Turn(step_s, acting_s, parts.env_steps, int(jax.numpy.sum(first))))
        worlds = later
    return _of_turns(turns[1:], training)


def _of_turns(turns: Sequence[three_way.Turn], training: float) -> dict[str, Any]:
    step, acting = median(x.env_steps / x.step_s for x in turns), median(x.env_steps / x.acting_s for x in turns)
    return three_way.report(step=step, acting=acting, training=training, begun=sum(x.begun for x in turns))


def _host_clocks(
    lead: Experiment, layout: Layout, compiled: Program, run: Run, update: int
) -> tuple[Run, dict[str, Any]]:
    """Of a run whose environments or data are on the host: what the time of the learner's thread goes to."""
    run, _ = compiled.chunk(run, 1)  # opens environments
    seconds, (run, _) = _timed(compiled.chunk, run, 1)
    num_updates = min(_MAX_UPDATES, max(1, round(_CHUNK_S / seconds)))
    rounds = []
    for _ in range(_REPETITIONS):
        seconds, (run, metrics) = _timed(compiled.chunk, run, num_updates)
        evaluation_s, _ = _timed(compiled.evaluate, run, update)
        rounds.append(
            (seconds, evaluation_s, *(float(mean(metrics[f"time/{name}_share"])[0]) for name in Shares.NAMES))
        )
    chunk_s, evaluation_s, *medians = map(median, zip(*rounds, strict=True))
    shares = dict(zip(Shares.NAMES, medians, strict=True))
    training, ways = lead.env_steps_per_update * num_updates / chunk_s, None
    if lead.steps_environments:
        with contextlib.closing(three_way.on_host(lead, run, layout.mesh.local_devices[0])) as turns:
            ways = _of_turns(list(itertools.islice(turns, 1 + _REPETITIONS))[1:], training)
    return run, {
        "repetitions": _REPETITIONS,
        "updates_per_chunk": num_updates,
        "env_steps_per_update": lead.env_steps_per_update,
        "env_steps_per_second": training,
        "three_way": ways,
        "clock": lead.clock,
        "seconds_per_update": {"chunk": chunk_s / num_updates},
        "shares": shares,
        "bound_by": max(shares, key=lambda name: shares[name]),
        "evaluation": {"seconds": evaluation_s, "episodes": lead.config.eval.num_episodes},
    }


def _timed(f: Callable, *args: Any) -> tuple[float, Any]:
    """Seconds until all of the result is there, and the result."""
    began = time.perf_counter()
    out = jax.block_until_ready(f(*args))
    return time.perf_counter() - began, out


# --- trace -----------------------------------------------------------------------------------------------------------


def _trace(folder: Path, compiled: Program, run: Run, num_updates: int) -> Path:
    """Traces chunks, their metrics fetched; gives the file."""
    options = ProfileOptions()
    options.python_tracer_level = 0  # it slows the host down, and nothing here reads it
    with jax.profiler.trace(folder, profiler_options=options):
        for step in range(_TRACED_CHUNKS):
            with StepTraceAnnotation("chunk", step_num=step):
                run, metrics = compiled.chunk(run, num_updates)
                jax.device_get(jax.block_until_ready(metrics))
    return max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)


def origins(hlo: str) -> dict[str, str]:
    """{instruction: the code that it came from}, such as "update/transpose(jvp(Head))/Dense_0/dot_general"."""
    found = re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?metadata={[^}]*?op_name="([^":]*)', hlo, flags=re.MULTILINE)
    paths = {name: path.replace("/(", "/").split("/")[1:] for name, path in found}  # of merged ones the first: a/(b:c)
    return {name: "/".join(x for x in path if x not in _PLUMBING) for name, path in paths.items()}


_PLUMBING = ("while", "body", "cond", "closed_call", "shard_map", "vmap()")
_PLUMBING += ("jit(<lambda>)", "eval_jaxpr")  # since jax 0.11
_PART = re.compile(r"(?:\w+\()*(rollout|update)\)*(?:/|$)")  # the scope's name, also as vmap(rollout)
_COLLECTIVE = re.compile("all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective|sendrecv", re.IGNORECASE)
_CONTROL_FLOW = re.compile(r"(while|conditional|call)(\.\d+)*")  # holds operations that are counted themselves
_LINES = {"GPU": "Stream", "TPU": "XLA Ops", "CPU": ""}  # of a device's plane; its other lines tell the same again


class Operation(NamedTuple):
    """Something that a device did, once."""

    name: str
    origin: str
    seconds: float
    bytes_to_host: int | None  # None but for a copy to the host


def _operations(profile: Any, origins: Mapping[str, str]) -> Iterator[Operation]:
    planes = list(profile.planes)  # the host's plane holds the operations only where the CPU is the device
    devices = [p for p in planes if p.name.startswith(("/device:GPU", "/device:TPU"))]
    for plane in devices or [p for p in planes if p.name == "/host:CPU"]:
        kind = plane.name.split(":")[1]
        for event in (e for line in plane.lines if line.name.startswith(_LINES[kind]) for e in line.events):
            stats = dict(event.stats)
            if kind == "CPU" and "hlo_op" not in stats:
                continue
            name = event.name.removeprefix("%").split(" ")[0]  # a TPU gives the whole instruction
            op, copy = str(stats.get("hlo_op", name)), str(stats.get("memcpy_details", ""))
            if not copy and _CONTROL_FLOW.fullmatch(op):
                continue
            size = re.search(r"size:(\d+)", copy)
            to_host = int(size[1]) if size and "D2H" in name else None
            yield Operation(name if copy else op, origins.get(op, ""), event.duration_ns * 1e-9, to_host)


def summarise(profile: Any, origins: Mapping[str, str], *, num_device_updates: int) -> dict[str, Any]:
    """Sums over a ProfileData, divided by updates and devices: those of one update on the mean device."""
    done = list(_operations(profile, origins))
    all_s = sum(op.seconds for op in done) or 1.0

    def total(chosen: Sequence[Operation]) -> dict[str, float]:
        seconds, per = sum(op.seconds for op in chosen), num_device_updates
        return {"seconds": seconds / per, "count": len(chosen) / per, "share": seconds / all_s}

    parts, by_name = defaultdict(list), defaultdict(list)
    for op in done:
        part = _PART.match(op.origin)
        parts[part[1] if part else "rest"].append(op)
        by_name[op.name, op.origin].append(op)
    dearest = sorted(by_name.items(), key=lambda item: -sum(op.seconds for op in item[1]))[:_TOP]
    copies = [op for op in done if op.bytes_to_host is not None]
    return {
        "parts": {name: total(parts[name]) for name in ("rollout", "update", "rest")},
        "collectives": total([op for op in done if _COLLECTIVE.search(op.name)]),
        "copies_to_host": total(copies) | {"bytes": sum(op.bytes_to_host or 0 for op in copies) / num_device_updates},
        "operations": [{"name": name, "origin": origin, **total(ops)} for (name, origin), ops in dearest],
    }


# --- what the user sees ----------------------------------------------------------------------------------------------


_MEANT = {
    "acting": "the policy and the environments, or reading data, one after the other with the learning",
    "learning": "until the policy of the update is there",
    "copying": "batches to the devices",
    "waiting": "for those who act while the learner learns",
}


def _print_shares(report: dict[str, Any], run_dir: Path) -> None:
    update_s, devices = report["seconds_per_update"]["chunk"], report["devices"]
    print(f"{report['algo']} on {report['env']}, {devices['num']} x {devices['kind']}; an update has")
    if report["clock"] == "updates":
        print(f"no environment steps, and takes {1e3 * update_s:,.3f} ms: {1 / update_s:,.1f} updates/s\n")
    else:
        print(f"{report['env_steps_per_update']:,} environment steps, and takes {1e3 * update_s:,.3f} ms: ", end="")
        print(f"{report['env_steps_per_second']:,.0f} environment steps/s\n")
    for name, share in report["shares"].items():
        print(f"{name:<12}{share:>6.1%}{1e3 * share * update_s:>12,.3f} ms  {_MEANT[name]}")
    print(f"\nBound by {report['bound_by']}.")
    _print_three_way(report)
    print(f"All numbers: {run_dir / 'profile.json'}; the trace of the learning: {run_dir / 'profile'}")


def _print_three_way(report: dict[str, Any]) -> None:
    if ways := report["three_way"]:
        speeds, bound = ways["env_steps_per_second"], ways["bound_by"]
        print(f"\nEnvironment steps/s: {speeds['step']:,.0f} of the environment alone,")
        print(f"{speeds['with_inference']:,.0f} with inference, {speeds['training']:,.0f} of training;")
        print(f"bound by {bound}, {ways['shares'][bound]:.0%} of the time")
        if not ways["episodes_begun"]:
            print("No episode ended while the first two were timed: what a reset costs is not in them.")


def _print(report: dict[str, Any], run_dir: Path) -> None:
    clock, evaluation, host = report["seconds_per_update"], report["evaluation"], report["host_per_chunk"]
    fetched, devices, trace = report["fetched_per_chunk"], report["devices"], report["trace"]
    collectives, copies = trace["collectives"], trace["copies_to_host"]
    share = {name: f"{part['share']:.0%} of the trace" for name, part in trace["parts"].items()}
    rows = [
        ("compilation", report["compile_s"], "without the compilation cache"),
        ("chunk, per update", clock["chunk"], f"{report['env_steps_per_second']:,.0f} environment steps/s"),
        ("  rollout", clock["rollout"], f"compiled apart; {share['rollout']}"),
        ("  update", clock["update"], f"compiled apart; {share['update']}"),
        (
            "  collectives",
            collectives["seconds"],
            f"{collectives['count']:,.1f}; {collectives['share']:.0%} of the trace",
        ),
        ("  device to host", copies["seconds"], f"{copies['count']:,.1f} copies, {copies['bytes']:,.0f} bytes"),
        ("an evaluation", evaluation["seconds"], f"{evaluation['episodes']} episodes"),
        ("host, a chunk", sum(host.values()), f"fetches {fetched['arrays']} arrays, {fetched['bytes']:,} bytes"),
    ]
    print(f"{report['algo']} on {report['env']}, {devices['num']} x {devices['kind']}; an update has")
    print(f"{report['env_steps_per_update']:,} environment steps, a chunk {report['updates_per_chunk']} updates\n")
    for name, seconds, note in rows:
        took = f"{seconds:,.1f} s " if seconds >= 10 else f"{1e3 * seconds:,.3f} ms"
        print(f"{name:<18}{took:>13}  {note}")
    _print_three_way(report)
    print("\nRollout and update are compiled apart, so they need not add up. The dearest operations of an update:\n")
    for op in trace["operations"]:
        cost = f"{1e3 * op['seconds']:>10,.3f} ms {op['share']:>5.1%} {op['count']:>9,.1f} times"
        print(f"{cost}  {op['name']}  {op['origin']}".rstrip())
    print(f"\nAll numbers: {run_dir / 'profile.json'}; the trace, for TensorBoard or Perfetto: {run_dir / 'profile'}")
