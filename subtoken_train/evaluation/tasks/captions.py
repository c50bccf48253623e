"""Caption tasks: one prompt, reference captions, CIDEr (Vedantam et al., CVPR 2015) as pycocoevalcap computes it.

PTB tokens, n-grams up to 4, sigma 6. Document frequencies come from the references of the very set that is scored, so a
figure belongs to that set, and a single image scores 0. The tokenizer is a Java program, started once per ``compute``.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.errors import check_package
from subtoken_train.evaluation.metrics.metric import TaskMetric
from subtoken_train.evaluation.metrics.short_answers import bag_f1
from subtoken_train.evaluation.tasks.files import FileRow
from subtoken_train.evaluation.tasks.image_questions import ImageQuestions


def check_tokenizer() -> None:
    """Raise where captions could not be scored here, so that no model answers in vain."""
    check_package("pycocoevalcap", "eval", "CIDEr")
    if shutil.which("java") is None:
        raise ValueError("CIDEr's PTB tokenizer needs Java, and there is no 'java' on the PATH; install a Java runtime")
    folder = Path(next(iter(import_module("pycocoevalcap").__path__))) / "tokenizer"  # it may be a namespace
    if not os.access(folder, os.W_OK):
        raise ValueError(f"CIDEr's PTB tokenizer writes to {folder}, which is read-only; install the package elsewhere")


def ptb_tokens(captions: Sequence[Sequence[str]]) -> list[list[str]]:
    """Split each image's captions into PTB tokens, lower case, no punctuation, joined by spaces."""
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
    return bag_f1(*(re.findall(r"\w+", text.lower()) for text in (predicted, reference)))


class CaptionCider(TaskMetric):
    """``cider``, of references with ``captions``; ``score`` is no term of it, but the best ``word_overlap``."""

    points = frozenset({"cider"})

    def compute(self) -> dict[str, float]:
        tokens = ptb_tokens([[said, *reference["captions"]] for said, reference in self.rows])
        return {"cider": cider([some[0] for some in tokens], [some[1:] for some in tokens])[0]}

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        return max(word_overlap(prediction, caption) for caption in reference["captions"])


class CaptionTask(ImageQuestions):
    """One caption per image, as lmms-eval asks it, such as TextCaps (Sidorov et al., ECCV 2020); no OCR words."""

    def question(self, row: FileRow) -> str:
        return "Provide a one-sentence caption for the provided image."

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"captions": self.answers(row, self.columns[-1])}

    def kind(self, row: FileRow) -> str:
        return "caption"

    def check_requirements(self) -> None:
        check_tokenizer()


@dataclass
class CocoCaption(CaptionTask):
    """COCO Captions (arXiv:1504.00325), validation, each year a set of the Hub; no Karpathy split."""

    year: int = 2014

    sets: ClassVar = {2014: ("lmms-lab/COCO-Caption", 40_504), 2017: ("lmms-lab/COCO-Caption2017", 5_000)}
    allowed: ClassVar = {"year": tuple(sets)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is None and self.year != 2014:
            self.source = self.sets[self.year][0]

    @property
    def expected_rows(self) -> int:
        return int(self.sets[self.year][1])
