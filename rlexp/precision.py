"""Number formats. Parameters, optimiser, returns, log-probabilities and losses are float32 whatever is chosen here."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from rlexp.config import Host, schema


@schema
class Config:
    """precision=f32 or bf16."""

    module: Host[str]
    compute: Literal["float32", "bfloat16"]
    """What networks compute in."""
    matmul: Literal["default", "float32"]
    """Precision of float32 matrix products; on TPU the default multiplies in bfloat16."""


def make(config: Config) -> Any:
    """Sets the precision of matrix products; gives the dtype that networks compute in."""
    jax.config.update("jax_default_matmul_precision", None if config.matmul == "default" else config.matmul)
    return jnp.dtype(config.compute)
