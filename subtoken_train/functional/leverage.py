"""Leverage: how much of a direction that few vectors have a vector has; approximate, from a sketch.

Legend: h heads, N rows, d width, k width of the sketch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

JITTER, TRIES = 1e-2, 8


def gaussian_sketch(heads: int, width: int, sketch_width: int, seed: int) -> Tensor:
    """Normal numbers of variance 1 / k, [h, d, k] in fp32 on the CPU; the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    drawn_hdk: Tensor = torch.randn(heads, width, sketch_width, generator=generator)
    return drawn_hdk / math.sqrt(sketch_width)


def leverage_scores(vectors_hNd: Tensor, sketch_hdk: Tensor) -> Tensor:
    """Leverage of every vector among its head's, [h, N] in fp32, 0 or more.

    The vectors less their mean, times the sketch, are X; the scores are diag(X (X^T X + jitter)^-1 X^T). A jitter of
    ``JITTER`` that leaves the matrix of some head without a Cholesky factor is raised tenfold for all.
    """
    centred_hNd = vectors_hNd.float() - vectors_hNd.float().mean(1, keepdim=True)
    x_hNk = centred_hNd @ sketch_hdk
    gram_hkk = x_hNk.transpose(-1, -2) @ x_hNk
    identity_kk = torch.eye(gram_hkk.shape[-1], device=gram_hkk.device)
    for attempt in range(TRIES):
        factor_hkk, failed_h = torch.linalg.cholesky_ex(gram_hkk + JITTER * 10**attempt * identity_kk)
        if not bool(failed_h.any()):
            break
    else:
        raise AssertionError("vectors without a Cholesky factor")
    # |L^-1 x|^2 is x^T G^-1 x
    half_hkN = torch.linalg.solve_triangular(factor_hkk, x_hNk.transpose(-1, -2), upper=False)
    scores_hN: Tensor = half_hkN.square().sum(1)
    return scores_hN


def standardised(values: Tensor) -> Tensor:
    """Less their mean, over their (unbiased) standard deviation, all numbers together; 0 where all are the same."""
    centred = values - values.mean()
    deviation = (centred.square().sum() / max(values.numel() - 1, 1)).sqrt()
    return centred / deviation.clamp(min=1e-6)
