"""Generation with the whole cache, and beside it what an eviction would have kept: is what it lets go read later?

An eviction scores and plans as it would, but nothing is let go: tokens are generated greedily from everything that the
prompt left (after reducer and routers), and the attention that these tokens pay to its entries is summed up. Statistics
of one layer exist at a time but for its keys, which are held a second time.

Legend: B batch, N rows of a layer's cache, T tokens since the prompt, H query heads, h key-value heads (1 where all
heads share a set), d head width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions.base import Candidates, Eviction, LayerScores
from subtoken_train.evictions.layer_views import LayerView
from subtoken_train.evictions.observers import task_rows
from subtoken_train.evictions.vl_cache import post_vision_statistics
from subtoken_train.functional.attention_statistics import attention_rows
from subtoken_train.inference.batched import greedy_tokens
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.types import Batch, Protocol, Region, in_compressed_region

THRESHOLD = 0.01  # attention below this share of its row's largest counts as zero (VL-Cache, equation 1)


@dataclass
class WatchedEntries:
    """What one layer's entries were worth, to the method and to the tokens that were generated.

    Attributes:
        key_BhNd: rotated keys.
        entries_BN: rows that are entries, bool.
        body_BN: those of them that are VISUAL or CONTEXT, bool.
        prompt_density_B: 1 - sparsity of the rows that ask about the body (``task_rows``), mean over heads.
        mass_BHN: attention that the generated tokens paid, summed, fp32.
        passed_B: attention weights of generated tokens that do not count as zero.
        seen_B: attention weights of generated tokens.
        scores_BhN: the method's scores.
        competes_BN: entries that the method chose among, bool.
        kept_BhN: those that it would have kept, bool.
    """

    key_BhNd: Tensor
    entries_BN: Tensor
    body_BN: Tensor
    prompt_density_B: Tensor
    mass_BHN: Tensor
    passed_B: Tensor
    seen_B: Tensor
    scores_BhN: Tensor
    competes_BN: Tensor
    kept_BhN: Tensor

    def read(self, query_BH1d: Tensor, tail_BhTd: Tensor, tail_BT: Tensor, scale: float, active_B: Tensor) -> None:
        """Add what one generated token of every active sample reads; the tail's last key is its own."""
        keys_BK = torch.cat([self.entries_BN, tail_BT], 1)
        own = torch.zeros_like(active_B, dtype=torch.long)[:, None]
        keys = torch.cat([self.key_BhNd, tail_BhTd.to(self.key_BhNd.dtype)], 2)
        read_BHK = attention_rows(query_BH1d, keys, own, keys_BK, scale, offset=keys_BK.shape[1] - 1)[:, :, 0]
        read_BHK = read_BHK * active_B[:, None, None]
        self.mass_BHN = self.mass_BHN + read_BHK[..., : self.entries_BN.shape[1]]
        passes_BHK = (read_BHK >= THRESHOLD * read_BHK.amax(-1, keepdim=True)) & (read_BHK > 0)
        self.passed_B = self.passed_B + passes_BHK.sum((1, 2))
        self.seen_B = self.seen_B + keys_BK.sum(-1) * read_BHK.shape[1] * active_B


class WatchedLayer(PackedLayer):
    """A packed layer that notes what every generated token reads, while ``active_B`` says of which samples."""

    entries: WatchedEntries | None = None
    active_B: Tensor | None = None

    def attend(self, query_BHqd: Tensor, scale: float) -> Tensor:
        """See ``PackedLayer.attend``."""
        if self.active_B is not None:
            assert self.entries is not None
            tail = self.keys[:, :, : self.tail_length]
            places_T = torch.arange(self.tail_length, device=tail.device)
            first_B = torch.zeros_like(self.active_B) if self.tail_start_B is None else self.tail_start_B
            self.entries.read(query_BHqd, tail, places_T >= first_B[:, None], scale, self.active_B)
        return super().attend(query_BHqd, scale)


def watched(method: Eviction, layers: list[WatchedEntries]) -> Eviction:
    """The method with its settings, except that it keeps everything and notes in ``layers`` what it would have."""
    kind = type(method)

    def score(self: Eviction, view: LayerView) -> LayerScores:
        rows_BN = task_rows(view.regions_BN)
        _, density_BH = post_vision_statistics(view.blocks(rows_BN), view.entries_BN, THRESHOLD)
        scores = kind.score(self, view)
        none_B = torch.zeros(len(rows_BN), dtype=torch.long, device=rows_BN.device)
        nothing = torch.zeros_like(view.entries_BN)
        body_BN = in_compressed_region(view.regions_BN)
        mass = torch.zeros(*view.query_BHNd.shape[:3], device=rows_BN.device)
        layers.append(
            WatchedEntries(
                view.key_BhNd, view.entries_BN, body_BN, density_BH.mean(1), mass, none_B, none_B,
                scores.scores_BhN, nothing, nothing[:, None],
            )
        )  # fmt: skip
        return scores

    def keep(self: Eviction, scores: list[LayerScores], candidates: Candidates) -> list[Tensor]:
        kept = kind.keep(self, scores, candidates)
        for each, found, competes_BN, kept_BhN in zip(layers, scores, candidates.competes_LBN, kept, strict=True):
            each.scores_BhN, each.competes_BN = found.scores_BhN, competes_BN
            each.kept_BhN = kept_BhN & competes_BN[:, None]
        return [(regions_BN != Region.PADDING)[:, None] for regions_BN in candidates.regions_LBN]

    copy: Eviction = object.__new__(type(kind.__name__, (kind,), {"score": score, "keep": keep}))
    copy.__dict__.update(method.__dict__, needs=method.needs | {"blocks"})  # a wrapper's are those of what it wraps
    return copy


@torch.no_grad()
def watch_generation(
    backbone: CompressedBackbone, prompts: Batch, compression: Compression, protocol: Protocol, new_tokens: int
) -> list[WatchedEntries]:
    """Generate up to ``new_tokens`` after each prompt with its whole cache; what every layer's entries were worth.

    A token counts once it is read again: the last one generated does not, nor does end-of-text.

    Args:
        backbone: in evaluation mode.
        prompts: without answers.
        compression: with an eviction.
        protocol: when the question is seen, see ``open_prompts``.
        new_tokens: at least 1.

    Raises:
        ValueError: an eviction that lets nothing go, or acts while tokens are decoded; what ``open_prompts`` refuses.
    """
    assert compression.eviction is not None
    if compression.eviction.reads:
        raise ValueError(f"eviction {compression.eviction.name!r} lets nothing go that could be read later")
    if compression.every is not None:
        raise ValueError(
            f"eviction_every={compression.every}: what a prompt's eviction lets go is watched while nothing is "
            "evicted; leave it out"
        )
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
