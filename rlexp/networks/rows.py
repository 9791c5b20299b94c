"""What is a row of an observation, to `lq` and to its normaliser.

A leaf [..., F] is rows of F numbers, such as the cars that are seen; a leaf [] is a row of one. A row of nothing but zeros is not
there.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool


def shape(of_leaf: tuple[int, ...]) -> tuple[int, int]:
    """(R, F): rows of a leaf, without leading axes, and numbers of each."""
    return math.prod(of_leaf[:-1]), of_leaf[-1] if of_leaf else 1


def there(rows: Array) -> Bool[Array, "*N"]:
    """[..., F] -> which rows are."""
    return jnp.any(rows != 0, axis=-1)
