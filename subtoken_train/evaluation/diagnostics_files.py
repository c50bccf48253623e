"""The files of a diagnosis: CSV tables, and the pictures drawn from the same numbers.

    figure1a.csv  K_j under a global budget: tokens by kept groups, all layers and each
    figure1b.csv  mean K_j by relevance rank within the prompt, most relevant first, all layers together
    groups.csv    per layer, the share of the kept (token, group) pairs that falls on each group
    layers.csv    per layer: budget, spread of the usage, agreement with value norm
    figure1.png, layers.png

Legend: S value groups, L routed layers, R ranks.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from subtoken_train.evaluation.charts import bar_chart, heat_map, line_chart, side_by_side
from subtoken_train.evaluation.diagnostics import Diagnosis
from subtoken_train.functional.usage import usage_entropy
from subtoken_train.routing.base import RoutingConfig


class LayerRow(NamedTuple):
    """One routed layer's row of ``layers.csv``.

    Attributes:
        layer: its index.
        kept_groups: mean number of groups that a routed token keeps.
        value_fraction: the same over S.
        entropy: of the groups' usage, over log S; 1 where all are used alike.
        largest_share: of the kept pairs, that of the most used group.
        value_norm_agreement: share of the kept (token, group) pairs that value norm would keep at the same budget.
        chance: what that share would be for a random choice.
    """

    layer: int
    kept_groups: float
    value_fraction: float
    entropy: float
    largest_share: float
    value_norm_agreement: float
    chance: float


def layer_rows(diagnosis: Diagnosis, config: RoutingConfig) -> list[LayerRow]:
    """A row for every routed layer."""
    groups_K = torch.arange(config.num_groups + 1)
    rows = []
    for i, layer in enumerate(diagnosis.layers):
        kept_K, usage_S = diagnosis.kept_LK[i], diagnosis.counts_LS[i] / diagnosis.counts_LS[i].sum()
        tokens, pairs = int(kept_K.sum()), int((kept_K * groups_K).sum())
        fraction = pairs / (config.num_groups * tokens)
        # token by token a random choice shares K_j^2 / S pairs; value norm under a global budget picks its own K_j
        per_token = int((kept_K * groups_K**2).sum()) / (config.num_groups * pairs)
        rows.append(
            LayerRow(
                layer=layer,
                kept_groups=pairs / tokens,
                value_fraction=fraction,
                entropy=usage_entropy(usage_S),
                largest_share=float(usage_S.max()),
                value_norm_agreement=int(diagnosis.norm_pairs_L[i]) / pairs,
                chance=fraction if config.budget == "global" else per_token,
            )
        )
    return rows


def write_tables(diagnosis: Diagnosis, config: RoutingConfig, folder: Path) -> None:
    """Write the CSV files into an existing folder."""
    labels = ["all", *map(str, diagnosis.layers)]
    histogram = [
        (label, groups, tokens, tokens / sum(row))
        for label, row in zip(labels, [diagnosis.figure_LK.sum(0).tolist(), *diagnosis.figure_LK.tolist()], strict=True)
        for groups, tokens in enumerate(row)
    ]
    _write(folder / "figure1a.csv", ("layer", "kept_groups", "tokens", "share"), histogram)
    relevance, kept = rank_means(diagnosis)
    ranks = zip(range(len(kept)), diagnosis.rank_tokens_R.tolist(), relevance, kept, strict=False)
    _write(folder / "figure1b.csv", ("rank", "tokens", "relevance", "kept_groups"), ranks)
    shares = (
        (layer, group, share)
        for layer, row in zip(diagnosis.layers, _usage(diagnosis), strict=True)
        for group, share in enumerate(row)
    )
    _write(folder / "groups.csv", ("layer", "group", "share"), shares)
    _write(folder / "layers.csv", LayerRow._fields, layer_rows(diagnosis, config))


def draw_figures(diagnosis: Diagnosis, config: RoutingConfig, folder: Path) -> None:
    """Draw the PNG files into an existing folder."""
    histogram, (_, kept) = diagnosis.figure_LK.sum(0), rank_means(diagnosis)
    title = f"(a) kept groups, S = {config.num_groups}, mean K = {config.kept_groups}"
    bars = bar_chart((histogram / histogram.sum()).tolist(), title, "kept groups K_j", "share of tokens")
    allotted = {"mean K_j": kept, "budget": [float(config.kept_groups)] * len(kept)}
    ranks = line_chart(allotted, "(b) allocation by relevance", "tokens, most relevant first", "kept groups K_j")
    side_by_side([bars, ranks]).save(folder / "figure1.png")
    first, rows = diagnosis.layers[0], layer_rows(diagnosis, config)
    usage = heat_map(_usage(diagnosis), "share of kept groups", "group", "layer", first)
    lines = {
        "entropy of usage": [row.entropy for row in rows],
        "agreement with value norm": [row.value_norm_agreement for row in rows],
        "agreement by chance": [row.chance for row in rows],
    }
    side_by_side([usage, line_chart(lines, "per layer", "layer", "share", first)]).save(folder / "layers.png")


def rank_means(diagnosis: Diagnosis) -> tuple[list[float], list[float]]:
    """Mean relevance and mean K_j of every rank that occurs."""
    occurs = diagnosis.rank_tokens_R > 0
    tokens = diagnosis.rank_tokens_R[occurs]
    return (diagnosis.rank_relevance_R[occurs] / tokens).tolist(), (diagnosis.rank_kept_R[occurs] / tokens).tolist()


def _usage(diagnosis: Diagnosis) -> list[list[float]]:
    """Per layer, the share of the kept pairs that falls on each group."""
    shares: list[list[float]] = (diagnosis.counts_LS / diagnosis.counts_LS.sum(-1, keepdim=True)).tolist()
    return shares


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in row])
