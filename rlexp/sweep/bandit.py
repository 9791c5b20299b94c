"""Population-based bandits (PB2; Parker-Holder et al., 2020, https://arxiv.org/abs/2002.02518): with which settings copies go on.

What a stretch of training between two exchanges has brought is what its settings were worth there. A Gaussian process has that
as a function f of the settings x, each from 0 to 1 on the scale of the space, and of the exchange t that ended the stretch:

    f ~ GP(0, s² exp(-|x - x'|² / 2l²) (1 - e)^(|t - t'| / 2)),   change of return = f + b * (return before) + noise

so that what was seen counts less the longer ago it was. The copies of an exchange get, one after the other, the settings with
the highest mean + k * deviation at t + 1. The deviation is as if those had been tried already that were chosen before, and
those of the members that go on as they are; the mean is of what was seen alone: so the choices of an exchange differ.

Deviations from the paper: changes and returns before are standardised within each exchange, since it is asked who gained more
than others at the time, and not when most was gained; b is linear, and prior to all (who was high by luck falls, and copies are
made of those who were high), where the authors' code has the return before beside x; s, l, e and the noise are the most likely
ones of a grid, and the highest bound that of a pool of settings, so that the same numbers come out again.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from rlexp.sweep.lineage import GENERATION
from rlexp.sweep.parameters import Parameter, at, name_of, unit
from rlexp.training.between import Moment

_MOST = 256  # stretches that are remembered, since the process costs their number cubed; and members that go on, of more some
_NEW = _MOST // 2  # of them of one exchange, of more some: what came before is to be remembered too
_POOL = 256  # settings among which copies choose, from all of the space; and as many near those that members have
_NEAR = 0.1  # standard deviation of these from there
_LENGTHS, _FORGOTTEN, _NOISES = (0.8, 0.4, 0.2, 0.1), (0.05, 0.2, 0.5), (0.9, 0.5, 0.2, 0.05)

Rng = Callable[[str], random.Random]  # a stream for each parameter


class Points(NamedTuple):
    """Where the process is asked or has been seen."""

    x: np.ndarray  # [points, parameters], from 0 to 1
    time: np.ndarray  # [points], in exchanges
    before: np.ndarray  # [points], standardised; 0 where nobody asks


class _Process(NamedTuple):
    length: float
    forgotten: float
    noise: float  # share of it in the variance of f and noise


def remembered(parameters: Sequence[Parameter], moment: Moment, parents: Sequence[int]) -> dict[str, Any]:
    """What an exchange leaves to the next one: the stretches so far, and the return that each member has now."""
    was = moment.remembered or {"returns": [0.0] * len(parents), "stretches": []}
    new = [
        [told[GENERATION], before, float(now) - before, *(told[name_of(p.key)] for p in parameters)]
        for before, now, told in zip(was["returns"], moment.returns, moment.told, strict=True)
        if before is not None and np.isfinite(now)
    ]
    now = [float(moment.returns[parent]) for parent in parents]
    return {
        "returns": [x if math.isfinite(x) else None for x in now],
        "stretches": [*was["stretches"], *_some(new)][-_MOST:],
    }


def _some(new: list[list[float | int]]) -> list[list[float | int]]:
    """Of a large population as many as one exchange may leave, evenly among its members."""
    return new if len(new) <= _NEW else [new[i] for i in np.linspace(0, len(new) - 1, _NEW).round().astype(int)]


def chosen(
    parameters: Sequence[Parameter],
    stretches: Sequence[Sequence[float | int]],
    going: Sequence[Sequence[float | int]],
    number: int,
    rng: Rng,
) -> list[dict[str, float]]:
    """The settings of so many copies, {key: value} of each.

    Args:
      stretches: as `remembered` has them, of one exchange at least.
      going: the settings of the members that go on as they are, in the order of the parameters.
    """
    table = np.asarray(stretches, np.float64)
    change = _standardised(table[:, 2], table[:, 0])
    seen = Points(_units(parameters, table[:, 3:]), table[:, 0], _standardised(table[:, 1], table[:, 0]))
    now = table[-1, 0] + 1
    going = going[:: -(-len(going) // _MOST)]
    values = _pool(parameters, going, rng)
    asked = _units(parameters, [*going, *values])
    rows = _highest(seen, change, Points(asked, np.full(len(asked), now), np.zeros(len(asked))), len(going), number)
    return [{p.key: values[row - len(going)][i] for i, p in enumerate(parameters)} for row in rows]


def _pool(parameters: Sequence[Parameter], going: Sequence[Sequence[float | int]], rng: Rng) -> list[tuple[float, ...]]:
    """Settings that may be chosen."""
    columns = []
    for i, p in enumerate(parameters):
        stream = rng(p.key)
        near = [unit(p, going[k % len(going)][i]) + stream.gauss(0.0, _NEAR) for k in range(_POOL)]
        columns.append([at(p, x) for x in [*(stream.random() for _ in range(_POOL)), *near]])
    return list(zip(*columns, strict=True))


def _units(parameters: Sequence[Parameter], values: Any) -> np.ndarray:
    return np.array([[unit(p, x) for p, x in zip(parameters, row, strict=True)] for row in values], np.float64)


def _standardised(values: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Within each exchange; 0 where all are equal."""
    out = np.zeros_like(values)
    for one in np.unique(time):
        own = values[time == one]
        spread = own.std()
        if spread > 1e-12 * np.abs(own).max():
            out[time == one] = (own - own.mean()) / spread
    return out


# --- the process -----------------------------------------------------------------------------------------------------


def _highest(seen: Points, change: np.ndarray, asked: Points, num_going: int, number: int) -> list[int]:
    """The rows of `asked` with the highest bounds, one after the other; its first ones are of members that go on."""
    process = _most_likely(seen, change)
    root = np.linalg.cholesky(_of_seen(process, _apart(seen, seen)))
    cross = solve_triangular(root, _covariance(process, _apart(seen, asked)), lower=True)
    signal = 1 - process.noise
    scale = math.sqrt(_scale(root, change))
    mean = cross.T @ solve_triangular(root, change, lower=True)
    variance = signal - (cross**2).sum(axis=0)
    k = math.sqrt(max(0.0, 0.5 * math.log(0.4 * len(change))))  # grows as in the authors' code, which has 0.2

    rows = np.concatenate([cross, np.empty((num_going + number, cross.shape[1]))])
    used = len(cross)

    def pretend(row: int) -> None:
        """As if these settings had been tried: only the deviation asks for that."""
        nonlocal used, variance
        own = Points(*(column[row : row + 1] for column in asked))
        new = _covariance(process, _apart(own, asked))[0] - rows[:used, row] @ rows[:used]
        rows[used] = new / math.sqrt(max(variance[row], 0.0) + process.noise)
        variance = variance - rows[used] ** 2
        used += 1

    for row in range(num_going):
        pretend(row)
    found = []
    for _ in range(number):
        bound = mean + k * scale * np.sqrt(np.maximum(variance, 0.0))
        row = num_going + int(np.argmax(bound[num_going:]))
        found.append(row)
        pretend(row)
    return found


def _most_likely(seen: Points, change: np.ndarray) -> _Process:
    """Of equals the smoothest: of few stretches all say the same, and then nothing is read into them."""
    best, highest, apart = None, -math.inf, _apart(seen, seen)
    for process in itertools.starmap(_Process, itertools.product(_LENGTHS, _FORGOTTEN, _NOISES)):
        root = np.linalg.cholesky(_of_seen(process, apart))
        likelihood = -0.5 * len(change) * math.log(_scale(root, change)) - np.log(np.diag(root)).sum()
        if likelihood > highest + 1e-9:
            best, highest = process, likelihood
    assert best is not None
    return best


def _scale(root: np.ndarray, change: np.ndarray) -> float:
    """The likeliest variance of f and noise together."""
    return max(float(np.square(solve_triangular(root, change, lower=True)).mean()), 1e-12)


class _Apart(NamedTuple):
    """Of each pair of points, [points of a, points of b]."""

    square: np.ndarray  # of the distance of their settings
    exchanges: np.ndarray
    before: np.ndarray  # the product of both


def _apart(a: Points, b: Points) -> _Apart:
    square = np.square(a.x).sum(axis=1)[:, None] + np.square(b.x).sum(axis=1)[None] - 2 * a.x @ b.x.T
    return _Apart(np.maximum(square, 0.0), np.abs(a.time[:, None] - b.time[None]), a.before[:, None] * b.before[None])


def _covariance(process: _Process, apart: _Apart) -> np.ndarray:
    """Of f and of what the return before explains, in shares of the variance of f and noise."""
    ago = 0.5 * math.log(1 - process.forgotten) * apart.exchanges
    return (1 - process.noise) * np.exp(ago - apart.square / (2 * process.length**2)) + apart.before


def _of_seen(process: _Process, apart: _Apart) -> np.ndarray:
    """Of what was seen, which has noise."""
    return _covariance(process, apart) + process.noise * np.eye(len(apart.square))
