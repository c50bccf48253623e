"""One model's answer on the page, and what is left of its cache to look at."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.picture import check_places, visual_grid
from subtoken_train.evaluation.runner.arms import groups_words
from subtoken_train.families.family import Family
from subtoken_train.inference.cache_report import CacheReport
from subtoken_train.inference.compression import Compression
from subtoken_train.types import Batch, Plan


@dataclass(frozen=True)
class SideAnswer:
    """One model's finished answer, and what is left of its cache to look at.

    Attributes:
        title: of its ``ShownModel``.
        method: reducer, groups and eviction, as tables name them; ``-`` where nothing is compressed.
        tokens: generated ones.
        image: the picture that was asked about.
        family: of the backbone, which knows how the picture was laid out.
        batch: the prompt, without pixels.
        plan: what the cache kept of it.
        report: what the cache took.
        prefill_seconds: of the prompt's pass.
        decode_seconds: of everything after it.
        undrawn: why kept tokens cannot be drawn on the picture; None where they can.
        notes: warnings that came with the answer.
    """

    title: str
    method: str
    tokens: int
    image: Image.Image
    family: Family
    batch: Batch
    plan: Plan
    report: CacheReport
    prefill_seconds: float
    decode_seconds: float
    undrawn: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Spoken:
    """What one model has said by now.

    Attributes:
        place: of its side.
        text: so far.
        answer: once it is finished.
    """

    place: int
    text: str
    answer: SideAnswer | None = None


def compressed_by(backbone: CompressedBackbone, compression: Compression) -> str:
    """What compresses: ``fastv 0.25, S16K4 linear, snapkv 0.5``; ``-`` where nothing does."""
    reducer = backbone.reducer
    parts = [f"{reducer.name} {reducer.keep_ratio:.6g}" if reducer.acts else "-"]
    parts += [groups_words(backbone.active_routing), compression.label]
    return ", ".join(part for part in parts if part != "-") or "-"


def why_undrawn(backbone: CompressedBackbone, batch: Batch) -> str | None:
    """Why kept tokens cannot be drawn on the picture; None where they can."""
    try:
        check_places(backbone)
        visual_grid(backbone.family, batch)
    except ValueError as error:
        return str(error)
    return None
