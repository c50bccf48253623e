"""Caption tasks: one prompt, reference captions, CIDEr (Vedantam et al., CVPR 2015) as pycocoevalcap computes it.

PTB tokens, n-grams up to 4, sigma 6. Document frequencies come from the references of the very set that is scored, so
a figure belongs to that set: a part of it has another scale, and a single image scores 0. The tokenizer is a Java
program, started once per ``compute``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.errors import check_package
from subtoken_train.evaluation.metrics.metric import TaskMetric
from subtoken_train.evaluation.tasks.file_rows import FileRow
from subtoken_train.evaluation.tasks.image_questions import ImageQuestions
from subtoken_train.evaluation.tasks.task import Sample


def check_tokenizer() -> None:
    """Raise where captions could not be scored here, so that no model answers in vain."""
    check_package("pycocoevalcap", "eval", "CIDEr")
    if shutil.which("java") is None:
        raise ValueError("CIDEr's PTB tokenizer needs Java, and there is no 'java' on the PATH; install a Java runtime")
    found = find_spec("pycocoevalcap")
    assert found is not None
    assert found.submodule_search_locations  # a namespace: importlib.resources gives no folder of it
    folder = Path(next(iter(found.submodule_search_locations))) / "tokenizer"
    if not os.access(folder, os.W_OK):
        raise ValueError(f"CIDEr's PTB tokenizer writes to {folder}, which is read-only; install the package elsewhere")


def ptb_tokens(captions: Sequence[Sequence[str]]) -> list[list[str]]:
    """Split each image's captions into PTB tokens, lower case, no punctuation, joined by spaces: one Java process.

    Raises as ``check_tokenizer``, and where the Java program did not answer for each caption.
    """
    check_tokenizer()
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    # any run of white space separates tokens alike, but some of its characters would start a new line in Java
    asked = {i: [{"caption": " ".join(one.split())} for one in some] for i, some in enumerate(captions)}
    tokens: dict[int, list[str]] = PTBTokenizer().tokenize(asked)
    found = [tokens.get(i, []) for i in range(len(captions))]
    if [len(some) for some in found] != [len(some) for some in captions]:
        raise ValueError("CIDEr's PTB tokenizer (Java) did not return every caption; its own message is above")
    return found


def cider(predicted: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, list[float]]:
    """Return the CIDEr of the set and the terms it averages, from tokens joined by spaces; references by image."""
    from pycocoevalcap.cider.cider import Cider

    numbers = range(len(predicted))
    mean, terms = Cider().compute_score({i: list(references[i]) for i in numbers}, {i: [predicted[i]] for i in numbers})
    return float(mean), [float(term) for term in terms]


def word_overlap(predicted: str, reference: str) -> float:
    """Return the F1 of the two captions' words (letters and digits, in lower case), repeated words counted."""
    ours, theirs = (Counter(re.findall(r"\w+", text.lower())) for text in (predicted, reference))
    shared = (ours & theirs).total()
    return 2 * shared / (ours.total() + theirs.total()) if shared else 0.0


class CaptionCider(TaskMetric):
    """``cider``, of references ``{"captions": [text, ...]}``.

    ``score`` is *not* a term of CIDEr, which needs the whole set: it is the best ``word_overlap`` with a reference.
    """

    points = frozenset({"cider"})

    def compute(self) -> dict[str, float]:
        """Return the CIDEr of all captions, by ``ptb_tokens``."""
        tokens = ptb_tokens([[said, *reference["captions"]] for said, reference in self.rows])
        return {"cider": cider([some[0] for some in tokens], [some[1:] for some in tokens])[0]}

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        """Return the best word overlap with a reference."""
        return max(word_overlap(prediction, caption) for caption in reference["captions"])


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
        """Return the sample of a row."""
        name, captions = self.columns
        if not row.values[captions]:
            raise self.without_answer(row)
        reference = {"captions": row.texts(captions)}
        return self.ask(row, row.values[name], CAPTION_PROMPT, reference, max_new_tokens=64, kind="caption")

    def check_requirements(self) -> None:
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

    Each year of images is a set of its own on the Hub. Not here: the Karpathy split, whose Parquet files hold addresses
    in the place of images.
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
        return _COCO[self.year][1]
