"""Trains with the PPO of navix's own package; run by suites.py.

Reads a work as JSON from the command line, and seeds from standard input. Only the compiled program is timed. It finds advantages
anew at each epoch: that is its algorithm. Its network sees symbols as numbers, as published, or one-hot, as ours does.
"""

import json
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import navix
from navix.agents import PPO, PPOHparams
from navix.agents.models import ActorCritic, MLPEncoder

SYMBOLS = (11, 6, 4)  # objects, colours, states


def main() -> None:
    """Compiles once, and trains for each seed."""
    work = json.loads(sys.argv[1])
    assert (tuple(work["hidden"]), work["activation"]) == ((64, 64), "tanh"), "its layers are two of 64 units"
    env = navix.make(work["name"], observation_fn=navix.observations.symbolic, gamma=work["gamma"])
    settings = PPOHparams(
        budget=work["env_steps"],
        num_envs=work["num_envs"],
        num_steps=work["num_steps"],
        num_minibatches=work["num_minibatches"],
        num_epochs=work["num_epochs"],
        gae_lambda=work["gae_lambda"],
        clip_eps=work["clip_eps"],
        ent_coef=work["entropy_coef"],
        vf_coef=work["value_coef"],
        max_grad_norm=work["max_grad_norm"],
        lr=work["lr"],
        anneal_lr=False,
    )
    layers = [
        nn.Sequential([*([one_hot] if work["one_hot"] else []), jnp.ravel, MLPEncoder()]) for _ in ("actor", "critic")
    ]
    agent = PPO(settings, ActorCritic(len(env.action_set), *layers), env)
    train = jax.jit(agent.train).lower(jax.random.key(0)).compile()
    for line in sys.stdin:
        began = time.perf_counter()
        jax.block_until_ready(train(jax.random.key(int(line))))
        rate = work["env_steps"] / (time.perf_counter() - began)
        print(json.dumps({"env_steps_per_second": rate, "env_steps": work["env_steps"]}), flush=True)


def one_hot(symbols: jax.Array) -> jax.Array:
    """[..., 3] -> [..., 21]."""
    return jnp.concatenate([jax.nn.one_hot(symbols[..., i], n) for i, n in enumerate(SYMBOLS)], axis=-1)


if __name__ == "__main__":
    main()
