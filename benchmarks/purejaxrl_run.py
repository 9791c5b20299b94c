"""Trains with PureJaxRL's ppo.py as it is published, from a checkout, in the environment of Rejax; run by gpu.py.

Reads a Work as JSON from the command line, and seeds from standard input. Only the compiled program is timed, no evaluation is in
it. Its file imports Brax and navix for environments that are not used here: empty modules stand in for them.
"""

import json
import sys
import time
import types
from importlib import metadata

import jax

PACKAGES = ("gymnax", "jax", "jaxlib", "flax", "optax", "distrax", "numpy")


def main() -> None:
    """Compiles once, and trains for each seed."""
    work = json.loads(sys.argv[1])
    for name in ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["brax"].envs = sys.modules["brax.envs"]  # type: ignore[attr-defined]
    for wrapper in ("EpisodeWrapper", "AutoResetWrapper"):
        setattr(sys.modules["brax.envs.wrappers.training"], wrapper, object)
    sys.path.insert(0, f"{work['checkout']}/purejaxrl")
    import ppo  # type: ignore[import-not-found]

    config = {
        "LR": work["lr"],
        "NUM_ENVS": work["num_envs"],
        "NUM_STEPS": work["num_steps"],
        "TOTAL_TIMESTEPS": work["env_steps"],
        "UPDATE_EPOCHS": work["num_epochs"],
        "NUM_MINIBATCHES": work["num_minibatches"],
        "GAMMA": work["gamma"],
        "GAE_LAMBDA": work["gae_lambda"],
        "CLIP_EPS": work["clip_eps"],
        "ENT_COEF": work["entropy_coef"],
        "VF_COEF": work["value_coef"],
        "MAX_GRAD_NORM": work["max_grad_norm"],
        "ACTIVATION": work["activation"],
        "ENV_NAME": "CartPole-v1",
        "ANNEAL_LR": False,
        "DEBUG": False,
    }
    assert tuple(work["hidden"]) == (64, 64), "its layers have 64 units"
    began = time.perf_counter()
    train = jax.jit(ppo.make_train(config)).lower(jax.random.PRNGKey(0)).compile()
    compile_s = time.perf_counter() - began
    device = jax.devices()[0]
    for line in sys.stdin:
        began = time.perf_counter()
        out = jax.block_until_ready(train(jax.random.PRNGKey(int(line))))
        seconds = time.perf_counter() - began
        told = {name: x[-10:] for name, x in out["metrics"].items()}  # of the last ten updates
        ended = told["returned_episode"]
        returns = float((told["returned_episode_returns"] * ended).sum() / ended.sum())
        sample = {
            "seed": int(line),
            "env_steps_per_second": work["env_steps"] / seconds,
            "env_steps": work["env_steps"],
            "return_mean": returns,
            "compile_s": compile_s,
        }
        versions = {name: metadata.version(name) for name in PACKAGES}
        answer = {"sample": sample, "device": f"{device.platform} {device.device_kind}", "versions": versions}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
