"""Bootstrap intervals over questions.

Legend: n questions, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000


def bootstrap_interval(
    scores: Sequence[float] | npt.NDArray[np.float64], level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean of ``scores`` (one per question), over questions resampled with replacement.

    For a paired comparison pass per-question differences: both arms then meet the same resampled questions. A mean
    over several seeds per question treats the questions, not the seeds, as the sample.
    """
    values = np.asarray(scores, dtype=np.float64)
    if not len(values):
        raise ValueError("no scores to resample")
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, 100):  # in blocks: R x n indices at once would be large
        picks = rng.integers(0, len(values), (100, len(values)))
        means[start : start + 100] = values[picks].mean(-1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
