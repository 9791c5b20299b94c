"""What the adapters of suites have in common: packages that are imported only where they are used, and `adapt`.

A suite's own `step` often resets by itself, and ends an episode at a time limit as if the game were over. So an adapter takes the
functions beneath it, which know of neither, and `adapt` puts them under `envs.base.episodic`: resets are fresh ones, an episode's
last observation is a row of its own, and the limit truncates.

What becomes of observations: bool and uint8 stay what they are, an image for one; all else becomes float32.
"""

import contextlib
import functools
import importlib
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from rlexp.config import ConfigError, Resets, nearest
from rlexp.envs.base import Env, Tally, Transition, action_struct, episodic
from rlexp.envs.imports import at_fault, reason, unimported
from rlexp.types import Continuous, Discrete, EnvSpec, Key, MultiDiscrete, PyTree

T = TypeVar("T")
_NONE: Mapping[str, Any] = MappingProxyType({})
_REMEMBERED = 8  # environments; some hold a model of physics


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Traces a suite's own code: types mix as they like, and warnings are for its authors."""
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def foreign() -> Iterator[None]:
    """Runs a suite's own code, which may print as it likes too. Arrays that it makes are no tracers."""
    quiet = io.StringIO()
    with (
        jax.ensure_compile_time_eval(),
        traced(),
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
    ):
        yield


def remembered(make: Callable[[Any], T]) -> Callable[[Any], T]:
    """The `make` or `world` of an adapter, which gives for an equal configuration what it gave before.

    A program asks several times for its environment, and to trace a step of physics takes seconds.
    """
    given: dict[str, T] = {}

    @functools.wraps(make)
    def ask(config: Any) -> T:
        if (key := repr(config)) not in given:
            if len(given) == _REMEMBERED:
                del given[next(iter(given))]
            given[key] = make(config)
        return given[key]

    return ask


def imported(name: str, *, extra: str) -> Any:
    """A module of a suite. Raises ConfigError, which names the extra that brings it, or says why it does not import."""
    with foreign():
        try:
            importlib.import_module(name.partition(".")[0])
            return importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise unimported(name, error, extra=extra) from error


def known(suite: str, name: str, names: Iterable[str]) -> None:
    """Raises ConfigError where `names` lacks `name`."""
    if name not in (names := sorted(names)):
        raise ConfigError(f'env.id: {suite} has no "{name}"{nearest(name, names) or "."} Allowed: {", ".join(names)}')


@contextlib.contextmanager
def refused(name: str, *, key: str | None = None, kwargs: Mapping[str, Any] = _NONE) -> Iterator[None]:
    """Whatever is raised within becomes a ConfigError of one line: the code of a suite may raise anything.

    Args:
      key: what it is about; by default what `at_fault` says.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key or at_fault(error, kwargs)}: {name} cannot be made ({reason(error)})") from error


def made(name: str, make: Callable[[], Any], kwargs: Mapping[str, Any] = _NONE) -> Any:
    """What `make` gives. Raises ConfigError for whatever it raises."""
    with foreign(), refused(name, kwargs=kwargs):
        return make()


def adapt(
    name: str,
    reset: Callable[[jax.Array], tuple[PyTree, PyTree]],
    step: Callable[[jax.Array, PyTree, Any], Transition],
    *,
    action: Discrete | MultiDiscrete | Continuous,
    max_episode_steps: int,
    info: Mapping[str, Tally],
    resets: Resets,
) -> Env:
    """A suite's functions as an Env.

    Args:
      reset: key -> state, observation. Keys are uint32 [2], which suites of any age understand.
      step: (key, state, action) -> what `envs.base.episodic` wants; of `info` all but scalars is left out. It never resets.

    Raises:
      ConfigError: `info` names a number that the suite does not tell; or the suite's own code raises while it is traced.
    """

    def begin(key: Key, params: PyTree) -> tuple[PyTree, PyTree]:
        with traced():
            state, obs = reset(jax.random.key_data(key))
            return of_types(state, types), observed(obs)

    def go_on(key: Key, state: PyTree, action: Any, params: PyTree) -> Transition:
        with traced():
            own = jax.tree.map(lambda x: x, state)  # some suites write into the dicts of the state that they are given
            out = step(jax.random.key_data(key), own, action)
            told = {k: x for k, x in dict(out.info or {}).items() if jnp.ndim(x) == 0}
            return out._replace(state=of_types(out.state, types), obs=observed(out.obs), info=told)

    def once(key: Key, action: Any) -> tuple[PyTree, PyTree, Transition]:
        state, obs = reset(jax.random.key_data(key))
        return state, observed(obs), step(jax.random.key_data(key), jax.tree.map(lambda x: x, state), action)

    spec = EnvSpec(name, (), action, max_episode_steps)
    with traced(), refused(name):
        state, observation, out = jax.eval_shape(once, jax.random.key(0), action_struct(spec))
        # A state that begins with the integer 0 and goes on with fractions is one of fractions from the start.
        types = jax.tree.map(lambda x, y: jnp.promote_types(x.dtype, y.dtype), state, out.state)
    check_info(name, info, [k for k, x in dict(out.info or {}).items() if x.shape == ()])
    return episodic(spec._replace(observation=observation), begin, go_on, info=info, resets=resets)


def physics(config: Any, task: Any, *, default_limit: int, seen: Callable[[Any], Any] = lambda obs: obs) -> Env:
    """A task in the style of brax, which Playground's have too, as an Env.

    Args:
      config: with id, max_episode_steps, info and resets.
      task: with reset, step and action_size; actions are within -1 and 1.
      default_limit: steps, where the configuration names none.
      seen: what is seen of a task's observation.
    """
    with foreign():
        size = int(task.action_size)

    def reset(key: jax.Array) -> tuple[Any, Any]:
        state = task.reset(key)
        return state, seen(state.obs)

    def step(key: jax.Array, state: Any, action: Any) -> Transition:
        state = task.step(state, action)
        return Transition(state, seen(state.obs), state.reward, state.done > 0, info=state.metrics)

    return adapt(
        config.id,
        reset,
        step,
        action=Continuous((size,), -1.0, 1.0),
        max_episode_steps=config.max_episode_steps or default_limit,
        info=config.info,
        resets=config.resets,
    )


def check_info(name: str, wanted: Iterable[str], told: Iterable[str]) -> None:
    """Raises ConfigError where env.info names a number that is not told."""
    told = sorted(told)
    for number in wanted:
        if number not in told:
            said = f"Allowed: {', '.join(told)}" if told else f"{name} tells none"
            raise ConfigError(f"env.info.{number}: unknown number{nearest(number, told) or '.'} {said}")


def one_hots(categories: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Whole numbers [..., D] of which entry i is one of sizes[i], as float32 [..., sum(sizes)]."""
    parts = [jax.nn.one_hot(categories[..., i], n, dtype=jnp.float32) for i, n in enumerate(sizes)]
    return jnp.concatenate(parts, axis=-1)


def of_types(tree: PyTree, types: PyTree) -> PyTree:
    """Leaves of the dtypes in `types`."""
    return jax.tree.map(lambda x, dtype: jnp.asarray(x, dtype), tree, types)


def observed(obs: PyTree) -> PyTree:
    """An observation as the platform has it."""
    kept = (jnp.bool_, jnp.uint8)
    return jax.tree.map(lambda x: x if jnp.result_type(x) in kept else jnp.asarray(x, jnp.float32), obs)
