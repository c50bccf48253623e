"""Training on scenes whose pictures the frozen tower has seen once: what never changes is looked up, not made again.

A step's pictures, the tower's pass over them and, under ``reducer.ranking: frozen``, the scout's row depend on the
record alone. They are those of a batch of other records: runs agree to rounding, not bit by bit. Training batches only
(padded on the right).

Legend: R records, B batch, N positions, T visual tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor

from subtoken_train.datasets import collate
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.engine import compressed_backbone
from subtoken_train.engine.attention_rows import scouted_row
from subtoken_train.families.family import Family
from subtoken_train.families.llava.model import LlavaFamily
from subtoken_train.types import Batch, TowerStatistics, VisualStates

BATCH = 128
MAX_LENGTH = 160
_PARTS = ("tokens", "cls", "received", "keys")


class SceneMemory:
    """What the tower of one LLaVA backbone makes of the pictures of one data file, one picture a record.

    Args:
        path: where it is kept; see ``write``.
    """

    def __init__(self, path: Path) -> None:
        content: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
        self.places = {name: place for place, name in enumerate(content["ids"])}
        self.parts: dict[str, Tensor] = {part: content[part] for part in _PARTS}
        self.rows: dict[tuple[int, str], Tensor] = {}
        self.batch: Batch | None = None
        self.blank = Image.new("RGB", (1, 1))

    @staticmethod
    def write(path: Path, family: LlavaFamily, data: Path) -> None:
        """Run the tower over the pictures of ``data``; the file appears when all of it is there."""
        records, collator = InstructionRecords(data), Collator(family, MAX_LENGTH)
        ids: list[str] = []
        found: dict[str, list[Tensor]] = {part: [] for part in _PARTS}
        for start in range(0, len(records), BATCH):
            batch = collator([records[place] for place in range(start, min(start + BATCH, len(records)))])
            with torch.inference_mode():
                states = family.visual_states(batch, "received")
            ids += batch.record_ids
            for part, made in found.items():
                made.append(torch.stack(getattr(states, part)))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")  # another process may make the same
        torch.save({"ids": ids, **{part: torch.cat(made) for part, made in found.items()}}, partial)
        partial.rename(path)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the block, LLaVA's pictures and states, and frozen scouts, come from here where they are known."""
        opened, processed = collate.open_picture, LlavaFamily.process_images
        seen = LlavaFamily.visual_states

        def open_picture(source: Any, record_id: str, *limits: int) -> Any:
            return self.blank if record_id in self.places else opened(source, record_id, *limits)

        def process_images(family: LlavaFamily, images: Sequence[Any], together: Sequence[int]) -> Any:
            known = all(image is self.blank for image in images)
            return (torch.zeros(len(images), 1), None) if known else processed(family, images, together)

        def visual_states(
            family: LlavaFamily, batch: Batch, statistics: TowerStatistics | None = None
        ) -> VisualStates | None:
            self.batch = batch
            if batch.pixel_values is None or batch.pixel_values.dim() > 2:
                return seen(family, batch, statistics)
            return self._states(batch, statistics)

        with ExitStack() as stack:
            stack.enter_context(patch.object(collate, "open_picture", open_picture))
            stack.enter_context(patch.object(LlavaFamily, "process_images", process_images))
            stack.enter_context(patch.object(LlavaFamily, "visual_states", visual_states))
            stack.enter_context(patch.object(compressed_backbone, "scouted_row", self._scouted_row))
            yield

    def _states(self, batch: Batch, statistics: TowerStatistics | None) -> VisualStates:
        assert statistics in (None, "received"), "other statistics are not remembered"
        at_B = torch.tensor([self.places[name] for name in batch.record_ids])
        tokens = list(self.parts["tokens"][at_B])
        if statistics is None:
            return VisualStates(tokens)
        return VisualStates(tokens, *(list(self.parts[part][at_B]) for part in _PARTS[1:]))

    def _scouted_row(
        self, family: Family, layer: int, *, visible_BN: Tensor, row_B: Tensor, frozen: bool, **rest: Any
    ) -> Tensor:
        """See ``engine.attention_rows.scouted_row``; a frozen scout's rows of known records are made once."""

        def made() -> Tensor:
            return scouted_row(family, layer, visible_BN=visible_BN, row_B=row_B, frozen=frozen, **rest)

        assert self.batch is not None
        names = self.batch.record_ids
        if not frozen or not all(name in self.places for name in names):
            return made()
        if not all((layer, name) in self.rows for name in names):
            rows_BN = made()
            for name, row_N, last in zip(names, rows_BN, row_B.tolist(), strict=True):
                self.rows[layer, name] = row_N[: last + 1].clone()
            return rows_BN
        rows_BN = torch.zeros(visible_BN.shape)
        for row_N, name in zip(rows_BN, names, strict=True):
            known = self.rows[layer, name]
            row_N[: len(known)] = known
        return rows_BN
