"""What a cache takes: the plan's ledger beside the bytes of the tensors that are there."""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.cache.cache import PackedCache, PackedLayer
from subtoken_train.functional.ledger import Ledger


@dataclass(frozen=True)
class CacheReport:
    """Bytes of a cache, all samples together.

    Attributes:
        ledger: the prompt's entries per layer and region, as the plan promises them in the model's dtype; once, however
            many beams the cache holds.
        nominal_fraction: retained share of the compressed region (visual or context) that the budget promises, before
            eviction.
        payload_bytes: keys and values of the prompt, measured on the tensors.
        index_bytes: what finds the stored pieces, measured.
        tail_bytes: what came after the prompt, in full.
        slack_bytes: room that the tail holds in advance, at most 64 tokens.
        dense_bytes: an uncompressed cache of the same prompt and tail.
    """

    ledger: Ledger
    nominal_fraction: float
    payload_bytes: int
    index_bytes: int
    tail_bytes: int
    slack_bytes: int
    dense_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything the cache holds."""
        return self.payload_bytes + self.index_bytes + self.tail_bytes + self.slack_bytes

    @property
    def realised_fraction(self) -> float:
        """Retained share of the compressed region, from the plan; 1 where a prompt has none."""
        region = next((name for name in ("visual", "context") if self.ledger.dense_bytes(name)), None)
        return 1.0 if region is None else self.ledger.fraction(region)

    def table(self) -> str:
        """Markdown: a row per layer and region."""
        lines = ["| layer | region | tokens before | entries | key bytes | value bytes | index bytes |"]
        lines.append("|---|---|---|---|---|---|---|")
        lines += [
            "| "
            + " | ".join(
                map(str, (e.layer, e.region, e.tokens_before, e.tokens, e.key_bytes, e.value_bytes, e.index_bytes))
            )
            + " |"
            for e in self.ledger.entries
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        """One line; the slack, which does not grow with the prompt, is named apart."""
        held = self.total_bytes - self.slack_bytes
        return (
            f"KV {held:,} of {self.dense_bytes:,} bytes ({held / self.dense_bytes:.1%}); "
            f"compressed region {self.realised_fraction:.4%} of its KV (nominal {self.nominal_fraction:.4%}); index "
            f"{self.index_bytes:,}, slack {self.slack_bytes:,} bytes"
        )


def report(cache: PackedCache, ledger: Ledger, nominal_fraction: float) -> CacheReport:
    """Measure a filled cache; beams are copies of their prompt, in a dense cache as well."""
    assert cache.origin_B is not None
    copies = len(cache.origin_B) // (int(cache.origin_B.max()) + 1)  # every prompt keeps as many beams
    layers = [layer for layer in cache.layers if isinstance(layer, PackedLayer)]
    tail = [layer.tail_bytes for layer in layers]
    return CacheReport(
        ledger=ledger,
        nominal_fraction=nominal_fraction,
        payload_bytes=sum(layer.payload_bytes for layer in layers),
        index_bytes=sum(layer.index_bytes for layer in layers),
        tail_bytes=sum(used for used, _ in tail),
        slack_bytes=sum(slack for _, slack in tail),
        dense_bytes=ledger.dense_bytes() * copies + sum(used for used, _ in tail),
    )
