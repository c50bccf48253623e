"""Merging and choosing rows by diversity (fp64), entry by entry. h key-value heads, N rows, d head width."""

import math
from itertools import pairwise

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


def cosine(one, other):
    return float((one.double() @ other.double()) / (one.double().norm() * other.double().norm()))


def by_max_min(rows, count):
    """One distance at a time: the row whose nearest other is farthest, then the one farthest from all chosen."""
    distance = [[1 - cosine(a, b) for b in rows] for a in rows]
    every, chosen = range(len(rows)), []
    for _ in range(count):
        left = [i for i in every if i not in chosen]
        among = {i: chosen or [j for j in every if j != i] for i in left}
        chosen.append(max(left, key=lambda i: (min((distance[i][j] for j in among[i]), default=0), -i)))
    return chosen


def by_determinants(rows, weights, count):
    """Greedy in the determinant of the kernel itself, anew for every candidate; none where a row adds 1e-6 at most."""
    unit = rows.double() / rows.double().norm(dim=-1, keepdim=True)
    kernel, chosen, before = weights[:, None] * (unit @ unit.T).fill_diagonal_(1) * weights, [], 0.0
    for _ in range(count):
        left = [i for i in range(len(rows)) if i not in chosen]
        volume = {i: float(torch.linalg.slogdet(kernel[[*chosen, i]][:, [*chosen, i]])[1]) for i in left}
        adds = {i: math.exp(volume[i] - before) / float(weights[i]) ** 2 if before > -math.inf else 0 for i in left}
        chosen.append(max(left, key=lambda i: (round(volume[i], 9) if adds[i] > 1e-6 else -math.inf, -i)))
        before = volume[chosen[-1]] if adds[chosen[-1]] > 1e-6 else -math.inf
    return chosen


def without_by_loop(rows, count):
    left = list(range(len(rows)))
    while len(left) > count:
        first, second = left[::2], left[1::2]
        like = {i: max(cosine(rows[i], rows[j]) for j in second) for i in first}
        left = sorted(first, key=lambda i: -like[i])[min(8, len(left) - count, len(first)) :] + second
    return left


def by_components(tokens, received, kept, classes):
    """PruneSID in fp64, a token at a time: components of the tokens' covariance; places in the order of choice."""
    count, want = len(tokens), kept - classes
    states = tokens.double().sigmoid() - tokens.double().sigmoid().mean(1, keepdim=True)
    held, axes = torch.linalg.eigh(states @ states.T)
    axes = axes.T[held > 1e-12 * held[-1]].flip(0)[: max(1, kept // 4)]
    most = axes.abs().argmax(0).tolist() if len(axes) else [0] * count
    groups = [[place for place in range(count) if most[place] == i] for i in range(max(1, len(axes)))]
    like = [[cosine(one, other) for other in tokens] for one in tokens]
    pairs = [like[i][j] for i in range(count) for j in range(i)]
    limit, apart, orders = kept / 32 * sum(pairs) / max(1, len(pairs)), [], []
    for group in groups:
        order, own = sorted(group, key=lambda place: (-float(received[place]), place)), []
        for place in order:
            own += [place] if all(like[place][better] <= limit for better in own) else []
        apart.append(len(own))
        orders.append(own + [place for place in order if place not in own])
    most = [min(number, 5 * math.ceil(kept / 64)) for number in apart]
    while sum(most) < kept:
        most = [min(number + 1, len(group)) for number, group in zip(most, groups, strict=True)]
    left = max(0, want - sum(map(bool, groups)))
    passed = torch.tensor([number / sum(apart) for number in apart]).cumsum(0)  # fp32 says what is half
    shares = [after - before for before, after in pairwise([0, *(round(float(each * left)) for each in passed)])]
    taken = [min(share + bool(group), top) for share, group, top in zip(shares, groups, most, strict=True)]
    for i in sorted(range(len(groups)), key=lambda i: -apart[i]):
        taken[i] += min(most[i] - taken[i], want - sum(taken))
    return [place for order, number in zip(orders, taken, strict=True) for place in order[:number]]


def by_pivots(rows, norms, asking, count):
    """DART: ``norms`` are those of the rows, ``asking`` (row, norm) of each row of the text."""
    image = sorted(range(len(rows)), key=lambda i: (-float(norms[i]), i))[: min(4, count)]
    text = [row for row, _ in sorted(asking, key=lambda each: -float(each[1]))[:4]]
    pivots, taken = [*(rows[i] for i in image), *text], list(image)
    for number, pivot in enumerate(pivots):
        share, more = divmod(count - len(image), len(pivots))
        left = [i for i in range(len(rows)) if i not in taken]
        taken += sorted(left, key=lambda i: (cosine(rows[i], pivot), i))[: share + (number < more)]
    return taken


def by_relevance(rows, asking):
    """CDPruner's weights, of rows and the text's rows."""
    mean = torch.tensor([-sum(cosine(row, other) for other in asking) / max(1, len(asking)) for row in rows]).double()
    if float(mean.max() - mean.min()) < 1e-6:
        return torch.ones(len(rows)).double()
    return (mean - mean.min() + 1e-6) / (mean.max() - mean.min())
