"""The GPU's command: its processes, its counts of kernels, and what it says where there is no GPU."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu, gpu_run, worker
from benchmarks.measure import Failed

ANSWERS = """
import sys
from benchmarks.worker import answer
print("what a library prints", flush=True)
answer(lambda seed: {"seed": seed} if seed < 2 else sys.exit(3))
"""


@pytest.fixture
def side():
    made = worker.Worker([sys.executable, "-c", ANSWERS])
    yield made
    made.close()


def test_a_process_answers_each_seed_and_is_missed_when_it_ends(side):
    assert [side.ask(seed) for seed in (0, 1)] == [{"seed": 0}, {"seed": 1}]
    for _ in range(2):
        with pytest.raises(Failed, match="ended with exit code 3"):
            side.ask(2)


def test_a_process_that_says_nothing_is_ended(monkeypatch):
    monkeypatch.setattr(worker, "TIMEOUT_S", 0.5)
    silent = worker.Worker([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(Failed, match="ended with exit code -9"):
        silent.ask(0)
    silent.close()


def test_the_largest_loop_of_a_program_is_counted():
    def program(x):
        x = jax.lax.fori_loop(0, 3, lambda i, x: x + 1, x)
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.sort(jnp.sort(x * 2)[::-1]) @ jnp.ones((8, 8)), x)

    text = jax.jit(program).lower(jnp.zeros((8, 8))).compile().as_text()
    assert gpu_run._loop(text)["sort"] == 2
    assert gpu_run._loop(jax.jit(jnp.sin).lower(1.0).compile().as_text()) == {}


def test_it_says_that_there_is_no_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "run", lambda *args, **kwargs: ("cpu|cpu\n", 0.0))
    gpu.measure(tmp_path, rounds=1, quick=True, say=print)
    assert "not run" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_what_the_command_measures_is_what_was_asked():
    """Each try changes what it says, by overrides that a profile of GPUs takes."""
    from rlexp import compose

    options = {}
    for name, what in gpu.TRIES.items():
        node, _ = compose.compose_node([*gpu.COSTS, "hardware=gpu", *what.overrides])
        told = {**node["hardware"]["compiler_options"], **what.env}
        options[name] = json.dumps([told, node["precision"]], sort_keys=True)
    assert len(set(options.values())) == len(options)
