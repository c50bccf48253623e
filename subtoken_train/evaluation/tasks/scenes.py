"""Digit scenes, held out: the embedded vision-language model's tasks, one for each benchmark whose style they follow.

The files are LLaVA's instruction format, as ``subtoken-train data scenes`` writes them; all tasks read the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.evaluation.metrics.short_answers import SceneScore
from subtoken_train.evaluation.tasks.base import Sample, Task

_WHERE = """Made on this machine, from 1,797 embedded handwritten digits; data/scenes is read unless a folder is named:
  subtoken-train data scenes
  subtoken-train data scenes --seed 1 --out FOLDER --train 1 --dev 1 --test 4800     (as the tables ask)"""


@dataclass
class _Scenes(Task):
    """Scenes of one split.

    Attributes:
        split: ``dev`` or ``test``.
    """

    modality = "image"
    hub_id = None
    rows = None
    primary = "score"
    where = _WHERE
    made_in = "data/scenes"
    kinds: ClassVar[tuple[str, ...]]

    split: str = "test"

    def samples(self) -> Sequence[Sample]:
        """The split's records of the task's kinds; see ``InstructionRecords`` for the errors."""
        if self.source is None:
            raise ValueError(f"task {self.name} needs a folder of scenes (source, or below data_root). {self.where}")
        records = InstructionRecords(Path(self.source) / f"{self.split}.json")
        chosen = (records[i] for i in range(len(records)))
        return [
            Sample(
                id=record.id,
                prompt=record.turns[-1].prompt,
                reference={"answer": record.turns[-1].answer, "kind": record.kind},
                images=tuple(record.images),
                max_new_tokens=64,
                kind=str(record.kind),
            )
            for record in chosen
            if record.kind in self.kinds
        ]

    def metric(self) -> SceneScore:
        """Exact match, or F1 of the described objects."""
        return SceneScore()


@dataclass
class ScenesPope(_Scenes):
    """Is there a digit, or a colour? POPE's style."""

    name = "scenes_pope"
    kinds = ("exists", "exists_color")


@dataclass
class ScenesTextVQA(_Scenes):
    """Which digit stands at a place? TextVQA's style."""

    name = "scenes_textvqa"
    kinds = ("read",)


@dataclass
class ScenesGQA(_Scenes):
    """Colour, place and count: GQA's and MME's style."""

    name = "scenes_gqa"
    kinds = ("color", "where", "count")


@dataclass
class ScenesMMBench(_Scenes):
    """Multiple choice: MMBench's style."""

    name = "scenes_mmbench"
    kinds = ("choice",)


@dataclass
class ScenesCaption(_Scenes):
    """The whole scene in words: captioning."""

    name = "scenes_caption"
    kinds = DESCRIPTION_KINDS
