"""One's own questions: JSON lines, each with a question, its answers and the rule that scores it.

    {"image": "cat.png", "question": "What is this?", "answers": ["cat", "a cat"], "metric": "exact_match"}

``image`` is a path relative to the file, or a list of paths, or absent; ``id`` (default: the line's number) and
``kind`` are optional. Two tasks read the same format: ``local`` for models that see, ``local_text`` for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.datasets.image_sources import inside
from subtoken_train.documents import text_problem
from subtoken_train.errors import MAX_TOKENS, check_word, unknown_name
from subtoken_train.evaluation.metrics.metric import MeanScores
from subtoken_train.evaluation.metrics.short_answers import evalai_answer, leave_one_out, lmms_similarity, relaxed_match
from subtoken_train.evaluation.tasks.files import FileRow, read_jsonl, unique_ids
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.families.literal_marks import IMAGE_MARK, picture_marks


def _plain(text: str) -> str:
    return text.strip().rstrip(".").strip().lower()


RULES: dict[str, Callable[[str, Sequence[str]], float]] = {
    # but for case, surrounding space and full stops at the end
    "exact_match": lambda said, answers: float(_plain(said) in map(_plain, answers)),
    # an answer is a part of what is said, in any case
    "contains": lambda said, answers: float(any(answer.lower() in said.lower() for answer in answers)),
    # within 5 % of a number, or equal
    "relaxed": lambda said, answers: float(any(relaxed_match(said, answer) for answer in answers)),
    "anls": lambda said, answers: max(lmms_similarity(said, answer) for answer in answers),
    # answers are those of several people, usually ten
    "vqa": lambda said, answers: leave_one_out(evalai_answer(said), list(map(evalai_answer, answers))),
}  # score of an answer, 0 to 1, by the rule's name


class LocalScores(MeanScores):
    """``score``, the mean over all samples, and by each rule; references hold ``answers`` and ``metric``, a rule."""

    names = ("score", *RULES)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        value = RULES[reference["metric"]](prediction, reference["answers"])
        return {"score": value, reference["metric"]: value}


@dataclass
class LocalQuestions(Task):
    """Questions in one's own format, about images or not, which stay in the file's folder unless they may lead out."""

    max_new_tokens: int = 32
    images_outside_folder: bool = False

    scored_by = LocalScores
    where = (
        'write a .jsonl file with one question a line, {"image": "cat.png", "question": "What is this?", '
        '"answers": ["cat"], "metric": "exact_match"} (metrics: exact_match, contains, relaxed, anls, vqa; image: task '
        "local only); the file, or its folder, is the source"
    )
    ranges: ClassVar = {"max_new_tokens": (1, MAX_TOKENS)}
    keys: ClassVar = ("id", "image", "question", "answers", "metric", "kind")
    people: ClassVar = 4  # people whose answers ``vqa`` needs: three others must agree for a full score

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options.items() if name != "images_outside_folder"}

    def samples(self) -> list[Sample]:
        path = self._file()
        rows = read_jsonl(path, ("question", "answers", "metric"))
        samples = [self._sample(row, number, path.parent) for number, row in enumerate(rows, 1)]
        unique_ids((sample.id, row.place) for sample, row in zip(samples, rows, strict=True))
        if self.modality == "image" and not any(sample.images for sample in samples):
            raise ValueError(f"{self.source}: no line has an image; use the task local_text")
        return samples

    def _file(self) -> Path:
        if self.source is None:
            raise ValueError(f"task {self.name} needs a source. {self.where}")
        source = Path(self.source)
        found = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
        if len(found) != 1:
            raise ValueError(f"task {self.name}: {source} has {len(found)} .jsonl files; name the file that is meant")
        return found[0]

    def _sample(self, row: FileRow, number: int, folder: Path) -> Sample:
        values = row.values
        try:
            self._check(values)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None
        names, answers = _listed(values.get("image") or []), _listed(values["answers"])
        question: str = values["question"]
        placed = IMAGE_MARK in picture_marks(question)
        return Sample(
            id=str(values.get("id", number)),
            prompt=question if placed else f"{IMAGE_MARK}\n" * len(names) + question,
            reference={"answers": answers, "metric": values["metric"]},
            images=tuple(inside(folder, name, self.images_outside_folder) for name in names),
            max_new_tokens=self.max_new_tokens,
            kind=values.get("kind", values["metric"]),
        )

    def _check(self, values: Mapping[str, Any]) -> None:
        if unknown := [key for key in values if key not in self.keys]:
            raise unknown_name("key", unknown[0], self.keys)
        for key in ("question", "metric", "kind"):
            if key in values and not (isinstance(values[key], str) and text_problem(values[key]) is None):
                raise ValueError(f"{key} must be a text that is not empty, got {values[key]!r}")
        if type(values.get("id", "")) not in (str, int):
            raise ValueError(f"id must be a text or a number, got {values['id']!r}")
        check_word("metric", values["metric"], RULES)
        for key in ("answers", "image"):
            value = values.get(key, "")
            texts = isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))
            if not texts or (key == "answers" and (not value or any(map(text_problem, _listed(value))))):
                raise ValueError(f"{key} must be a text or a list of texts, got {value!r}")
        images, answers = len(_listed(values.get("image") or [])), len(_listed(values["answers"]))
        if images and self.modality == "text":
            raise ValueError("there is an image; use the task local")
        if values["metric"] == "vqa" and answers < self.people:
            raise ValueError(f"metric vqa needs {self.people} people's answers or more, got {answers}")
        if (written := picture_marks(values["question"]).count(IMAGE_MARK)) not in (0, images):
            raise ValueError(
                f"{written} {IMAGE_MARK} in the question, {images} images; write one for each, and "
                f"\\{IMAGE_MARK} where it is text"
            )


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
