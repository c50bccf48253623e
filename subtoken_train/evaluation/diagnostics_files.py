"""The files of a diagnosis: CSV tables, and the pictures drawn from the same numbers.

    figure1a.csv  K_j under a global budget: tokens by kept groups, all layers and each
    figure1b.csv  mean K_j by relevance rank within the prompt, most relevant first, all layers together
    groups.csv    per layer, the share of the kept (token, group) pairs that falls on each group
    layers.csv    per layer: budget, spread of the usage, agreement with value norm
    figure1.png, layers.png

Legend: S value groups, L routed layers, R ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from subtoken_train.evaluation.charts import axes_in_a_row, draw_bars, draw_cells, draw_lines, image_of
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
        (label, groups, tokens, tokens / int(row_K.sum()))
        for label, row_K in zip(labels, [diagnosis.figure_LK.sum(0), *diagnosis.figure_LK], strict=True)
        for groups, tokens in enumerate(row_K.tolist())
    ]
    relevance, kept = rank_means(diagnosis)
    ranks = zip(range(len(kept)), diagnosis.rank_tokens_R.tolist(), relevance, kept, strict=False)
    shares = [
        (layer, group, share)
        for layer, row in zip(diagnosis.layers, _usage(diagnosis), strict=True)
        for group, share in enumerate(row)
    ]
    tables = {
        "figure1a": pd.DataFrame(histogram, columns=["layer", "kept_groups", "tokens", "share"]),
        "figure1b": pd.DataFrame(ranks, columns=["rank", "tokens", "relevance", "kept_groups"]),
        "groups": pd.DataFrame(shares, columns=["layer", "group", "share"]),
        "layers": pd.DataFrame(layer_rows(diagnosis, config)),
    }
    for name, frame in tables.items():
        frame.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\r\n")


def draw_figures(diagnosis: Diagnosis, config: RoutingConfig, folder: Path) -> None:
    """Draw the PNG files into an existing folder."""
    histogram, (_, kept) = diagnosis.figure_LK.sum(0), rank_means(diagnosis)
    figure, (left, right) = axes_in_a_row(2)
    title = f"(a) kept groups, S = {config.num_groups}, mean K = {config.kept_groups}"
    draw_bars(left, (histogram / histogram.sum()).tolist(), title, "kept groups K_j", "share of tokens")
    allotted = {"mean K_j": kept, "budget": [float(config.kept_groups)] * len(kept)}
    draw_lines(right, allotted, "(b) allocation by relevance", "tokens, most relevant first", "kept groups K_j")
    image_of(figure).save(folder / "figure1.png")
    first, rows = diagnosis.layers[0], layer_rows(diagnosis, config)
    lines = {
        "entropy of usage": [row.entropy for row in rows],
        "agreement with value norm": [row.value_norm_agreement for row in rows],
        "agreement by chance": [row.chance for row in rows],
    }
    figure, (left, right) = axes_in_a_row(2)
    draw_cells(left, _usage(diagnosis), "share of kept groups", "group", "layer", first)
    draw_lines(right, lines, "per layer", "layer", "share", first)
    image_of(figure).save(folder / "layers.png")


def rank_means(diagnosis: Diagnosis) -> tuple[list[float], list[float]]:
    """Mean relevance and mean K_j of every rank that occurs."""
    occurs = diagnosis.rank_tokens_R > 0
    tokens = diagnosis.rank_tokens_R[occurs]
    return (diagnosis.rank_relevance_R[occurs] / tokens).tolist(), (diagnosis.rank_kept_R[occurs] / tokens).tolist()


def _usage(diagnosis: Diagnosis) -> list[list[float]]:
    """Per layer, the share of the kept pairs that falls on each group."""
    shares: list[list[float]] = (diagnosis.counts_LS / diagnosis.counts_LS.sum(-1, keepdim=True)).tolist()
    return shares
