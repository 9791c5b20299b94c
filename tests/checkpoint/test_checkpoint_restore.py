"""Opening checkpoints: damage, mismatches, parts of a Run."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from rlexp.config import ConfigError
from rlexp.storage import checkpoint


def truncate_arrays(step):
    biggest = max((step / "run").rglob("d/*"), key=lambda p: p.stat().st_size)
    os.truncate(biggest, biggest.stat().st_size // 2)


def flip_a_bit(step):
    biggest = max((step / "run").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(biggest.read_bytes())
    content[len(content) // 2] ^= 1
    biggest.write_bytes(content)


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


def garble_meta(step):
    meta = step / "meta" / "metadata"
    meta.write_bytes(b"x" * meta.stat().st_size)


DAMAGE = {
    "truncated arrays": (truncate_arrays, "bytes instead of"),
    "a flipped bit": (flip_a_bit, "other bytes than were written"),
    "no metadata": (lambda step: (step / "run" / "_METADATA").unlink(), "run/_METADATA is missing"),
    "an emptied directory": (empty, "checksums.json is missing"),
    "a garbled meta": (lambda step: (step / "meta" / "metadata").write_text("{"), "meta/metadata has 1 bytes instead"),
    "a meta of equal size": (garble_meta, "other bytes than were written"),
    "no meta": (lambda step: shutil.rmtree(step / "meta"), "is missing"),
    "no arrays": (lambda step: shutil.rmtree(step / "run"), "is missing"),
    "garbled checksums": (lambda step: (step / "checksums.json").write_text("[1"), "cannot be read"),
    "checksums of another kind": (lambda step: (step / "checksums.json").write_text("[1]"), "cannot be read"),
    "no checksums": (lambda step: (step / "checksums.json").write_text("{}"), "checksums.json is empty"),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory, tools):
    """A directory with the updates 1 and 2; to be copied, not changed."""
    directory = tmp_path_factory.mktemp("two")
    tools.save(directory, 1, 2)
    return directory


@pytest.fixture
def copied(two, tmp_path):
    return shutil.copytree(two, tmp_path / "checkpoints")


def test_nothing_there(tmp_path, tools):
    run = tools.build_run()
    for directory in (tmp_path / "missing", tmp_path):
        assert checkpoint.restore(directory, tools.abstract(run), warn=tools.never) is None
        assert checkpoint.restore_into(directory, run, what="params", warn=tools.never) is None
        assert checkpoint.restore_state(directory, tools.abstract(run.state), warn=tools.never) is None
        assert checkpoint.latest_meta(directory) is None


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(copied, tools, kind):
    harm, words = DAMAGE[kind]
    harm(copied / "2")
    warnings = []
    wanted = tools.abstract(tools.build_run())
    restored = checkpoint.restore(copied, wanted, warn=warnings.append)
    assert (restored.update, restored.meta) == (1, {"env_steps": 10})
    assert tools.same(restored.run, tools.build_run(1))
    (warning,) = warnings
    assert str(copied) in warning
    assert words in warning
    assert "\n" not in warning
    assert checkpoint.latest_meta(copied)["env_steps"] in (10, 20)  # 20 where sizes tell nothing
    # The run goes on from 1 and comes to 2 again.
    tools.save(copied, 2)
    assert sorted(os.listdir(copied)) == ["1", "2", "2.set-aside"]
    restored = checkpoint.restore(copied, wanted, warn=tools.never)
    assert restored.update == 2
    assert tools.same(restored.run, tools.build_run(2))


def test_no_damage_to_any_file_gives_other_values(copied, tools):
    """Each file in turn: what comes out is what was saved, of this checkpoint or of the one before."""
    wanted = tools.abstract(tools.build_run())
    whole = copied.with_name("whole")
    shutil.copytree(copied / "2", whole)
    passed_over = 0
    for file in sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file()):
        for content in (None, (whole / file).read_bytes()[:-1] + b"\0"):
            shutil.rmtree(copied / "2")
            shutil.copytree(whole, copied / "2")
            (copied / "2" / file).unlink()
            if content is not None:
                (copied / "2" / file).write_bytes(content)
            restored = checkpoint.restore(copied, wanted, warn=lambda text: None)
            assert tools.same(restored.run, tools.build_run(restored.update)), (file, content)
            assert restored.meta == {"env_steps": 10 * restored.update}
            passed_over += restored.update == 1
    assert passed_over > 10


def test_later_checkpoints_make_way_for_a_run_begun_anew(copied, tools):
    """As after restore=params, which counts updates from 0: the old ones must not count as the newest."""
    shutil.copytree(copied / "2", copied / "50")
    (copied / "50.set-aside").mkdir()
    tools.save(copied, 2, 3)  # 2 is there, and whole
    assert sorted(os.listdir(copied)) == ["1", "2", "3", "50.set-aside", "50.set-aside1"]
    assert checkpoint.latest_meta(copied) == {"env_steps": 30}


def test_leftovers_of_a_killed_save(copied, tools):
    half = copied / "3.orbax-checkpoint-tmp"
    shutil.copytree(copied / "2" / "run", half / "run.orbax-checkpoint-tmp")
    restored = checkpoint.restore(copied, tools.abstract(tools.build_run()), warn=tools.never)
    assert restored.update == 2
    checkpoint.make(tools.config(), copied).close()
    assert sorted(os.listdir(copied)) == ["1", "2"]


def test_all_damaged(copied, tools):
    empty(copied / "1")
    truncate_arrays(copied / "2")
    (copied / "2" / "meta" / "metadata").unlink()
    for call in (
        lambda: checkpoint.restore(copied, tools.abstract(tools.build_run()), warn=tools.never),
        lambda: checkpoint.restore_into(copied, tools.build_run(), what="learner", warn=tools.never),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        text = str(error.value)
        assert text.startswith(f"{copied}: no checkpoint can be read; 2: ")
        assert "; 1: checksums.json is missing" in text
        assert "\n" not in text
    assert checkpoint.latest_meta(copied) is None


def with_data(run, **data):
    return run._replace(data=run.data | data)


def with_rbg_key(run):
    key = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    return run._replace(state=run.state._replace(key=key))


KERNEL = "state.params.head.kernel is float32[4,8,2] there, and "
MISMATCH = {
    "shape": (lambda t: t.build_run(width=9), KERNEL + "float32[4,9,2] in this run"),
    "members": (lambda t: t.build_run(members=2), KERNEL + "float32[2,8,2] in this run"),
    "dtype": (
        lambda t: with_data(t.build_run(), half=jnp.zeros((4, 8))),
        "data.half is bfloat16[4,8] there, and float32",
    ),
    "more": (lambda t: with_data(t.build_run(), new=(jnp.zeros(4),)), "data.new.0 is missing there, and float32[4] in"),
    "less": (lambda t: t.build_run()._replace(data={}), "data.env.0 is uint32[4,2] there, and missing in this run"),
    "key": (lambda t: with_rbg_key(t.build_run()), "state.key is uint32[4,2] there, and uint32[4,4] in this run"),
}


@pytest.mark.parametrize("kind", MISMATCH)
def test_another_structure_is_no_damage(two, tools, kind):
    build, words = MISMATCH[kind]
    with pytest.raises(ConfigError) as error:
        checkpoint.restore(two, tools.abstract(build(tools)), warn=tools.never)
    text = str(error.value)
    assert text.startswith(f"{two / '2'}: {words}")
    assert "checkpoint.restore=all|learner|params" in text
    assert "\n" not in text


def test_empty_nodes_may_differ(two, tools):
    """() or None, where there are no arrays, are taken from this run."""
    run = tools.build_run()
    run = run._replace(state=run.state._replace(normaliser=None), data=run.data | {"more": {}})
    restored = checkpoint.restore(two, tools.abstract(run), warn=tools.never)
    assert jax.tree.structure(restored.run) == jax.tree.structure(run)
    assert tools.host(restored.run) == tools.host(tools.build_run(2))


@pytest.mark.parametrize("what", ["learner", "params"])
def test_a_part_of_the_run(tmp_path, tools, what):
    """The rest is that of the fresh Run, whose replay may have another size."""
    saved, fresh = tools.build_run(2), tools.build_run(9, capacity=33)
    mean = jnp.arange(4.0)
    saved = saved._replace(state=saved.state._replace(normaliser={"mean": mean}))
    fresh = fresh._replace(state=fresh.state._replace(normaliser={"mean": -mean}))
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    checkpointer.save(2, saved, {"env_steps": 20}, None)
    checkpointer.close()
    restored = checkpoint.restore_into(tmp_path, fresh, what=what, warn=tools.never)
    expected = fresh._replace(state=fresh.state._replace(params=saved.state.params, normaliser={"mean": mean}))
    if what == "learner":
        expected = expected._replace(state=expected.state._replace(opt_state=saved.state.opt_state))
    assert (restored.update, restored.meta) == (2, {"env_steps": 20})
    assert tools.same(restored.run, expected)
    assert not tools.same(restored.run, fresh)


class WithTarget(NamedTuple):
    params: Any
    target: Any
    opt_state: Any
    normaliser: Any
    step: Any


def with_target(run):
    s = run.state
    target = jax.tree.map(lambda x: x + 1.0, s.params)
    return run._replace(state=WithTarget(s.params, target, s.opt_state, s.normaliser, s.step))


@pytest.mark.parametrize("what", ["learner", "params"])
def test_a_target_network_is_taken_with_the_network(tmp_path, two, tools, what):
    saved, fresh = with_target(tools.build_run(2)), with_target(tools.build_run(9))
    checkpointer = checkpoint.make(tools.config(), tmp_path)
    checkpointer.save(2, saved, {}, None)
    checkpointer.close()
    state = checkpoint.restore_into(tmp_path, fresh, what=what, warn=tools.never).run.state
    assert tools.same((state.params, state.target), (saved.state.params, saved.state.target))
    assert tools.same(state.step, fresh.state.step)
    without = tools.build_run(9)  # an algorithm that has none takes none
    state = checkpoint.restore_into(tmp_path, without, what="params", warn=tools.never).run.state
    assert tools.same(state, without.state._replace(params=saved.state.params))
    with pytest.raises(
        ConfigError, match=r"state\.target\.head\.kernel is missing there, and float32\[4,8,2\] in this"
    ):
        checkpoint.restore_into(two, fresh, what=what, warn=tools.never)


def test_the_state_alone(two, tools):
    state = tools.build_run(2).state
    restored = checkpoint.restore_state(two, tools.abstract(state), warn=tools.never)
    assert (restored.update, restored.meta) == (2, {"env_steps": 20})
    assert tools.same(restored.run, state)
    with pytest.raises(
        ConfigError, match=r"state\.params\.head\.kernel is float32\[4,8,2\] there, and float32\[4,9,2\]"
    ):
        checkpoint.restore_state(two, tools.abstract(tools.build_run(width=9).state), warn=tools.never)


def test_all_of_the_run_through_restore_into(two, tools):
    restored = checkpoint.restore_into(two, tools.build_run(5), what="all", warn=tools.never)
    assert tools.same(restored.run, tools.build_run(2))


def test_another_optimiser_starts_anew(two, tools):
    fresh = tools.build_run(5, optimiser=optax.sgd(0.1, momentum=0.9))
    warnings = []
    restored = checkpoint.restore_into(two, fresh, what="learner", warn=warnings.append)
    saved = tools.build_run(2)
    assert tools.same(restored.run, fresh._replace(state=fresh.state._replace(params=saved.state.params)))
    (warning,) = warnings
    assert "optimiser starts anew" in warning
    assert "state.opt_state." in warning
    checkpoint.restore_into(two, fresh, what="params", warn=tools.never)


@pytest.mark.parametrize("what", ["learner", "params"])
def test_other_parameters_or_normalisers_are_refused(two, tools, what):
    with pytest.raises(
        ConfigError, match=r"state\.params\.head\.kernel is float32\[4,8,2\] there, and float32\[4,9,2\]"
    ):
        checkpoint.restore_into(two, tools.build_run(width=9), what=what, warn=tools.never)
    fresh = tools.build_run()
    fresh = fresh._replace(state=fresh.state._replace(normaliser=(jnp.zeros(4),)))
    with pytest.raises(ConfigError, match=r"state\.normaliser\.0 is missing there, and float32\[4\] in this run"):
        checkpoint.restore_into(two, fresh, what=what, warn=tools.never)


def bytes_read():
    """By the whole process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_part_is_read_without_the_replay(tmp_path, tools):
    tools.save(tmp_path, 1, capacity=400_000)  # 10 MB of noise
    checkpoint.restore_into(tmp_path, tools.build_run(), what="learner", warn=tools.never)  # what is imported, is now
    before = bytes_read()
    checkpoint.restore_into(tmp_path, tools.build_run(), what="learner", warn=tools.never)
    checkpoint.restore_state(tmp_path, tools.abstract(tools.build_run().state), warn=tools.never)
    assert checkpoint.latest_meta(tmp_path) == {"env_steps": 10}
    between = bytes_read()
    checkpoint.restore(tmp_path, tools.abstract(tools.build_run(capacity=400_000)), warn=tools.never)
    assert between - before < 1_000_000
    assert bytes_read() - between > 10_000_000


def test_latest_meta_passes_over_what_is_damaged(copied):
    assert checkpoint.latest_meta(copied) == {"env_steps": 20}
    (copied / "2" / "meta" / "metadata").write_text(json.dumps({"metric": None, "meta": {"env_steps": 99}}))
    assert checkpoint.latest_meta(copied) == {"env_steps": 10}


def test_inside_a_running_event_loop(two, tools):
    """As in a notebook."""

    async def cell():
        return checkpoint.restore(two, tools.abstract(tools.build_run()), warn=tools.never)

    assert tools.same(asyncio.run(cell()).run, tools.build_run(2))
