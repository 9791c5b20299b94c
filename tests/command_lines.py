"""Command lines that nobody would type, and the harness that runs them in this process with the training cut off."""
# ruff: noqa: SIM905  the words of a grammar are read more easily without quotes

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import yaml
from hypothesis import strategies as st

from rlexp import __main__ as cli
from rlexp import compose


class Line(NamedTuple):
    """A command line, and what lies around it."""

    arguments: Sequence[str]
    files: dict[str, bytes] = {}  # noqa: RUF012  path below the working directory -> what is in it
    environment: dict[str, str | None] = {}  # noqa: RUF012  None: unset
    links: dict[str, str] = {}  # noqa: RUF012  path -> what it points to
    modes: dict[str, int] = {}  # noqa: RUF012  path -> permissions, which say nothing to root


class Ended(NamedTuple):
    """How it ended."""

    code: int
    out: str
    err: str
    left: list[str]  # what was not there before, or has changed


def run(line: Line, root: Path) -> Ended:
    """Runs it in an empty directory below `root`, as a user's process would."""
    work, temporary = root / "work", root / "temporary"
    for directory in (work, temporary):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    for name, content in line.files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(content)
    for name, target in line.links.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).symlink_to(target)
    for name, mode in line.modes.items():
        (work / name).chmod(mode)
    before = _tree(work)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with _as_a_process(line, work, temporary), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    left = sorted(_tree(work) ^ before) + os.listdir(temporary)
    for name in line.modes:
        (work / name).chmod(0o700)
    return Ended(code, out.getvalue(), err.getvalue(), left)


def wrong_with(ended: Ended) -> str | None:
    """What is not as it should be: 0; or 2, one line, and nothing left."""
    if ended.code == 0:
        return None
    if ended.code != 2:
        return f"exit code {ended.code}"
    if ended.err.count("\n") != 1 or not ended.err.startswith("rlexp: "):
        return "not one line on stderr"
    return f"left on the disk: {ended.left}" if ended.left else None


@contextlib.contextmanager
def _as_a_process(line: Line, work: Path, temporary: Path) -> Iterator[None]:
    """What a process has of its own, and what this one shares among the command lines."""
    argv, directory, environment, temp = sys.argv, os.getcwd(), dict(os.environ), tempfile.tempdir
    flags = {x: getattr(jax.config, x) for x in ("jax_debug_nans", "jax_disable_jit", "jax_log_compiles")}
    flags["jax_compilation_cache_dir"] = jax.config.jax_compilation_cache_dir
    try:
        os.chdir(work)
        sys.argv, tempfile.tempdir = ["rlexp", *line.arguments], str(temporary)
        os.environ.update({k: v for k, v in line.environment.items() if v is not None})
        for name in (k for k, v in line.environment.items() if v is None):
            os.environ.pop(name, None)
        os.environ.pop("WANDB_RUN_GROUP", None)
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # it would be shown, on lines of its own
            warnings.filterwarnings("ignore", category=DeprecationWarning)  # not shown in others' modules
            yield
    finally:
        os.chdir(directory)
        sys.argv, tempfile.tempdir = argv, temp
        os.environ.clear()
        os.environ.update(environment)
        for name, value in flags.items():
            jax.config.update(name, value)


def _tree(directory: Path) -> set[str]:
    return {f"{p.relative_to(directory)} {p.stat().st_mtime_ns if p.is_file() else ''}" for p in directory.rglob("*")}


# --- the grammar --------------------------------------------------------------------------------------------------------


def _leaves(node: Any, path: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        yield from [path] if path else []
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path


with compose.hydra() as _app:
    _KEYS = sorted(_leaves(compose.compose_node([])[0]))
_HYDRA = (
    "hydra.run.dir hydra.sweep.dir hydra.sweep.subdir hydra.mode hydra.output_subdir hydra.job.chdir hydra.job.name "
    "hydra.job.num hydra.job.id hydra.job.env_set hydra.searchpath hydra.callbacks hydra.verbose hydra.sweeper.max_batch_size "
    "hydra.sweeper.params hydra.sweeper._target_ hydra.launcher._target_ hydra.launcher.pack hydra.launcher hydra.sweeper "
    "hydra.help.template hydra.runtime.cwd hydra.runtime.output_dir hydra.runtime.choices hydra.overrides.task hydra.env hydra "
    "hydra.job_logging hydra.hydra_logging hydra.nope"
).split()
_GROUPS = [
    "algo",
    "env",
    "env@env",
    "network",
    "hardware",
    "precision",
    "logger",
    "checkpoint",
    "launcher",
    "sweeper",
    "debug",
]
_GROUPS += [
    "experiment",
    "hydra/launcher",
    "hydra/sweeper",
    "hydra/job_logging",
    "hydra/help",
    "nothing",
    "env/gymnax",
    "local",
    "hydra/env",
    "hydra/output",
    "hydra/hydra_logging",
    "hydra",
    "ALGO",
    "algo/ppo",
    "launcher@hydra.launcher",
]
_OPTIONS = (
    "ppo dqn pqn gymnax/pendulum [gymnax/breakout] gymnax mlp cnn cpu gpu gpu-4 v4-8 bf16 f32 quiet off slurm tpu_vm local "
    "random optuna grid nans nojit none basic disabled fast null nothing ppoo ../algo/ppo /etc/passwd [ppo,dqn] ppo,dqn mine"
).split()
_VALUES = [
    *"0 1 -1 2 3 7 1.5 1e-50 1e30 1e39 -1e39 1e400 9223372036854775808 4294967296 2147483648 1_000 100k 1M 2.5M 0x10 1e6".split(),
    *"nan inf -inf .nan null true yes '' [] {} [1] [1,2] [[8]] [1e12] {a:1} {a:{b:1}} [null] abc 'a_b' ??? auto all".split(),
    *"${seed} ${nope} ${nope:1} ${oc.env:HOME} ${oc.env:NOT_THERE} ${ ${algo} ${..x} ${run_id:} ${multiply:a,1} $".split(),
    *"[1 {a:1 'abc a=b a:b \\ . .. ~ /dev/null/x /proc/x /dev/null gs://bucket gs:// s3://x x://y @ % * # ! ; &".split(),
    *"range(4,0) range(0,2) choice(1,2) interval(0,1) tag(log,interval(1,2)) glob(*) 1,2 int(x) json_str('[1') sort(2,1)".split(),
    *"rlexp.algos.ppo rlexp.config json os.path this.is.none __main__ .relative a..b rlexp.envs.probe".split(),
    *[
        "",
        " ",
        "\n",
        "a\nb",
        "\t",
        "ü",
        "🎲",
        "e\u0301",
        "\u202eabc",
        "a\u200bb",
        "\u2028",
        "\ufeff1",
        "１２",
        "٣",
        "½",
        "\xa0",
        "\x7f",
        "\x85",
        "\ufffd",
        "'a'",
        "''a''",
        "'\\''",
        '"\\""',
        "'\"'",
        "'a' 'b'",
        "['a','b\\'']",
        "{'a':'b,c'}",
        "'[1,2]'",
        "\\,",
        "a\\,b",
        "\\\\",
        "'${seed}'",
        "\\${seed}",
        "${oc.env:HOME,'a'}",
        "${oc.env:NOT_THERE,null}",
        "${oc.decode:'[1'}",
        "${oc.select:nope,3}",
        "${oc.create:{a:1}}",
        "${seed}${seed}",
        "${hydra:run.dir}",
        "${hydra:nope}",
        "${now:%Y}",
        "${now:}",
        "${local_root:x}",
        "${cache_dir:x}",
        "${oc.dict.keys:algo}",
        "${${seed}}",
        "[[[[[[[[1]]]]]]]]",
        "{a:{b:{c:{d:{e:1}}}}}",
        "[a,{b:[c,{d:1}]}]",
        "1" + "0" * 5000,
        "0." + "1" * 5000,
        "[" + "1," * 20_000 + "1]",
        "é" * 100_000,
        "loop",
        "loop/x",
        "no_entry",
        "no_entry/x",
        "dangling",
        "/sys/x",
        "/proc/self/mem",
        "/root/../dev/full",
        "~",
        "~nobody/x",
        "-",
        "./-m",
        "a/" * 3000,
        "\x1b[31m",
        "\udcff",
        "9" * 400,
        "x" * 300,
        "[" * 200,
        "a" * 5000,
    ],
]


def _override(key: str, value: str, form: str) -> str:
    return form.format(key=key, value=value)


_FORMS = ["{key}={value}"] * 12 + [
    "+{key}={value}",
    "++{key}={value}",
    "~{key}",
    "~{key}={value}",
    "{key}",
    "{key}@x={value}",
]
_FORMS += [
    "{key}.more={value}",
    "{key}..x={value}",
    "={value}",
    "{key}.0={value}",
    "{value}",
    "--{key}={value}",
    "+{key}",
]
_OVERRIDES = st.builds(
    _override, st.sampled_from(_KEYS * 2 + _HYDRA * 6), st.sampled_from(_VALUES), st.sampled_from(_FORMS)
)


def _elsewhere() -> Iterator[tuple[str, str]]:
    """(choice, key) of the keys that only other choices have; suites of worlds take seconds to trace."""
    slow = ("brax", "craftax", "jumanji", "navix", "pgx", "playground", "xminigrid")
    for group in ("algo", "env", "network", "source", "sweeper", "launcher", "logger", "checkpoint"):
        for file in sorted((compose.CONF_DIR / group).rglob("*.yaml")):
            name = file.relative_to(compose.CONF_DIR / group).with_suffix("").as_posix()
            root = "algo.source" if group == "source" else group
            node = {k: v for k, v in yaml.safe_load(file.read_text()).items() if k != "defaults"}
            if not name.startswith(slow):
                yield from ((f"{group}={name}", key) for key in _leaves(node, root) if key not in _KEYS)


_ELSEWHERE = st.builds(
    lambda of, value, form, more: Line([of[0], *more, _override(of[1], value, form)]),
    st.sampled_from(list(_elsewhere())),
    st.sampled_from(["2147483647", "100000", "unix:/dev/null", "unix:file", "gs://x/y-v0", "2e9", *_VALUES]),
    st.sampled_from(_FORMS),
    st.sampled_from([[], [], ["env=gymnasium/cartpole"], ["env=gymnax/pendulum"], ["run=plan"], ["-m"]]),
)
_CHOICES = st.builds(_override, st.sampled_from(_GROUPS), st.sampled_from(_OPTIONS), st.sampled_from(_FORMS[10:]))

_YAML = [
    b"a: [1",
    b"\ta: 1",
    b"a:\n\tb: 1",
    b"\x00\x01\xff\xfe",
    b"\xff\xfea\x00",
    b"seed: 1\nseed: 2\n",
    b"a: &a\n  b: *a\n",
    b"&a [*a]",
    b"",
    b"null",
    b"[]",
    b"- 1\n- 2\n",
    b"just words",
    b"3.5",
    b"defaults: 3",
    b"defaults: [nothing]",
    b"defaults: [{algo: nothing}]",
    b"defaults: [mine]",
    b"defaults: [{override /algo: dqn}, _self_]\nseed: 3\n",
    b"# @package _global_\nseed: x\n",
    b"# @package _global_\nseed: 3\n",
    b"# @package\nseed: 3\n",
    b"module: rlexp.algos.ppo",
    b"module: 3",
    b"module: null",
    b"hydra: 3",
    b"# @package _global_\nhydra:\n  run: {dir: ''}\n",
    b"a: ${b}\nb: ${a}\n",
    b"? [1, 2]\n: 3\n",
    b"1: 2\nnull: 3\ntrue: 4\n",
    b"!!python/object/apply:os.system ['true']",
    b"--- 1\n--- 2\n",
    b"%YAML 9.9\n---\na: 1\n",
    b"a: !!binary x\n",
    b"a: 2026-01-01\n",
    b"*nothing",
    b"a: '" + b"x" * 100_000 + b"'",
    b"a: " + b"[" * 5_000,
    b"<<: {a: 1}\n",
    b"<<: 3\n",
    b"<<: [1, {a: 2}]\n",
    b"x: &x {seed: 1}\ny:\n  <<: *x\n  seed: 2\n",
    b"# @package _global_\nhp: &hp {lr: 1}\nalgo: {hp: {<<: *hp}}\n",
    b"# @package _global_\nalgo: &a {hp: {lr: 0.1}}\nnetwork: *a\n",
    b"# @package _global_\nseed: &s 3\ntotal_env_steps: *s\n",
    b"<<: *nothing",
    b"a: !nope 3",
    b"!nope {a: 1}",
    b"a: !!set {b, c}",
    b"a: !!omap [b: 1]",
    b"a: !!float x",
    b"a: !!int 1e400",
    b"a: !!python/name:os.system",
    b"a: !!python/tuple [1]",
    b"a: !!timestamp x",
    b"a: !!null x",
    b"a: !!str 3\nb: !!bool maybe\n",
    b"a: 1:30:00\nb: 0o17\nc: 0b2\n",
    b"# @package _global_\nseed: 1:30\n",
    b"# @package a..b\na: 1\n",
    b"# @package _group_\na: 1\n",
    "# @package _global_\nseed: ３\n".encode(),
    "ü: 🎲\n".encode(),
    "a: \u2028\n".encode(),
    b"\xef\xbb\xbfa: 1\n",
    b"a: >\n  x\n y\n",
    b"a: |\n" + b"  x\n" * 5000,
    b"x: &a [1,1,1,1,1,1,1,1]\ny: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nz: [*b,*b,*b,*b,*b,*b,*b,*b]\n",
    b"k" * 5000 + b": 1\n",
    b"a: 1" + b"0" * 5000,
    b"a: {b: {c: {d: {e: ${..f}}}}}",
    b"'': 1\n' ': 2\n'a.b': 3\n",
    b"a: ${oc.env:NOT_THERE}\n",
    b"_target_: os.system\n",
    b"defaults:\n  - algo: ppo\n  - algo: dqn\n",
    b"defaults: [_self_, _self_]\n",
    b"defaults: [{optional algo: nothing}]\n",
    b"defaults: [{override /nothing: x}]\n",
    b"defaults: [{/algo@x.y: ppo}]\n",
    b"defaults: [{a: 1, b: 2}]\n",
    b"defaults: [[algo]]\n",
    b"defaults: ['${a}']\n",
]
_PLACES = st.builds(
    lambda form, place: Line(
        [part.format(place) for part in form.split(" ")],
        {"no_entry/inner/x.yaml": b"a: 1\n", "file": b"", "no_entry/environment.json": b"{}"},
        links={
            "loop": "loop",
            "ring": "ring2",
            "ring2": "ring",
            "dangling": "nowhere/at/all",
            "up": "..",
            "own/algo": "../loop",
        },
        modes={"no_entry": 0},
    ),
    st.sampled_from(
        [
            *"hydra.run.dir={} output_root={} resume={} compilation_cache={} --config-dir={} hydra.searchpath=[{}]".split(),
            *"hydra.searchpath=[file://{}] hydra.searchpath=[pkg://{}] hydra.runtime.cwd={} hydra.sweep.subdir={}".split(),
            *[
                "-m hydra.sweep.dir={}",
                "-m hydra.sweep.subdir={}",
                "-m hydra/launcher=basic hydra.sweep.dir={}",
                "algo=mine --config-dir={}",
            ],
            *[
                "resume=auto hydra.run.dir={}",
                "run=eval resume={}",
                "-m seed=1,2 hydra.sweeper.max_batch_size=1 hydra.sweep.subdir={}",
            ],
        ]
    ),
    st.sampled_from(
        [
            *"loop loop/x ring ring/x/y dangling dangling/x up up/x own file file/x".split(),
            *"no_entry no_entry/x no_entry/inner /dev/null".split(),
            *"/proc/1 /proc/self/fd/0 /sys/kernel/x /dev/stdin . .. ./../x".split(),
            *["x" * 256, "x/" * 2500, "ü", "🎲/ü", "a b", "a%b", "*", "?", "a:b"],
        ]
    ),
)
_FOLDERS = st.builds(
    lambda group, content, name: Line(
        [f"{group}=mine", "--config-dir", "own"], {f"own/{group.split('@')[0]}/{name}": content}
    ),
    st.sampled_from(
        ["experiment", "experiment", "algo", "env@env", "env", "network", "sweeper", "launcher", "logger", "local"]
    ),
    st.sampled_from(_YAML),
    st.sampled_from(["mine.yaml", "mine.yaml", "mine.yaml", "mine.yml", "mine", "mine.yaml/x"]),
)
SOUND = {
    "config.yaml": b"run: train\n",
    "overrides.yaml": b"- seed=3\n",
    "environment.json": json.dumps({"run_id": "c0ffee42", "starts": []}).encode(),
}
_JSON = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"null",
    b"{}",
    b'{"run_id": 3}',
    b'{"run_id": null, "starts": 3}',
    b"\xff",
    b"[" * 5_000,
]
_RESUMED = st.builds(
    lambda name, content, how, more: Line([how, *more], {f"a/{k}": v for k, v in (SOUND | {name: content}).items()}),
    st.sampled_from(
        [*SOUND, "checkpoints", "checkpoints/3/meta/metadata", "summary.json", ".store.json", "sweep.sqlite"]
    ),
    st.sampled_from(_YAML + _JSON + [b"- [1]\n- {a: 1}\n", b"- 1\n", b"- algo.hp.lrr=1\n", b"- resume=a\n", b"- ''\n"]),
    st.sampled_from(["resume=a", "resume=a", "resume='a'", "+resume=a", "resume=auto", "resume=c0ffee42"]),
    st.lists(
        st.sampled_from(["hydra.run.dir=a", "run=eval", "output_root=.", "checkpoint.restore=params", "run=plan"]),
        max_size=2,
    ),
)
_PROCESSES = st.lists(
    st.builds(
        _override,
        st.sampled_from([k for k in _KEYS if k.startswith("processes.")]),
        st.sampled_from(
            ["0", "1", "2", "5", "-1", "null", "auto", "host", "host:", ":1", "host:x", "host:99999999", "1e30", "[1]"]
        ),
        st.just("{key}={value}"),
    ),
    min_size=1,
    max_size=3,
)
_FLAGS = [
    ["-m"], ["-m"], ["-m", "seed=0,1"], ["-m", "seed=range(4,0)"], ["-m", "run=eval"], ["--multirun", "seed=1,x"], ["--run"],
    ["-m", "sweeper=random", "sweeper.num_trials=2", "algo.hp.lr=interval(1e-4,1e-3)"], ["--cfg", "job"], ["--cfg", "hydra"],
    ["--cfg", "all"], ["--cfg"], ["--cfg", "x"], ["--cfg", "job", "--resolve"], ["--resolve"], ["--cfg", "job", "-p", "algo"],
    ["-p", "nope", "--cfg", "job"], ["-p", "a..b", "--cfg", "all"], ["--help"], ["--hydra-help"], ["--help", "--cfg", "job"],
    ["--info"], ["--info", "defaults"], ["--info", "config"], ["--info", "x"], ["--config-name", "nope"], ["--config-name", ""],
    ["--config-name", "config"], ["--config-path", "/nothing"], ["--config-path", "conf"], ["--config-dir"], ["--config-dir", ""],
    ["--config-dir", "/nothing"], ["--config-dir", "/dev/null"], ["--config-dir", "."], ["--experimental-rerun", "x"],
    ["--shell-completion"], ["-sc", "query=bash"], ["-sc", "install=nope"], ["--nope"], ["-x"], ["--"], ["-m", "--cfg", "job"],
    ["-m", "launcher=slurm"], ["-m", "launcher=tpu_vm"], ["launcher=slurm"], ["launcher=tpu_vm"], ["-m", "launcher.workers=2"],
    ["-m", "launcher=tpu_vm", "launcher.project=p", "launcher.accelerator_type=v4-8"], ["launcher=slurm", "hydra.run.dir=."],
    ["-m", "hydra.sweep.dir=."], ["-m", "hydra.sweep.dir=/dev/null/x"], ["-m", "hydra/launcher=basic"],
]  # fmt: skip
_ENVIRONMENT = st.sampled_from(
    [
        {"HOME": None},
        {"HOME": None, "XDG_CACHE_HOME": None},
        {"HOME": "", "XDG_CACHE_HOME": ""},
        {"XDG_CACHE_HOME": "/dev/null"},
        {"HYDRA_MAIN_MODULE": "nothing.like.it"},
        {"WANDB_MODE": "odd"},
        {"CUDA_VISIBLE_DEVICES": "x"},
        {"SLURM_JOB_ID": "x", "SLURM_NTASKS": "y"},
        {"SLURM_JOB_ID": "1"},
        {"COLUMNS": "x"},
        {"USER": None},
        {"HOME": "/dev/null"},
        {"HOME": "relative"},
        {"HOME": "/nothing/like/it", "XDG_CACHE_HOME": "relative"},
        {"TMPDIR": "/nothing"},
        {"LANG": "C", "LC_ALL": "C"},
        {"LC_ALL": "nope"},
        {"TZ": "x"},
        {"HYDRA_FULL_ERROR": "0"},
        {"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"},
        {"WANDB_BASE_URL": "x"},
        {"WANDB_RUN_GROUP": ""},
        {"NETRC": "/dev/null/x"},
        {"JAX_COORDINATOR_ADDRESS": "x", "JAX_NUM_PROCESSES": "y", "JAX_PROCESS_ID": "z"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "7", "SLURM_JOB_NODELIST": "["},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "x"},
        {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "x"},
        {"GOOGLE_APPLICATION_CREDENTIALS": "/dev/null"},
        {"PATH": ""},
        {"ODD": "\udcff"},
    ]
)


@st.composite
def lines(draw: Any) -> Line:
    """Odd ones, of several kinds, one at a time or together."""
    first = draw(
        st.one_of(
            st.just(Line([])),
            _FOLDERS,
            _FOLDERS,
            _ELSEWHERE,
            _ELSEWHERE,
            _PLACES,
            _RESUMED,
            _PROCESSES.map(Line),
            st.sampled_from(_FLAGS).map(Line),
            st.just(Line([])),
        )
    )
    some = draw(
        st.lists(st.one_of(_OVERRIDES, _OVERRIDES, _OVERRIDES, _CHOICES), min_size=not first.arguments, max_size=2)
    )
    flags = draw(st.one_of(*[st.just([])] * 4, st.sampled_from(_FLAGS)))
    environment = draw(st.one_of(*[st.just({})] * 5, _ENVIRONMENT))
    return first._replace(arguments=[*first.arguments, *some, *flags], environment=environment)
