"""Merging of dropped entries, written out entry by entry.

Legend: h key-value heads, N rows, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def merged_by_loop(
    kind: str, key_hNd: Tensor, value_hNd: Tensor, kept_hN: Tensor, entries_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values after every entry that a head does not keep joined one that it keeps."""
    key, value = key_hNd.clone(), value_hNd.clone()
    places = entries_N.cumsum(0).tolist()
    for head in range(len(key)):
        kept = [n for n in range(len(entries_N)) if kept_hN[head, n]]
        joins: dict[int, list[int]] = {n: [] for n in kept}
        like = functional.normalize(key_hNd[head].float(), dim=-1)
        like = like @ like.T
        for n in range(len(entries_N)):
            if entries_N[n] and not kept_hN[head, n] and kept:
                if kind == "position":
                    best = min(kept, key=lambda k: abs(places[k] - places[n]))
                else:
                    best = max(kept, key=lambda k: float(like[n, k]))
                joins[best].append(n)
        for target, sources in joins.items():
            for states, merged in ((key_hNd[head].float(), key[head]), (value_hNd[head].float(), value[head])):
                own, others = states[target], states[sources]
                if kind == "weighted":
                    shares = (1 + like[target, sources][:, None]) / 2
                    joined = (own + (shares * others).sum(0)) / (1 + shares.sum())
                elif kind == "pivot":
                    joined = torch.cat([own[None], (own + others) / 2]).mean(0)
                else:
                    joined = torch.cat([own[None], others]).mean(0)
                merged[target] = joined.to(key.dtype)
    return key, value


def clusters_by_loop(points, count):
    """Density peaks, point by point; of equals the earlier one."""
    n = len(points)
    apart = [[float((points[i] - points[j]).norm()) / points.shape[1] ** 0.5 for j in range(n)] for i in range(n)]
    dense = [float(torch.tensor([-sum(d * d for d in sorted(row)[:count]) / count]).exp()) for row in apart]
    farthest = max(map(max, apart))
    peak = []
    for i in range(n):
        denser = [apart[i][j] for j in range(n) if (dense[j], -j) > (dense[i], -i)]
        peak.append(dense[i] * min(denser, default=farthest))
    centres = sorted(range(n), key=lambda i: -peak[i])[:count]
    return centres, [
        centres.index(i) if i in centres else min(range(count), key=lambda c: apart[centres[c]][i]) for i in range(n)
    ]
