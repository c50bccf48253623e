"""LongBench (Bai et al., ACL 2024): 21 sets of long texts in English, Chinese and code, asked as its ``pred.py`` asks.

Read from the files of its ``data.zip``, ``SET.jsonl`` each. Prompts, lengths of answers, the sets without a chat format
and the cut in the middle of a prompt that is too long are the original's (THUDM/LongBench, ``config`` and ``pred.py``).
What may be compressed is all before the question's words, the instruction in front of the context included; with
``question: compressed`` all before the last line, which is where the answer begins ("Answer:").

Not here: LongBench-E and LongBench v2; the wrappings of single models (a tokenizer's own chat template takes their
place); that ``samsum`` must say one token before a line break may end its answer; kvpress's form, whose instruction
after the context is compressed and whose answer prefix stands after the template's end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files as files_of_package
from pathlib import Path
from typing import ClassVar

from subtoken_train.evaluation.metrics.longbench_scores import (
    CLASSIFIED,
    PARAGRAPH,
    SETS,
    LongBenchScores,
    check_jieba,
)
from subtoken_train.evaluation.tasks.file_rows import FileRow, find_file, task_source
from subtoken_train.evaluation.tasks.long_context import QUESTIONS, LongContext
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.text_files import read_jsonl

PROMPTS_FILE = "longbench_prompts.json"
"""The original's ``config/dataset2prompt.json``, beside this file."""
NEW_TOKENS = {
    **dict.fromkeys(SETS, 32),
    **dict.fromkeys(("multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"), 64),
    **dict.fromkeys(("narrativeqa", "qasper", "dureader", "samsum"), 128),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), 512),
}
"""The original's ``config/dataset2maxlen.json``."""
ROWS = {**dict.fromkeys(SETS, 200), "multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
WITHOUT_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
_COLUMNS = ("input", "context", "answers", "all_classes")
_LINE_BREAK_ENDS = ("samsum",)


@dataclass
class LongBench(LongContext):
    """The sets; see ``LongContext`` for ``question``. ``chat`` leaves out examples and code (``WITHOUT_CHAT``).

    Attributes:
        sets: which of the 21.
    """

    sets: tuple[str, ...] = SETS

    name = "longbench"
    modality = "text"
    rows = sum(ROWS.values())
    primary = "score"
    scored_by = LongBenchScores
    allowed: ClassVar = {"sets": SETS, "question": QUESTIONS}
    where = (
        "hf download THUDM/LongBench data.zip --repo-type dataset --local-dir DIR, then unzip DIR/data.zip in DIR, "
        "which leaves DIR/data/SET.jsonl; DIR, or DIR/data, is the source"
    )

    @property
    def expected_rows(self) -> int:
        """Of all of ``sets``."""
        return sum(ROWS[name] for name in self.sets)

    def check_requirements(self) -> None:
        """jieba, for some of the Chinese sets."""
        check_jieba(self.sets)

    def samples(self) -> list[Sample]:
        """Set by set; ids are a set's name and the sample's number."""
        source = task_source(self)
        if not isinstance(source, Path):
            raise ValueError(f"task longbench reads a folder, and {source} is none. {self.where}")
        files = [find_file(self, source, f"{name}.jsonl", f"data/{name}.jsonl") for name in self.sets]
        prompts = json.loads(files_of_package(__package__).joinpath(PROMPTS_FILE).read_text(encoding="utf-8"))
        made = []
        for name, path in zip(self.sets, files, strict=True):
            rows = read_jsonl(path, _COLUMNS)
            made += [self._sample(name, number, row, prompts[name]) for number, row in enumerate(rows)]
        return made

    def _sample(self, name: str, number: int, row: FileRow, prompt: str) -> Sample:
        if (stated := row.values.get("dataset", name)) != name:
            raise ValueError(f"{row.place}: dataset is {stated!r}, in the file of {name!r}; fetch the file again")
        answers = row.texts("answers")
        if not answers:
            raise ValueError(f"{row.place}: no answers; fetch the file again")
        if name in PARAGRAPH and not all(PARAGRAPH[name].search(answer) for answer in answers):
            raise ValueError(f"{row.place}: an answer names no paragraph: {answers[0][:80]!r}; fetch the file again")
        reference = {"set": name, "answers": answers}
        if name in CLASSIFIED:
            reference["classes"] = row.texts("all_classes")
        before, _, after = prompt.partition("{context}")
        context = before + row.text("context")
        whole = context + after.replace("{input}", row.text("input"))
        compressed = max(len(context), whole.rstrip().rfind("\n") + 1) if self.compresses_question else len(context)
        return Sample(
            id=f"{name}-{number}",
            prompt=whole,
            reference=reference,
            context_characters=compressed,
            max_new_tokens=NEW_TOKENS[name],
            stop=("\n",) if name in _LINE_BREAK_ENDS else (),
            kind=name,
            cut_middle=True,
            chat=self.chat and name not in WITHOUT_CHAT,
            keep_space=True,
        )
