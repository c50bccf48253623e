"""Diagnoses on real prompts: a router by the paper's Figure 1 and the usage of groups, an eviction by its foresight.

Figure 1 shows how many groups K_j a token keeps under a *global* budget; a router with another budget is shown as it
would allot a global one of the same size. Values are zeroed, nothing is packed, and nothing reads an answer.

Files: ``figure1a.csv`` tokens by K_j, of all layers and each; ``figure1b.csv`` the mean K_j by relevance rank within
the prompt; ``groups.csv`` each group's share of a layer's kept pairs; ``layers.csv`` budget and spread of each layer.

Of an eviction VL-Cache's figures are shown: sparsity of a layer's attention in the prompt and while generating, and
their correlation over layers (Figure 2); the share of the entries read most that it keeps (hit rate, Figure 3); how
much of what is read is image or context (Figure 9, equations 3 to 5); and the share of the attention that it keeps. It
scores and plans as it would, but nothing is let go: tokens are generated greedily from all that the prompt left, and
the attention that they pay to its entries is summed up, a mean over the query heads of a key-value head (or over all).

Legend: B batch, N positions after the reducer or rows of a layer's cache, S value groups, L layers, R ranks (tokens of
one prompt), T tokens since the prompt, H query heads, h key-value heads (1 where all share a set), d head width.
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

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.attention_rows import region_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import question_rows
from subtoken_train.evaluation.charts import axes_in_a_row, draw_bars, draw_cells, draw_lines, image_of
from subtoken_train.evictions.base import Eviction, keep_best_entries
from subtoken_train.evictions.observers import over_groups, task_rows
from subtoken_train.evictions.vision import post_vision_statistics
from subtoken_train.forks import changed
from subtoken_train.functional import masks as usage
from subtoken_train.functional.causal_attention import attention_rows
from subtoken_train.inference.batched import greedy_tokens
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.routing.bank import RouterBank
from subtoken_train.routing.base import RoutingConfig
from subtoken_train.types import Batch, Protocol, Region, in_compressed_region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View


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
            place = seen_BN, rows.position, question_rows(batch, rows)
            found.relevance[layer] = region_attention(backbone.family, layer, hidden[layer], *place)
    return found


def _count(backbone: CompressedBackbone, bank: RouterBank, batch: Batch) -> Diagnosis:
    config = bank.config
    shared = own = observe(backbone, batch, with_relevance=config.budget == "global")
    if config.budget != "global":
        # N * K groups are shared out over all tokens of a sample
        with changed(bank, config=replace(config, budget="global")):
            shared = observe(backbone, batch, with_relevance=True)
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


def layer_table(diagnosis: Diagnosis, config: RoutingConfig) -> pd.DataFrame:
    """Return a row for every routed layer.

    ``kept_groups`` of a routed token, mean, and ``value_fraction``, the same over S; ``entropy`` of the groups' usage,
    over log S: 1 where all are used alike; ``largest_share`` of the kept pairs, that of the most used group.
    """
    kept_L = (diagnosis.kept_LK * torch.arange(config.num_groups + 1)).sum(-1) / diagnosis.kept_LK.sum(-1).double()
    usage_LS = diagnosis.counts_LS / diagnosis.counts_LS.sum(-1, keepdim=True)
    columns = {"layer": diagnosis.layers, "kept_groups": kept_L, "value_fraction": kept_L / config.num_groups}
    spread = {"entropy": [*map(usage.usage_entropy, usage_LS)], "largest_share": usage_LS.amax(-1)}
    return pd.DataFrame(columns | spread)


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
        "layers": layer_table(diagnosis, config),
    }
    _write(tables, folder)


def _write(tables: dict[str, pd.DataFrame], folder: Path) -> None:
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
    first, rows = diagnosis.layers[0], layer_table(diagnosis, config)
    lines = {"entropy of usage": rows.entropy.tolist(), "largest share": rows.largest_share.tolist()}
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


THRESHOLD = 0.01  # attention below this share of its row's largest counts as zero (VL-Cache, equation 1)


@dataclass
class WatchedEntries:
    """Worth of one layer's entries to the method and to the tokens that were generated."""

    key_BhNd: Tensor
    entries_BN: Tensor  # rows that are entries, bool
    body_BN: Tensor  # those of them that are VISUAL or CONTEXT, bool
    asking_density_BH: Tensor  # 1 - sparsity of the rows that ask about the body (task_rows)
    prompt_density_BH: Tensor  # the same of all rows
    mass_BHN: Tensor  # attention that the generated tokens paid, summed, fp32
    passed_BH: Tensor  # attention weights of generated tokens that do not count as zero
    seen_B: Tensor  # attention weights of generated tokens in a head
    competes_BN: Tensor  # entries that the method chose among, bool
    kept_BhN: Tensor  # those that it would have kept, bool

    def read(self, query_BH1d: Tensor, tail_BhTd: Tensor, tail_BT: Tensor, scale: float, active_B: Tensor) -> None:
        """Add what one generated token of every active sample reads; the tail's last key is its own."""
        keys_BK = torch.cat([self.entries_BN, tail_BT], 1)
        own = torch.zeros_like(active_B, dtype=torch.long)[:, None]
        keys = torch.cat([self.key_BhNd, tail_BhTd.to(self.key_BhNd.dtype)], 2)
        read_BHK = attention_rows(query_BH1d, keys, own, keys_BK, scale, offset=keys_BK.shape[1] - 1)[:, :, 0]
        read_BHK = read_BHK * active_B[:, None, None]
        self.mass_BHN = self.mass_BHN + read_BHK[..., : self.entries_BN.shape[1]]
        passes_BHK = (read_BHK >= THRESHOLD * read_BHK.amax(-1, keepdim=True)) & (read_BHK > 0)
        self.passed_BH = self.passed_BH + passes_BHK.sum(2)
        self.seen_B = self.seen_B + keys_BK.sum(-1) * active_B


class WatchedLayer(PackedLayer):
    """A packed layer that notes what every generated token reads, while ``active_B`` says of which samples."""

    entries: WatchedEntries | None = None
    active_B: Tensor | None = None

    def attend(self, query_BHqd: Tensor, scale: float) -> Tensor:
        if self.active_B is not None:
            assert self.entries is not None
            tail = self.own_keys(self.keys[:, :, : self.tail_length])
            places_T = torch.arange(self.tail_length, device=tail.device)
            first_B = torch.zeros_like(self.active_B) if self.tail_start_B is None else self.tail_start_B
            self.entries.read(query_BHqd, tail, places_T >= first_B[:, None], scale, self.active_B)
        return super().attend(query_BHqd, scale)


def watched(method: Eviction, layers: list[WatchedEntries]) -> Eviction:
    """Make the method, with its settings, keep everything and note in ``layers`` what it would have kept."""
    kind = type(method)

    def score(self: Eviction, view: View) -> Scores:
        asking_BH, density_BH = (
            post_vision_statistics(view.blocks(rows_BN), view.entries_BN, THRESHOLD)[1]
            for rows_BN in (task_rows(view.regions_BN), view.entries_BN)
        )
        scores = method.score(view)
        nothing = torch.zeros_like(view.entries_BN)
        body_BN = in_compressed_region(view.regions_BN)
        mass = torch.zeros(*view.query_BHNd.shape[:3], device=nothing.device)
        none_BH = torch.zeros_like(density_BH, dtype=torch.long)
        seen = view.key_BhNd, view.entries_BN, body_BN, asking_BH, density_BH
        layers.append(WatchedEntries(*seen, mass, none_BH, none_BH[:, 0], nothing, nothing[:, None]))
        return scores

    def keep(self: Eviction, scores: list[Scores], candidates: Candidates) -> list[Tensor]:
        kept = method.keep(scores, candidates)
        for each, competes_BN, kept_BhN in zip(layers, candidates.competes_LBN, kept, strict=True):
            each.competes_BN, each.kept_BhN = competes_BN, kept_BhN & competes_BN[:, None]
        return [(regions_BN != Region.PADDING)[:, None] for regions_BN in candidates.regions_LBN]

    copy: Eviction = object.__new__(type(kind.__name__, (kind,), {"score": score, "keep": keep}))
    copy.__dict__.update(method.__dict__, needs=method.needs | {"blocks"})  # a wrapper's are those of what it wraps
    return copy


@torch.no_grad()
def watch_generation(
    backbone: CompressedBackbone, prompts: Batch, compression: Compression, protocol: Protocol, new_tokens: int
) -> list[WatchedEntries]:
    """Generate up to ``new_tokens`` with the whole cache; a token counts once it is read again."""
    assert compression.eviction is not None
    if compression.eviction.reads:
        raise ValueError(f"eviction {compression.eviction.name!r} drops nothing that could be read later")
    if compression.every is not None:
        raise ValueError(f"eviction_every={compression.every}: nothing is evicted while it is watched; leave it out")
    if compression.threshold is not None:
        label = compression.threshold.label
        raise ValueError(f"eviction_keep {label} is a threshold, and a budget is diagnosed; give a share, such as 0.2")
    layers: list[WatchedEntries] = []
    cache = PackedCache(backbone.family.shape.num_layers)
    packed = [WatchedLayer() for _ in cache.layers]
    cache.layers = list(packed)
    method = watched(compression.eviction, layers)
    first = open_prompts(backbone, prompts, cache, replace(compression, eviction=method), protocol)
    for layer, entries in zip(packed, layers, strict=True):
        layer.entries = entries
    end = backbone.family.tokenizer.eos_token_id

    def watch(generated: list[Tensor]) -> Tensor:
        done_B: Tensor = (torch.stack(generated) == end).any(0)
        for layer in packed:
            layer.active_B = ~done_B
        return done_B

    greedy_tokens(backbone, cache, first.logits_BV, new_tokens + 1, watch)
    return layers


class PromptLayer(NamedTuple):
    """One layer of one prompt, means over heads; "those read most" are as many as stay; NaN: none is read or stays."""

    record: str
    layer: int
    entries: int
    kept: float  # of them, those that stay, mean over heads
    sparsity: float  # share of attention weights below 1 % of their row's largest, in the prompt's rows that ask
    prompt_sparsity: float  # the same in all rows, each up to its own entry
    generated_sparsity: float  # the same of generated tokens
    body_attention: float  # of what generated tokens pay to the prompt's entries, that to image or context
    body_coverage: float  # of those read most while generating, share that is image or context
    hit_rate: float  # of those read most while generating, share that stays
    attention_kept: float  # of the attention that generated tokens pay to what competes, that to what stays


def diagnose_eviction(
    backbone: CompressedBackbone,
    batches: Iterable[Batch],
    compression: Compression,
    protocol: Protocol,
    new_tokens: int,
) -> list[PromptLayer]:
    """Return a row for every prompt and layer, after up to ``new_tokens`` generated ones."""
    rows = []
    for batch in batches:
        for layer, watched in enumerate(watch_generation(backbone, batch, compression, protocol, new_tokens)):
            columns = [column.tolist() for column in layer_measures(watched)]
            rows += [PromptLayer(name, layer, *found) for name, *found in zip(batch.record_ids, *columns, strict=True)]
    if not any(row.generated_sparsity == row.generated_sparsity for row in rows):
        raise ValueError("every answer was empty; choose other prompts")
    return rows


def layer_measures(watched: WatchedEntries) -> tuple[Tensor, ...]:
    """Return the columns of ``PromptLayer`` from ``entries`` on, [B] each."""
    competes_B1N, kept_BhN = watched.competes_BN[:, None], watched.kept_BhN
    read_BhN = over_groups(watched.mass_BHN, kept_BhN.shape[1])
    count_Bh = kept_BhN.sum(-1)
    unprotected = torch.zeros_like(watched.competes_BN)
    best_BhN = keep_best_entries(read_BhN, watched.competes_BN, unprotected, count_Bh, least=0)
    read_B, counted_B = watched.mass_BHN.sum((1, 2)), watched.seen_B > 0
    body_B = (watched.mass_BHN * watched.body_BN[:, None]).sum((1, 2))
    measures = (
        (best_BhN & watched.body_BN[:, None]).sum((1, 2)) / count_Bh.sum(-1),
        (best_BhN & kept_BhN).sum((1, 2)) / count_Bh.sum(-1),
        (read_BhN * kept_BhN).sum((1, 2)) / (read_BhN * competes_B1N).sum((1, 2)),
    )
    return (
        watched.competes_BN.sum(-1),
        count_Bh.double().mean(1),
        1 - watched.asking_density_BH.mean(1),
        1 - watched.prompt_density_BH.mean(1),
        1 - (watched.passed_BH / watched.seen_B[:, None]).mean(1),
        body_B / read_B,
        *(measure.masked_fill(~counted_B, torch.nan) for measure in measures),
    )


def phase_correlation(rows: list[PromptLayer]) -> float:
    """Return Pearson's correlation over layers of prompt and generated sparsity, mean over prompts; NaN: none."""
    by_prompt = pd.DataFrame(rows).groupby("record")[["prompt_sparsity", "generated_sparsity"]]
    return float(by_prompt.apply(lambda own: own["prompt_sparsity"].corr(own["generated_sparsity"])).mean())


def eviction_layers(rows: list[PromptLayer]) -> pd.DataFrame:
    """Return a row per layer: means over the prompts that have a figure; ``kept_share`` is what chance would hit."""
    means = pd.DataFrame(rows).drop(columns="record").groupby("layer", as_index=False).mean()
    means.insert(3, "kept_share", means["kept"] / means["entries"])
    return means


def write_eviction_tables(rows: list[PromptLayer], folder: Path) -> None:
    """Write the CSV files into an existing folder."""
    prompts = pd.DataFrame(rows)[["record", "layer", "entries", "kept"]]
    _write({"eviction_layers": eviction_layers(rows), "eviction_prompts": prompts}, folder)


def draw_eviction(rows: list[PromptLayer], label: str, folder: Path) -> None:
    """Draw the PNG file into an existing folder; ``label`` names the compression."""
    means = eviction_layers(rows)
    figure, (left, *others) = axes_in_a_row(4)
    draw_bars(left, means["kept"].tolist(), f"budget per layer, {label}", "layer", "entries that stay, mean")
    sparsity = {"prompt": "prompt_sparsity", "generated tokens": "generated_sparsity", "rows that ask": "sparsity"}
    on_body = {"of what generated tokens read": "body_attention", "of the entries they read most": "body_coverage"}
    foreseen = {"hit rate": "hit_rate", "attention kept": "attention_kept", "hit rate by chance": "kept_share"}
    shown = {"sparsity": sparsity, "image or context": on_body, "what stays, against what is read": foreseen}
    for axes, (title, names) in zip(others, shown.items(), strict=True):
        draw_lines(axes, {words: means[name].tolist() for words, name in names.items()}, title, "layer", "share")
    image_of(figure).save(folder / "eviction.png")
