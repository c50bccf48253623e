"""Short answers against texts: how similar, equal, or near as a number; over several people's answers; for a judge.

Sources: DocVQA's ANLS (Biten et al., arXiv:1905.13648, threshold 0.5) as lmms-eval's ``anls``; GQA's exact match by
LLaVA's ``convert_gqa_for_eval.py`` before GQA's ``eval.py``; ChartQA's accuracy (Masry et al., arXiv:2203.10244,
section 5.1), as Qwen-VL's and lmms-eval's ``chartqa``; TextVQA and VizWiz: LLaVA's ``m4c_evaluator.py`` and lmms-eval,
which agree; VQAv2: GT-Vision-Lab's ``vqaEval.py`` after LLaVA's ``convert_vqav2_for_submission.py``.

``evalai_answer`` is EvalAI's processor as LLaVA and lmms-eval use it; its two last steps also normalise for
``vqaEval.py``. Odd, and kept: a punctuation mark is deleted where it touches a space *anywhere in the input*, or where
a comma stands between digits, and else becomes a space; a full stop goes unless a digit follows, and only the first 32
go (the original passes a flag where ``re.sub`` takes a count); "none" becomes "0", and "ten" is the last number word;
missing apostrophes come back, except in words that are others too (its, were, well).
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from subtoken_train.evaluation.metrics.metric import mean_of

SIMILAR_ENOUGH = 0.5
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
TOLERANCE = 0.05


def lmms_similarity(prediction: str, answer: str) -> float:
    """Return 1 - distance / length, 0 where that is below ``SIMILAR_ENOUGH``; two empty texts are equal.

    White space collapses for the distance, which is divided by the longer of the two *raw* texts, so that space around
    a text raises its score (also Qwen-VL's and VLMEvalKit's rule).
    """
    if not (length := max(len(prediction.upper()), len(answer.upper()))):
        return 1.0
    similarity = 1 - levenshtein(*(" ".join(text.lower().split()) for text in (prediction, answer))) / length
    return similarity if similarity >= SIMILAR_ENOUGH else 0.0


def levenshtein(first: str, second: str) -> int:
    """Return the edit distance of two texts (torchmetrics' looks at a beam of 25 cells only)."""
    row = list(range(len(second) + 1))
    for i, character in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (character != other))
    return row[-1]


ANLS = mean_of("lmms_anls", lambda said, of: max(lmms_similarity(said, answer) for answer in of["answers"]))
"""The best similarity to any of the reference's ``answers``, 0 where it is below one half."""
RelaxedAccuracy = mean_of(
    "relaxed_accuracy", lambda said, of: relaxed_match(said, of["answer"]), {"kind": ("human", "augmented")}
)
"""Share of answers that are right by ``relaxed_match``: of all, and of each ``kind`` (human, augmented)."""
ExactMatch = mean_of("accuracy", lambda said, of: said.rstrip(".").lower() == of["answer"])
"""Answers equal to the reference's ``answer``, in lower case, but for full stops at the end."""
Answered = mean_of("answered", lambda said, _: bool(said.strip()))
"""The share of answers that are not empty. It says nothing of their quality: that is a judge's."""


def bag_f1(ours: Iterable[str], theirs: Iterable[str]) -> float:
    """Return the F1 of two texts' words, repeated ones counted; 0 where they share none."""
    first, second = Counter(ours), Counter(theirs)
    return 2 * (first & second).total() / ((first.total() + second.total()) or 1)


def without_punctuation(text: str) -> str:
    """Lower the text and drop ASCII punctuation."""
    return text.lower().translate(_WITHOUT_PUNCTUATION)


def relaxed_match(prediction: str, target: str) -> bool:
    """Tell whether numbers (``float``'s, or hundredths with "%") differ by 5 % at most, or texts only in case."""
    predicted, wanted = _number(prediction), _number(target)
    if predicted is None or not wanted:
        return prediction.lower() == target.lower()
    return abs(predicted - wanted) / abs(wanted) <= TOLERANCE


def _number(text: str) -> float | None:
    percent = text.endswith("%")
    try:
        return float(text.rstrip("%")) / 100 if percent else float(text)
    except ValueError:
        return None


_FULL_WIDTH = {0x3000: " "} | {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}


def holds_answer(said: str, reference: Mapping[str, Any]) -> bool:
    """Tell whether a text holds one of the accepted ones (``answers``), as ``tasks/ocrbench/utils.py`` of lmms-eval.

    Case does not count, and a full-width character is its ASCII one; of formulas (``formula``) case counts, and space
    does not.
    """

    def read(text: str) -> str:
        text = text.strip().replace("\n", " ")
        return text.replace(" ", "") if reference["formula"] else text.translate(_FULL_WIDTH).lower()

    return any(read(answer) in read(said) for answer in reference["answers"])


ContainsAnswer = mean_of("accuracy", holds_answer)
"""OCRBench's: the share of answers that hold an accepted text."""
MARKS = ';/[]"{}()=+\\_-><@`,?!'
ARTICLES = frozenset({"a", "an", "the"})
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten"
NUMBERS = {word: str(n) for n, word in enumerate(_NUMBER_WORDS.split())}
NUMBERS["none"] = "0"
EVALAI_COMMA = re.compile(r"(?<=\d),+(?=\d)")
OFFICIAL_COMMA = re.compile(r"\d,\d")  # differs in texts like "1,,2" alone
MAX_STOPS = 32
STOP = re.compile(r"\.(?!\d)")
APOSTROPHES = {
    word[:place] + word[place + 1 :]: word
    for word in files(__package__).joinpath("contractions.txt").read_text("utf-8").split()
    for place, mark in enumerate(word)
    if mark == "'"
}
"""Every contraction with one of its apostrophes missing -> the contraction."""
APOSTROPHES["somebody'd"] = "somebodyd"


def evalai_answer(text: str) -> str:
    """Return the text as EvalAI compares it: ``word_tokens``, then ``without_marks``, then ``plain_words``."""
    return plain_words(without_marks(without_breaks(word_tokens(text))))


def word_tokens(text: str) -> str:
    """Lower the text, drop commas and question marks, put a space before every "'s"."""
    return text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()


def without_breaks(text: str) -> str:
    """Make line ends and tabs spaces, and strip the text."""
    return text.replace("\n", " ").replace("\t", " ").strip()


def without_marks(text: str, comma: re.Pattern[str] = EVALAI_COMMA) -> str:
    """Delete punctuation or make it a space; where ``comma`` (between digits) is found, all marks are deleted."""
    spaced, has_comma = text, comma.search(text) is not None
    for mark in MARKS:
        touches_space = f"{mark} " in text or f" {mark}" in text
        spaced = spaced.replace(mark, "" if has_comma or touches_space else " ")
    return STOP.sub("", spaced, count=MAX_STOPS)


def plain_words(text: str) -> str:
    """Lower the text; number words become digits, articles go, apostrophes come back, spaces are single."""
    words = (NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(APOSTROPHES.get(word, word) for word in words if word not in ARTICLES)


def leave_one_out(answer: str, people: Sequence[str]) -> float:
    """Average min(1, how many *others* gave ``answer`` / 3) over the people: of ten, 0, .3, .6, .9 or 1; 0 of none."""
    if not people:
        return 0.0
    same = sum(other == answer for other in people)
    agreed, differed = min(1.0, (same - 1) / 3), min(1.0, same / 3)
    return (same * agreed + (len(people) - same) * differed) / len(people)


SoftAccuracy = mean_of(
    "accuracy", lambda said, of: leave_one_out(evalai_answer(said), [*map(evalai_answer, of["answers"])])
)
"""``leave_one_out`` of the normalised prediction among the normalised ``answers``."""
VQAv2Accuracy = mean_of(
    "llava_accuracy", lambda said, of: official(evalai_answer(said), [*map(without_breaks, of["answers"])])
)
"""The official scorer's, after ``evalai_answer``; the sub-token paper names none."""


def official(answer: str, people: Sequence[str]) -> float:
    """Score one answer as ``vqaEval.py`` does, in 0..1; it normalises only where the ten answers are not the same."""
    if len(set(people)) > 1:
        answer, *people = (plain_words(without_marks(text, OFFICIAL_COMMA)) for text in (answer, *people))
    return leave_one_out(answer, people)
