"""Statistics of rows that count, against NumPy's of those rows alone."""

import jax.numpy as jnp
import numpy as np

from rlexp.ops import weighted


def test_rows_that_do_not_count_change_nothing():
    rng = np.random.default_rng(0)
    x, target = rng.normal(3, 5, (2, 2, 6)).astype(np.float32)
    weight = np.array([[1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]], np.float32)
    found = np.asarray(weighted.normalised(jnp.asarray(x), jnp.asarray(weight), jnp.sum(jnp.asarray(weight), axis=1)))
    for row, counts, ours in zip(x, weight == 1, found, strict=True):
        np.testing.assert_allclose(ours[counts], (row[counts] - row[counts].mean()) / row[counts].std(), rtol=1e-5)
    counts = weight == 1
    expected = 1 - (target - x)[counts].var() / target[counts].var()
    given = (jnp.asarray(array) for array in (x, target, weight))
    np.testing.assert_allclose(weighted.explained_variance(*given), expected, rtol=1e-5)


def test_where_no_row_counts_nothing_is_infinite():
    zeros = jnp.zeros((2, 3))
    assert np.isfinite(weighted.normalised(zeros + 4, zeros, jnp.zeros(2))).all()
    assert np.isfinite(weighted.explained_variance(zeros, zeros, zeros))
