"""The embedded models' own tasks, held out: digit scenes for the vision-language model, key-value recall for the other.

Scenes are in LLaVA's instruction format, as ``subtoken-train data scenes`` writes them; all their tasks, one for each
benchmark whose style they follow, read the same files. Of recall, facts are stated in English, and eight are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subtoken_train.datasets.english import SPLITS
from subtoken_train.datasets.recall import RecallRecords, RecallSample, RecallTask, check_num_facts
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.errors import MAX_COUNT, MAX_SEED, MAX_TOKENS
from subtoken_train.evaluation.metrics.scene_scores import SceneScore
from subtoken_train.evaluation.metrics.string_match import RecallScore
from subtoken_train.evaluation.tasks.long_context import MadeTexts, read_tokenizer
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.families.literal_marks import IMAGE_MARK, picture_marks, unescaped


@dataclass
class Recall(MadeTexts, row="recall"):
    """Contexts of a split's English with facts drawn for them.

    A context is a text here: where two of its parts make other tokens together, it is a token or two longer or shorter
    than it was drawn.

    Attributes:
        context_length: tokens of each, by ``tokenizer``.
    """

    contexts: int = 200
    context_length: int = 512
    num_facts: int = 24
    num_questions: int = 8
    tokenizer: str = "checkpoints/tiny-llama"
    split: str = "test"
    seed: int = 0

    scored_by = RecallScore
    allowed: ClassVar = {"split": SPLITS}
    ranges: ClassVar = {"contexts": (1, MAX_COUNT), "context_length": (1, MAX_TOKENS), "seed": (0, MAX_SEED)}
    length_option = "context_length"
    where = "Drawn on this machine from the English that ships with the package; there is nothing to fetch."

    def check_options(self) -> None:
        check_num_facts(self.num_facts, self.num_questions)
        super().check_options()

    def check_lengths(self) -> None:
        self._drawn()

    def _drawn(self) -> list[RecallSample]:
        task = RecallTask(read_tokenizer(self.tokenizer), self.context_length, self.num_facts, self.num_questions)
        records = RecallRecords(task, self.split, self.contexts, self.seed)
        return [records[i] for i in range(self.contexts)]

    def samples(self) -> Sequence[Sample]:
        tokenizer, drawn = read_tokenizer(self.tokenizer), self._drawn()
        longest = max(len(sample.text.input_ids) - sample.text.prompt_length for sample in drawn)
        made = []
        for sample in drawn:
            ids, start = [int(token) for token in sample.text.input_ids], sample.text.context_length
            parts = ids[:start], ids[start : sample.text.prompt_length]
            context, question = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
            made.append(
                Sample(
                    id=sample.text.record_id,
                    prompt=context + question,
                    reference={"codes": sample.codes},
                    context_characters=len(context),
                    max_new_tokens=longest + 4,
                    kind="recall",
                )
            )
        return made


def instruction_samples(
    records: InstructionRecords, limit: int | None = None, max_new_tokens: int = 64
) -> list[Sample]:
    """Ask the last answer that is learnt of the first ``limit`` records (None: of all), with the turns before it.

    What follows it (answers that are only read) is no reference, and left out with its pictures.
    """
    total = len(records) if limit is None else min(limit, len(records))
    return [_asked(records[i], max_new_tokens) for i in range(total)]


def _asked(record: Record, max_new_tokens: int) -> Sample:
    """Return a record as a sample for ``SceneScore``."""
    last = max(place for place, turn in enumerate(record.turns) if turn.learnt)
    turns = record.turns[: last + 1]
    return Sample(
        id=record.id,
        prompt=turns[-1].prompt,
        reference={"answer": unescaped(turns[-1].answer or ""), "kind": record.kind},
        images=tuple(record.images[: sum(picture_marks(turn.prompt).count(IMAGE_MARK) for turn in turns)]),
        max_new_tokens=max_new_tokens,
        kind=record.kind or "question",
        earlier=tuple(turns[:-1]),
    )


@dataclass
class Scenes(Task):
    """Scenes of one split, ``test``, ``dev`` or ``train``, of the kinds that the table gives the task."""

    split: str = "test"

    scored_by = SceneScore
    made_in = "data/scenes"
    allowed: ClassVar = {"split": SPLITS}
    kinds: ClassVar[str]
    where = """Made on this machine, from 1,797 embedded digits; data/scenes is read unless a folder is named:
  subtoken-train data scenes
  subtoken-train data scenes --seed 1 --out FOLDER --train 1 --dev 1 --test 4800     (as the tables ask)"""

    def samples(self) -> Sequence[Sample]:
        if self.source is None:
            raise ValueError(f"task {self.name} needs a folder of scenes (source, or below data_root). {self.where}")
        samples = instruction_samples(InstructionRecords(Path(self.source) / f"{self.split}.json"))
        return [sample for sample in samples if sample.kind in self.kinds.split()]


class ScenesPope(Scenes, row="scenes_pope"):
    """Existence of a digit or a colour, in POPE's style."""


class ScenesTextVQA(Scenes, row="scenes_textvqa"):
    """Reading the digit at a place, in TextVQA's style."""


class ScenesGQA(Scenes, row="scenes_gqa"):
    """Colour, place and count: GQA's and MME's style."""


class ScenesMMBench(Scenes, row="scenes_mmbench"):
    """Multiple choice: MMBench's style."""


class ScenesCaption(Scenes, row="scenes_caption"):
    """The whole scene in words: captioning."""
