"""Multiple choice by a letter in a free answer: MMBench with its rotations (Liu et al., arXiv:2307.06281), ScienceQA.

MMBench's letters are read as LLaVA-1.5 gives them, and by the rules of VLMEvalKit (``utils/matching_util.py``) without
its judge: where it asks a language model, the answer here names no option. Options are a mapping from letter to text.
ScienceQA: ``llava/eval/eval_science_qa.py`` of LLaVA-1.5. What lmms-eval reads, lmms-eval itself says (its plug-in).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from subtoken_train.evaluation.metrics.metric import MeanScores, TaskMetric, mean

LETTERS = "ABCDE"
_LETTER = re.compile(r"[(\uff08]?([A-E])(?:[.:,)\u3002\uff1a\uff0c\u3001\uff09].*)?", re.DOTALL)
_STATIC_PHRASES = (
    *(f"{before}{what} is" for what in ("answer", "option", "choice") for before in ("correct ", "the correct ")),
    *(f"{before}{what} is" for what in ("answer", "option") for before in ("best ", "the best ")),
    *(f"{before}{what} is" for what in ("answer", "choice") for before in ("", "the ", "my ")),
    *(f"i {verb}" for verb in ("choose", "select", "pick")),
    *("옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは"),
)
_STATIC_FRAMES = ((3, "{})"), (4, "{}:"), (5, "{}."), (6, "({})"), (2, "{} "))
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_VERBOSE = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_PUNCTUATION = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))


def plain_letter(text: str, options: Mapping[str, str]) -> str | None:
    """Read an answer that is a letter (LLaVA-1.5's form): alone, in brackets, or with a mark and more text after it."""
    match = _LETTER.fullmatch(text.strip())
    return match[1] if match and match[1] in options else None


def vlmevalkit_letter(text: str, options: Mapping[str, str]) -> str | None:
    """Read as VLMEvalKit's ``can_infer``; ``Z`` for an answer that refuses to choose."""
    if any(refusal in text for refusal in _REFUSALS):
        return "Z"
    words = text.translate(_PUNCTUATION).split()
    found = [letter for letter in options if letter in words]
    if len(found) == 1 and words.index(found[0]) > len(words) - 5:  # among the last four words
        return found[0]
    if not found and "Z" in words:
        return "Z"
    match = _VERBOSE.search(text)
    if match and match[1].upper() in options:
        return match[1].upper()
    if len(text) > 2 * sum(map(len, options.values())):
        return None
    named = [letter for letter, option in options.items() if option.lower() in text.lower()]
    return named[0] if len(named) == 1 else None


READINGS: dict[str, Callable[[str, Mapping[str, str]], str | None]] = {
    "": plain_letter,
    "vlmevalkit_": vlmevalkit_letter,
}
"""The rules by the prefix that their scores have."""


def best_placed_letter(text: str, letters: Iterable[str]) -> str | None:
    """Return lmms-eval's ``extract_mcq_answer``: the letter in the most telling place, the last among equals."""
    text = text.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    padded, bare = f" {text} ", text.strip()
    letters, places = tuple(letters), list[tuple[int, int, str]]()
    for letter in letters:
        frames = ((rank, frame.format(letter)) for rank, frame in _STATIC_FRAMES)
        places += [(rank, padded.rfind(framed), letter) for rank, framed in frames if framed in padded]
        after = (padded.lower().find(phrase) + len(phrase) for phrase in _STATIC_PHRASES if phrase in padded.lower())
        places += [(7, padded.find(letter, start), letter) for start in after if letter in padded[start:]]
        if bare.startswith(letter) and not bare[1:2].isalpha():
            places.append((10, 0, letter))
        if bare.endswith(letter) and not bare[-2:-1].isalpha():
            places.append((9, len(padded) - 1, letter))
    places = places or [(0, padded.rfind(letter), letter) for letter in letters if letter in padded]
    return max(places)[2] if places else None


_SENTENCE = re.compile(r"The answer is ([A-Z]).")  # the last point stands for any character, as in the original
ROTATION = 1_000_000
"""Rows of one question have the same index modulo this."""


class MMBenchScores(TaskMetric):
    """Accuracy over all rows, and over questions whose rotations are all answered right.

    A reference holds ``index``, ``answer`` (a letter) and ``options`` (texts by letter).

    Scores, each with the prefix of its reading (none: ``plain_letter``; ``vlmevalkit_``):
        ``accuracy``: vanilla, over all rows, rotations included. That the sub-token paper prints this is a reading: its
            figures are whole numbers of 4,329 rows, and it names no score.
        ``unrotated_accuracy``: over rows with an index below one million (VLMEvalKit's vanilla), if there are any.
        ``circular``: questions all of whose rows are right, if one has two. A limited run may lack rotations: too high.
    """

    @staticmethod
    def right(prediction: str, reference: Mapping[str, Any]) -> list[bool]:
        """Tell whether each reading is right."""
        return [read(prediction, reference["options"]) == reference["answer"] for read in READINGS.values()]

    def compute(self) -> dict[str, float]:
        rows = [(reference["index"], self.right(prediction, reference)) for prediction, reference in self.rows]
        questions: dict[int, list[list[bool]]] = defaultdict(list)
        for index, right in rows:
            questions[index % ROTATION].append(right)
        rotated = any(len(members) > 1 for members in questions.values())
        scored = {
            "accuracy": [right for _, right in rows],
            "unrotated_accuracy": [right for index, right in rows if index < ROTATION],
            "circular": [[*map(all, zip(*members, strict=True))] for members in questions.values() if rotated],
        }
        by_reading = {score: zip(*marks, strict=True) for score, marks in scored.items()}
        return {
            f"{name}{score}": mean(marks)
            for score, columns in by_reading.items()
            for name, marks in zip(READINGS, columns, strict=False)
        }

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        return float(plain_letter(prediction, reference["options"]) == reference["answer"])


class ScienceQAScores(MeanScores):
    """Chosen letters: ``accuracy`` by LLaVA's reading, ``llava_image_accuracy`` of samples with an image.

    A reference holds ``answer`` (index of the right choice), ``choices`` (their number) and ``image`` (true, false). A
    sample that was never answered is no sample here, while LLaVA's program counts it as wrong and without an image.
    """

    names = ("accuracy", "llava_image_accuracy")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        right = float(llava_choice(prediction, reference["choices"]) == reference["answer"])
        return dict.fromkeys(("accuracy", "llava_image_accuracy")[: 1 + reference["image"]], right)


def llava_letter(text: str) -> str | None:
    """Find LLaVA's letter: alone (no space), before ". " at the start, or in one "The answer is X."; else None."""
    if text in tuple(LETTERS):
        return text
    if len(text) >= 3 and text[0] in LETTERS and text[1:3] == ". ":
        return text[0]
    found: list[str] = _SENTENCE.findall(text)
    return found[0] if len(found) == 1 else None


def llava_choice(text: str, choices: int) -> int:
    """Return the index of the choice that LLaVA reads; -1 where there is no such letter or choice."""
    letter = llava_letter(text)
    return LETTERS[:choices].find(letter) if letter else -1
