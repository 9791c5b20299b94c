"""What a `Between` does to the members of a pack, on the devices where they are."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rlexp.experiment import lr_factor
from rlexp.sameness import TRACED
from rlexp.training.between import Between, Exchange
from rlexp.training.members import Pack
from rlexp.training.program import Run, Traced, changed_by
from rlexp.types import PyTree

Act = Callable[[Run, int], Run]  # (run, update) -> run; what is told of the members changes in the pack


def acting(hook: Between, traced: Traced, pack: Pack) -> Act:
    """All that a hook changes after an evaluation. Each part is compiled at its first use, once."""
    lead = pack.lead
    change = hook.change and changed_by(hook.change, traced, lead.config.seed)
    copy = _copied(traced)

    def act(run: Run, update: int) -> Run:
        if change:
            run = change(run, update, pack.returns())
        found = hook.exchange(pack.moment(update))
        if found is None:
            return run
        pack.told, pack.remembered = [dict(told) for told in found.told], found.remembered
        if found.words:
            pack.progress.note(found.words)
        return copy(run, np.asarray(found.parents, np.int32), _scaled(found, pack))

    return act


def _scaled(found: Exchange, pack: Pack) -> dict[str, np.ndarray]:
    """As they stand in a Run, where the learning rate is that of the configuration times a factor."""
    factors = {"algo.hp.lr": lr_factor(pack.lead.config)}
    return {
        path: np.asarray([x * factors.get(path, 1.0) for x in values], np.float32)
        for path, values in found.settings.items()
    }


def _copied(traced: Traced) -> Callable[[Run, np.ndarray, Mapping[str, np.ndarray]], Run]:
    """(run, parents, settings) -> run: a gather over the members, of all that is no random key. The run is donated.

    Keys stay with their member, or copies would act and shuffle alike.
    """

    def copy(run: Run, parents: jax.Array, settings: Mapping[str, jax.Array]) -> Run:
        def rows(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            return x.at[parents].get(mode="promise_in_bounds")

        return with_settings(jax.tree.map(rows, run), settings)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, traced.abstract_run)
    return jax.jit(copy, donate_argnums=0, out_shardings=shardings)


def with_settings(run: Run, settings: Mapping[str, jax.Array]) -> Run:
    """The run with these traced settings, by their paths in a configuration, in the place of its own."""
    hp, env, source = run.state.hp, run.settings.env, run.settings.source
    for path, value in settings.items():
        part = next(part for part in TRACED if path.startswith(f"{part}."))
        names = path.removeprefix(f"{part}.").split(".")
        if part == "algo.hp":
            hp = _replaced(hp, names, value)
        elif part == "env.params":
            env = _replaced(env, names, value)
        else:
            source = _replaced(source, names, value)
    return run._replace(state=run.state._replace(hp=hp), settings=run.settings._replace(env=env, source=source))


def _replaced(tree: PyTree, names: list[str], value: jax.Array) -> PyTree:
    first, *rest = names
    if first not in tree:  # a path that no configuration has
        raise KeyError(first)
    return {**tree, first: _replaced(tree[first], rest, value) if rest else value}
