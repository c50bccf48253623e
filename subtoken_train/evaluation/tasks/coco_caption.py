"""COCO Captions (Chen et al., arXiv:1504.00325): the validation images of 2014 or of 2017, as lmms-eval asks them.

Not here: the Karpathy split, whose Parquet files hold addresses in the place of images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.captions import CaptionTask, caption_samples
from subtoken_train.evaluation.tasks.reading import read_split

_SETS = {2014: ("lmms-lab/COCO-Caption", 40_504), 2017: ("lmms-lab/COCO-Caption2017", 5_000)}


@dataclass
class CocoCaption(CaptionTask):
    """Captions of the validation images.

    Attributes:
        year: of the split. Its set is another one on the Hub.
    """

    year: Literal[2014, 2017] = 2014

    name = "coco_caption"
    modality = "image"
    hub_id = _SETS[2014][0]
    rows = _SETS[2014][1]
    primary = "cider"
    where = (
        "Get it: hf download lmms-lab/COCO-Caption --repo-type dataset --local-dir DIR (year 2017: "
        "lmms-lab/COCO-Caption2017); DIR is the source"
    )

    def __post_init__(self) -> None:
        if self.year not in _SETS:
            raise unknown_name("year of coco_caption", self.year, map(str, _SETS))
        if self.source is None and self.year != 2014:
            self.source = _SETS[self.year][0]

    @property
    def expected_rows(self) -> int:
        """Images of the year's split."""
        return _SETS[self.year][1]

    def samples(self) -> list[Sample]:
        """The rows of split ``val``; an id is an image's file name."""
        rows = read_split(self, "val", ("question_id", "answer"), images=("image",))
        return caption_samples(rows, "question_id", "answer", "val")
