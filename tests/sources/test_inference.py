"""Workers in processes of their own: that a run trains on them, what they hold, and that nothing of them is left."""

import os
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from support import SMALL, build, listening, processes

from rlexp.config import ConfigError
from rlexp.sources import inference
from rlexp.sources.base import is_host
from rlexp.storage import store
from rlexp.training import program
from rlexp.training.loop import layout_of
from rlexp.workers import meeting
from rlexp.workers.__main__ import live

NEW = set(inference.OWN_METRICS)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith(("inference", "workers"))] == []
    assert processes("rlexp.workers", f"--parent\0{os.getpid()}") == []


@pytest.mark.parametrize(
    ("algo", "env"),
    [
        ("ppo", "gymnasium/cartpole"),
        pytest.param("pqn", "envpool/cartpole", marks=pytest.mark.slow),
        pytest.param("impala", "gymnasium/cartpole", marks=pytest.mark.slow),
    ],
)
def test_a_run_trains_on_workers_without_jax(tmp_path, algo, env):
    lead = build(f"env={env}", "source=inference", f"algo={algo}", "algo.num_envs=4", "shards=1", *SMALL)
    compiled = program.trace([lead], layout_of([lead])).compile()
    compiled.at(tmp_path)
    before = compiled.init()
    try:
        run, metrics = compiled.chunk(before, 3)
        found = processes("rlexp.workers", f"{tmp_path}/workers")
        assert len(found) == 2
        for pid in found:
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "_multiarray_umath" in maps and "jaxlib" not in maps
        assert (tmp_path / "workers" / meeting.TOKEN).stat().st_mode & 0o777 == 0o600
        note, _ = meeting.read(tmp_path / "workers")  # type: ignore[misc]
        assert listening(int(note.address.rpartition(":")[2])) == {"127.0.0.1"}  # unless it is told otherwise
    finally:
        compiled.close()
    assert sorted(path.name for path in (tmp_path / "workers").iterdir()) == ["0.log", "1.log"]
    assert metrics.keys() >= NEW
    assert metrics["train/lag_mean"].count == 3 and metrics["train/workers_lost"].sum == 0
    assert metrics["time/waiting_share"].sum > metrics["time/acting_share"].sum  # workers start meanwhile
    assert 0 < metrics["train/agent_step_share"].sum <= metrics["train/agent_step_share"].count
    assert run.state is not None


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_a_policy_that_remembers(tmp_path, algo):
    """With a memory for each environment; that it goes on across unrolls test_inference_server.py shows."""
    small = [line for line in SMALL if "hidden" not in line]
    one = ("algo.source.num_workers=1", "algo.source.max_lag=0", "algo.num_envs=4", "shards=1")
    lead = build("env=gymnasium/cartpole", "source=inference", f"algo={algo}", "network=gru", *one, *small)
    compiled = program.trace([lead], layout_of([lead])).compile()
    compiled.at(tmp_path)
    try:
        run, metrics = compiled.chunk(compiled.init(), 3)
    finally:
        compiled.close()
    assert metrics["train/lag_mean"].sum == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(run.state.params)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["algo=dqn algo.num_updates=2", "algo=r2d2 network=gru algo.sequence_length=12 algo.burn_in=2"]
)
def test_what_workers_make_comes_into_a_replay(tmp_path, line):
    """Each environment has its place there; nothing but YAML."""
    small = [override for override in SMALL if "hidden" not in override and "total" not in override]
    sizes = (
        "algo.source.capacity=256",
        "algo.source.batch_size=8",
        "algo.source.prefill_env_steps=64",
        "algo.num_envs=4",
    )
    lead = build("env=gymnasium/cartpole", "source=inference", *small, *sizes, "algo.num_steps=8", "shards=1",
                 "total_env_steps=320", *line.split())  # fmt: skip
    compiled = program.trace([lead], layout_of([lead])).compile()
    compiled.at(tmp_path)
    try:
        run, metrics = compiled.chunk(compiled.init(), 3)
    finally:
        compiled.close()
    assert metrics["train/lag_mean"].count == 3 and metrics["train/workers_lost"].sum == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(run.state.params)))


def test_one_worker_without_a_lag_gives_the_same_numbers_again(tmp_path):
    found = []
    for folder in ("a", "b"):
        lead = build("env=gymnasium/cartpole", "source=inference", "algo.num_envs=2", "shards=1", *SMALL,
                     "algo.source.num_workers=1", "algo.source.max_lag=0")  # fmt: skip
        source = lead.source_of(lead.settings)
        source.at(tmp_path / folder)
        state = jax.jit(lead.algorithm.init)(jax.random.key(0), {k: np.float32(v) for k, v in lead.hp.items()})
        policy = lead.algorithm.policy(state, True)
        data = source.init(jax.random.key(1), policy)
        for _ in range(2):
            data, batch, _ = source.next(data, policy)
        source.close()
        found.append(batch)
        shapes = source.shapes(policy)[1]
        for leaf, shape in zip(jax.tree.leaves(batch), jax.tree.leaves(shapes), strict=True):
            assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("num_devices", [0, 2])
def test_each_device_that_acts_gets_the_policy(num_devices, monkeypatch):
    """That the devices share the workers test_inference_server.py shows."""
    given = ("env=gymnasium/cartpole", "source=inference", "algo.num_envs=2", "shards=1", *SMALL)
    lead = build(*given, f"algo.source.num_devices={num_devices}")
    source, heard = lead.source_of(lead.settings), []
    assert source.num_devices == num_devices  # by which the learner's devices are told from those

    class Heard:
        def __init__(self, *args, **kwargs):
            self.close = lambda: None

        def learn_from(self, policies):
            heard.extend([*policy.devices()] for policy in policies)
            raise RuntimeError("heard")

    monkeypatch.setattr(inference, "Acting", Heard)
    devices = jax.devices()[1 : 1 + max(1, num_devices)]
    policy = jax.device_put(np.float32(0), devices[0])
    with pytest.raises(RuntimeError, match="heard"):
        source.next(source.init(jax.random.key(0), policy), policy)
    assert heard == [[device] for device in devices]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("algo.source.num_workers=3", r"num_workers: 3 does not divide algo\.num_envs 4; the nearest that fits is 2"),
        ("algo.source.inference_batch=1", r"inference_batch: 1 is less than the 2 environments of a worker"),
        ("algo.source.max_message_bytes=40", r"max_message_bytes: 40 is less than the \d+ of the 2 environments"),
        (
            "algo.source.max_message_bytes=4G",
            r"max_message_bytes: 4000000000 is more than gRPC counts; at most 2147483647",
        ),
        ("algo.source.address=here", r"address: 'here' is none; allowed: host:port"),
        ("algo.source.address=no.such.host.invalid:1", r"address: it is not possible to listen on 'no\.such"),
        ("algo.source.address=here..there:1", r"address: it is not possible to listen on 'here\.\.there:1' "),
        ("algo.source.address=unix:/no/such/folder/socket", r"address: it is not possible to listen on 'unix:/no"),
        ("algo.source.tls_key=/no/such/file", r"tls_certificate: this key is missing"),
        ("algo.source.start=threads", r"start: "),
        ("algo.source.start=slurm", r"start: slurm needs sbatch"),
        ("algo.source.silence_s=0", r"silence_s: "),
        ("env=gymnax/cartpole source=inference", r"inference steps environments of the host, and .* is compiled"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(line, said, monkeypatch):
    monkeypatch.setenv("PATH", "")

    def prepare():
        lead = build("env=gymnasium/cartpole", "source=inference", "algo.num_envs=4", "shards=1", *line.split())
        lead.source_of(lead.settings).check()

    with pytest.raises(ConfigError, match=said) as told:
        prepare()
    assert "\n" not in str(told.value)
    assert is_host(inference)
    assert meeting.TOKEN.endswith(store._NOT_PUSHED)


def test_workers_that_others_start_fill_a_memory_anew_and_train_on(tmp_path):
    """Each comes once: it ends when it is told that the run is over."""
    sizes = (
        "algo.source.capacity=64",
        "algo.source.batch_size=4",
        "algo.source.prefill_env_steps=16",
        "algo.num_envs=2",
    )
    given = ("algo.num_updates=1", "algo.num_steps=4", "network.hidden=[4]", "shards=1", "total_env_steps=80")
    own = ("algo.source.start=none", "algo.source.num_workers=1", "algo.source.timeout_s=5")
    lead = build("env=gymnasium/cartpole", "source=inference", "algo=dqn", *sizes, *given, *own)
    traced = program.trace([lead], layout_of([lead]))
    compiled = traced.compile()
    compiled.at(tmp_path)

    def worker() -> threading.Thread:
        alive = {"parent": None, "patience_s": 30.0}
        thread = threading.Thread(target=live, args=(tmp_path / meeting.FOLDER, 0), kwargs=alive, daemon=True)
        thread.start()
        return thread

    workers = [worker()]
    try:
        run = compiled.init()
        compiled.close()
        workers[0].join(30)
        workers.append(worker())
        run, metrics = compiled.chunk(traced.refill(run, 3), 2)
    finally:
        compiled.close()
    for thread in workers:
        thread.join(30)
        assert not thread.is_alive()
    assert metrics["train/workers_lost"].sum == 0 and run.state is not None
