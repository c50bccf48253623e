"""TextCaps (Sidorov et al., ECCV 2020): captions that read the text in an image, as lmms-eval asks them."""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.captions import CaptionTask, caption_samples
from subtoken_train.evaluation.tasks.reading import read_split


@dataclass
class TextCaps(CaptionTask):
    """Captions of the validation images. No OCR tokens are in the prompt."""

    name = "textcaps"
    modality = "image"
    hub_id = "lmms-lab/TextCaps"
    rows = 3_166
    primary = "cider"
    where = "Get it: hf download lmms-lab/TextCaps --repo-type dataset --local-dir DIR; DIR is the source"

    def samples(self) -> list[Sample]:
        """The rows of split ``val``."""
        rows = read_split(self, "val", ("image_id", "caption_str"), images=("image",))
        return caption_samples(rows, "image_id", "caption_str", "val")
