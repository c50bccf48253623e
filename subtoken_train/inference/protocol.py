"""Protocols under which prompts are compressed; ``inference/opening.py`` runs them. Importing this file is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from subtoken_train.engine.compressed_backbone import CompressedBackbone
    from subtoken_train.inference.compression import Compression

Protocol = Literal["query_aware", "context_first"]


def check_context_first(backbone: CompressedBackbone, compression: Compression) -> None:
    """Raise a worded ``ValueError`` where something that compresses reads the question."""
    bank, reducer = backbone.bank, backbone.reducer
    reads = None
    if reducer.stage == "context" and reducer.config.keep_ratio < 1:
        reads = f"reducer {reducer.config.name!r} chooses pages by the question"
    elif (
        bank is not None
        and backbone.active_routing is not None
        and any(part.query_conditioned for part in bank.selectors)
    ):
        reads = "the routers are conditioned on the question"
    elif compression.eviction is not None and compression.eviction.needs_image:
        reads = f"eviction {compression.eviction.name!r} reads the attention from the question to the image"
    elif compression.eviction is not None and compression.eviction.reads_question:
        reads = f"eviction {compression.eviction.name!r} is set to score by the question"
    if reads is not None:
        raise ValueError(f"context_first compresses before the question is seen, but {reads}; use query_aware")
