"""Builders that several tests share."""

from __future__ import annotations

import torch

from subtoken_train.types import Batch, Region


def make_batch(prompts: list[tuple[int, int]], pad_left: bool = False, visual: int = 64, seed: int = 0) -> Batch:
    """Random batch for the tiny LLaVA: per sample (images, text tokens after them); text answers fill the last two."""
    generator = torch.Generator().manual_seed(seed)
    rows, regions, ranks = [], [], []
    for images, text in prompts:
        words = torch.randint(10, 60, (2 + text,), generator=generator)
        head, tail = words[:2], words[2:]
        rows.append(torch.cat([head, torch.full((images * visual,), 4), tail]))
        codes = [Region.SYSTEM] * 2 + [Region.VISUAL] * (images * visual)
        codes += [Region.QUERY] * (text - 2) + [Region.ANSWER] * 2
        regions.append(torch.tensor(codes))
        ranks.append(len(codes) - 3 if images else -1)
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    region = torch.full((len(rows), width), int(Region.PADDING))
    for i, (row, code) in enumerate(zip(rows, regions, strict=True)):
        span = slice(width - len(row), width) if pad_left else slice(0, len(row))
        ids[i, span], region[i, span] = row, code
        if pad_left and ranks[i] >= 0:
            ranks[i] += width - len(row)
    counts = torch.tensor([images for images, _ in prompts])
    pixels = torch.randn(int(counts.sum()), 3, 96, 96, generator=generator) if counts.sum() else None
    labels = torch.where(region == Region.ANSWER, ids, -100)
    names = [f"sample-{i}" for i in range(len(rows))]
    return Batch(ids, labels, region, torch.tensor(ranks), pixels, counts, names)
