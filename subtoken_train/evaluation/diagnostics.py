"""Diagnosis of a routed arm on real prompts: the paper's Figure 1 and the usage of groups.

Figure 1 shows how many groups K_j a token keeps under a *global* budget; a router with another budget is shown as it
would allot a global one of the same size. Values are zeroed, nothing is packed, and nothing reads an answer.

Files: ``figure1a.csv`` tokens by K_j, of all layers and each; ``figure1b.csv`` the mean K_j by relevance rank within
the prompt; ``groups.csv`` each group's share of a layer's kept pairs; ``layers.csv`` budget and spread of each layer.

Legend: B batch, N positions after the reducer, S value groups, L routed layers, R ranks (tokens of one prompt).
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from subtoken_train.engine.attention_rows import region_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import question_rows
from subtoken_train.evaluation.charts import axes_in_a_row, draw_bars, draw_cells, draw_lines, image_of
from subtoken_train.functional import masks as usage
from subtoken_train.routing.bank import RouterBank
from subtoken_train.routing.base import RoutingConfig
from subtoken_train.types import Batch, in_compressed_region


@dataclass
class Observation:
    """Routed tokens and kept groups, bool [B, N] and [B, N, S], and alpha_j, fp32 [B, N] or empty, per routed layer."""

    routed: dict[int, Tensor]
    masks: dict[int, Tensor]
    relevance: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Diagnosis:
    """Counts over all prompts; rows of L are ``layers``."""

    layers: list[int]
    counts_LS: Tensor  # routed tokens that keep each group
    kept_LK: Tensor  # routed tokens by the number of groups that they keep, 0 to S
    figure_LK: Tensor  # as kept_LK, under a global budget
    rank_tokens_R: Tensor  # (token, layer) pairs of each relevance rank, most relevant first
    rank_relevance_R: Tensor  # their summed relevance
    rank_kept_R: Tensor  # their summed K_j under a global budget


def diagnose(backbone: CompressedBackbone, batches: Iterable[Batch]) -> Diagnosis:
    """Run batches of prompts, of any size, through a routed arm in evaluation mode, and count."""
    if backbone.bank is None:
        raise ValueError("a token-only arm routes nothing, so there is nothing to diagnose; use a routed adapter")
    if (budget := backbone.bank.config.budget) in ("bytes", "delayed"):
        raise ValueError(f"budget {budget!r} drops keys, too, which Figure 1 does not show; use another adapter")
    found = [_count(backbone, backbone.bank, batch) for batch in batches]
    if not any(int(each.rank_tokens_R.sum()) for each in found):
        raise ValueError("none of the prompts has a token to route (no image?); choose other --data")
    names = [field.name for field in fields(Diagnosis) if field.name != "layers"]
    counts = {name: [getattr(each, name) for each in found] for name in names}
    # ranks that only some have count as zeros for the others
    return Diagnosis(found[0].layers, **{name: pad_sequence(each, True).sum(0) for name, each in counts.items()})


@torch.no_grad()
def observe(backbone: CompressedBackbone, batch: Batch, with_relevance: bool = False) -> Observation:
    """Run a batch of prompts and keep what the routers saw and did."""
    bank, layers = backbone.bank, backbone.family.decoder.layers
    assert bank is not None
    hidden: dict[int, Tensor] = {}

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            # a scout runs the lowest layers first; the routed run comes last and overwrites what they left
            keep = partial(lambda index, _, args: hidden.update({index: args[0]}), index)
            stack.callback(layer.register_forward_pre_hook(keep).remove)
        result = backbone.run(batch, pad_left=True)
    state = result.state
    assert state is not None
    found = Observation({}, {})
    spread = [rows for start, stop, rows in result.spans for _ in range(start, stop)]
    for layer, mask_BNS in sorted(state.masks.items()):
        rows = spread[layer]
        seen_BN = result.kept.get(layer, rows.visible_BM)  # what query rows attend to
        found.routed[layer] = in_compressed_region(rows.regions_BM) & seen_BN
        found.masks[layer] = mask_BNS
        if with_relevance:
            found.relevance[layer] = region_attention(
                backbone.family, layer, hidden[layer], seen_BN, rows.position, question_rows(batch, rows)
            )
    return found


def _count(backbone: CompressedBackbone, bank: RouterBank, batch: Batch) -> Diagnosis:
    config = bank.config
    shared = own = observe(backbone, batch, with_relevance=config.budget == "global")
    if config.budget != "global":
        bank.config = replace(config, budget="global")  # N * K groups are shared out over all tokens of a sample
        try:
            shared = observe(backbone, batch, with_relevance=True)
        finally:
            bank.config = config
    layers = list(own.masks)
    ordered = [usage.by_relevance(shared.masks[i], shared.relevance[i], shared.routed[i]) for i in layers]
    return Diagnosis(
        layers,
        torch.stack([usage.group_counts(own.masks[i], own.routed[i]) for i in layers]).cpu(),
        torch.stack([usage.kept_histogram(own.masks[i], own.routed[i]) for i in layers]).cpu(),
        torch.stack([usage.kept_histogram(shared.masks[i], shared.routed[i]) for i in layers]).cpu(),
        over_layers(valid for _, _, valid in ordered),
        over_layers(relevance.double() * valid for _, relevance, valid in ordered),
        over_layers(kept * valid for kept, _, valid in ordered),
    )


def over_layers(layers: Iterable[Tensor]) -> Tensor:
    """Sum over layers and samples, [R] on the CPU; a layer above a cut has fewer rows, and none of the last ranks."""
    return pad_sequence([ranks_BR.sum(0) for ranks_BR in layers], True).sum(0).cpu()


class LayerRow(NamedTuple):
    """One routed layer's row of ``layers.csv``."""

    layer: int
    kept_groups: float  # of a routed token, mean
    value_fraction: float  # the same over S
    entropy: float  # of the groups' usage, over log S; 1 where all are used alike
    largest_share: float  # of the kept pairs, that of the most used group


def layer_rows(diagnosis: Diagnosis, config: RoutingConfig) -> list[LayerRow]:
    """Return a row for every routed layer."""
    groups_K = torch.arange(config.num_groups + 1)
    rows = []
    for i, layer in enumerate(diagnosis.layers):
        kept_K, usage_S = diagnosis.kept_LK[i], diagnosis.counts_LS[i] / diagnosis.counts_LS[i].sum()
        tokens, pairs = int(kept_K.sum()), int((kept_K * groups_K).sum())
        spread = usage.usage_entropy(usage_S), float(usage_S.max())
        rows.append(LayerRow(layer, pairs / tokens, pairs / (config.num_groups * tokens), *spread))
    return rows


def write_tables(diagnosis: Diagnosis, config: RoutingConfig, folder: Path) -> None:
    """Write the CSV files into an existing folder."""
    labels = ["all", *map(str, diagnosis.layers)]
    histogram = [
        (label, groups, tokens, tokens / int(row_K.sum()))
        for label, row_K in zip(labels, [diagnosis.figure_LK.sum(0), *diagnosis.figure_LK], strict=True)
        for groups, tokens in enumerate(row_K.tolist())
    ]
    relevance, kept = _rank_means(diagnosis)
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
    histogram, (_, kept) = diagnosis.figure_LK.sum(0), _rank_means(diagnosis)
    figure, (left, right) = axes_in_a_row(2)
    title = f"(a) kept groups, S = {config.num_groups}, mean K = {config.kept_groups}"
    draw_bars(left, (histogram / histogram.sum()).tolist(), title, "kept groups K_j", "share of tokens")
    allotted = {"mean K_j": kept, "budget": [float(config.kept_groups)] * len(kept)}
    draw_lines(right, allotted, "(b) allocation by relevance", "tokens, most relevant first", "kept groups K_j")
    image_of(figure).save(folder / "figure1.png")
    first, rows = diagnosis.layers[0], layer_rows(diagnosis, config)
    lines = {"entropy of usage": [row.entropy for row in rows], "largest share": [row.largest_share for row in rows]}
    figure, (left, right) = axes_in_a_row(2)
    draw_cells(left, _usage(diagnosis), "share of kept groups", "group", "layer", first)
    draw_lines(right, lines, "per layer", "layer", "share", first)
    image_of(figure).save(folder / "layers.png")


def _rank_means(diagnosis: Diagnosis) -> tuple[list[float], list[float]]:
    occurs = diagnosis.rank_tokens_R > 0
    tokens = diagnosis.rank_tokens_R[occurs]
    return (diagnosis.rank_relevance_R[occurs] / tokens).tolist(), (diagnosis.rank_kept_R[occurs] / tokens).tolist()


def _usage(diagnosis: Diagnosis) -> Any:
    return (diagnosis.counts_LS / diagnosis.counts_LS.sum(-1, keepdim=True)).tolist()
