"""Trains with Brax's PPO as it is published, its own tasks or Playground's; run by suites.py.

Reads a work as JSON from the command line, and seeds from standard input. One training is made, a part of it for each seed that is
asked, after a first one that compiles; its own clock, of training without evaluations, is told. `jax.device_put_replicated`, which
newer jax has no more, is put back for it.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)  # type: ignore[attr-defined]

from brax import envs  # noqa: E402
from brax.training.agents.ppo import networks, train  # noqa: E402


def main() -> None:
    """Trains, and tells the rate of each part."""
    work = json.loads(sys.argv[1])
    asked = iter(sys.stdin)
    next(asked)

    def tell(env_steps: int, metrics: Any) -> None:
        rate = float(metrics["training/sps"])
        print(json.dumps({"env_steps_per_second": rate, "env_steps": work["env_steps"]}), flush=True)
        next(asked, None)  # the next part begins when it is asked for

    layers = {"policy_hidden_layer_sizes": tuple(work["hidden"]), "value_hidden_layer_sizes": tuple(work["hidden"])}
    activation = getattr(jax.nn, work["activation"])
    train.train(
        **_environment(work["name"]),
        num_timesteps=work["env_steps"] * work["samples"],
        num_evals=work["samples"] + 1,
        run_evals=False,
        episode_length=1000,
        num_envs=work["num_envs"],
        unroll_length=work["num_steps"],
        batch_size=work["num_envs"] // work["num_minibatches"],
        num_minibatches=work["num_minibatches"],
        num_updates_per_batch=work["num_epochs"],
        normalize_observations=True,
        discounting=work["gamma"],
        clipping_epsilon=work["clip_eps"],
        entropy_cost=work["entropy_coef"],
        max_grad_norm=work["max_grad_norm"],
        learning_rate=work["lr"],
        num_eval_envs=1,
        network_factory=lambda *args, **kwargs: networks.make_ppo_networks(
            *args, **layers, activation=activation, **kwargs
        ),
        progress_fn=tell,
    )


def _environment(name: str) -> dict[str, Any]:
    if name == "ant":
        return {"environment": envs.get_environment(name)}
    from mujoco_playground import registry, wrapper

    environment = registry.load(name, config_overrides={"impl": "jax"})
    return {"environment": environment, "wrap_env_fn": wrapper.wrap_for_brax_training}


if __name__ == "__main__":
    main()
