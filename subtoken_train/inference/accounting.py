"""What each sample's prompt takes in a packed cache, measured on the stored tensors.

Legend: B batch, L layers, M positions of the part that was compressed, S value groups, h key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from subtoken_train.cache.by_sample import sample_shares, vector_bytes
from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions.observers import last_marked
from subtoken_train.functional.gather import take_rows
from subtoken_train.inference.prefill import Prefill
from subtoken_train.ledger.measure import emptied_regions
from subtoken_train.types import Batch, LayerPlan, Region, in_compressed_region


@dataclass(frozen=True, kw_only=True)
class PromptBytes:
    """One sample's prompt in all layers, measured on the packed tensors.

    Attributes:
        kv_bytes: everything that is stored of it: text, compressed region and index.
        dense_kv_bytes: the same prompt uncompressed; of a layer with a window what the next token can see.
        region_bytes: its compressed region (visual or context) with the index of its value groups and the numbers of
            its key channels; 0 where there is none.
        region_dense_bytes: the same region uncompressed.
        index_bytes: of ``region_bytes``, those that find the stored value groups and key channels; the paper's fraction
            leaves them out.
        entries_before: (token, layer) entries of the region.
        entries_after: those that any head keeps: the proof that token reduction or eviction acted.
        values_after: their stored values, a layer's stored mean among them (``fill: mean``), in whole ones, rounded to
            4 places: below ``entries_after`` where routing acted.
        kept_visual: which visual tokens the last layer keeps, a bit each, in hexadecimal: the first token is the
            highest bit of the first digit, zeros fill the last. None without visual tokens, and where the reducer
            merges them into tokens without a place (VisionZip on LLaVA).
        emptied: region -> layers that keep nothing of it, see ``emptied_regions``.
        unread_bytes: of ``kv_bytes``, what one new token does not read: 0 unless pages are chosen in every step.
    """

    kv_bytes: int
    dense_kv_bytes: int
    region_bytes: int
    region_dense_bytes: int
    index_bytes: int
    entries_before: int
    entries_after: int
    values_after: float
    kept_visual: str | None
    emptied: dict[str, int] = field(default_factory=dict)
    unread_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class KeptPrompt(PromptBytes):
    """The same, with what no record keeps.

    Attributes:
        keys_after: stored keys of the region, in whole ones, rounded to 4 places: ``entries_after`` unless heads keep
            entries of their own or channels are cut.
    """

    keys_after: float


@dataclass(frozen=True, kw_only=True)
class Measured(PromptBytes):
    """What one sample's answer took.

    Attributes:
        new_tokens: tokens generated, end-of-text included, or tokens scored.
        batch_size: prompts that shared the passes.
        prefill_seconds: until the batch's prompts were in the cache, over ``batch_size``.
        decode_seconds: what came after it, likewise.
    """

    new_tokens: int
    batch_size: int
    prefill_seconds: float
    decode_seconds: float


def held_rows(windows: Sequence[int | None], regions_BN: Tensor) -> list[Tensor]:
    """Return which rows of a prompt each layer holds uncompressed, bool: of a window, what the next token sees.

    Args:
        windows: of every layer, as ``DecoderStack.windows``.
        regions_BN: ``Region`` codes of the prompt, in which places count positions.
    """
    visible_BN = regions_BN != Region.PADDING
    held = {size: visible_BN if size is None else last_marked(visible_BN, size - 1) for size in set(windows)}
    return [held[size] for size in windows]


def account(backbone: CompressedBackbone, prompts: Batch, opened: Prefill, cache: PackedCache) -> list[KeptPrompt]:
    """The prompts of a cache right after they were put in; ``kv_bytes`` add up to what the cache holds of them."""
    shape = backbone.family.shape
    in_region_BM = in_compressed_region(opened.regions_BM)
    held_LBM = held_rows(backbone.family.windows, opened.regions_BM)
    region_LB = [(in_region_BM & held_BM).sum(-1).tolist() for held_BM in held_LBM]
    dense_LB = [held_BM.sum(-1).tolist() for held_BM in held_LBM]
    tokens_B = (prompts.regions_BN != Region.PADDING).sum(-1)
    appended_B = (tokens_B - (opened.regions_BM != Region.PADDING).sum(-1)).tolist()
    counts = [_region_counts(plan, in_region_BM, shape.num_kv_heads) for plan in opened.plan.layers]
    entries_LB, slices_LB, whole_LB, cut_LB, cut_whole_LB = torch.stack(counts, dim=1).tolist()
    layers = [layer for layer in cache.layers if isinstance(layer, PackedLayer)]
    shares_LB = [sample_shares(layer.blocks, layer.keys, layer.fill_bytes) for layer in layers]
    stored_L = [layer.blocks[0].parts[0].keys for layer in layers]
    width, cuts_L = shape.head_dim, [plan.cut_keys for plan in opened.plan.layers]
    thin_L = [width if cut is None else cut.kept for cut in cuts_L]
    slices_L = [2 * vector_bytes(payload, width) for payload in stored_L]
    saved_L = [vector_bytes(x, width) - vector_bytes(x, thin) for x, thin in zip(stored_L, thin_L, strict=True)]
    filled = sum(plan.filled for plan in opened.plan.layers)
    kept = [None] * len(tokens_B) if backbone.placeless else _kept_visual(opened)
    emptied = emptied_regions(opened.plan, opened.regions_BM, held_LBM)
    made = []
    for b in range(len(tokens_B)):
        shares = [of_layer[b] for of_layer in shares_LB]
        whole_L = [of_layer[b] for of_layer in whole_LB]
        whole_bytes = sum(whole * size for whole, size in zip(whole_L, slices_L, strict=True))
        whole_bytes -= sum(of_layer[b] * saved for of_layer, saved in zip(cut_whole_LB, saved_L, strict=True))
        key_channels = sum(
            of_layer[b] * width - thinner[b] * (width - thin)
            for of_layer, thinner, thin in zip(slices_LB, cut_LB, thin_L, strict=True)
        )
        found = sum(share.index_bytes + share.channel_bytes for share in shares)
        channels = sum(share.routed_channels for share in shares) + sum(whole_L) * shape.head_dim
        channels += filled * shape.value_dim
        made.append(
            KeptPrompt(
                kv_bytes=sum(share.total_bytes for share in shares) + appended_B[b] * shape.token_bytes,
                unread_bytes=sum(share.unread_bytes for share in shares),
                dense_kv_bytes=2 * shape.side_bytes * sum(appended_B[b] + of_layer[b] for of_layer in dense_LB),
                region_bytes=sum(share.routed_bytes + share.channel_bytes for share in shares) + whole_bytes,
                region_dense_bytes=2 * shape.side_bytes * sum(of_layer[b] for of_layer in region_LB),
                index_bytes=found,
                entries_before=sum(of_layer[b] for of_layer in region_LB),
                entries_after=sum(of_layer[b] for of_layer in entries_LB),
                values_after=round(channels / shape.value_dim, 4),
                kept_visual=kept[b],
                emptied=emptied[b],
                keys_after=round(key_channels / shape.value_dim, 4),
            )
        )
    return made


def _region_counts(plan: LayerPlan, in_region_BM: Tensor, kv_heads: int) -> Tensor:
    """Entries of the region in a layer and, of their heads, slices, [5, B].

    The slices are all, those of entries with a whole value, those with a cut key, and those with both.
    """
    valid_BN = plan.entries_BN >= 0
    region_BN = take_rows(in_region_BM, plan.entries_BN.clamp(min=0)) & valid_BN
    heads_BN = torch.full_like(plan.entries_BN, kv_heads) if plan.heads_BNh is None else plan.heads_BNh.sum(-1)
    whole_BN = region_BN if plan.group_mask_BNS is None else region_BN & plan.group_mask_BNS.all(-1)
    cut_BN = torch.zeros_like(region_BN) if plan.cut_keys is None else region_BN & plan.cut_keys.entries_BN
    marks = (region_BN, whole_BN, cut_BN, cut_BN & whole_BN)
    return torch.stack([region_BN.sum(-1), *((heads_BN * marked_BN).sum(-1) for marked_BN in marks)])


def _kept_visual(opened: Prefill) -> list[str | None]:
    visual_BM, last = opened.regions_BM == Region.VISUAL, opened.plan.layers[-1].entries_BN
    kept: list[str | None] = []
    for visual, entries in zip(visual_BM.cpu(), last.cpu(), strict=True):
        stays = torch.zeros_like(visual)
        stays[entries[entries >= 0]] = True
        bits = "".join("1" if bit else "0" for bit in stays[visual].tolist())
        digits = -(-len(bits) // 4)
        kept.append(f"{int(bits.ljust(4 * digits, '0'), 2):0{digits}x}" if bits else None)
    return kept
