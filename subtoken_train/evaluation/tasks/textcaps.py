"""TextCaps (Sidorov et al., ECCV 2020): captions that read the text in an image."""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.evaluation.tasks.captions import CaptionTask


@dataclass
class TextCaps(CaptionTask):
    """Captions of the validation images. No OCR tokens are in the prompt."""

    name = "textcaps"
    hub_id = "lmms-lab/TextCaps"
    rows = 3_166
    columns = ("image_id", "caption_str")
    where = "hf download lmms-lab/TextCaps --repo-type dataset --local-dir DIR --include 'data/val-*'"
