"""Caption tasks: one prompt, reference captions, CIDEr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train.evaluation.metrics.caption_cider import CaptionCider, check_tokenizer
from subtoken_train.evaluation.tasks.file_rows import FileRow
from subtoken_train.evaluation.tasks.image_questions import ImageQuestions
from subtoken_train.evaluation.tasks.task import Sample

CAPTION_PROMPT = "Provide a one-sentence caption for the provided image."
_COCO = {2014: ("lmms-lab/COCO-Caption", 40_504), 2017: ("lmms-lab/COCO-Caption2017", 5_000)}


@dataclass
class CaptionTask(ImageQuestions):
    """One caption per image, as lmms-eval asks it, scored by CIDEr over the set: a part of it has another scale."""

    primary = "cider"
    scored_by = CaptionCider
    answered = "val"
    columns: ClassVar[tuple[str, str]]
    """The image's name and its reference captions."""

    def sample(self, row: FileRow, number: int) -> Sample:
        """The sample of a row."""
        name, captions = self.columns
        if not row.values[captions]:
            raise self.without_answer(row)
        reference = {"captions": row.texts(captions)}
        return self.ask(row, row.values[name], CAPTION_PROMPT, reference, max_new_tokens=64, kind="caption")

    def check_requirements(self) -> None:
        """See ``check_tokenizer``: Java and pycocoevalcap must be there before a model runs."""
        check_tokenizer()


@dataclass
class TextCaps(CaptionTask):
    """TextCaps (Sidorov et al., ECCV 2020): captions that read the text in an image; no OCR tokens are in the prompt.

    The validation images.
    """

    name = "textcaps"
    hub_id = "lmms-lab/TextCaps"
    rows = 3_166
    columns = ("image_id", "caption_str")
    where = "hf download lmms-lab/TextCaps --repo-type dataset --local-dir DIR --include 'data/val-*'"


@dataclass
class CocoCaption(CaptionTask):
    """COCO Captions (Chen et al., arXiv:1504.00325) of the validation images; ids are their file names.

    Not here: the Karpathy split, whose Parquet files hold addresses in the place of images.

    Attributes:
        year: of the images. Each year is a set of its own on the Hub.
    """

    year: int = 2014

    name = "coco_caption"
    hub_id = _COCO[2014][0]
    rows = _COCO[2014][1]
    columns = ("question_id", "answer")
    allowed: ClassVar = {"year": tuple(_COCO)}
    where = (
        "hf download lmms-lab/COCO-Caption --repo-type dataset --local-dir DIR --include 'data/val-*' (with year 2017: "
        "lmms-lab/COCO-Caption2017)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is None and self.year != 2014:
            self.source = _COCO[self.year][0]

    @property
    def expected_rows(self) -> int:
        """Images of the year."""
        return _COCO[self.year][1]
