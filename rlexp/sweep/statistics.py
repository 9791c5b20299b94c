"""The numbers of a report: interquartile means, how sure they are, and which parameters matter.

Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", NeurIPS 2021: report the
interquartile mean over runs, and the percentile interval of a bootstrap that resamples runs inside each stratum, where
a stratum is a task. Here a configuration names its environment, so it is one task and one stratum: its runs, the seeds,
are resampled as whole curves. Means over several environments would need normalised scores, which rlexp does not have,
so there are none: each environment is reported apart.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy import stats

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000  # as in the paper's curves
_BATCH = 4_000_000  # numbers resampled at once: bounds the memory


class Estimate(NamedTuple):
    """Interquartile mean over runs with its interval: a number, or one for each of P points."""

    iqm: Float[np.ndarray, "..."]
    low: Float[np.ndarray, "..."]  # NaN where there is one run: nothing is known of the spread
    high: Float[np.ndarray, "..."]


def iqm(values: ArrayLike, axis: int = 0) -> np.ndarray:
    """The mean of the middle half. A quarter of the values, rounded down, is cut off at either end: none of three."""
    return np.asarray(stats.trim_mean(values, proportiontocut=0.25, axis=axis))


def estimate(values: Float[np.ndarray, "N ..."]) -> Estimate:
    """Of N runs. The resamples are drawn from a fixed seed, so that a report can be made again."""
    num_runs = values.shape[0]
    middle = iqm(values)
    if num_runs < 2:
        unknown = np.full(middle.shape, math.nan)
        return Estimate(middle, unknown, unknown)
    found = stats.bootstrap(
        (values,),
        iqm,
        axis=0,
        vectorized=True,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=NUM_RESAMPLES,
        batch=max(1, _BATCH // values.size),
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(middle, np.asarray(found.low), np.asarray(found.high))


def estimate_curves(curves: Float[np.ndarray, "N P"]) -> Estimate:
    """Of N curves, NaN where a run has no such point (yet): each point is estimated from the runs that have it."""
    there = np.isfinite(curves)
    out = Estimate(*(np.full(curves.shape[1], math.nan) for _ in Estimate._fields))
    # Points that the same runs have are resampled together, as whole curves.
    for runs in np.unique(there, axis=1).T:
        points = (there == runs[:, None]).all(axis=0)
        if runs.any():
            for whole, part in zip(out, estimate(curves[np.ix_(runs, points)]), strict=True):
                whole[points] = part
    return out


def numeric(values: Sequence[str]) -> list[float] | None:
    """The values as numbers, if each of them is one."""
    try:
        found = [float(value) for value in values]
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None


def spans_decades(values: Sequence[float]) -> bool:
    """Whether an axis of these should be logarithmic."""
    return min(values) > 0 and max(values) >= 10 * min(values)


def importance(
    settings: Sequence[Mapping[str, str]], objectives: Sequence[float], keys: Sequence[str]
) -> dict[str, float]:
    """How much each parameter decides whether a run is among the best tenth: shares of 1, the largest first.

    PED-ANOVA (Watanabe et al., IJCAI 2023) as Optuna has it. A parameter that only some runs have counts where it is.

    Raises:
      ValueError: with the reason, where it cannot be told.
    """
    if not keys:
        raise ValueError("no parameter differs between the jobs")
    if len(set(objectives)) < 2:
        raise ValueError("it takes two jobs with different objectives")
    try:
        import optuna
    except ImportError:
        raise ValueError('it needs Optuna: pip install "rlexp[optuna]"') from None
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    space: dict[str, BaseDistribution] = {}
    numbers: dict[str, dict[str, float]] = {}
    for key in keys:
        there = sorted({setting[key] for setting in settings if key in setting})
        if len(there) < 2:
            continue  # the only value says nothing
        found = numeric(there)
        if found is None:
            space[key] = CategoricalDistribution(there)
        else:
            space[key] = FloatDistribution(min(found), max(found), log=spans_decades(found))
            numbers[key] = dict(zip(there, found, strict=True))
    if not space:
        raise ValueError("no parameter differs between the jobs that have an objective")
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it tells of each study that is made
    try:
        study = optuna.create_study(direction="maximize")
        study.add_trials([_trial(setting, x, space, numbers) for setting, x in zip(settings, objectives, strict=True)])
        with warnings.catch_warnings(action="ignore"):  # of few runs it says that they are few; so does the report
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    finally:
        optuna.logging.set_verbosity(verbosity)


def _trial(
    setting: Mapping[str, str], objective: float, space: Mapping[str, Any], numbers: Mapping[str, Mapping[str, float]]
) -> Any:
    import optuna

    own = {key: distribution for key, distribution in space.items() if key in setting}
    values = {key: numbers[key][setting[key]] if key in numbers else setting[key] for key in own}
    return optuna.create_trial(params=values, distributions=own, value=objective)
