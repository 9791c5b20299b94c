"""Trains with Craftax_Baselines' ppo.py or ppo_rnn.py as they are published, from a checkout; run by suites.py.

Reads a work as JSON from the command line, and seeds from standard input. Only the compiled program is timed. Their files import
W&B, which is not used here: an empty module stands in for it where it is not installed.
"""

import importlib.util
import json
import sys
import time
import types

import jax

if importlib.util.find_spec("wandb") is None:
    sys.modules["wandb"] = types.ModuleType("wandb")


def main() -> None:
    """Compiles once, and trains for each seed."""
    work = json.loads(sys.argv[1])
    sys.path.insert(0, work["checkout"])
    script = __import__("ppo_rnn" if work["memory"] else "ppo")
    config = {
        "ENV_NAME": work["name"],
        "NUM_ENVS": work["num_envs"],
        "NUM_STEPS": work["num_steps"],
        "TOTAL_TIMESTEPS": work["env_steps"],
        "UPDATE_EPOCHS": work["num_epochs"],
        "NUM_MINIBATCHES": work["num_minibatches"],
        "LAYER_SIZE": work["hidden"][0],
        "ACTIVATION": work["activation"],
        "LR": work["lr"],
        "ANNEAL_LR": False,
        "GAMMA": work["gamma"],
        "GAE_LAMBDA": work["gae_lambda"],
        "CLIP_EPS": work["clip_eps"],
        "ENT_COEF": work["entropy_coef"],
        "VF_COEF": work["value_coef"],
        "MAX_GRAD_NORM": work["max_grad_norm"],
        "USE_OPTIMISTIC_RESETS": True,  # their default: worlds are shared
        "OPTIMISTIC_RESET_RATIO": 16,
        "TRAIN_ICM": False,
        "USE_E3B": False,
        "USE_WANDB": False,
        "DEBUG": False,
    }
    began = time.perf_counter()
    train = jax.jit(script.make_train(config)).lower(jax.random.PRNGKey(0)).compile()
    compile_s = time.perf_counter() - began
    for line in sys.stdin:
        began = time.perf_counter()
        jax.block_until_ready(train(jax.random.PRNGKey(int(line))))
        rate = work["env_steps"] / (time.perf_counter() - began)
        sample = {"env_steps_per_second": rate, "env_steps": work["env_steps"], "compile_s": compile_s}
        print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    main()
