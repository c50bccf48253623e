"""Bootstrap intervals over questions, and over training seeds where there are several.

Legend: s seeds, n questions, u different columns, p resamples drawn together.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
CHUNKS = 20  # parts in which resamples are drawn, so that a task of many different scores fits into memory
KEPT_QUESTIONS = 8192  # up to here draws are kept: 32 MiB a shape at most
Floats = npt.NDArray[np.float64]
Table = Sequence[float] | Floats


def bootstrap_interval(scores: Table) -> tuple[float, float]:
    """Return the percentile interval of the mean of ``scores``, [n] or, of several trainings, [s, n], resampled.

    Seeds *and* questions are resampled; with few seeds the interval is a rough one. For a paired comparison pass
    differences: both arms then meet the same seeds and questions.
    """
    values_sn = _filled(scores)
    num_seeds, num_questions = values_sn.shape
    if num_questions <= KEPT_QUESTIONS:
        counts_ps, counts_pn = _kept_draws(num_seeds, num_questions)
        totals_p = (counts_pn @ values_sn.T * counts_ps).sum(1)
    else:
        totals_p = np.array([each_s @ values_sn @ each_n for each_s, each_n in _draws(num_seeds, num_questions)])
    return quantile_interval(totals_p / values_sn.size)


def _filled(scores: Table) -> Floats:
    if not (values_sn := np.atleast_2d(np.asarray(scores, dtype=np.float64))).size:
        raise ValueError("no scores to resample")
    return values_sn


def _draws(num_seeds: int, num_questions: int) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    """Count how often each resample draws each seed, [s], and each question, [n]."""
    rng = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        counts_s = np.bincount(rng.integers(0, num_seeds, num_seeds), minlength=num_seeds)
        yield counts_s, np.bincount(rng.integers(0, num_questions, num_questions), minlength=num_questions)


@lru_cache(maxsize=16)
def _kept_draws(num_seeds: int, num_questions: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Draw all resamples once, [p, s] and [p, n]: a table asks for hundreds of intervals of few shapes."""
    counts_ps, counts_pn = (np.empty((RESAMPLES, size), np.uint16) for size in (num_seeds, num_questions))
    for row, (counts_s, counts_n) in enumerate(_draws(num_seeds, num_questions)):
        counts_ps[row], counts_pn[row] = counts_s, counts_n
    return counts_ps, counts_pn


def resampled_means(tables: Sequence[Table]) -> Floats:
    """Draw bootstrap samples of the mean over tasks of the tasks' mean scores, [``RESAMPLES``].

    Questions are resampled within their task. Tables with equally many seeds share their draw: one training answers all
    tasks. Counts of equal columns are drawn (a multinomial), which has the distribution of single draws.
    """
    rng = np.random.default_rng(0)
    weights: dict[int, Floats] = {}
    means = np.zeros(RESAMPLES)
    for table in tables:
        values_sn = _filled(table)
        num_seeds, num_questions = values_sn.shape
        if num_seeds not in weights:
            weights[num_seeds] = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), RESAMPLES) / num_seeds
        columns_su, counts_u = np.unique(values_sn, axis=1, return_counts=True)
        for part in np.array_split(np.arange(RESAMPLES), CHUNKS):
            drawn_pu = rng.multinomial(num_questions, counts_u / num_questions, len(part)) / num_questions
            means[part] += (drawn_pu @ columns_su.T * weights[num_seeds][part]).sum(1)
    return means / len(tables)


def quantile_interval(draws: Floats, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of draws, rounded to 12 places: a sum's last digit is the processor's."""
    low, high = np.quantile(draws.round(12), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
