"""What `python -m benchmarks gymnax --search` draws, by environment, as it would be typed after `python -m rlexp -m`."""

from typing import NamedTuple


class Search(NamedTuple):
    """A random search around the recipe that there is."""

    space: tuple[str, ...]  # traced settings alone, so that a search is one program
    trials: int = 16
    seeds: int = 2
    more: tuple[str, ...] = ()  # what is the same for all trials, and not as in the recipe


def _one_of(key: str, *values: float) -> str:
    return f"+sweeper.space.{key}.choices=[{','.join(map(str, values))}]"


def _lr(low: float, high: float) -> str:
    return f"algo.hp.lr=tag(log,interval({low:g},{high:g}))"


_GAMMA, _LAMBDA, _ENTROPY = "algo.hp.gamma", "algo.hp.gae_lambda", "algo.hp.entropy_coef"
_PPO = (_lr(3e-4, 5e-3), _one_of(_ENTROPY, 0.0, 0.003, 0.01, 0.03), _one_of(_LAMBDA, 0.8, 0.95))
_NEAR, _FAR = _one_of(_GAMMA, 0.9, 0.95, 0.99), _one_of(_GAMMA, 0.99, 0.997, 0.999)
_CONTINUOUS = (_lr(3e-4, 3e-3), _one_of(_ENTROPY, 0.0, 0.001, 0.003), _one_of(_LAMBDA, 0.8, 0.95), _NEAR)
_MEMORY = (
    _lr(3e-4, 3e-3),
    _one_of(_ENTROPY, 0.0, 0.003, 0.01),
    _one_of(_LAMBDA, 0.8, 0.95),
    _one_of(_GAMMA, 0.9, 0.99),
)
# A tenth of the recipe's steps: what two cores do in minutes.
_MINATAR = Search(
    (_lr(5e-4, 1e-2), _one_of(_ENTROPY, 0.003, 0.01, 0.03), _one_of(_LAMBDA, 0.8, 0.95), _one_of(_GAMMA, 0.99, 0.995)),
    trials=8,
    seeds=1,
    more=("total_env_steps=100_000",),
)

SEARCHES = {
    "acrobot": Search((*_PPO, _one_of(_GAMMA, 0.99, 0.995))),
    "asterix": _MINATAR,
    "bernoulli_bandit": Search(_MEMORY, trials=8),
    "breakout": _MINATAR,
    "cartpole": Search((*_PPO, _one_of(_GAMMA, 0.98, 0.99))),
    "catch": Search((*_PPO, _one_of(_GAMMA, 0.99, 1.0))),
    "deep_sea": Search((_lr(3e-4, 5e-3), _one_of(_ENTROPY, 0.01, 0.03, 0.1), _one_of(_LAMBDA, 0.8, 0.95, 1.0))),
    "discounting_chain": Search((*_PPO, _one_of(_GAMMA, 0.5, 0.8, 0.9, 0.95))),
    "four_rooms": Search((*_PPO, _one_of(_GAMMA, 0.97, 0.99))),
    "freeway": _MINATAR,
    "frozen_lake": Search((*_PPO, _FAR)),
    "gaussian_bandit": Search((*_PPO, _NEAR)),
    "memory_chain": Search(_MEMORY, trials=8),
    "meta_maze": Search(_MEMORY, trials=8, more=("total_env_steps=300_000",)),
    "mnist_bandit": Search((_lr(1e-4, 5e-3), _one_of(_ENTROPY, 0.0, 0.01)), trials=8),
    "mountain_car": Search((_lr(1e-4, 1e-3), _one_of(_GAMMA, 0.98, 0.99, 0.995), _one_of(_LAMBDA, 0.9, 0.95, 0.98))),
    "mountain_car_continuous": Search(
        (_lr(1e-4, 3e-3), _FAR, _one_of(_ENTROPY, 0.0, 0.003, 0.01, 0.03), _one_of(_LAMBDA, 0.9, 0.95, 0.98))
    ),
    "pendulum": Search(_CONTINUOUS),
    "point_robot": Search(_MEMORY, trials=8, more=("total_env_steps=300_000",)),
    "pong": _MINATAR,
    "reacher": Search(_CONTINUOUS),
    "seaquest": _MINATAR,
    "simple_bandit": Search((*_PPO,), trials=4),
    "space_invaders": _MINATAR,
    "swimmer": Search(_CONTINUOUS),
    "umbrella_chain": Search((*_PPO, _one_of(_GAMMA, 0.99, 1.0))),
}

# Returns in the table of gymnax's README, of its own agents (gymnax-blines, PPO or evolution strategies, seeds and steps not told).
PUBLISHED = {
    "acrobot": -80,
    "bernoulli_bandit": 90,
    "cartpole": 500,
    "catch": 1,
    "four_rooms": 1,
    "gaussian_bandit": 0,
    "meta_maze": 32,
    "mountain_car": -118,
    "mountain_car_continuous": 92,
    "pendulum": -130,
    "point_robot": 10,
}
