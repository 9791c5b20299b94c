"""Whatever stands on a command line and lies around it: it ends with 0, or with 2, one line on stderr, and nothing on the disk.

RLEXP_COMMAND_LINES=5000 tries as many.
"""

import os

import jax
import pytest
from command_lines import SOUND, Line, lines, run, wrong_with
from hypothesis import HealthCheck, given, settings
from support import ALGORITHMS

from rlexp import compose, session
from rlexp.machine import hardware
from rlexp.sweep import hydra_jobs, packs

TWO = ("hardware.emulate=true", "hardware.mesh.data=2")
RUN = {f"a/{name}": content for name, content in SOUND.items()}
# The samples: (arguments, words of the line). What else must hold of each is in `wrong_with`.
SAMPLES: list[tuple[Line, list[str]]] = [
    (Line(["-m", "seed=range(4,0)"]), ["seed=range(4,0)", "nothing to run"]),
    (
        Line(["-m", "seed=range(4,0)", "sweeper=random", "algo.hp.lr=interval(1e-4,1e-3)"]),
        ["seed=range(4,0)", "nothing to run"],
    ),
    *[  # what a program or a sweep is made of one by one: each of these was waited for without end
        (Line(line.split()), words)
        for line, words in (
            ("-m seed=range(0,1e9)", ["1000000000 jobs", "100000"]),
            ("-m seed=range(0,inf)", ["seed=range(0,inf)", "finite"]),
            ("-m seed=range(0,1000) total_env_steps=range(1,1000)", ["999000 jobs"]),
            ("-m seed=range(0,1e9) hydra/sweeper=basic", ["1000000000 jobs"]),
            (
                "-m sweeper=random sweeper.num_trials=1e9 algo.hp.lr=interval(1e-4,1e-3)",
                ["sweeper.num_trials", "100000"],
            ),
            ("-m sweeper=pbt sweeper.population=1e9 algo.hp.lr=interval(1e-4,1e-3)", ["sweeper.population", "100000"]),
            ("-m sweeper=pbt sweeper.population=60000 seed=0,1 algo.hp.lr=interval(1e-4,1e-3)", ["120000 jobs"]),
            (
                "-m sweeper=tournament sweeper.population=60000 algo.hp.lr=interval(1e-4,1e-3)",
                ["600000 jobs", "100000"],
            ),
            ("-m sweeper=asha sweeper.num_trials=1e9 algo.hp.lr=interval(1e-4,1e-3)", ["sweeper.num_trials", "100000"]),
            ("-m launcher.workers=1e9", ["launcher.workers", "4096"]),
            ("source=actors env=gymnasium/cartpole algo.source.num_actors=1e9", ["algo.source.num_actors", "4096"]),
            ("env=wrapped env.frame_stack=1e9", ["env.frame_stack", "256"]),
            ("env=wrapped env.action_repeat=1e5", ["env.action_repeat", "256"]),
            ("network=lq network.layers=1e9", ["network.layers", "256"]),
            ("network=transformer network.heads=2e9", ["network.heads", "nearest that fits is 64"]),
            ("algo.num_minibatches=2e9", ["algo.num_minibatches", "nearest that fits is 512"]),
            ("algo=c51 algo.num_atoms=2e9", ["algo.num_atoms", "65536"]),
        )
    ],
    *[
        (Line(line.split()), [line.split("=")[0].split()[-1], "gs://x/y"])
        for line in ("hydra.run.dir=gs://x/y", "-m hydra.sweep.dir=gs://x/y")
    ],
    *[
        (Line(["source=inference", "env=gymnasium/cartpole", f"algo.source.address=unix:{path}"]), ["address", path])
        for path in ("/dev/null", "/tmp")
    ],
    *[
        (Line(["env=gymnax_class", f"env.name={name}"]), ["env.name", word])
        for name, word in (("sys:exit", "SystemExit"), ("os:system", "TypeError"), ("this_is.none:X", "this_is"))
    ],
    (Line(["-m", "run=eval"]), ["resume", "run=eval"]),
    (Line(["-m", "run=train,eval"]), ["resume", "run=eval"]),
    (Line(["-m", "hydra.sweep.dir=/dev/null/x"]), ["hydra.sweep.dir", "/dev/null/x"]),
    *[
        (Line(["-m", f"hydra.sweep.{key}={path}", *basic]), [f"hydra.sweep.{key}", path[:7]])
        for key in ("dir", "subdir")
        for path in (f"a/{'x' * 256}/b", "/proc/1/x")
        for basic in ([], ["hydra/launcher=basic"], ["hydra/sweeper=basic"])
    ],
    (Line(["-m", "hydra.sweep.dir=" + "x" * 256]), ["File name too long"]),
    (Line(["-m", "hydra.sweep.dir="]), ["hydra.sweep.dir", "''"]),
    (Line(["-m", "+algo.base_num_envs=1", "hydra/launcher=basic"]), ["algo.base_num_envs"]),
    (Line(["-m", "hydra.sweep.dir=/dev/null"]), ["hydra.sweep.dir", "/dev/null", "Not a directory"]),
    (Line(["--config-dir=" + "x" * 256]), ["File name too long"]),
    (Line(["-m", "hydra.sweeper.max_batch_size=-1"]), ["hydra.sweeper.max_batch_size", "-1"]),
    (Line(["-m", "hydra.sweeper.max_batch_size=two"]), ["hydra.sweeper.max_batch_size=two", "to Integer"]),
    (Line(["env=gymnasium"]), ["env.id", "no value", "gymnasium/cartpole"]),
    (
        Line(["launcher=slurm", "launcher.sbatch=[1]"]),
        ["launcher.sbatch=[1]: ", "a list is not allowed; expected a node"],
    ),
    (Line(["-m", "launcher=slurm"]), ["launcher"]),
    (Line(["-m", "launcher=slurm", "hydra.sweep.dir=."]), ["launcher"]),
    (Line(["-m", "launcher=tpu_vm"]), ["output_root"]),
    (Line(["launcher=slurm", "hydra.run.dir=."]), ["launcher"]),
    (Line(["launcher=tpu_vm"]), ["output_root"]),
    (Line(["seed=1", "seed=2", "launcher=slurm"]), ["slurm"]),
    (Line(["-m", "resume=x"]), ["resume", "'x'", "-m"]),
    (Line(["~algo.module"]), ["algo", "module"]),
    (Line(["algo.module=null"]), ["algo", "module"]),
    (Line(["~algo"]), ["~algo", "algo=NAME"]),
    *[
        (Line([f"{group}=null"]), ["sweeper=null", "add -m"] if group == "sweeper" else [f"{group}: null", "choice"])
        for group in sorted(compose._groups())
    ],
    *[(Line([blank]), ["cannot be read as key=value"]) for blank in ("\u2028", "\n", "\x85")],  # ends of lines, to some
    (Line(["env=3"]), ["env: 3", "gymnax/cartpole"]),
    (Line(["algo="]), ["algo: ''", ", ".join(ALGORITHMS)]),
    (Line(["algo=[null]"]), ["algo: [null]", ", ".join(ALGORITHMS)]),
    (Line(["~algo", "+algo.source.path=x"]), ["algo"]),
    (Line(["algo=dqn", "algo.source=3", "+algo.source.path=x"]), ["algo.source"]),
    (Line(["+hydra/launcher=true"]), ["hydra/launcher: true", "rlexp"]),
    (Line(["-m", "env=null,gymnax/catch"]), ["env: null", "gymnax/cartpole"]),
    (Line(["algo.module="]), ["algo.module", "''"]),
    (Line(["resume=[1]"]), ["resume", "[1]", "string"]),
    (Line(["resume=nowhere"]), ["resume", "nowhere"]),
    (Line(["algo.num_envs=9223372036854775808"]), ["algo.num_envs", "9223372036854775808", "2147483648"]),
    (Line(["total_env_steps=1e30"]), ["total_env_steps", "1000000000000000"]),
    (Line(["total_env_steps=1e15"]), ["total_env_steps", "updates", "2147483647"]),
    (Line(["eval.num_episodes=1e30"]), ["eval.num_episodes", "2147483648"]),
    (Line(["eval.num_episodes=2e9"]), ["eval.num_episodes", "GB of memory that this machine has"]),
    (Line(["network.hidden=[1e12]"]), ["network.hidden", "2147483648"]),
    (Line(["network.hidden=[2e6,2e6]"]), ["network", "TB", "GB of memory that this machine has"]),
    (Line(["algo.num_envs=1e9", "algo.num_steps=1"]), ["algo: environments", "GB of memory that this machine has"]),
    (Line(["algo=dqn", "algo.source.capacity=1e9"]), ["replay memory", "GB of memory that this machine has"]),
    (Line(["algo.num_envs=1e6", "algo.num_steps=1e6"]), ["algo", "1000000000000"]),
    (Line(["processes.timeout_s=1e9"]), ["processes.timeout_s", "10000000"]),
    (Line(["algo.hp.lr=1e39"]), ["algo.hp.lr", "1e+39", "float32"]),
    (Line(["algo.hp.lr=1e-50"]), ["algo.hp.lr", "1e-50", "float32"]),
    (Line(["env.params.gravity=-1e39"]), ["env.params.gravity", "-1e+39", "float32"]),
    (Line(["algo.hp.lr=inf"]), ["algo.hp.lr", "inf", "finite"]),
    (Line(["total_env_steps=1Q"]), ["total_env_steps", "'1Q'", "integer"]),
    (Line(["algo.num_steps=1.5k", "algo.num_minibatches=7"]), ["algo.num_minibatches", "1500"]),
    (Line(["algo.lr=1"]), ["algo.lr", 'did you mean "algo.hp.lr"?']),
    (Line(["lr=1"]), ["lr", 'did you mean "algo.hp.lr"?']),
    (Line(["gravity=1"]), ['did you mean "env.params.gravity"?']),
    (Line(["num_envs=8"]), ['did you mean "algo.num_envs" or "hardware.num_envs"?']),
    (Line(["+network.hp.lr=3"]), ["network.hp", '"algo.hp"']),
    (Line(["--config-name", "nope"]), ["--config-name", "experiment=NAME"]),
    (Line(["--config-path", "/nothing"]), ["--config-path", "--config-dir"]),
    (Line(["--experimental-rerun", "x"]), ["--experimental-rerun", "resume"]),
    (Line(["-m", "--cfg", "job"]), ["--multirun and --cfg"]),
    (Line(["--resolve"]), ["--resolve", "--cfg"]),
    (Line(["--cfg", "job", "-p", "nope"]), ["--package", "nope"]),
    (Line(["--cfg", "x"]), ["--cfg", "choice"]),
    (Line(["--nope"]), ["--nope", "--help"]),
    (Line(["--info", "all", "algo=x"]), ["algo=x"]),
    (Line(["output_root="]), ["output_root", "''"]),
    (Line(["hydra.run.dir="]), ["hydra.run.dir", "''"]),
    (Line(["hydra.mode=MULTIRUN"]), ["hydra.mode", "-m"]),
    (Line(["hydra.run.dir=/dev/null/x"]), ["/dev/null/x"]),
    *[
        (Line([*mode, f"hydra.{key}.dir='~/x'"]), [f"hydra.{key}.dir", "'~/x'"])
        for mode, key in (([], "run"), (["-m"], "sweep"))
    ],
    (Line(["hydra.callbacks={x:{_target_:no.such}}"]), ["no.such"]),
    (Line(["seed=\udcff"]), ["UTF-8"]),
    (Line(["processes.index=5"]), ["processes.index", "processes.coordinator"]),
    (Line(["processes.number=2"]), ["processes.number", "2 processes"]),
    (
        Line([*TWO, "processes.coordinator=host", "processes.number=2", "processes.index=0"]),
        ["processes.coordinator", "'host'", "host:port"],
    ),
    (
        Line([*TWO, "processes.coordinator=host:", "processes.number=2", "processes.index=0"]),
        ["processes.coordinator", "host:port"],
    ),
    (Line([*TWO, "processes.coordinator=h:1", "processes.number=2", "processes.index=2"]), ["processes.index", "2"]),
    (Line(["experiment=mine", "--config-dir", "own"], {"own/experiment/mine.yaml": b"a: [1"}), ["mine.yaml", "line 1"]),
    (
        Line(["experiment=mine", "--config-dir", "own"], {"own/experiment/mine.yaml": b"\ta: 1"}),
        ["mine.yaml", "line 1"],
    ),
    (Line(["experiment=mine", "--config-dir", "own"], {"own/experiment/mine.yaml": b"\x00\xff"}), ["mine.yaml"]),
    (
        Line(["experiment=mine", "--config-dir", "own"], {"own/experiment/mine.yaml": b"a: 1\na: 2"}),
        ["mine.yaml", "duplicate key a"],
    ),
    (
        Line(["experiment=mine", "--config-dir", "own"], {"own/experiment/mine.yaml": b"a: &a\n  b: *a"}),
        ["mine.yaml", "recursi"],
    ),
    (Line(["experiment=mine", "--config-dir", "own"], {"own/experiment/mine.yaml": b"- 1"}), ["experiment"]),
    (Line(["experiment=mine", "--config-dir", "own"], {"own/experiment/mine.yaml": b"seed: 1"}), ["=mine", "_global_"]),
    (Line(["experiment=mine", "--config-dir", "own"], {"own/experiment/mine.yaml/x": b""}), ["mine"]),
    (Line(["resume=a"], RUN | {"a/overrides.yaml": b"a: ["}), ["a/overrides.yaml", "cannot be read"]),
    (Line(["resume=a"], RUN | {"a/overrides.yaml": b"a: 1"}), ["a/overrides.yaml", "no list"]),
    (Line(["resume=a"], RUN | {"a/overrides.yaml": b"\xff"}), ["a/overrides.yaml", "cannot be read"]),
    (Line(["resume=a"], RUN | {"a/environment.json": b"{"}), ["a/environment.json", "not the record"]),
    (
        Line(["resume=auto", "hydra.run.dir=a"], RUN | {"a/config.yaml": b"&a [*a]"}),
        ["a/config.yaml", "cannot be read"],
    ),
    (Line(["resume=auto", "hydra.run.dir=a"], RUN | {"a/config.yaml": b"3"}), ["a/config.yaml", "cannot be read"]),
    (Line(["resume=a"], RUN | {"a/checkpoints": b""}), ["a/checkpoints"]),
    (Line(["resume=a"], RUN | {"a/.store.json": b"3"}), ["a/.store.json"]),
    *[
        (Line(f"-m sweeper=optuna algo.hp.lr=interval(1e-4,1e-3) {words}".split()), [key, "leave this out"])
        for words, key in (
            ("sweeper.min_steps=50k", "sweeper.min_steps: 50000 is of a pruner"),
            ("sweeper.pruner=median sweeper.reduction=4", "sweeper.reduction: 4 is of sweeper.pruner=hyperband"),
        )
    ],
    *[
        (Line([*mode, f"hardware.param_rules=[{{path: {path}, spec: [null, model]}}]"]), ["hardware.param_rules", word])
        for mode, path, word in (
            ([], "foo", "no parameter of 2"),
            (["-m"], "foo", "no parameter of 2"),
            ([], "'['", "regular"),
        )
    ],
]


@pytest.fixture(scope="module", autouse=True)
def cut_off():
    """What is accepted ends before it is compiled; no process is waited for, and no program of the machine is found."""

    def train(pack, sweep_dir, record, **_):
        del sweep_dir
        record.settle({job.number: {"status": "finished", "objective": 1.0} for job in pack})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "_run", lambda *_: 1.0)
        patch.setattr(packs, "train", train)
        patch.setattr(jax.distributed, "initialize", lambda **_: None)
        for module in (compose, hydra_jobs):  # pytest has handlers of its own
            patch.setattr(module, "configure_log", lambda *_: None)
        patch.setattr("hydra.core.utils.configure_log", lambda *_: None)
        patch.setenv("PATH", "/nothing")
        yield


@pytest.mark.parametrize(
    ("line", "words"),
    # Two of three take their turn with the slow tests: there are many, and each is a whole command.
    [
        pytest.param(*sample, id=" ".join(sample[0].arguments), marks=pytest.mark.slow if i % 3 else ())
        for i, sample in enumerate(SAMPLES)
    ],
)
def test_a_sample(line, words, tmp_path):
    ended = run(line, tmp_path)
    assert wrong_with(ended) is None, ended
    assert ended.code == 2 and [word for word in words if word not in ended.err] == [], ended


OWN = {
    "own/source/my/kind.yaml": (compose.CONF_DIR / "source/replay.yaml").read_bytes(),
    "own/source/no.yaml": b"[",
}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (Line(["total_env_steps=100k"]), "total_env_steps: 100000"),
        (Line(["total_env_steps=1M"]), "total_env_steps: 1000000"),
        (Line([], environment={"HOME": None, "XDG_CACHE_HOME": ""}), "/rlexp"),
        (Line(["algo=ppo", "algo=dqn"]), "rlexp.algos.dqn"),
        (Line(["env=wrapped", "env@env.inner=probe/recall"]), "rlexp.envs.recall"),
        (
            Line(["--config-dir", "own", "algo=c51", "source=my/kind", "algo.source.capacity=5120"], OWN),
            "capacity: 5120",
        ),
    ],
    ids=["100k", "1M", "no HOME", "algo twice", "a part of the environment", "a key of a source of one's own"],
)
def test_taken(line, wanted, tmp_path):
    ended = run(line._replace(arguments=[*line.arguments, "hydra.run.dir=here"]), tmp_path)
    assert ended.code == 0, ended
    assert wanted in (tmp_path / "work/here/config.yaml").read_text()
    if "env=wrapped" in line.arguments:
        assert "given twice" not in ended.out
    if "algo=dqn" in line.arguments:
        assert ended.out.startswith("algo is given twice, algo=ppo and algo=dqn: the last counts\n") and not ended.err


@pytest.mark.parametrize(
    ("given", "shows"),
    [
        ("env=jumanji env.id=Snake-v1 env.kwargs.num_rows=97", "--cfg job"),
        ("env=jumanji env.id=Snake-v1 env.kwargs.num_rows=97", "--info config"),
        ("env=brax env.id=ant env.info.x=mean", "--help"),
        ("env=brax env.id=ant env.info.x=mean", "--hydra-help"),
        ("env=gymnax/pendulum env.params.g=97 hydra.verbose=false", "--cfg all --resolve"),
        ("env=gymnax/pendulum +env.params.g=97 hydra/job_logging=none", "--cfg job -p env"),
    ],
)
def test_what_is_shown_is_composed_as_what_is_run(given, shows, tmp_path):
    """Of a dict that is open Hydra has no key."""
    ended = run(Line([*given.split(), *shows.split()]), tmp_path)
    assert ended.code == 0 and not ended.err, ended
    assert (": 97" in ended.out) == ("97" in given)


@pytest.mark.parametrize("mode", [[], ["-m"]])
def test_a_loop_of_links_is_no_folder_to_search(mode, tmp_path):
    """Before Python 3.13, Path.resolve raises RuntimeError there."""
    ended = run(Line(["hydra.searchpath=[loop]", *mode], links={"loop": "loop"}), tmp_path)
    assert ended.code == 0 and wrong_with(ended) is None, ended


@pytest.mark.slow
def test_all_of_a_pack_has_to_fit_into_the_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "machine_bytes", lambda: 100_000_000)
    sweep = ["-m", "seed=0,1,2,3", "network.hidden=[1500,1500]"]  # 54 MB each
    ended = run(Line(sweep), tmp_path)
    assert wrong_with(ended) is None and ended.code == 2, ended
    assert "network: parameters and optimiser of a pack of 4 (launcher.max_pack) takes 217 MB" in ended.err
    assert run(Line([*sweep, "launcher.max_pack=1"]), tmp_path).code == 0


def test_code_that_calls_exit_does_not_end_a_command_as_if_all_were_well(monkeypatch, tmp_path):
    (tmp_path / "leaves.py").write_text(
        "from rlexp.networks.mlp import Config\ndef make(config, **_): raise SystemExit(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = run(Line(["network.module=leaves"]), tmp_path)
    assert wrong_with(ended) is None and ended.code == 2 and "exit(0)" in ended.err, ended


@settings(
    max_examples=int(os.environ.get("RLEXP_COMMAND_LINES", "30")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(lines())
def test_any(tmp_path, line):
    ended = run(line, tmp_path)
    assert wrong_with(ended) is None, ended
