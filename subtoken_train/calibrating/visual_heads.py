"""SparseMM's calibration: how much every head looks at the places of a picture that an answer tells of.

Source: section 3.1 of "SparseMM" and ``visual_head/qwen_visual_head.py`` of its release: while a page's words are said,
a head whose largest weight of a row lies on a visual token of the word's box gets 1 over the box's tokens; mean over
pages, and the sum over the query heads of a key-value head. The release reads 1,000 synthetic pages and counts the
tokens of its own answers that one word alone holds. Here the pictures are digit scenes (``datasets/scenes.py``), drawn
anew and described in their own words ("B3 red 7 C1 blue 2"), whose answers are given: a box is a cell of the scene.
What it does not do: pictures in tiles, whose tokens make no one grid.

Legend: B batch, N positions, A tokens of an answer, W rows that are looked at, H query heads.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from subtoken_train.calibrating.base import PromptSource
from subtoken_train.calibrating.head_scores import HeadCalibrator
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.image_sources import EncodedImage
from subtoken_train.datasets.record_format import IMAGE_PLACEHOLDER
from subtoken_train.datasets.records import Record
from subtoken_train.datasets.scenes import GRID, PLACES, SPLITS, ask, draw_scene
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS
from subtoken_train.evaluation.picture import check_drawable, visual_grid
from subtoken_train.families.family import Family
from subtoken_train.families.positions import position_bound
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.inference.batched import in_batches
from subtoken_train.types import Batch, Region, Turn
from subtoken_train.view.method import setting

SCENES = "scenes"
_TOLD = re.compile(r"([A-D][1-4])\s+\w+\s+\d")


@dataclass(frozen=True)
class VisualCalibrator(HeadCalibrator):
    """Cells of digit scenes that answers tell of; see ``Calibrator`` for the settings, of which no context is drawn."""

    name: ClassVar[str] = "sparsemm"

    samples: int = setting(50, 1, MAX_COUNT)

    def check(self, backbone: CompressedBackbone) -> None:
        if backbone.family.image_token_id is None:
            raise ValueError("sparsemm is calibrated on pictures, and the backbone sees none; use headkv")
        check_drawable(backbone.family)
        super().check(backbone)

    def prompts(self, family: Family, data: str | None) -> PromptSource:
        if data not in (None, SCENES):
            raise ValueError(f"data {data!r}: sparsemm draws {SCENES!r}, whose places it knows; leave it out")
        return PromptSource(SCENES, self._scenes(family))

    def _scenes(self, family: Family) -> Iterator[Batch]:
        collate = Collator(family, position_bound(family.decoder.config) or MAX_TOKENS)
        for numbers in in_batches(range(self.samples), self.batch_size):
            records = [scene_record(np.random.default_rng([self.seed, number]), number) for number in numbers]
            yield move_data_to_device(collate(records), family.device)

    def needles(self, family: Family, batch: Batch) -> tuple[Tensor, Tensor]:
        rows, marks = [], []
        of_cells = torch.stack([cell_tokens(cell, *visual_grid(family, batch)) for cell in range(len(PLACES))])
        for labels_N, regions_N in zip(batch.labels_BN, batch.regions_BN, strict=True):
            label_A = (labels_N != IGNORE_INDEX).nonzero()[:, 0]
            cell_A = torch.tensor(told_cells(family.tokenizer, labels_N[label_A].tolist()), device=label_A.device)
            label_A, cell_A = label_A[cell_A >= 0], cell_A[cell_A >= 0]
            needle_AN = torch.zeros(len(label_A), len(regions_N), dtype=torch.bool, device=label_A.device)
            needle_AN[:, regions_N == Region.VISUAL] = of_cells.to(label_A.device)[cell_A]
            rows.append(label_A - 1)
            marks.append(needle_AN)
        return pad_sequence(rows, True, -1), pad_sequence(marks, True, False)

    def weight(self, looked_BHWN: Tensor, needle_BWN: Tensor) -> Tensor:
        largest_BHW1 = looked_BHWN.argmax(-1, keepdim=True)
        hit_BHW = needle_BWN[:, None].expand(looked_BHWN.shape).gather(-1, largest_BHW1)[..., 0]
        return hit_BHW / needle_BWN.sum(-1).clamp(min=1)[:, None]


def scene_record(rng: np.random.Generator, number: int) -> Record:
    """Draw a scene of the training split with its description."""
    scene = draw_scene(rng, SPLITS[0])
    question, answer = ask(rng, scene.objects, "describe")
    picture = EncodedImage(partial(_png, scene.pixels), f"scene {number}")
    return Record(f"scene-{number}", [picture], [Turn(f"{IMAGE_PLACEHOLDER}\n{question}", answer)])


def _png(pixels: Any) -> bytes:
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def cell_tokens(cell: int, rows: int, columns: int) -> Tensor:
    """Mark the visual tokens of a grid that a scene's cell reaches into, bool [rows * columns]."""
    marks = []
    for place, tokens in ((cell // GRID, rows), (cell % GRID, columns)):
        token = torch.arange(tokens)
        marks.append((token * GRID < (place + 1) * tokens) & ((token + 1) * GRID > place * tokens))
    return (marks[0][:, None] & marks[1]).flatten()


def told_cells(tokenizer: Any, answer: list[int]) -> list[int]:
    """Return the cell that every token of a description tells of; -1 where it ends in none's words."""
    cells = [-1] * len(answer)
    told = list(_TOLD.finditer(tokenizer.decode(answer)))
    for i in range(len(answer)):
        end = len(tokenizer.decode(answer[: i + 1]))
        for match in told:
            if match.start() < end <= match.end():
                cells[i] = PLACES.index(match[1])
    return cells
