"""Bytes of a cache: the plan's ledger beside the tensors that are there, of all samples together and of each.

Legend: B samples of the cache, P prompts that they belong to, N positions, M positions of the compressed part, L
layers, S value groups, h key-value heads.
"""

import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import starmap
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from subtoken_train.cache.by_sample import Share, sample_shares
from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.pack import plan_marks
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.functional.gather import each_tensor, last_marked, take_rows
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import Prefill, who_drops
from subtoken_train.kernels.formats import MODEL
from subtoken_train.ledger.kv_budget import mean_deviation
from subtoken_train.ledger.ledger import Ledger
from subtoken_train.ledger.measure import emptied_regions, emptied_words, measured_ledger
from subtoken_train.settings import KVDtype
from subtoken_train.types import Batch, LayerPlan, Layout, Plan, Region, in_compressed_region


@dataclass(frozen=True)
class CacheReport:
    """Bytes of a cache, all samples together.

    Attributes:
        ledger: the prompts' entries per layer and region, as the plan promises them in the model's dtype; each prompt
            once, however many beams it has.
        nominal_fraction: retained share of the compressed region (visual or context) that reducer, routers and key
            channels promise, before an eviction.
        payload_bytes: keys and values of what is packed, measured; index_bytes: what finds the stored pieces.
        tail_bytes: what came after the prompt (or after the last eviction), in full; slack_bytes: its spare room.
        dense_bytes: an uncompressed cache of the same prompts and tail.
        plan_bytes: ids, regions and plan of the prompts, which are held beside the cache.
        statistics_bytes: notes of an eviction while decoding: stored entries, the method's own, the last queries.
        kernel_bytes: tables and scratch of the fused kernels; 0 where others run.
        evictions: how often generated tokens were evicted; ``ledger`` says what the prompt's own eviction left.
        unread_bytes: of ``payload_bytes``, what one new token does not read: 0 unless pages are chosen in every step.
        shares: under a threshold the retained share of each prompt's compressed region; empty elsewhere.
        kept_entries: share of the region's entries, over layers and heads, that an eviction left; None: no eviction.
        kv_dtype: of the stored prompt; dtype: of the model, and so of what is not rounded.
        way: how an answer was decoded on a GPU, in words: captured in a graph, or step by step, and why.
    """

    ledger: Ledger
    nominal_fraction: float
    payload_bytes: int
    index_bytes: int
    tail_bytes: int
    slack_bytes: int
    dense_bytes: int
    plan_bytes: int
    statistics_bytes: int = 0
    kernel_bytes: int = 0
    evictions: int = 0
    unread_bytes: int = 0
    shares: list[float] = field(default_factory=list)
    kept_entries: float | None = None
    kv_dtype: KVDtype = "model"
    dtype: str = "bfloat16"
    way: str = ""

    @property
    def total_bytes(self) -> int:
        """Everything the layers hold."""
        stored = self.payload_bytes + self.index_bytes + self.tail_bytes
        return stored + self.slack_bytes + self.statistics_bytes + self.kernel_bytes

    @property
    def realised_fraction(self) -> float:
        """Retained share of the compressed region, from the plan; 1 where a prompt has none."""
        region = _compressed_region(self.ledger)
        return 1.0 if region is None else self.ledger.fraction(region)

    def table(self) -> str:
        """Return a Markdown table with a row for each layer and region."""
        lines = ["| layer | region | tokens before | entries | key bytes | value bytes | index bytes |"]
        lines.append("|---|---|---|---|---|---|---|")
        lines += [f"| {' | '.join(map(str, astuple(entry)))} |" for entry in self.ledger.entries]
        return "\n".join(lines)

    def __str__(self) -> str:
        """One line, whose share is of bfloat16, as in tables; slack, which does not grow with the prompt, is apart."""
        held, evicted, kernels = self.total_bytes - self.slack_bytes, self.statistics_bytes, self.kernel_bytes
        online = f"; {self.evictions:,} evictions while decoding, statistics {evicted:,} bytes" if evicted else ""
        scratch = f", kernels' tables and scratch {kernels:,} bytes" if kernels else ""
        share = held * getattr(torch, self.dtype).itemsize / (2 * self.dense_bytes)
        took = f"{self.dtype if self.kv_dtype == 'model' else self.kv_dtype}, {share:.1%} of the full cache in bfloat16"
        took += f" (a decoding step reads {held - self.unread_bytes:,} bytes)" if self.unread_bytes else ""
        return (
            f"KV {held:,} bytes in {took}; {self._region_words()}; index {self.index_bytes:,}, "
            f"slack {self.slack_bytes:,} bytes{scratch}{online}{self.way and f'; decoded {self.way}'}"
        )

    def _region_words(self) -> str:
        if _compressed_region(self.ledger) is None:
            return "no visual token and no context to compress"
        evicts, note = self.kept_entries is not None, ""
        kept = [f"{self.kept_entries:.1%} of its entries"] if evicts else []
        if self.nominal_fraction < 1 or not evicts:
            kept.append(f"{self.realised_fraction:.1%} of its keys and values")
            note = f" (nominal {self.nominal_fraction:.1%}{' before the eviction' * evicts})"
        if self.shares:
            mean, deviation = mean_deviation(self.shares)
            each = f"; {mean:.1%} ± {deviation:.1%} of each of {len(self.shares):,} prompts"
            note = f" (measured: a threshold promises none{each if len(self.shares) > 1 else ''})"
        return f"compressed region: {', '.join(kept)} kept{note}"


def report(
    backbone: CompressedBackbone, prompts: Batch, plan: Plan, cache: PackedCache, compression: Compression | None = None
) -> CacheReport:
    """Measure a filled cache, whichever samples it holds by now; ``compression`` None: reducer and routers alone."""
    compression = compression or Compression()
    assert cache.origin_B is not None
    origin_B = cache.origin_B.to(prompts.regions_BN.device)
    held_P = torch.unique(origin_B)
    regions_PN, shape = prompts.regions_BN[held_P], backbone.family.shape
    own, tokens_B = each_tensor(plan, itemgetter(held_P)), (prompts.regions_BN[origin_B] != Region.PADDING).sum(-1)
    generated = cache.get_seq_length() - cache.prompt_length
    in_region_PN, heads = in_compressed_region(regions_PN), shape.num_kv_heads
    samples, whole = in_region_PN.sum(-1).tolist(), int(in_region_PN.sum()) * heads * len(plan.layers)
    evicted = own.layers if compression.eviction is not None else []
    kept = sum(int(_region_counts(layer, in_region_PN, heads)[1].sum()) for layer in evicted)
    shares: list[float] = []
    for place in range(len(regions_PN) if compression.threshold is not None else 0):
        one = slice(place, place + 1)
        ledger = measured_ledger(each_tensor(own, itemgetter(one)), regions_PN[one], shape)
        shares += [] if (region := _compressed_region(ledger)) is None else [ledger.fraction(region)]
    return CacheReport(
        ledger=measured_ledger(own, regions_PN, shape),
        nominal_fraction=backbone.promised_fraction(samples, compression.key_channels, compression.key_axes),
        dense_bytes=(int(tokens_B.sum()) + generated * len(origin_B)) * shape.token_bytes,
        plan_bytes=_bytes(prompts) + sum(_bytes(layer) + _bytes(layer.cut_keys) for layer in plan.layers),
        shares=shares,
        kept_entries=None if compression.eviction is None else (kept / whole if whole else 1.0),
        kv_dtype=compression.kv_dtype,
        dtype=str(backbone.family.model.dtype).removeprefix("torch."),
        way=cache.way,
        **held_bytes(cache),
    )


def held_bytes(cache: PackedCache) -> dict[str, Any]:
    """Return the fields of a ``CacheReport`` that are measured on a cache's tensors alone."""
    layers = cache.layers
    used, slack = (sum(sizes) for sizes in zip(*(layer.tail_bytes for layer in layers), strict=True))
    return {
        "payload_bytes": sum(layer.payload_bytes for layer in layers),
        "index_bytes": sum(layer.index_bytes for layer in layers),
        "tail_bytes": used,
        "slack_bytes": slack,
        "statistics_bytes": sum(layer.eviction_state.nbytes for layer in layers if layer.eviction_state is not None),
        "kernel_bytes": cache.kernel_bytes,
        "unread_bytes": sum(layer.unread_bytes for layer in layers),
        "evictions": 0 if cache.evictor is None else cache.evictor.evictions,
    }


def warn_of_emptied(backbone: CompressedBackbone, compression: Compression, prompts: Batch, plan: Plan) -> None:
    """Warn where nothing is left of a whole region of a prompt in some layer."""
    emptied = emptied_regions(plan, prompts.regions_BN, held_rows(backbone.family.windows, prompts.regions_BN))
    if words := emptied_words(emptied, *who_drops(backbone.active_routing, compression.label)):
        warnings.warn(words, SubTokenWarning, stacklevel=4)


def _compressed_region(ledger: Ledger) -> str | None:
    return next((name for name in ("visual", "context") if ledger.dense_bytes(name)), None)


def _bytes(thing: object) -> int:
    held: dict[str, object] = {} if thing is None else vars(thing)
    return sum(each.nbytes for each in held.values() if isinstance(each, torch.Tensor))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One sample's prompt in all layers, measured on the packed tensors, and the seconds of its answer."""

    kv_bytes: int
    dense_kv_bytes: int  # the same prompt uncompressed; of a layer with a window what the next token can see
    region_bytes: int  # its compressed region (visual or context) with all indices; 0: no region
    region_dense_bytes: int
    index_bytes: int
    entries_before: int  # (token, layer) entries of the region
    entries_after: int  # those that any head keeps
    values_after: float  # their stored values, a layer's stored mean among them, in whole ones
    emptied: dict[str, int] = field(default_factory=dict)  # region -> layers that keep nothing of it
    unread_bytes: int = 0  # of ``kv_bytes``, what one new token does not read
    new_tokens: int
    batch_size: int
    prefill_seconds: float  # the batch's over ``batch_size``, as all seconds
    decode_seconds: float


@dataclass(frozen=True)
class TokenScore:
    """Given tokens, read one after another: sum of their log-probabilities (fp32, nats), how many are the likeliest."""

    logprob: float
    right: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Outcome(Measured):
    """One prompt of a batch, with its answer once there is one."""

    keys_after: float  # stored keys of the region, in whole ones
    text: str = ""  # up to the first stop text, without special tokens, not stripped
    token_ids: list[int] = field(default_factory=list)  # end-of-text and later cut
    logprobs: list[float] = field(default_factory=list)  # sums of each continuation
    greedy: list[bool] = field(default_factory=list)  # whether greedy decoding would say it
    reference: TokenScore | None = None


def held_rows(windows: Sequence[int | None], regions_BN: Tensor) -> list[Tensor]:
    """Return which rows of a prompt each layer holds uncompressed, bool: of a window, what the next token sees."""
    visible_BN = regions_BN != Region.PADDING
    held = {size: visible_BN if size is None else last_marked(visible_BN, size - 1) for size in set(windows)}
    return [held[size] for size in windows]


def account(backbone: CompressedBackbone, prompts: Batch, opened: Prefill, cache: PackedCache) -> list[Outcome]:
    """Return the prompts of a cache right after they were put in, unanswered."""
    shape, plan, regions_BM = backbone.family.shape, opened.plan, opened.regions_BM
    in_region_BM, held_LBM = in_compressed_region(regions_BM), held_rows(backbone.family.windows, regions_BM)
    region_B = sum((in_region_BM & held_BM).sum(-1) for held_BM in held_LBM).tolist()  # type: ignore[union-attr]
    dense_B = sum(held_BM.sum(-1) for held_BM in held_LBM).tolist()  # type: ignore[union-attr]
    tokens_B = (prompts.regions_BN != Region.PADDING).sum(-1)
    appended_B = (tokens_B - (regions_BM != Region.PADDING).sum(-1)).tolist()
    counts = [_region_counts(each, in_region_BM, shape.num_kv_heads) for each in plan.layers]
    entries_LB, slices_LB, whole_LB, cut_LB = torch.stack(counts, dim=1).cpu()
    width, layers = shape.head_dim, zip(cache.layers, plan.layers, strict=True)
    thinner_L1 = torch.tensor([[0 if each.cut_keys is None else width - each.cut_keys.kept] for each in plan.layers])
    key_channels_B = (slices_LB * width - cut_LB * thinner_L1).sum(0).tolist()
    whole_bytes_LB = [_whole_bytes(layer, own, in_region_BM, plan.layout) for layer, own in layers]
    entries_B, whole_B = entries_LB.sum(0).tolist(), whole_LB.sum(0).tolist()
    filled, emptied = sum(each.filled for each in plan.layers), emptied_regions(plan, regions_BM, held_LBM)

    def outcome(b: int, shares: tuple[Share, ...]) -> Outcome:
        channels = sum(share.routed_channels for share in shares) + whole_B[b] * width + filled * shape.value_dim
        routed = sum(share.routed_bytes + share.channel_bytes + share.basis_bytes for share in shares)
        return Outcome(
            kv_bytes=sum(share.total_bytes for share in shares) + appended_B[b] * shape.token_bytes,
            unread_bytes=sum(share.unread_bytes for share in shares),
            dense_kv_bytes=appended_B[b] * shape.token_bytes + 2 * shape.side_bytes * dense_B[b],
            region_bytes=sum(of_layer[b] for of_layer in whole_bytes_LB) + routed,
            region_dense_bytes=2 * shape.side_bytes * region_B[b],
            index_bytes=sum(share.index_bytes + share.channel_bytes for share in shares),
            entries_before=region_B[b],
            entries_after=entries_B[b],
            values_after=round(channels / shape.value_dim, 4),
            emptied=emptied[b],
            keys_after=round(key_channels_B[b] / shape.value_dim, 4),
            batch_size=len(tokens_B),
            new_tokens=0,
            prefill_seconds=0.0,
            decode_seconds=0.0,
        )

    shares_LB = [sample_shares(layer.blocks, layer.keys, layer.fill_bytes, layer.basis_bytes) for layer in cache.layers]
    return list(starmap(outcome, enumerate(zip(*shares_LB, strict=True))))


def _region_counts(plan: LayerPlan, in_region_BM: Tensor, kv_heads: int) -> Tensor:
    """Return per sample the region's entries in a layer and, of their heads, all, whole and cut slices, [4, B]."""
    region_BN = take_rows(in_region_BM, plan.entries_BN.clamp(min=0)) & (plan.entries_BN >= 0)
    heads_BN = torch.full_like(plan.entries_BN, kv_heads) if plan.heads_BNh is None else plan.heads_BNh.sum(-1)
    whole_BN = region_BN if plan.group_mask_BNS is None else region_BN & plan.group_mask_BNS.all(-1)
    cut_BN = torch.zeros_like(region_BN) if plan.cut_keys is None else region_BN & plan.cut_keys.entries_BN
    marks = (region_BN, whole_BN, cut_BN)
    return torch.stack([region_BN.sum(-1), *((heads_BN * marked_BN).sum(-1) for marked_BN in marks)])


def _whole_bytes(layer: PackedLayer, plan: LayerPlan, in_region_BM: Tensor, layout: Layout) -> list[int]:
    """Return the bytes of each sample's entries of the region that a layer stores with a whole value."""
    batch, heads, _, width = layer.keys.shape
    rounded = (payload.format for block in layer.blocks for payload in block.payloads if payload.format.rounds)
    region_BN, total = take_rows(in_region_BM, plan.entries_BN.clamp(min=0)), [0] * batch
    for kind in plan_marks(plan, heads, width, layout, next(rounded, MODEL)).kinds:
        if kind.routed:
            continue
        times = len(kind.marks_RM) // batch
        own_RM = kind.marks_RM & region_BN.repeat_interleave(times, 0)
        key_width = plan.cut_keys.kept if kind.cut and plan.cut_keys is not None else width
        for sample, count in enumerate(own_RM.reshape(batch, -1).sum(-1).tolist()):
            slices = count * heads // times
            total[sample] += kind.form.bytes_of(slices, key_width, layer.dtype, "keys")
            total[sample] += kind.form.bytes_of(slices, width, layer.dtype, "values")
    return total
