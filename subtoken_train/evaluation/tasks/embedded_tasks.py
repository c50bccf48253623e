"""The embedded models' own tasks, held out: digit scenes for the vision-language model, key-value recall for the other.

Scenes are in LLaVA's instruction format, as ``subtoken-train data scenes`` writes them; their tasks, one for each
benchmark whose style they follow, read the same files.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.datasets.english import SPLITS
from subtoken_train.datasets.recall import RecallRecords, RecallSample, RecallTask, check_num_facts, recall_accuracy
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scenes import COLOR_NAMES, DESCRIPTION_KINDS, PLACES
from subtoken_train.errors import MAX_COUNT, MAX_SEED, MAX_TOKENS
from subtoken_train.evaluation.metrics.metric import MeanScores, mean_of
from subtoken_train.evaluation.metrics.short_answers import bag_f1
from subtoken_train.evaluation.tasks.made_texts import MadeTexts, read_tokenizer
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.families.literal_marks import IMAGE_MARK, picture_marks, unescaped

RecallScore = mean_of("score", lambda said, of: recall_accuracy(said, of["codes"]))
"""Mean over contexts of the share of asked facts that are stated exactly; ``codes`` are name to code."""


@dataclass
class Recall(MadeTexts):
    """Contexts of a split's English with drawn facts; as a text, one may be a token or two longer or shorter."""

    contexts: int = 200
    context_length: int = 512
    num_facts: int = 24
    num_questions: int = 8
    tokenizer: str = "checkpoints/tiny-llama"
    split: str = "test"
    seed: int = 0

    allowed: ClassVar = {"split": SPLITS}
    ranges: ClassVar = {"contexts": (1, MAX_COUNT), "context_length": (1, MAX_TOKENS), "seed": (0, MAX_SEED)}
    length_option = "context_length"

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
            rest: dict[str, Any] = {"context_characters": len(context), "max_new_tokens": longest + 4, "kind": "recall"}
            made.append(Sample(sample.text.record_id, context + question, {"codes": sample.codes}, **rest))
        return made


def instruction_samples(
    records: InstructionRecords, limit: int | None = None, max_new_tokens: int = 64
) -> list[Sample]:
    """Ask the last learnt answer of the first ``limit`` records, with the turns before it alone."""
    samples = []
    for record in (records[i] for i in range(len(records))[:limit]):
        last = max(place for place, turn in enumerate(record.turns) if turn.learnt)
        *earlier, asked = turns = record.turns[: last + 1]
        reference = {"answer": unescaped(asked.answer or ""), "kind": record.kind}
        images = tuple(record.images[: sum(picture_marks(turn.prompt).count(IMAGE_MARK) for turn in turns)])
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "kind": record.kind or "question"}
        samples.append(Sample(record.id, asked.prompt, reference, images, **how, earlier=tuple(earlier)))
    return samples


ATTRIBUTES = ("place", "color", "digit")


def scene_objects(text: str) -> frozenset[frozenset[str]]:
    """Return the (place, colour, digit) triples that a scene description names, in either order of the two styles."""
    triples, current = set(), set[str]()
    for word in text.split():
        if word not in PLACES and word not in COLOR_NAMES and not word.isdigit():
            current = set()
            continue
        current = {word} if len(current) == 3 or not current else current | {word}
        if len(current) == 3:
            triples.add(frozenset(current))
            current = set()
    return frozenset(triples)


def scene_f1(prediction: str, answer: str) -> float:
    """Return the F1 of the described objects: each counts only with the right place, colour and digit together."""
    found, wanted = scene_objects(prediction), scene_objects(answer)
    return 2 * len(found & wanted) / (len(found) + len(wanted)) if found and wanted else float(found == wanted)


def is_description(kind: str | None, answer: str) -> bool:
    """Tell whether a reference describes a scene: by its kind and its objects, since other data has such kinds too."""
    return kind in DESCRIPTION_KINDS and bool(scene_objects(answer))


def scene_score(kind: str | None, prediction: str, answer: str) -> float:
    """Return ``scene_f1`` for descriptions; else 1 where the texts are equal but for space and case."""
    if is_description(kind, answer):
        return scene_f1(prediction, answer)
    return float(prediction.strip().lower() == answer.strip().lower())


def scene_attributes(text: str) -> dict[str, Counter[str]]:
    """Return a description's places, colours and digits, counted; a digit before ``none`` is not in the scene."""
    words = text.split()
    found: dict[str, Counter[str]] = {name: Counter() for name in ATTRIBUTES}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word in PLACES:
            found["place"][word] += 1
        elif word in COLOR_NAMES:
            found["color"][word] += 1
        elif word.isdigit() and following != "none":
            found["digit"][word] += 1
    return found


def attribute_f1(prediction: str, answer: str) -> dict[str, float]:
    """Return each attribute's multiset F1, 1 where neither names any; whose colour it is, ``scene_f1`` says."""
    found, wanted = scene_attributes(prediction), scene_attributes(answer)
    return {
        name: bag_f1(own.elements(), wanted[name].elements()) if own or wanted[name] else 1.0
        for name, own in found.items()
    }


class SceneScore(MeanScores):
    """``score``: exact match or, of descriptions, objects' F1; beside it, of these alone, each attribute's F1."""

    names = ("score", *(f"{name}_f1" for name in ATTRIBUTES))

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        kind, answer = reference["kind"], reference["answer"]
        figures = {"score": scene_score(kind, prediction, answer)}
        if is_description(kind, answer):
            figures |= {f"{name}_f1": f1 for name, f1 in attribute_f1(prediction, answer).items()}
        return figures


@dataclass
class Scenes(Task):
    """Scenes of one split, ``test``, ``dev`` or ``train``, of the kinds that the table gives the task."""

    split: str = "test"

    made_in = "data/scenes"
    where = """Made on this machine, from 1,797 embedded digits; data/scenes is read unless a folder is named:
  subtoken-train data scenes
  subtoken-train data scenes --seed 1 --out FOLDER --train 1 --dev 1 --test 4800     (as the tables ask)"""
    allowed: ClassVar = {"split": SPLITS}
    kinds: ClassVar[str]

    def samples(self) -> Sequence[Sample]:
        if self.source is None:
            raise ValueError(f"task {self.name} needs a folder of scenes (source, or below data_root). {self.where}")
        samples = instruction_samples(InstructionRecords(Path(self.source) / f"{self.split}.json"))
        return [sample for sample in samples if sample.kind in self.kinds.split()]
