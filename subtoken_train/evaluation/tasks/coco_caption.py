"""COCO Captions (Chen et al., arXiv:1504.00325): the validation images of 2014 or of 2017.

Not here: the Karpathy split, whose Parquet files hold addresses in the place of images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.tasks.captions import CaptionTask

_SETS = {2014: ("lmms-lab/COCO-Caption", 40_504), 2017: ("lmms-lab/COCO-Caption2017", 5_000)}


@dataclass
class CocoCaption(CaptionTask):
    """Captions of the validation images; ids are their file names.

    Attributes:
        year: of the images. Each year is a set of its own on the Hub.
    """

    year: Literal[2014, 2017] = 2014

    name = "coco_caption"
    hub_id = _SETS[2014][0]
    rows = _SETS[2014][1]
    columns = ("question_id", "answer")
    where = (
        "hf download lmms-lab/COCO-Caption --repo-type dataset --local-dir DIR --include 'data/val-*' (with year 2017: "
        "lmms-lab/COCO-Caption2017)"
    )

    def __post_init__(self) -> None:
        if self.year not in _SETS:
            raise unknown_name("year of coco_caption", self.year, map(str, _SETS))
        if self.source is None and self.year != 2014:
            self.source = _SETS[self.year][0]

    @property
    def expected_rows(self) -> int:
        """Images of the year."""
        return _SETS[self.year][1]
