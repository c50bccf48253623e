"""Text tasks that are scored by log-likelihoods: MMLU's letters, and WikiText's perplexity after a context.

MMLU (Hendrycks et al., arXiv:2009.03300), scored as lm-evaluation-harness's ``acc``; read as Parquet, or as CSV files
``dev/SUBJECT_dev.csv`` and ``test/SUBJECT_test.csv``, the authors' (no header, letters) or with header and indices.
WikiText (Merity et al., 2016): the test split is one text, cut into windows of words that do not overlap: a context, a
short prefix that is read in full and chooses what is kept, and the words that are scored. lm-eval's ``wikitext`` undoes
WikiText's tokenisation first and scores every word, so figures compare with others of this task only.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.documents import check_file_name
from subtoken_train.errors import MAX_TOKENS, refuse
from subtoken_train.evaluation.metrics.metric import MeanScores, Prediction, TaskMetric, mean_of
from subtoken_train.evaluation.tasks.files import FileRow, benchmark_text, read_split, read_table, task_source
from subtoken_train.evaluation.tasks.image_questions import lettered
from subtoken_train.evaluation.tasks.task import Sample, Task


class Perplexity(TaskMetric):
    """``word_perplexity``, ``byte_perplexity`` and ``bits_per_byte`` of scored texts, lower is better.

    With L the sum of log-likelihoods in nats: exp(-L / words), exp(-L / bytes) and -L / bytes / ln 2. A reference holds
    ``words`` and ``bytes`` of the scored text, a prediction its one log-likelihood. ``score`` is 1 / byte perplexity.
    """

    higher_is_better = False
    points = frozenset({"word_perplexity", "byte_perplexity", "bits_per_byte"})

    def compute(self) -> dict[str, float]:
        parts = [(_only(said), of["words"], of["bytes"]) for said, of in self.rows]
        nats, words, octets = map(sum, zip(*parts, strict=True))
        return {
            "word_perplexity": math.exp(-nats / words),
            "byte_perplexity": math.exp(-nats / octets),
            "bits_per_byte": -nats / octets / math.log(2),
        }

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        return math.exp(_only(prediction) / reference["bytes"])


class TextLoss(MeanScores):
    """``nats_per_word`` of scored texts, the mean over windows, lower is better; references as ``Perplexity``'s."""

    names = ("nats_per_word",)
    points = frozenset(names)
    higher_is_better = False

    @staticmethod
    def figures(prediction: Prediction, reference: Mapping[str, Any]) -> dict[str, float]:
        return {"nats_per_word": -_only(prediction) / reference["words"]}


def _only(prediction: Prediction) -> float:
    assert isinstance(prediction, list)
    (value,) = prediction
    return value


MultipleChoice = mean_of("accuracy", lambda said, of: said.index(max(said)) == of["answer"])
"""The share of questions whose likeliest choice is right; among equals the first counts as chosen.

Likelihoods are taken as they are, not divided by length. A reference holds ``answer``, the right choice's index.
"""


_LETTERS = "ABCD"
_CELLS = ("question", "choice0", "choice1", "choice2", "choice3", "answer")


@dataclass
class MMLU(Task):
    """The 14,042 test questions; a subject's first examples of ``dev`` come before each, and may be compressed.

    ``style``: ``lm_eval`` (lm-evaluation-harness) or ``hendrycks`` (the authors' program), which has two spaces after
    "about" and keeps the space around a question.
    """

    num_fewshot: int = 5
    style: str = "lm_eval"

    allowed: ClassVar = {"style": ("lm_eval", "hendrycks"), "num_fewshot": range(6)}

    def samples(self) -> Sequence[Sample]:
        examples = self._by_subject("dev") if self.num_fewshot else {}
        samples = []
        for subject, rows in self._by_subject("test").items():
            shown = examples.get(subject, [])[: self.num_fewshot]
            few = f"{len(shown)} of {self.num_fewshot} examples in dev"
            refuse((len(shown) < self.num_fewshot, f"task mmlu: subject {subject} has {few}. {self.where}"))
            prefix = self.prefix(subject, shown)
            samples += [
                Sample(
                    f"{subject}/{number}",
                    prefix + self.question(row),
                    {"answer": _answer(row)},
                    choices=tuple(f" {letter}" for letter in _LETTERS),
                    context_characters=len(prefix),
                    kind=subject,
                )
                for number, row in enumerate(rows)
            ]
        return samples

    def prefix(self, subject: str, examples: Sequence[FileRow]) -> str:
        """Return the description and solved examples before a question."""
        about = ("  " if self.style == "hendrycks" else " ") + subject.replace("_", " ")
        solved = (f"{self.question(row)} {_LETTERS[_answer(row)]}\n\n" for row in examples)
        return f"The following are multiple choice questions (with answers) about{about}.\n\n{''.join(solved)}"

    def question(self, row: FileRow) -> str:
        """Return a question up to where its answer's letter belongs."""
        asked = row.values["question"] if self.style == "hendrycks" else row.values["question"].strip()
        return f"{asked}\n{lettered(row.values['choices'])}\nAnswer:"

    def _by_subject(self, split: str) -> dict[str, list[FileRow]]:
        source = task_source(self)
        subjects: dict[str, list[FileRow]] = defaultdict(list)
        folder = source / split if isinstance(source, Path) else None
        if folder is not None and folder.is_dir():
            for path in sorted(folder.glob(f"*_{split}.csv")):
                found = subjects[path.stem.removesuffix(f"_{split}")]
                for row in read_table(path, _CELLS, header=False):
                    answer, cells = row.text("answer").strip(), [row.values[name] for name in _CELLS[:5]]
                    letter = _LETTERS.find(answer) if answer in tuple(_LETTERS) else -1
                    number = int(answer) if answer.isdecimal() else letter  # -1: neither letter nor number
                    if found or tuple(cells) != _CELLS[:5]:  # a first row of names is a header
                        found.append(row.with_values(choices=cells[1:], answer=number))
        else:
            for row in read_split(self, split, self.columns, config="all"):
                subjects[row.values["subject"]].append(row)
        refuse((not subjects, f"task mmlu: {folder} has no *_{split}.csv. {self.where}"))
        return subjects


def _answer(row: FileRow) -> int:
    answer, choices = row.values["answer"], row.values["choices"]
    if len(choices) != len(_LETTERS) or answer not in range(len(_LETTERS)):
        needs = "it needs 4 choices, and A to D or 0 to 3"
        raise ValueError(f"{row.place}: {len(choices)} choices with answer {answer}; {needs}")
    return int(answer)


@dataclass
class WikiText(Task):
    """Windows of words that may be compressed, words that are read, words that are scored; ``config`` is the Hub's."""

    config: str = "wikitext-103-raw-v1"
    context_words: int = 768
    prefix_words: int = 48
    query_words: int = 720

    ranges: ClassVar = dict.fromkeys(("context_words", "prefix_words", "query_words"), (1, MAX_TOKENS))
    text_files: ClassVar = ("test.txt", "wiki.test.raw", "wiki.test.tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_file_name(self.config, "config of wikitext")

    @property
    def asks(self) -> str:
        return "raw text, no chat template; no question: what follows the context is scored"

    def samples(self) -> Sequence[Sample]:
        sizes = (self.context_words, self.prefix_words, self.query_words)
        if not (samples := list(windows(self._text(), sizes))):
            raise ValueError(f"{self.source or self.hub_id} has fewer words than one window of {sum(sizes)}; ask fewer")
        return samples

    def _text(self) -> str:
        source = task_source(self)
        if isinstance(source, Path):
            for path in (source / name for name in self.text_files):
                if path.is_file():
                    return benchmark_text(path)
        return "".join(row.values["text"] for row in read_split(self, "test", self.columns, config=self.config))


@dataclass
class OwnText(WikiText):
    """Windows of one's own text (``test.txt`` of a folder), scored so that arms are compared window by window."""

    context_words: int = 256
    prefix_words: int = 16
    query_words: int = 128

    def _text(self) -> str:
        return benchmark_text(Path(task_source(self)) / self.text_files[0])


def windows(text: str, sizes: Sequence[int]) -> Iterable[Sample]:
    """Cut samples of ``sizes`` words of context, prefix and scored text; white space before a word belongs to it."""
    ends = [match.end() for match in re.finditer(r"\s*\S+", text)]
    context, prefix, query = sizes
    window = context + prefix + query
    for number in range(len(ends) // window):
        first = number * window
        start = ends[first - 1] if first else 0
        context_end, prefix_end, end = (ends[first + words - 1] for words in (context, context + prefix, window))
        scored = text[prefix_end:end]
        counts = {"words": query, "bytes": len(scored.encode())}
        yield Sample(str(number), text[start:prefix_end], counts, (), (scored,), context_end - start, kind="window")
