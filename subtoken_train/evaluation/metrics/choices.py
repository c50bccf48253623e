"""Multiple choice by a letter in a free answer: MMBench with its rotations (Liu et al., arXiv:2307.06281), ScienceQA.

MMBench's letters are read by the rules of several programs without their judge: MMBench_Evaluator of lmms-eval
(``tasks/mmbench/mmbench_evals.py``), the fallback of its static task (``tasks/_task_utils/mcq_extract.py`` of v0.7.2),
and ``utils/matching_util.py`` of VLMEvalKit. Where these ask a language model or draw a letter at random, the answer
here names no option. Options are a mapping from letter to text. Sources for ScienceQA:
``llava/eval/eval_science_qa.py`` of LLaVA-1.5, ``tasks/scienceqa/utils.py`` of lmms-eval.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from subtoken_train.evaluation.metrics.metric import MeanScores, TaskMetric, mean

LETTERS = "ABCDE"
_LETTER = re.compile(r"[(\uff08]?([A-E])(?:[.:,)\u3002\uff1a\uff0c\u3001\uff09].*)?", re.DOTALL)
_LMMS_FRAMES = (
    ("", "."), ("", ","), ("", ":"), ("", ")"), ("", ")."), ("(", ")"), ("(", ")."),
    (":", ""), (":", ","), (":", "."), (":", ")"), (":", ")."),
)  # fmt: skip
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


def lmms_letter(text: str, options: Mapping[str, str]) -> str | None:
    """Read as lmms-eval's ``can_infer``: a letter, else the one option whose text the answer contains."""
    return _lmms_option(text) or _contained(text, options)


def lmms_static_letter(text: str, options: Mapping[str, str]) -> str | None:
    """Read as lmms-eval's task ``mmbench_en_dev_static``: ``can_infer``, else the best-placed letter of an option."""
    return lmms_letter(text, options) or best_placed_letter(text, options)


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
    return _contained(text, options)


READINGS: dict[str, Callable[[str, Mapping[str, str]], str | None]] = {
    "": plain_letter,
    "lmms_": lmms_letter,
    "lmms_static_": lmms_static_letter,
    "vlmevalkit_": vlmevalkit_letter,
}
"""The rules by the prefix that their scores have."""


def _contained(text: str, options: Mapping[str, str]) -> str | None:
    found = [letter for letter, option in options.items() if option.lower() in text.lower()]
    return found[0] if len(found) == 1 else None


def _lmms_option(text: str) -> str | None:
    """Find a letter that is the only one among the words, else one in the first frame in which only one letter is."""
    words = text.split()
    for before, after in (("", ""), *_LMMS_FRAMES):
        found = [letter for letter in LETTERS if before + letter + after in words]
        article = not before + after and "A" in words and len(words) > 3  # in a longer answer "A" may be one
        if len(found) == 1 and not article:
            return found[0]
    return None


def best_placed_letter(text: str, letters: Iterable[str]) -> str | None:
    """Return the letter in the most telling place, and among equals the last: start, end, phrase, frame, any word.

    The rule of lmms-eval's ``extract_mcq_answer``; None where none of ``letters`` is in the text.
    """
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

    A reference holds ``index``, ``answer`` (a letter), ``options`` (texts by letter) and, where the question has fewer
    options than four, ``nan_options``: the letters that the Hub's file gives the text "nan". lmms-eval asks without
    them and then reads answers with them, so "banana" may name one; only the ``lmms_`` readings do so here.

    Scores, each with the prefix of its reading (none: ``plain_letter``; ``lmms_``, ``lmms_static_``, ``vlmevalkit_``):
        ``accuracy``: vanilla, over all rows, rotations included. That the sub-token paper prints this is a reading: its
            figures are whole numbers of 4,329 rows, and it names no score.
        ``unrotated_accuracy``: over rows with an index below one million (VLMEvalKit's vanilla), if there are any.
        ``circular``: questions all of whose rows are right, if one has two. A limited run may lack rotations: too high.

    An answer that names no option is wrong. So of lmms-eval's tasks ``mmbench_en_dev_static`` gives
    ``lmms_static_circular``, and ``mmbench_en_dev`` gives ``lmms_circular`` and what its judge adds.
    """

    @staticmethod
    def right(prediction: str, reference: Mapping[str, Any]) -> list[bool]:
        """Tell whether each reading is right."""
        options, answer = reference["options"], reference["answer"]
        lmms = {**options, **dict.fromkeys(reference.get("nan_options", ()), "nan")}
        read = ((each, lmms if name.startswith("lmms_") else options) for name, each in READINGS.items())
        return [each(prediction, texts) == answer for each, texts in read]

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
    """Chosen letters: ``accuracy`` by LLaVA's reading (``llava_image_accuracy`` of samples with an image), lmms-eval's.

    A reference holds ``answer`` (index of the right choice), ``choices`` (their number) and ``image`` (true, false). A
    sample that was never answered is no sample here, while LLaVA's program counts it as wrong and without an image.
    """

    names = ("accuracy", "llava_image_accuracy", "lmms_accuracy")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        answer = reference["answer"]
        right = float(llava_choice(prediction, reference["choices"]) == answer)
        of_image = {"llava_image_accuracy": right} if reference["image"] else {}
        return {"accuracy": right, **of_image, "lmms_accuracy": float(lmms_right(prediction, LETTERS[answer]))}


def llava_letter(text: str) -> str | None:
    """Find the letter as LLaVA does: alone, before ". " at the start, or in the one "The answer is X."; else None.

    Space or a line break around a letter hides it, as in the original, whose model strips its answers first.
    """
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


def lmms_right(text: str, letter: str) -> bool:
    """Apply lmms-eval's rule: the letter in either case, or a text that starts with it and a full stop."""
    text = text.strip()
    return text.lower() == letter.lower() or text[:2] == f"{letter}."
