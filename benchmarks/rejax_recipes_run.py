"""Trains Rejax's PPO on one of gymnax's environments; run by recipes.py with the Python that has Rejax. Reads JSON from argv.

Settings are those of Rejax's own files where it has some (configs/gymnax of its repository), but for the steps; elsewhere they are
its defaults. Prints one JSON object: the mean return of each seed's last policy over 128 episodes.
"""

import json
import sys
from importlib import metadata

import jax
import rejax

_CARTPOLE = {
    "agent_kwargs": {"activation": "tanh"},
    "num_envs": 5,
    "num_steps": 100,
    "num_epochs": 5,
    "num_minibatches": 5,
    "learning_rate": 0.00075,
    "max_grad_norm": 0.5,
    "ent_coef": 0.01,
}
OWN = {
    "CartPole-v1": _CARTPOLE,
    "Acrobot-v1": _CARTPOLE | {"normalize_observations": True},
    "MountainCar-v0": {
        "agent_kwargs": {"activation": "tanh"},
        "num_envs": 10,
        "num_steps": 20,
        "num_epochs": 5,
        "num_minibatches": 5,
        "learning_rate": 2.5e-4,
        "max_grad_norm": 0.5,
        "gae_lambda": 0.98,
        "ent_coef": 0.0,
    },
    "MountainCarContinuous-v0": {
        "agent_kwargs": {"activation": "relu"},
        "num_envs": 5,
        "num_steps": 100,
        "num_epochs": 10,
        "num_minibatches": 10,
        "learning_rate": 0.0003,
        "max_grad_norm": 10,
        "gamma": 0.9,
        "ent_coef": 0.0,
    },
    "Pendulum-v1": {
        "agent_kwargs": {"activation": "swish"},
        "num_envs": 100,
        "num_steps": 100,
        "num_epochs": 10,
        "num_minibatches": 10,
        "learning_rate": 0.001,
        "max_grad_norm": 10,
        "gamma": 0.995,
        "ent_coef": 0.0,
        "normalize_observations": True,
    },
}


def main() -> None:
    """One seed after the other, in one program."""
    told = json.loads(sys.argv[1])
    jax.config.update("jax_compilation_cache_dir", told["cache"])
    steps = told["env_steps"]
    more = {"total_timesteps": steps, "eval_freq": steps, "skip_initial_evaluation": True}
    algo = rejax.PPO.create(env=told["env"], **OWN.get(told["env"], {}), **more)
    keys = jax.numpy.stack([jax.random.PRNGKey(seed) for seed in told["seeds"]])
    state, (_, returns) = jax.block_until_ready(jax.jit(lambda keys: jax.lax.map(algo.train, keys))(keys))
    print(
        json.dumps(
            {
                "algo": "ppo",
                "settings": "its own" if told["env"] in OWN else "its defaults",
                "env_steps": int(state.global_step[0]),
                "seeds": told["seeds"],
                "returns": [float(x) for x in returns[:, -1].mean(axis=-1)],
                "versions": {name: metadata.version(name) for name in ("rejax", "gymnax", "jax")},
            }
        )
    )


if __name__ == "__main__":
    main()
