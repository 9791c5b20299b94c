"""What one's own environments, networks, algorithms and loggers import: `from rlexp.api import Env, episodic, schema`.

These names are an interface. What they are called, take and hold changes with a new major version of rlexp only (before 1.0: with a
minor one), and the changelog says so; a test holds them against `tests/docs/api.txt`. Where they are defined is not part of it.
"""

from rlexp.algos.base import Algorithm, TorsoOf
from rlexp.algos.observations import normalised_observations
from rlexp.config import (
    ConfigError,
    Count,
    CountOrZero,
    Flag,
    Fraction,
    Host,
    NonNegative,
    Number,
    Part,
    Positive,
    TracedNumber,
    schema,
)
from rlexp.envs.base import Env, Tally, Transition, batched, episodic
from rlexp.envs.waiting import Batched
from rlexp.loggers import Config as LoggerConfig
from rlexp.loggers import check as check_loggers
from rlexp.loggers import make as make_loggers
from rlexp.loggers.base import Logger, RunInfo, fan_out, never_fatal
from rlexp.networks.base import MemoryTorso, SharedTrunk, activations, flatten_obs, layer_norm, net, split_image
from rlexp.networks.dense import Conv, Dense
from rlexp.networks.heads import Head, head_on
from rlexp.networks.initializers import orthogonal
from rlexp.ops.distributions import Categorical, DiagonalNormal, MultiCategorical, masked, multi_categorical
from rlexp.ops.returns import gae, lambda_returns, n_step_return
from rlexp.training.between import Between, Exchange, Finished, Leave, Moment, Origin
from rlexp.types import Batch, Continuous, Discrete, EnvSpec, Groups, Mean, MultiDiscrete, TimeStep, Trajectory, Update

__all__ = [
    "Algorithm",
    "Batch",
    "Batched",
    "Between",
    "Categorical",
    "ConfigError",
    "Continuous",
    "Conv",
    "Count",
    "CountOrZero",
    "Dense",
    "DiagonalNormal",
    "Discrete",
    "Env",
    "EnvSpec",
    "Exchange",
    "Finished",
    "Flag",
    "Fraction",
    "Groups",
    "Head",
    "Host",
    "Leave",
    "Logger",
    "LoggerConfig",
    "Mean",
    "MemoryTorso",
    "Moment",
    "MultiCategorical",
    "MultiDiscrete",
    "NonNegative",
    "Number",
    "Origin",
    "Part",
    "Positive",
    "RunInfo",
    "SharedTrunk",
    "Tally",
    "TimeStep",
    "TorsoOf",
    "TracedNumber",
    "Trajectory",
    "Transition",
    "Update",
    "activations",
    "batched",
    "check_loggers",
    "episodic",
    "fan_out",
    "flatten_obs",
    "gae",
    "head_on",
    "lambda_returns",
    "layer_norm",
    "make_loggers",
    "masked",
    "multi_categorical",
    "n_step_return",
    "net",
    "never_fatal",
    "normalised_observations",
    "orthogonal",
    "schema",
    "split_image",
]
