"""Choosing rows by diversity, a pair at a time in fp64: indices in the order of choice."""

import math

import torch


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
    """Lists of numbers, one pair at a time."""
    left = list(range(len(rows)))
    while len(left) > count:
        first, second = left[::2], left[1::2]
        like = {i: max(cosine(rows[i], rows[j]) for j in second) for i in first}
        order = sorted(first, key=lambda i: -like[i])
        left = order[min(8, len(left) - count, len(first)) :] + second
    return left


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
