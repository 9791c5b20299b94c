"""Every kind of observation and action that an environment may have: read as it was, or refused before anything is played."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from recorded.test_files import ACTIONS, FORMATS, same, world, written
from support import build

from rlexp.config import ConfigError
from rlexp.envs.base import action_struct
from rlexp.modes import record
from rlexp.recorded import reading, spaces, windows
from rlexp.recorded.writing import check_kinds


class Named(NamedTuple):
    first: Any
    second: Any


def of(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


DTYPES = ["bool_", "uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "bfloat16", "float32"]
KINDS = {name: of(getattr(jnp, name), *shape) for name, shape in zip(DTYPES, [(), (3,), (2, 2)] * 4, strict=False)} | {
    "a picture": of(jnp.uint8, 8, 8, 1),
    "a list": [of(jnp.float32, 2), of(jnp.int32)],
    "a named tuple": Named(of(jnp.float32, 2), {"in it": (of(jnp.bfloat16, 1),)}),
    "a name with a slash": {"a/b": of(jnp.float32, 2), "a/c": of(jnp.float32)},
    "a name like a tuple's": {"_index_0": of(jnp.float32), "0": of(jnp.uint8, 3)},
    "an empty name": {"": of(jnp.float32, 2), "a": of(jnp.float32)},
    "a point": {".": of(jnp.float32, 2)},
    "from the root": {"/a": of(jnp.float32, 2), "b": of(jnp.float32)},
    "one name in another": {"a/b": of(jnp.float32, 2), "a": {"b": of(jnp.float32, 2)}},
    "no entry": of(jnp.float32, 0),
    "no entry in it": {"a": of(jnp.float32, 2, 0), "b": of(jnp.float32)},
    "nothing": {},
    "complex": of(jnp.complex64, 2),
}
REFUSED = {"hdf5": {"an empty name", "a point", "from the root", "one name in another"}, "arrow": set()}
FOR_EVERY = {"no entry", "no entry in it", "nothing", "complex"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data_format", FORMATS)
def test_what_an_environment_gives_is_read_as_it_was_or_refused_before(data_format, kind, tmp_path):
    action = list(ACTIONS)[list(KINDS).index(kind) % len(ACTIONS)]
    env = world(action, KINDS[kind])
    if kind in REFUSED[data_format] | FOR_EVERY:
        with pytest.raises(ConfigError, match=rf"^record\.format: '{data_format}' cannot hold .* of rich: ") as told:
            check_kinds(env, data_format)
        assert "\n" not in str(told.value)
        return
    check_kinds(env, data_format)
    made = written(tmp_path / "rich-v0", action, data_format, observation=env.spec.observation)
    data = reading.opened(str(tmp_path / "rich-v0"))
    read = spaces.reading(data.observation_space, data.action_space, env)
    for i, one in enumerate(made):
        rows = windows.pool_of(data, read, [i], returns_to_go=False).rows
        same((rows.obs, rows.action[:-1]), (one.observations, one.actions))
        assert [x.dtype for x in jax.tree.leaves(rows.obs)] == [x.dtype for x in jax.tree.leaves(env.spec.observation)]
        assert rows.action.dtype == action_struct(env.spec).dtype
    data.close()


def test_what_cannot_be_written_is_told_before_anything_is_played(tmp_path):
    lead = build(f"record.path={tmp_path / 'rich-v0'}")
    record.check(lead)
    odd = world(observation=KINDS["a point"])
    with pytest.raises(ConfigError, match=r"^record\.format: 'hdf5' cannot hold .* of rich: "):
        record.check(lead._replace(env_of=lambda _: odd))
    assert not [*tmp_path.iterdir()]
