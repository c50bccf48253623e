"""LongBench's scorers (Bai et al., ACL 2024): ``metrics.py`` and ``eval.py`` of THUDM/LongBench, without its libraries.

Written out are ``rouge`` 1.0.1's ROUGE-L (over sets of words, sentences split at every full stop) and ``fuzzywuzzy``'s
``ratio`` as it is without ``python-Levenshtein`` (which would find other alignments). Oddities that are kept: a class
that follows a dropped one is not looked at; its fallback for an answer that names no class is never reached; all digits
of an answer count as numbers. Not kept: ``rouge`` recurses, so that its original gives 0 to pairs of long sentences.

Chinese is cut into words by ``jieba``, an optional dependency.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from subtoken_train.evaluation.metrics.metric import MeanScores

CHINESE_WORDS = ("multifieldqa_zh", "dureader", "vcsum")
"""Sets whose scores need ``jieba``."""
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Sets of examples, after which a model goes on with examples of its own: the first line is the answer."""
_CHINESE_MARKS = (  # full-width and Chinese punctuation
    "\uff01\uff1f\uff61\u3002\uff02\uff03\uff04\uff05\uff06\uff07\uff08\uff09\uff0a\uff0b\uff0c\uff0d"
    "\uff0f\uff1a\uff1b\uff1c\uff1d\uff1e\uff20\uff3b\uff3c\uff3d\uff3e\uff3f\uff40\uff5b\uff5c\uff5d"
    "\uff5e\uff5f\uff60\uff62\uff63\uff64\u3001\u3003\u300b\u300c\u300d\u300e\u300f\u3010\u3011\u3014"
    "\u3015\u3016\u3017\u3018\u3019\u301a\u301b\u301c\u301d\u301e\u301f\u3030\u303e\u303f\u2013\u2014"
    "\u2018\u2019\u201b\u201c\u201d\u201e\u201f\u2026\u2027\ufe4f."
)
_MARKS = str.maketrans("", "", string.punctuation)
_ALL_MARKS = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBERS = re.compile(r"\d+")
PARAGRAPH = {"passage_retrieval_en": re.compile(r"Paragraph (\d+)"), "passage_retrieval_zh": re.compile(r"段落(\d+)")}
"""What the answers of the retrieval sets hold."""


def check_jieba(sets: Iterable[str]) -> None:
    """Raise a worded ``ValueError`` where some of the sets need ``jieba``, and it is missing."""
    if (chinese := [name for name in CHINESE_WORDS if name in sets]) and find_spec("jieba") is None:
        raise ValueError(
            f"LongBench's {', '.join(chinese)} are cut into words by jieba, which is missing; install it with: "
            "pip install 'subtoken_train[eval]', or name other sets"
        )


def word_f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    """F1 of two bags of words."""
    shared = (Counter(prediction) & Counter(answer)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(answer)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, answer: str) -> float:
    """Of the words in lower case, without ASCII punctuation and articles."""
    return word_f1(*(_ARTICLES.sub(" ", text.lower().translate(_MARKS)).split() for text in (prediction, answer)))


def qa_f1_zh(prediction: str, answer: str) -> float:
    """Of jieba's words, without punctuation."""
    words = (["".join(word.lower().translate(_ALL_MARKS).split()) for word in _cut(t)] for t in (prediction, answer))
    return word_f1(*([word for word in some if word] for some in words))


def rouge_l(prediction: str, answer: str) -> float:
    """F1 of the words of all common subsequences of sentences, each word counted once."""
    said, wanted = ([" ".join(s.split()).split(" ") for s in text.split(".") if s] for text in (prediction, answer))
    if not said or not wanted:
        return 0.0
    common = {word for theirs in wanted for ours in said for word in _subsequence(theirs, ours)}
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in said for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(prediction: str, answer: str) -> float:
    """Of jieba's words."""
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def share_of_numbers(prediction: str, wanted: str) -> float:
    """The share of an answer's numbers that are the wanted one."""
    numbers = _NUMBERS.findall(prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Similarity of the first line without a comment or a fence, in hundredths."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100 if line and answer else 0.0


def class_score(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes that are named, where the right one is among them.

    Names that are parts of the right one's do not count.
    """
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in answer and named[place] != answer:
            named.remove(named[place])  # and the next one is passed over, as in the original
        place += 1
    return 1 / len(named) if answer in named else 0.0


_RULES: dict[Callable[[str, str], float], tuple[str, ...]] = {
    qa_f1: ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"),
    qa_f1_zh: ("multifieldqa_zh",),
    rouge_l: ("gov_report", "qmsum", "multi_news", "samsum"),
    rouge_l_zh: ("dureader", "vcsum"),
    share_of_numbers: ("passage_count", *PARAGRAPH),
    code_similarity: ("lcc", "repobench-p"),
}
_RULE = {name: rule for rule, names in _RULES.items() for name in names}
CLASSIFIED = ("trec", "lsht")
SETS = (
    "narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh", "hotpotqa", "2wikimqa", "musique", "dureader",
    "gov_report", "qmsum", "multi_news", "vcsum", "trec", "triviaqa", "samsum", "lsht", "passage_count",
    "passage_retrieval_en", "passage_retrieval_zh", "lcc", "repobench-p",
)  # fmt: skip


def longbench_score(prediction: str, reference: Mapping[str, Any]) -> float:
    """An answer's score in its set: the best over the accepted answers.

    Args:
        prediction: with the space around it: of code it is indentation.
        reference: see ``LongBenchScores``.

    Raises:
        ValueError: the set needs ``jieba``, which is missing.
    """
    name = reference["set"]
    if name in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max(_one(prediction, answer, name, reference) for answer in reference["answers"])


def _one(prediction: str, answer: str, name: str, reference: Mapping[str, Any]) -> float:
    if name in CLASSIFIED:
        return class_score(prediction, answer, reference["classes"])
    if name in PARAGRAPH:
        answer = PARAGRAPH[name].findall(answer)[0]
    return _RULE[name](prediction, answer)


class LongBenchScores(MeanScores):
    """``score``: the mean over the sets' means; each set's own mean has the set's name.

    A reference holds ``set``, ``answers`` (texts, at least one) and, of ``CLASSIFIED`` sets, ``classes``. A sample's
    ``score`` is its term of its set's mean.
    """

    names = SETS
    subtasks = SETS

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The answer's score in its set."""
        return {reference["set"]: longbench_score(prediction, reference)}

    def compute(self) -> dict[str, Tensor]:
        """The mean over the sets that were asked, and each set's."""
        means = super().compute()
        return {"score": torch.stack([*means.values()]).mean(), **means} if means else {}

    @classmethod
    def score(cls, prediction: Any, reference: Mapping[str, Any]) -> float:
        """The answer's score in its set."""
        return longbench_score(prediction, reference)


def _cut(text: str) -> list[str]:
    return list(_chinese().cut(text))


@cache
def _chinese() -> Any:
    check_jieba(CHINESE_WORDS)
    import jieba

    jieba.setLogLevel("WARNING")
    tokenizer = jieba.Tokenizer()
    with TemporaryDirectory() as folder:  # its cache is a file that anybody could leave in a shared folder
        tokenizer.tmp_dir = folder
        tokenizer.initialize()
    return tokenizer


def _subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A longest common subsequence; of several the one that is found by going back in ``second`` first."""
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    found, i, j = [], len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.append(first[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
