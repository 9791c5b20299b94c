"""One layer, which is all that the corridor needs."""

from typing import Any

import flax.linen as nn
import jax

from rlexp.api import Count, Dense, Host, flatten_obs, schema


@schema
class Config:
    """One layer."""

    module: Host[str]
    width: Count
    """Features."""


class Layer(nn.Module):
    """Observations with any leading axes -> features."""

    observation: Any
    width: int
    dtype: Any

    @nn.compact
    def __call__(self, obs):
        return jax.nn.relu(Dense(self.width, 1.0, self.dtype)(flatten_obs(obs, self.observation, dtype=self.dtype)))


def make(config: Config, *, observation, dtype) -> nn.Module:
    """The torso; heads are the algorithm's."""
    return Layer(observation, config.width, dtype)
