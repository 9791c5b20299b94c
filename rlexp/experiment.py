"""From a checked configuration to the parts of a run: environment, network, algorithm, source. No device is touched here."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from rlexp.algos.base import Algorithm
from rlexp.config import Config, ConfigError, load_module, parse
from rlexp.envs.base import Env, HostEnv
from rlexp.envs.host import held
from rlexp.kinds import GIVES
from rlexp.networks.base import MemoryTorso
from rlexp.sameness import resume_fingerprint
from rlexp.sources.base import HostSource, Source, environments, is_host, stepping
from rlexp.types import EnvSpec, Groups, PyTree, Settings, Shared


class Experiment(NamedTuple):
    """One run, built and checked."""

    config: Config
    node: dict[str, Any]  # the resolved configuration as plain data
    modules: dict[str, str]  # path of a node -> its module
    spec: EnvSpec
    algorithm: Algorithm
    on_host: bool  # the source is a HostSource: environments that run in Python, or a data set
    # (settings, shared=None), where None stands for the `shared` below
    env_of: Callable[..., Any]  # an Env, or a HostEnv
    source_of: Callable[..., Any]  # a Source, of one logical shard; or a HostSource, of all
    hp: dict[str, float]  # traced; with total_updates
    settings: Settings  # the other traced settings
    shared: Shared  # what is read and never changed, on the host
    num_shards: int
    steps_environments: bool  # the source does; without it updates are counted where environment steps are
    env_steps_per_update: int  # as the source says; 1 where it takes none, so that updates are counted in their place
    prefill_env_steps: int  # what the source takes before the first update
    total_updates: int

    def env_steps(self, update: int) -> int:
        """Environment steps after so many updates, over all shards."""
        return self.prefill_env_steps + update * self.env_steps_per_update

    @property
    def clock(self) -> str:
        """What is counted, in words."""
        return "environment steps" if self.steps_environments else "updates"

    @property
    def total_env_steps(self) -> int:
        """total_env_steps of the configuration, rounded up to whole updates."""
        return self.env_steps(self.total_updates)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """{path: value} of what a checkpoint of it, and a run that goes on with all of that, have to have in common."""
        return resume_fingerprint(self.config, self.modules, self.num_shards, jax.tree.leaves(self.shared.env))

    def part(self, path: str) -> Any:
        """The module behind a node, such as "logger"."""
        return load_module(self.modules[path], path)


def build(
    node: Mapping[str, Any], *, parsed: tuple[Config, dict[str, str]] | None = None, num_shards: int | None = None
) -> Experiment:
    """Checks a resolved configuration and builds the parts.

    Args:
      parsed: what `parse` made of the node, where that was done.
      num_shards: the logical shards of a checkpoint, which `shards: auto` then follows.

    Raises:
      ConfigError: one line.
    """
    config, modules = parsed or parse(node, Config)
    is_new = num_shards is None
    num_shards = _num_shards(config, num_shards)
    dtype = load_module(modules["precision"], "precision").make(config.precision)
    env_module = load_module(modules["env"], "env")
    source_module = load_module(modules["algo.source"], "algo.source")
    settings = _settings(config)

    own = Shared()  # until the modules have made theirs

    def env_of(settings: Settings, shared: Shared | None = None) -> Env | HostEnv:
        if isinstance(env, HostEnv):
            return env
        given = _given((shared or own).env, env_module.make, modules["env"])
        return env_module.make(_replaced(config.env, "params", settings.env), **given)

    env = env_module.make(_replaced(config.env, "params", settings.env))
    if isinstance(env, Env):
        own = Shared(env=env.shared)
    elif isinstance(env, HostEnv):
        env = held(env)._replace(node=node["env"])
    stepping_module = stepping(modules)
    is_over, on_host = stepping_module is not source_module, is_host(stepping_module)
    _check_place(modules, env, stepping_module, on_host)
    _check_rows(modules, load_module(modules["algo"], "algo"), source_module)
    network = load_module(modules["network"], "network")

    def torso_of(spec: EnvSpec, *, memory: bool = False) -> Any:
        if isinstance(spec.observation, Groups):
            raise ConfigError(
                f"env: {spec.name} shows the critic something else than the policy, which {modules['algo']} cannot learn from; "
                "expected algo=ppo or algo=impala, or the same for both (env.critic=[], env.privileged=none)"
            )
        torso = network.make(config.network, observation=spec.observation, dtype=dtype)
        if isinstance(torso, MemoryTorso) and not memory:
            raise ConfigError(
                f"network: {modules['network']} has a memory, with which {modules['algo']} cannot learn; "
                "take a network without one, such as network=mlp, or an algorithm that can, such as algo=ppo or algo=r2d2"
            )
        return torso

    algorithm = load_module(modules["algo"], "algo").make(
        config.algo,
        spec=env.spec,
        torso_of=torso_of,
        dtype=dtype,
        num_shards=num_shards,
    )
    of_one = 1 if on_host else num_shards  # what the source's numbers are of
    sizes = _sizes(config.algo, of_one, source_module.make, modules)

    def source_of(settings: Settings, shared: Shared | None = None) -> Source | HostSource:
        parts = {"env": env_of(settings, shared), "algorithm": algorithm, "num_shards": num_shards, **sizes}
        made = {"inner": stepping_module.make(config.algo.source.inner, **parts)} if is_over else {}
        return source_module.make(
            _replaced(config.algo.source, "hp", settings.source),
            **parts,
            **made,
            **_given((shared or own).source, source_module.make, modules["algo.source"]),
        )

    source = source_of(settings)
    if is_new and getattr(source_module, "GIVES", None) == "samples":
        _check_sequences(config.algo, algorithm)
    if isinstance(source, HostSource) != on_host:
        raise ConfigError(
            f"algo.source.module: {modules['algo.source']}.make gives a {type(source).__name__}; its return type has to say so"
        )
    if isinstance(source, Source):
        own = own._replace(source=source.shared)
    env_steps_per_update = source.env_steps_per_update * of_one or 1
    most = 2**31 - 1  # programs count in int32
    if env_steps_per_update > most:
        raise ConfigError(
            f"algo: {env_steps_per_update} environment steps in one update; at most {most} can be counted"
        )
    prefill = source.prefill_env_steps * of_one
    if is_new and config.total_env_steps <= prefill > 0:  # an older version took it, and made one update
        raise ConfigError(
            f"total_env_steps: {config.total_env_steps} leaves none to learn from: the first {prefill} fill the memory "
            f"(algo.source.prefill_env_steps); expected more than {prefill}"
        )
    total_updates = max(1, -(-(config.total_env_steps - prefill) // env_steps_per_update))
    if total_updates > most:
        raise ConfigError(
            f"total_env_steps: {config.total_env_steps} are {total_updates} updates of {env_steps_per_update} environment steps; "
            f"at most {most} can be counted"
        )
    return Experiment(
        config=config,
        node=dict(node),
        modules=modules,
        spec=env.spec,
        algorithm=algorithm,
        on_host=on_host,
        env_of=env_of,
        source_of=source_of,
        hp=_hyperparameters(config, modules, env.spec, total_updates),
        settings=settings,
        shared=own,
        num_shards=num_shards,
        steps_environments=source.env_steps_per_update > 0,
        env_steps_per_update=env_steps_per_update,
        prefill_env_steps=prefill,
        total_updates=total_updates,
    )


def alike(lead: Experiment, node: Mapping[str, Any], parsed: tuple[Config, dict[str, str]]) -> Experiment:
    """Another member of the lead's pack, which differs from it in data of the program alone: its parts are the same.

    Args:
      parsed: what `parse` made of the node.
    """
    config, modules = parsed
    own = _hyperparameters(config, modules, lead.spec, lead.total_updates)
    return lead._replace(config=config, node=dict(node), modules=modules, hp=own, settings=_settings(config))


def _settings(config: Config) -> Settings:
    return Settings(_traced(config.env, "params", "env"), _traced(config.algo.source, "hp", "algo.source"))


def _hyperparameters(config: Config, modules: Mapping[str, str], spec: EnvSpec, total_updates: int) -> dict[str, float]:
    """Raises ConfigError where they cannot be scaled as they are to be."""
    given = {f.name: getattr(config.algo.hp, f.name) for f in dataclasses.fields(config.algo.hp)}
    if left_open := [name for name, value in given.items() if value is None]:
        usual = getattr(load_module(modules["algo"], "algo"), "usual_hp", lambda spec: {})(spec)
        if missing := [name for name in left_open if name not in usual]:
            raise ConfigError(
                f"algo.hp.{missing[0]}: null is not allowed; expected a number, since {modules['algo']} says of none what is usual"
            )
        given |= {name: usual[name] for name in left_open}
    hp = {name: float(value) for name, value in given.items()}
    if "lr_scaling" in _fields(config.algo):
        missing = [name for name in ("num_envs", "base_num_envs") if name not in _fields(config.algo)]
        if missing := [*missing, *(() if "lr" in hp else ("hp.lr",))]:
            raise ConfigError(
                f"algo.lr_scaling: {modules['algo']} has no {' and no '.join(missing)}, which it is made of"
            )
        hp["lr"] *= lr_factor(config)
    return hp | {"total_updates": float(total_updates)}


def _check_place(modules: Mapping[str, str], env: Any, stepping_module: Any, on_host: bool) -> None:
    """Raises ConfigError where the environment is none that the source takes."""
    if isinstance(env, environments(stepping_module)):
        return
    runs, steps = "runs on the host", "steps compiled environments"
    if on_host:
        runs, steps = "is compiled", "steps environments of the host"
    raise ConfigError(
        f"algo.source.module: {stepping_module.__name__} {steps}, and {env.spec.name} of {modules['env']} {runs}; "
        f"expected source={'rollout, for one' if on_host else 'host'}"
    )


def _check_rows(modules: Mapping[str, str], algo_module: Any, source_module: Any) -> None:
    """Raises ConfigError where the source says that its rows are such as the algorithm says it cannot learn from."""
    wanted, given = getattr(algo_module, "LEARNS_FROM", None), getattr(source_module, "GIVES", None)
    if not wanted or given is None or given in wanted:
        return
    usual, choice = next(iter(wanted.items()))
    raise ConfigError(
        f"algo.source: {modules['algo'].rpartition('.')[2]} learns from {GIVES.get(usual, usual)}, and {modules['algo.source']} "
        f"gives {GIVES.get(given, given)}; expected source={choice}"
    )


def _check_sequences(algo: Any, algorithm: Algorithm) -> None:
    """Raises ConfigError where samples that begin where a rollout did leave transitions out. Of a new run: an older one goes on."""
    if not jax.tree.leaves(jax.eval_shape(lambda: algorithm.carry(1))):
        return  # without a memory they begin anywhere
    burn_in, length = getattr(algo, "burn_in", 0), getattr(algo.source, "sequence_length", None)
    if length is not None and algo.num_steps > length - burn_in:
        less = f"algo.sequence_length {length} - algo.burn_in {burn_in}" if burn_in else f"sequence_length {length}"
        raise ConfigError(
            f"algo.num_steps: {algo.num_steps} is not allowed, since sequences begin at every so many transitions, and the last of "
            f"them would be in none that is learnt from; expected at most {less} = {length - burn_in}"
        )


def _traced(config: Any, name: str, path: str) -> PyTree:
    """The traced settings of a part, as plain data; {} where it has none. Raises ConfigError for what is no number."""
    if name not in _fields(config):
        return {}
    value = getattr(config, name)
    values = value if isinstance(value, Mapping) else dataclasses.asdict(value)
    for key, leaf in jax.tree_util.tree_leaves_with_path(values):
        if not isinstance(leaf, int | float):
            where = ".".join([path, name, jax.tree_util.keystr(key, simple=True, separator=".")])
            raise ConfigError(
                f"{where}: {leaf!r} is not allowed; expected a number, since {path}.{name} is data of the program"
            )
    return values


def _replaced(config: Any, name: str, values: PyTree) -> Any:
    """The part's configuration with these traced settings in it."""
    if name not in _fields(config):
        return config
    before = getattr(config, name)
    if isinstance(before, Mapping):
        return dataclasses.replace(config, **{name: values})
    now = copy.copy(before)  # making one anew would hold an array of the trace to be a float
    for key, value in values.items():
        object.__setattr__(now, key, value)
    return dataclasses.replace(config, **{name: now})


def _sizes(algo: Any, num_shards: int, make: Callable, modules: Mapping[str, str]) -> dict[str, int]:
    """What an algorithm asks of a source that steps environments: how many of one shard, and for how long.

    A source that steps none need not take them. Raises ConfigError for one that does, with an algorithm that does not say.
    """
    sizes = {"num_envs": lambda: algo.num_envs // num_shards, "num_steps": lambda: algo.num_steps}
    parameters = inspect.signature(make).parameters
    asked = [name for name in sizes if name in parameters and parameters[name].default is inspect.Parameter.empty]
    if lacking := [name for name in asked if name not in _fields(algo)]:
        raise ConfigError(
            f"algo.source.module: {modules['algo.source']} asks for {' and '.join(lacking)}, and {modules['algo']} has no such key"
        )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {n: size() for n, size in sizes.items() if n in _fields(algo) and (takes_any or n in parameters)}


def _given(shared: PyTree, make: Callable, module: str) -> dict[str, PyTree]:
    """What `make` is given of what it shares. Raises ConfigError where it could not take it."""
    if not jax.tree.leaves(shared):
        return {}
    if "shared" not in inspect.signature(make).parameters:
        raise ConfigError(
            f"{module}: what it makes has `shared`, which its make does not take: make(config, …, shared=None)"
        )
    return {"shared": shared}


def _fields(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def _num_shards(config: Config, resumed: int | None) -> int:
    data = config.hardware.mesh.data
    num_shards = config.shards if config.shards != "auto" else resumed or data
    if num_shards % data and num_shards == resumed:
        allowed = "|".join(str(n) for n in range(1, num_shards + 1) if num_shards % n == 0)
        raise ConfigError(
            f"hardware.mesh.data: {data} does not divide the {num_shards} shards of the checkpoint; allowed: {allowed}"
        )
    if num_shards % data:
        fits = max(data, num_shards // data * data)
        raise ConfigError(
            f"shards: {num_shards} is not a multiple of hardware.mesh.data {data}; the nearest that fits is {fits}"
        )
    if "num_envs" in _fields(config.algo) and config.algo.num_envs % num_shards:
        fits = max(1, round(config.algo.num_envs / num_shards)) * num_shards
        raise ConfigError(
            f"algo.num_envs: {config.algo.num_envs} cannot be divided over {num_shards} shards; the nearest that fits is {fits}"
        )
    return num_shards


def lr_factor(config: Config) -> float:
    """By how much the learning rate is larger than `algo.hp.lr` says."""
    if "lr_scaling" not in _fields(config.algo):
        return 1.0
    ratio = config.algo.num_envs / config.algo.base_num_envs
    return {"none": 1.0, "sqrt": ratio**0.5, "linear": ratio}[config.algo.lr_scaling]
