"""DPC-KNN: clusters around density peaks (Du et al., 2016), as SparseVLM's release merges tokens by them.

Legend: N points, k clusters, C width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def distances(points_NC: Tensor) -> Tensor:
    """Euclidean distances over the root of the width, [N, N] in fp32."""
    points_NC = points_NC.float()
    with torch.autocast(points_NC.device.type, enabled=False):
        between_NN = torch.cdist(points_NC, points_NC, compute_mode="donot_use_mm_for_euclid_dist")
    return between_NN / math.sqrt(points_NC.shape[1])


def densities(distance_NN: Tensor, nearest: int) -> Tensor:
    """exp(-mean of the squared distances to the ``nearest`` points, the point itself among them), [N]."""
    return (-distance_NN.topk(nearest, largest=False).values.square().mean(-1)).exp()


def density_clusters(distance_NN: Tensor, density_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Centres and the cluster of every point.

    A point's peak score is its density times the distance to the nearest denser point (the largest distance of all
    where there is none). Of equally dense points, the earlier one is the denser.

    Args:
        distance_NN: from ``distances``.
        density_N: from ``densities``.
        count: k <= N.

    Returns:
        (centres [k], best peak first; cluster of each point [N], 0 to k - 1): ties go to the earlier one.
    """
    earlier_NN = torch.ones_like(distance_NN, dtype=torch.bool).tril(-1)
    denser_NN = (density_N > density_N[:, None]) | ((density_N == density_N[:, None]) & earlier_NN)
    apart_N = torch.where(denser_NN, distance_NN, distance_NN.max()).amin(-1)
    centres_k = (apart_N * density_N).sort(descending=True, stable=True).indices[:count]
    cluster_N = distance_NN[centres_k].argmin(0)
    cluster_N[centres_k] = torch.arange(count, device=cluster_N.device)
    return centres_k, cluster_N
