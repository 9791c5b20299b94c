"""Trains with Rejax, in Rejax's own environment; run by rejax.py. Reads a Work or ReplayWork as JSON from the command line.

Prints one JSON object; with `asked`, one for each seed on standard input. Only the compiled program is timed. Rejax evaluates as
often as `eval_freq` says, and at the end at the least; here the training is timed with the evaluation switched off, and the one at
the end is timed on its own.
"""

import json
import sys
import time
from importlib import metadata
from typing import Any

import jax
import rejax
from flax import linen as nn
from rejax.networks import DiscreteQNetwork, EpsilonGreedyPolicy

PACKAGES = ("rejax", "gymnax", "jax", "jaxlib", "flax", "optax", "distrax", "numpy")


def main() -> None:
    """Compiles once; trains, evaluates and prints for each seed."""
    work = json.loads(sys.argv[1])
    jax.config.update("jax_compilation_cache_dir", work["cache"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    algo = {"ppo": ppo, "dqn": dqn, "sac": sac}[work.get("algo", "ppo")](work)
    assert work["eval_episodes"] == 128 or work["quick"], "Rejax always plays 128 episodes"
    key = jax.random.PRNGKey(work["seed"])

    bare = algo.replace(eval_callback=lambda algo, state, key: ())
    train = jax.jit(lambda algo, key: algo.train(key)[0])
    evaluate = jax.jit(lambda algo, state, key: algo.eval_callback(algo, state, key))

    began = time.perf_counter()
    train_compiled = train.lower(bare, key).compile()
    state_shape = jax.eval_shape(train, bare, key)
    evaluate_compiled = evaluate.lower(algo, state_shape, key).compile()
    compile_s = time.perf_counter() - began

    def sample(seed: int) -> dict[str, Any]:
        key = jax.random.PRNGKey(seed)
        began = time.perf_counter()
        state = jax.block_until_ready(train_compiled(bare, key))
        train_s = time.perf_counter() - began

        began = time.perf_counter()
        _, returns = jax.block_until_ready(evaluate_compiled(algo, state, jax.random.fold_in(key, 1)))
        eval_s = time.perf_counter() - began

        env_steps = int(state.global_step)
        return {
            "seed": seed,
            "env_steps_per_second": env_steps / train_s,
            "env_steps_per_second_with_evaluation": env_steps / (train_s + eval_s),
            "env_steps": env_steps,
            "return_mean": float(returns.mean()),
            "compile_s": compile_s,
        }

    device = jax.devices()[0]
    about = {
        "device": f"{device.platform} {device.device_kind}",
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }
    for seed in map(int, sys.stdin) if work.get("asked") else [work["seed"]]:
        print(json.dumps({"sample": sample(seed), **about}), flush=True)


def common(work: dict[str, Any]) -> dict[str, Any]:
    """Settings of all its algorithms."""
    return {
        "num_envs": work["num_envs"],
        "total_timesteps": work["env_steps"],
        "eval_freq": work["env_steps"],
        "skip_initial_evaluation": True,
        "learning_rate": work["lr"],
        "gamma": work["gamma"],
        "max_grad_norm": work["max_grad_norm"],
    }


def replayed(work: dict[str, Any]) -> dict[str, Any]:
    """Settings of those with a memory. Its `num_epochs` are updates after each step of the environments."""
    return common(work) | {
        "num_epochs": work["num_updates"],
        "buffer_size": work["capacity"],
        "fill_buffer": work["prefill_env_steps"],
        "batch_size": work["batch_size"],
        "polyak": 1.0 - work["tau"],
        "target_update_freq": work["num_envs"],
    }


def ppo(work: dict[str, Any]) -> Any:
    """PPO on CartPole."""
    return rejax.PPO.create(
        env="CartPole-v1",
        agent_kwargs={"activation": work["activation"], "hidden_layer_sizes": tuple(work["hidden"])},
        num_steps=work["num_steps"],
        num_epochs=work["num_epochs"],
        num_minibatches=work["num_minibatches"],
        gae_lambda=work["gae_lambda"],
        clip_eps=work["clip_eps"],
        ent_coef=work["entropy_coef"],
        vf_coef=work["value_coef"],
        **common(work),
    )


def dqn(work: dict[str, Any]) -> Any:
    """DQN on CartPole. Its `create` knows no sizes of layers."""
    algo = rejax.DQN.create(env="CartPole-v1", exploration_fraction=0.5, **replayed(work))
    agent = EpsilonGreedyPolicy(DiscreteQNetwork)(
        hidden_layer_sizes=tuple(work["hidden"]), action_dim=2, activation=getattr(nn, work["activation"])
    )
    return algo.replace(agent=agent)


def sac(work: dict[str, Any]) -> Any:
    """SAC on Pendulum."""
    return rejax.SAC.create(
        env="Pendulum-v1",
        agent_kwargs={"activation": work["activation"]},
        hidden_layer_sizes=tuple(work["hidden"]),
        **replayed(work),
    )


if __name__ == "__main__":
    main()
