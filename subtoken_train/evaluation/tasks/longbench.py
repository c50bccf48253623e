"""LongBench (Bai et al., ACL 2024): 21 sets of long texts in English, Chinese and code; and LongBench v2.

Read from ``SET.jsonl`` of its ``data.zip``. Prompts, lengths of answers, sets without a chat format and the cut in the
middle are the original's (THUDM/LongBench, ``config`` and ``pred.py``). All before the question's words may be
compressed; with ``question: compressed`` all before the last line, where the answer begins ("Answer:").

Scorers are those of its ``metrics.py`` and ``eval.py``: ``rouge`` 1.0.1's ROUGE-L (sets of words, sentences split at
every full stop) and ``fuzzywuzzy``'s ``ratio`` without ``python-Levenshtein``, oddities included; but long sentences,
at which ``rouge``'s recursion ends with 0, are scored. Chinese is cut into words by ``jieba``. Not here: LongBench-E;
wrappings of single models (a chat template takes their place); that ``samsum`` must say one token before a line break
may end its answer; kvpress's form.

v2 (arXiv:2412.15204): 503 questions of four choices, in its ``data.json``, asked without reasoning (2e00731f,
``pred.py`` and ``prompts/0shot.txt``). Not here: its other prompts, sampling at temperature 0.1, and lm-eval's form,
which compares the letters' likelihoods.
"""

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files as files_of_package
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

from subtoken_train.errors import check_package, refuse, unknown_name
from subtoken_train.evaluation.metrics.metric import mean_of, mean_of_tasks
from subtoken_train.evaluation.metrics.short_answers import bag_f1, without_punctuation
from subtoken_train.evaluation.tasks import files
from subtoken_train.evaluation.tasks.files import FileRow, find_file, task_folder
from subtoken_train.evaluation.tasks.ruler import LongContext
from subtoken_train.evaluation.tasks.table import WORDS
from subtoken_train.evaluation.tasks.task import Sample


class LongBenchSet(NamedTuple):
    """A set as the original's ``config`` has it; rules that end in ``_zh`` need ``jieba``.

    ``first_line``: it has examples, after which a model goes on with examples of its own: the first line is the answer.
    """

    prompt: str
    rule: str
    tokens: int
    rows: int
    chat: bool = True
    first_line: bool = False


_READ = json.loads(files_of_package(__package__).joinpath("longbench_sets.json").read_text("utf-8"))
SETS = {name: LongBenchSet(**row) for name, row in _READ.items()}
_ALL_MARKS = str.maketrans("", "", string.punctuation + WORDS["chinese_marks"])  # and full-width and Chinese ones
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBERS = re.compile(r"\d+")
PARAGRAPH = {"passage_retrieval_en": re.compile(r"Paragraph (\d+)"), "passage_retrieval_zh": re.compile(r"段落(\d+)")}
"""Matches the paragraph that an answer of the retrieval sets names."""


def check_jieba(sets: Iterable[str]) -> None:
    """Raise a worded ``ValueError`` where some of the sets need ``jieba``, and it is missing."""
    if chinese := [name for name, row in SETS.items() if row.rule.endswith("_zh") and name in sets]:
        check_package("jieba", "eval", f"cutting LongBench's {', '.join(chinese)} into words", "name other sets")


def qa_f1(prediction: str, answer: str) -> float:
    """Return the F1 of words in lower case, without ASCII punctuation and articles."""
    return bag_f1(*(_ARTICLES.sub(" ", without_punctuation(text)).split() for text in (prediction, answer)))


def _qa_f1_zh(prediction: str, answer: str) -> float:
    texts = ((word.lower().translate(_ALL_MARKS) for word in _cut(text)) for text in (prediction, answer))
    return bag_f1(*([made for word in words if (made := "".join(word.split()))] for words in texts))


def rouge_l(prediction: str, answer: str) -> float:
    """Return the F1 of the words of all common subsequences of sentences, each word counted once."""
    said, wanted = ([" ".join(s.split()).split(" ") for s in text.split(".") if s] for text in (prediction, answer))
    if not said or not wanted:
        return 0.0
    common = {word for theirs in wanted for ours in said for word in _subsequence(theirs, ours)}
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in said for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _share_of_numbers(prediction: str, wanted: str) -> float:
    numbers = _NUMBERS.findall(prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Return the similarity of the first line without a comment or a fence, in hundredths."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100 if line and answer else 0.0


def class_score(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Return one over the number of classes that are named, without parts of the right one's name; 0 without it."""
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in answer and named[place] != answer:
            named.remove(named[place])  # and the next one is passed over, as in the original
        place += 1
    return 1 / len(named) if answer in named else 0.0


_RULES: dict[str, Callable[[str, str], float]] = {
    **{"qa_f1": qa_f1, "qa_f1_zh": _qa_f1_zh, "rouge_l": rouge_l, "code_similarity": code_similarity},
    "rouge_l_zh": lambda said, answer: rouge_l(" ".join(_cut(said)), " ".join(_cut(answer))),
    "share_of_numbers": _share_of_numbers,
}


def longbench_score(prediction: str, reference: Mapping[str, Any]) -> float:
    """Return an answer's score in its set, the best over the accepted ones; space around it is indentation in code."""
    name, answers = reference["set"], reference["answers"]
    if SETS[name].first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if SETS[name].rule == "class_score":
        return max(class_score(prediction, answer, reference["classes"]) for answer in answers)
    if name in PARAGRAPH:
        answers = [PARAGRAPH[name].findall(answer)[0] for answer in answers]
    return max(_RULES[SETS[name].rule](prediction, answer) for answer in answers)


LongBenchScores = mean_of_tasks("score", "set", tuple(SETS), longbench_score)
"""A reference holds ``set``, ``answers`` (texts, at least one) and, of sets with ``class_score``, ``classes``."""


def _cut(text: str) -> list[str]:
    return list(_chinese().cut(text))


@cache
def _chinese() -> Any:
    check_jieba(SETS)
    import jieba

    jieba.setLogLevel("WARNING")
    tokenizer = jieba.Tokenizer()
    with TemporaryDirectory() as folder:  # its cache is a file that anybody could leave in a shared folder
        tokenizer.tmp_dir = folder
        tokenizer.initialize()
    return tokenizer


def _subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return a longest common subsequence; of several the one that is found by going back in ``second`` first."""
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


@dataclass
class LongBench(LongContext):
    """Some or all of the 21 sets; ids are a set's name and the sample's number. ``chat`` spares some."""

    sets: tuple[str, ...] = tuple(SETS)

    allowed: ClassVar = {"sets": tuple(SETS)}

    @property
    def expected_rows(self) -> int:
        return sum(SETS[name].rows for name in self.sets)

    def check_requirements(self) -> None:
        check_jieba(self.sets)

    def samples(self) -> list[Sample]:
        source = task_folder(self)
        paths = [find_file(self, source, f"{name}.jsonl", f"data/{name}.jsonl") for name in self.sets]
        made = []
        for name, path in zip(self.sets, paths, strict=True):
            made += [self._sample(name, number, row) for number, row in enumerate(files.read_jsonl(path, self.columns))]
        return made

    def _sample(self, name: str, number: int, row: FileRow) -> Sample:
        if (stated := row.values.get("dataset", name)) != name:
            raise ValueError(f"{row.place}: dataset is {stated!r}, in the file of {name!r}; fetch the file again")
        answers = row.texts("answers")
        refuse((not answers, f"{row.place}: no answers; fetch the file again"))
        if name in PARAGRAPH and not all(PARAGRAPH[name].search(answer) for answer in answers):
            raise ValueError(f"{row.place}: an answer names no paragraph: {answers[0][:80]!r}; fetch the file again")
        reference, own = {"set": name, "answers": answers}, SETS[name]
        if own.rule == "class_score":
            reference["classes"] = row.texts("all_classes")
        before, _, after = own.prompt.partition("{context}")
        context = before + row.text("context")
        whole = context + after.replace("{input}", row.text("input"))
        compressed = max(len(context), whole.rstrip().rfind("\n") + 1) if self.compresses_question else len(context)
        return Sample(
            id=f"{name}-{number}",
            prompt=whole,
            reference=reference,
            context_characters=compressed,
            max_new_tokens=own.tokens,
            stop=("\n",) if name == "samsum" else (),
            kind=name,
            cut_middle=True,
            chat=self.chat and own.chat,
            keep_space=True,
        )


_SAID = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))
_GROUPS = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}


def said_letter(text: str) -> str | None:
    """Return the letter of the first "The correct answer is (A)", else of the first one without brackets, or None."""
    text = text.replace("*", "")
    found = next((match for form in _SAID if (match := form.search(text))), None)
    return found[1] if found else None


LongBenchV2Accuracy = mean_of("accuracy", lambda said, of: said_letter(said) == of["answer"], _GROUPS)
"""Shares of right letters: ``accuracy``, and of each difficulty and length; an answer without a letter is wrong."""


class LongBenchV2(LongContext):
    """All questions of v2; the original asks in a chat."""

    before: ClassVar = "Please read the following text and answer the question below.\n\n<text>\n"
    after: ClassVar = (
        "\n</text>\n\nWhat is the correct answer to this question: $Q$\nChoices:\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$"
        '\n(D) $C_D$\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
    )

    def samples(self) -> list[Sample]:
        path = find_file(self, task_folder(self), "data.json")
        return [self._sample(row) for row in files.read_entries(path, None, self.columns)]

    def _sample(self, row: FileRow) -> Sample:
        for column, allowed in {"answer": tuple("ABCD"), **_GROUPS}.items():
            if row.values[column] not in allowed:
                raise ValueError(f"{row.place}: {unknown_name(column, row.values[column], allowed)}")
        context, asked = self.before + row.text("context").strip(), self.after
        marks = {"$Q$": "question", **{f"$C_{letter}$": f"choice_{letter}" for letter in "ABCD"}}
        for mark, column in marks.items():  # one after the other, as the original, in the text too
            context, asked = (part.replace(mark, row.text(column).strip()) for part in (context, asked))
        whole = context + asked
        return Sample(
            str(row.values["_id"]),
            whole,
            {name: row.values[name] for name in ("answer", *_GROUPS)},
            context_characters=whole.rfind("\n") + 1 if self.compresses_question else len(context),
            max_new_tokens=self.tokens,
            kind=row.text("domain"),
            cut_middle=True,
            chat=self.chat,
        )
