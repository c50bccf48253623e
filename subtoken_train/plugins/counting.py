"""What compression did to all prompts of a harness, for its output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.inference.batched import Outcome
from subtoken_train.inference.compression import Compression
from subtoken_train.ledger.kv_budget import share_words
from subtoken_train.ledger.measure import emptied_words
from subtoken_train.types import Protocol

SUMMED = ("kv_bytes", "dense_kv_bytes", "region_bytes", "region_dense_bytes", "entries_before", "entries_after")


class Counted:
    """Sums over prompts; a prompt with several continuations counts once.

    Args:
        backbone: whose reducer and routers are at work.
        compression: eviction and precision.
        protocol: when the prompt is compressed.
    """

    def __init__(self, backbone: CompressedBackbone, compression: Compression, protocol: Protocol) -> None:
        self.backbone, self.compression, self.protocol = backbone, compression, protocol
        self.prompts = 0
        self.emptied: list[dict[str, int]] = []
        self.sums = dict.fromkeys(SUMMED, 0)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of prompts."""
        for outcome in outcomes:
            self.prompts += 1
            self.emptied.append(outcome.emptied)
            for name in SUMMED:
                self.sums[name] += getattr(outcome, name)

    @property
    def facts(self) -> dict[str, Any]:
        """JSON values for a results file; fractions are None where nothing could be compressed."""
        return {
            "reducer": self.backbone.reducer.name,
            "keep_ratio": self.backbone.reducer.keep_ratio,
            "routing": self.routing,
            "compression": self.compression.label,
            "protocol": self.protocol,
            "prompts": self.prompts,
            "prompts_with_an_emptied_region": sum(map(bool, self.emptied)),
            **self.sums,
            "kv_fraction_measured": _share(self.sums["kv_bytes"], self.sums["dense_kv_bytes"]),
            "region_fraction_measured": _share(self.sums["region_bytes"], self.sums["region_dense_bytes"]),
        }

    @property
    def routing(self) -> str | None:
        """``linear S=16 K=4``; None where no router is at work."""
        routing = self.backbone.active_routing
        return None if routing is None else f"{routing.selector} S={routing.num_groups} K={routing.kept_groups}"

    def warning(self) -> str | None:
        """Where the settings cannot change what a harness scores."""
        if self.compression.eviction is None or self.protocol == "context_first":
            return None
        return (
            f"{self.compression.label} acts after the whole prompt was read: under protocol=query_aware it cannot "
            "change the first token after the prompt, and so no log-likelihood of one-token answers; "
            "protocol=context_first evicts before the question is read"
        )

    def __str__(self) -> str:
        """The report, in lines."""
        sums = self.sums
        acting = [self.backbone.reducer.name, self.routing, self.compression.label]
        lines = [f"subtoken: {self.prompts:,} prompts; {', '.join(filter(None, acting))}; protocol {self.protocol}"]
        if not self.prompts:
            return f"{lines[0]}\nno prompt was run (all answers came from a cache, or there were no requests)"
        lines.append(_line("KV of the prompts", sums["kv_bytes"], sums["dense_kv_bytes"], "bytes"))
        if sums["region_dense_bytes"]:
            lines.append(_line("compressed region", sums["region_bytes"], sums["region_dense_bytes"], "bytes"))
            lines.append(
                _line("its entries, in any head", sums["entries_after"], sums["entries_before"], "(token, layer) pairs")
            )
        else:
            lines.append("no prompt had anything that may be compressed (an image, or a context before its question)")
        lines += filter(None, [emptied_words(self.emptied, self.compression.label)])
        return "\n".join(lines)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _line(what: str, kept: int, dense: int, unit: str) -> str:
    return f"{what}: {kept:,} of {dense:,} {unit} kept ({share_words(kept / dense, 2)})"
