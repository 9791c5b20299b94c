"""Workers in processes of their own step environments of the host, and the learner's process acts for all of them.

    worker     observations [b] →            → actions [b]          no network, no JAX: rlexp.workers
    server         batch of many workers · policy · memories        one thread of the learner's process
    learner    policy 0 · batch 0 · learn 0 · policy 1 · …

This is SEED RL (arXiv:1910.06591): what crosses processes are observations and actions, never parameters. The server acts for
those who wait, as soon as they are `inference_batch` environments, or nobody else is to come, or the first has waited for
`inference_wait_ms`. It owns what the policy remembers of each environment, its last action, and its unfinished unroll. Each step
has the newest policy, so that an unroll may have rows of several. `rlexp.sources.unrolls` says which unrolls make a batch and how
old they may be: at most `max_lag` updates, counted from their first row. A worker that is lost takes its unfinished unroll along
and nothing else; it is started anew. One that is lost again and again without an unroll in between ends the run: that rule has no
clock, so that an unroll may take as long as it does.

A checkpoint keeps the key alone, as that of `rlexp.sources.host`. With several workers the numbers depend on the clock.
"""

import functools
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from rlexp.algos.base import Algorithm
from rlexp.config import Bytes, ConfigError, Count, CountOrZero, Host, NonNegative, Seconds, Text, Workers, schema
from rlexp.envs.base import HostEnv
from rlexp.sources.acting import Acting, Settings, rows_of
from rlexp.sources.base import HostSource, check_even, no_feedback
from rlexp.sources.host import Data, collector, of_this_process, on_those_who_act
from rlexp.sources.unrolls import side_by_side
from rlexp.types import AGENT_STEPS, Batch, Key, Mean, Metrics, Trajectory
from rlexp.workers import address, wire
from rlexp.workers.keeper import Start, check_jobs, jobs, processes

GIVES = "played"


@schema
class Config:
    """Trajectories of environments in other processes, for which the learner's process acts."""

    module: Host[str]
    num_workers: Workers
    """Processes, which share algo.num_envs evenly, each side by side; where several processes learn, workers of each."""
    max_lag: Host[CountOrZero]
    """The most updates that a batch may be behind the policy that learns from it; 0: the learner waits for all workers."""
    inference_batch: Host[Count | None]
    """Environments that the policy acts for at once, at most; null: all."""
    inference_wait_ms: Host[NonNegative]
    """The longest that a batch waits for more, once there is one to act for."""
    num_devices: Host[CountOrZero] = 0
    """Devices that act and do not learn, from behind those of hardware.mesh; 0: the first one that learns acts too."""
    start: Host[Literal["processes", "slurm", "none"]]
    """How workers are started: as processes of this machine, as jobs of Slurm's; none: by you, with `python -m rlexp.workers`."""
    slurm: Host[dict[str, Any]]
    """Of start=slurm: options of submitit, such as {slurm_partition: cpu, timeout_min: 1440, cpus_per_task: 2}."""
    address: Host[Text]
    """Where the server listens: host:port, of which port 0 is any free one; or unix:<path>."""
    tls_certificate: Host[Text | None]
    """File with the server's certificate, which names the host that workers are told; null: no TLS."""
    tls_key: Host[Text | None]
    """File with its private key."""
    tls_authority: Host[Text | None]
    """File with the certificate that workers trust; null: tls_certificate, where it has signed itself."""
    max_message_bytes: Host[Bytes]
    """No message may be larger; a worker that sends one is turned away."""
    silence_s: Host[Seconds]
    """A worker that has an action and answers nothing for so long is given up, and started anew; longer than any step takes."""
    timeout_s: Host[Seconds]
    """The run ends with an error when no environment has taken a step for so long; an unroll may take longer. Time in Slurm's
    queue does not count."""


def make(
    config: Config,
    *,
    env: HostEnv,
    algorithm: Algorithm,
    num_envs: int,
    num_steps: int,
    num_shards: int,
    own_places: bool = False,
) -> HostSource:
    """A source of [1, num_steps + 1, num_envs] trajectories; `num_envs` are the environments of all shards.

    Args:
      own_places: every environment has its own place in all batches, and the learner waits for all workers.

    Raises:
      ConfigError: the workers cannot share the environments evenly, or a message would be too large.
    """
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "num_shards": num_shards}
    check_even("num_workers", config.num_workers, num_envs)
    whole = collector(env, algorithm, num_envs=num_envs, num_steps=num_steps)
    mine = num_envs // jax.process_count()  # environments whose workers this process serves
    of_worker = mine // config.num_workers
    rows = rows_of(env, of_worker)
    if rows.num_bytes > config.max_message_bytes:
        raise ConfigError(
            f"algo.source.max_message_bytes: {config.max_message_bytes} is less than the {rows.num_bytes} of the "
            f"{of_worker} environments of a worker; allow more, or take more workers"
        )
    if config.max_message_bytes > wire.MOST:
        raise ConfigError(
            f"algo.source.max_message_bytes: {config.max_message_bytes} is more than gRPC counts; at most {wire.MOST}"
        )
    if config.inference_batch is not None and config.inference_batch < of_worker:
        raise ConfigError(
            f"algo.source.inference_batch: {config.inference_batch} is less than the {of_worker} environments "
            "of a worker, which are acted for together; allow more, or take more workers"
        )
    address.check(config.address)
    listens = config.address
    if listens.startswith("unix:") and jax.process_count() > 1:
        listens += f".{jax.process_index()}"
    place: Path | None = None
    acting: Acting | None = None

    def at(directory: Path) -> None:
        nonlocal place
        place = directory

    def check() -> None:
        address.check_here(listens)
        address.check_tls(config.tls_certificate, config.tls_key, config.tls_authority, listens)
        if config.start == "slurm" and shutil.which("sbatch") is None:
            raise ConfigError(
                "algo.source.start: slurm needs sbatch, which is not on the PATH; allowed: processes|none"
            )
        if config.start == "slurm":
            check_jobs(config.slurm)
        elif config.slurm:
            raise ConfigError(
                f"algo.source.slurm: these are of algo.source.start=slurm, and it is {config.start}; choose that, or leave them out"
            )
        if env.node is None and config.start != "none":
            raise ConfigError(f"env: workers cannot make {env.spec.name} anew; it has to come from the configuration")

    def init(key: Key, policy: Any) -> Data:
        del policy
        close()
        return Data(key)

    def close() -> None:
        nonlocal acting
        before, acting = acting, None
        if before is not None:
            before.close()

    def next(data: Data, policy: Any) -> tuple[Data, Batch, Metrics]:
        nonlocal acting
        began = time.perf_counter()
        policy = jax.block_until_ready(policy)  # until it can be used the one before acts
        learnt = time.perf_counter()
        key, own = jax.random.split(data.key)
        if acting is None:
            settings = Settings(
                num_workers=config.num_workers,
                num_envs=of_worker,
                num_steps=num_steps,
                max_lag=config.max_lag,
                own_places=own_places,
                batch_size=config.inference_batch or mine,
                batch_timeout_s=config.inference_wait_ms / 1000,
                start=_start(config),
                address=listens,
                tls=address.check_tls(config.tls_certificate, config.tls_key, config.tls_authority, listens),
                max_message_bytes=config.max_message_bytes,
                silence_s=float(config.silence_s),
                timeout_s=float(config.timeout_s),
            )
            acting = Acting(settings, env, algorithm, key=of_this_process(own), place=place)
        playing = acting  # close(), in another thread, may take it away meanwhile
        unrolls, counted = playing.learn_from(on_those_who_act(policy, config.num_devices))
        waited = time.perf_counter() - learnt
        lag = playing.version - min(unroll.version for unroll in unrolls)
        rows: Any  # arrays are NumPy's here
        rows, memory = side_by_side(unrolls, num_steps, playing.rows, len(env.info))
        trajectory = Trajectory(
            obs=jax.tree.unflatten(jax.tree.structure(env.spec.observation), rows.obs),
            first=rows.first,
            action=rows.action,
            reward=rows.reward,
            discount=rows.discount,
            valid=rows.valid,
            extras=jax.tree.unflatten(playing.structures.extras, rows.extras),
        )
        weight: Any = np.ones((mine,), np.float32)
        whole_batch = Batch(trajectory, weight, memory=jax.tree.unflatten(playing.structures.memory, memory))
        num_valid: Any = np.uint32(rows.valid.sum())
        num_rows: Any = np.uint32(mine * num_steps)
        metrics = _summed(counted.episodes, env.info) | {
            AGENT_STEPS: Mean(num_valid, num_rows),
            "train/lag_mean": _mean(lag),
            "train/lag_at_most_share": _mean(lag == config.max_lag),
            "train/workers_lost": _mean(counted.lost, 1 / jax.process_count()),  # of all processes together
            "time/learner_waited_s": _mean(waited),
            "time/learnt_s": _mean(learnt - began),
            "time/acted_for_mean": _mean(counted.acted_for, counted.calls),
        }
        return Data(key), jax.tree.map(lambda x: x[None], whole_batch), metrics

    def shapes(policy: Any) -> tuple[Data, Batch, Metrics]:
        data, batch, metrics = whole.shapes(policy)
        scalar: Any = jax.ShapeDtypeStruct((), np.float32)
        return data, batch, metrics | {name: Mean(scalar, scalar) for name in OWN_METRICS}

    return HostSource(
        init,
        next,
        no_feedback,
        close,
        shapes,
        env_steps_per_update=num_envs * num_steps,
        num_devices=config.num_devices,
        in_places=lambda: make(config, env=env, algorithm=algorithm, own_places=True, **sizes),
        check=check,
        at=at,
        apart=True,
    )


def _start(config: Config) -> Callable[[Path], Start] | None:
    if config.start == "none":
        return None
    if config.start == "processes":
        return processes
    return functools.partial(jobs, cluster="slurm", patience_s=config.timeout_s, parameters=config.slurm)


OWN_METRICS = (
    "train/lag_mean",
    "train/lag_at_most_share",
    "train/workers_lost",
    "time/learner_waited_s",
    "time/learnt_s",
    "time/acted_for_mean",
)


def _summed(episodes: Any, info: Sequence[str]) -> Metrics:
    """Of the episodes that ended since the batch before."""
    names = ["train/return_mean", "train/length_mean", *(f"env/{name}" for name in info)]
    totals = np.zeros((len(names) + 1,), np.float32) + episodes
    return {name: _mean(total, totals[-1]) for name, total in zip(names, totals[:-1], strict=True)}


def _mean(total: Any, count: Any = 1) -> Mean:
    pair: Any = np.float32(total), np.float32(count)
    return Mean(*pair)
