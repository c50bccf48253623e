"""What a cache takes: the plan's ledger beside the bytes of the tensors that are there.

Legend: B samples of the cache, P prompts that they belong to, N positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.ledger.kv_budget import share_words
from subtoken_train.ledger.ledger import Ledger
from subtoken_train.ledger.measure import measured_ledger
from subtoken_train.types import Batch, LayerPlan, Plan, Region, in_compressed_region


@dataclass(frozen=True)
class CacheReport:
    """Bytes of a cache, all samples together.

    Attributes:
        ledger: the prompts' entries per layer and region, as the plan promises them in the model's dtype; each prompt
            that the cache holds once, however many beams it has.
        nominal_fraction: retained share of the compressed region (visual or context) that the budget promises, before
            eviction.
        payload_bytes: keys and values of the prompt, measured on the tensors; with ``eviction_every``, of what is left
            of it and of the generated tokens that were packed.
        index_bytes: what finds the stored pieces, measured.
        tail_bytes: what came after the prompt (or after the last eviction), in full.
        slack_bytes: room that the tail holds in advance: of an answer's tokens that were asked for and did not come
            (``PackedCache.reserve``), else of at most 64 tokens.
        dense_bytes: an uncompressed cache of the same prompts and tail.
        plan_bytes: what describes the prompts beside the cache: their ids and regions, and the plan.
        statistics_bytes: what evicting while decoding needs: which entries are stored, what the method noted of them,
            and the queries of the last tokens.
        kernel_bytes: tables and scratch of the fused kernels; 0 where others run.
        evictions: how often generated tokens were evicted; ``ledger`` says what the prompt's own eviction left.
        unread_bytes: of ``payload_bytes``, what one new token does not read: 0 unless pages are chosen in every step.
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

    @property
    def total_bytes(self) -> int:
        """Everything the cache holds."""
        stored = self.payload_bytes + self.index_bytes + self.tail_bytes
        return stored + self.slack_bytes + self.statistics_bytes + self.kernel_bytes

    @property
    def realised_fraction(self) -> float:
        """Retained share of the compressed region, from the plan; 1 where a prompt has none."""
        region = self._region
        return 1.0 if region is None else self.ledger.fraction(region)

    @property
    def _region(self) -> str | None:
        return next((name for name in ("visual", "context") if self.ledger.dense_bytes(name)), None)

    def table(self) -> str:
        """Markdown: a row per layer and region."""
        lines = ["| layer | region | tokens before | entries | key bytes | value bytes | index bytes |"]
        lines.append("|---|---|---|---|---|---|---|")
        lines += [f"| {' | '.join(map(str, astuple(entry)))} |" for entry in self.ledger.entries]
        return "\n".join(lines)

    def __str__(self) -> str:
        """One line; the slack, which does not grow with the prompt, is named apart."""
        held = self.total_bytes - self.slack_bytes
        compressed = f"compressed region {self.realised_fraction:.4%} of its KV (nominal {self.nominal_fraction:.4%})"
        if self._region is None:
            compressed = "no visual token and no context to compress"
        online = ""
        if self.statistics_bytes:
            online = f"; {self.evictions:,} evictions while decoding, statistics {self.statistics_bytes:,} bytes"
        kernels = f", kernels' tables and scratch {self.kernel_bytes:,} bytes" if self.kernel_bytes else ""
        took = share_words(held / self.dense_bytes, 1)
        took += f"; a step of decoding reads {held - self.unread_bytes:,} of them" if self.unread_bytes else ""
        return (
            f"KV {held:,} of {self.dense_bytes:,} bytes ({took}); {compressed}; "
            f"index {self.index_bytes:,}, slack {self.slack_bytes:,} bytes{kernels}{online}"
        )


def report(
    backbone: CompressedBackbone, prompts: Batch, plan: Plan, cache: PackedCache, key_channels: float = 1.0
) -> CacheReport:
    """Measure a filled cache, whichever samples it holds by now.

    Args:
        backbone: whose budget is the promise.
        prompts: the batch that was put into the cache.
        plan: what of it was kept.
        cache: with those prompts; beams are copies of their prompt, in a dense cache as well.
        key_channels: share of the key channels that stays, also a promise.
    """
    assert cache.origin_B is not None
    origin_B = cache.origin_B.to(prompts.regions_BN.device)
    held_P = torch.unique(origin_B)
    regions_PN = prompts.regions_BN[held_P]
    shape = backbone.family.shape
    own = Plan([layer.select(held_P) for layer in plan.layers], plan.layout)
    layers = [layer for layer in cache.layers if isinstance(layer, PackedLayer)]
    tail = [layer.tail_bytes for layer in layers]
    tokens_B = (prompts.regions_BN[origin_B] != Region.PADDING).sum(-1)
    generated = cache.get_seq_length() - cache.prompt_length
    return CacheReport(
        ledger=measured_ledger(own, regions_PN, shape),
        nominal_fraction=_nominal(backbone, regions_PN, key_channels),
        payload_bytes=sum(layer.payload_bytes for layer in layers),
        index_bytes=sum(layer.index_bytes for layer in layers),
        tail_bytes=sum(used for used, _ in tail),
        slack_bytes=sum(slack for _, slack in tail),
        dense_bytes=(int(tokens_B.sum()) + generated * len(origin_B)) * shape.token_bytes,
        plan_bytes=_bytes(vars(prompts).values()) + sum(map(_plan_bytes, plan.layers)),
        statistics_bytes=sum(layer.record.nbytes for layer in layers if layer.record is not None),
        kernel_bytes=cache.kernel_bytes,
        evictions=0 if cache.evictor is None else cache.evictor.evictions,
        unread_bytes=sum(layer.unread_bytes for layer in layers),
    )


def _nominal(backbone: CompressedBackbone, regions_PN: Tensor, key_channels: float) -> float:
    """Share of the compressed region that the budget promises."""
    return backbone.promised_fraction(in_compressed_region(regions_PN).sum(-1).tolist(), key_channels)


def _plan_bytes(layer: LayerPlan) -> int:
    return _bytes([*vars(layer).values(), *(() if layer.cut_keys is None else vars(layer.cut_keys).values())])


def _bytes(things: Iterable[object]) -> int:
    """Bytes of the tensors among them."""
    return sum(thing.nbytes for thing in things if isinstance(thing, torch.Tensor))
