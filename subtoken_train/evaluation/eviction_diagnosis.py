"""How well an eviction foresees what is read later, per layer, and how sparse the reading is (VL-Cache's figures).

Sparsity of a layer's attention in the prompt and while generating, and their correlation over layers (Figure 2); the
share of the entries read most that the method keeps (hit rate, Figure 3); how much of what is read is image or context
(Figure 9, equations 3 to 5); beside them the share of the attention that its choice keeps.

An eviction scores and plans as it would, but nothing is let go: tokens are generated greedily from all that the prompt
left (after reducer and routers), and the attention that they pay to its entries is summed up, a mean over the query
heads of a key-value head, or over all where heads share a set.

Legend: B batch, N rows of a layer's cache, T tokens since the prompt, H query heads, h key-value heads (1 where all
heads share a set), d head width, L layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.charts import axes_in_a_row, draw_bars, draw_lines, image_of
from subtoken_train.evictions.base import Eviction, keep_best_entries
from subtoken_train.evictions.observers import over_groups, task_rows
from subtoken_train.evictions.vision import post_vision_statistics
from subtoken_train.functional.causal_attention import attention_rows
from subtoken_train.inference.batched import greedy_tokens
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.types import Batch, Protocol, Region, in_compressed_region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View

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
        layers = watch_generation(backbone, batch, compression, protocol, new_tokens)
        for layer, watched in enumerate(layers):
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
    for name, frame in (("eviction_layers", eviction_layers(rows)), ("eviction_prompts", prompts)):
        frame.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\r\n")


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
