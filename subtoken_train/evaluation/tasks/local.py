"""One's own questions: JSON lines, each with a question, its answers and the rule that scores it.

    {"image": "cat.png", "question": "What is this?", "answers": ["cat", "a cat"], "metric": "exact_match"}

``image`` is a path relative to the file, or a list, or absent; ``id`` and ``kind`` are optional. ``local`` is for
models that see, ``local_text`` for others.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.datasets.image_sources import inside
from subtoken_train.documents import text_problem
from subtoken_train.errors import MAX_TOKENS, at_place, check_word, refuse
from subtoken_train.evaluation.metrics.metric import mean_of
from subtoken_train.evaluation.metrics.short_answers import evalai_answer, leave_one_out, lmms_similarity, relaxed_match
from subtoken_train.evaluation.tasks.files import read_jsonl, unique_ids
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.families.literal_marks import IMAGE_MARK, picture_marks
from subtoken_train.typed import typed


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


LocalScores = mean_of("score", lambda said, of: RULES[of["metric"]](said, of["answers"]), {"metric": tuple(RULES)})
"""``score``, the mean over all samples, and by each rule; references hold ``answers`` and ``metric``, a rule."""
Paths = str | list[str] | None
"""One or several, as a line names its images or its answers."""


def listed(value: Paths) -> list[str]:
    """Return what a line names."""
    return [value] if isinstance(value, str) and value else list(value or ())


def are_placed(texts: Iterable[str], images: int) -> bool:
    """Tell whether texts say where their images stand; as many marks as images, or none."""
    written = sum(picture_marks(text).count(IMAGE_MARK) for text in texts)
    rule = f"write one for each, and \\{IMAGE_MARK} where it is text"
    refuse((written not in (0, images), f"{written} {IMAGE_MARK} in the prompt, {images} images; {rule}"))
    return written > 0


@dataclass
class OwnLines(Task):
    """The lines of one's own file, a sample each; images stay in the file's folder unless they may lead out of it."""

    max_new_tokens: int = 32
    images_outside_folder: bool = False

    ranges: ClassVar = {"max_new_tokens": (1, MAX_TOKENS)}
    line: ClassVar[type[Any]]
    """Kind of its lines, a dataclass with an ``id``."""

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options.items() if name != "images_outside_folder"}

    def samples(self) -> list[Sample]:
        path, samples = self._file(), list[Sample]()
        rows = read_jsonl(path)
        for number, row in enumerate(rows, 1):
            line = typed(self.line, row.values, row.place)
            with at_place(f"{row.place}: "):
                samples.append(self.sample(line, str(number if line.id is None else line.id), path.parent))
        unique_ids((sample.id, row.place) for sample, row in zip(samples, rows, strict=True))
        refuse((not samples, f"{path} has no line; {self.where}"))
        return samples

    def _file(self) -> Path:
        if self.source is None:
            raise ValueError(f"task {self.name} needs a source. {self.where}")
        source = Path(self.source)
        found = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
        if len(found) != 1:
            raise ValueError(f"task {self.name}: {source} has {len(found)} .jsonl files; name the file that is meant")
        return found[0]

    @abstractmethod
    def sample(self, line: Any, name: str, folder: Path) -> Sample:
        """Return the sample of a line; its images lie below ``folder``."""

    def images(self, names: Sequence[str], folder: Path) -> tuple[Path, ...]:
        """Return the images that a line names; a text task has none."""
        if names and self.modality == "text":
            raise ValueError("it has an image, but the model reads text; remove the image, or use the task local")
        return tuple(inside(folder, name, self.images_outside_folder) for name in names)


@dataclass(frozen=True)
class QuestionLine:
    """A line of ``LocalQuestions``."""

    question: str
    answers: str | list[str]
    metric: str
    image: Paths = None
    id: str | int | None = None
    kind: str | None = None


@dataclass
class LocalQuestions(OwnLines):
    """Questions in one's own format, about images or not."""

    where = (
        'write a .jsonl file with one question a line, {"image": "cat.png", "question": "What is this?", '
        '"answers": ["cat"], "metric": "exact_match"} (metrics: exact_match, contains, relaxed, anls, vqa; image: task '
        "local only); the file, or its folder, is the source"
    )
    line = QuestionLine
    people: ClassVar = 4  # people whose answers ``vqa`` needs: three others must agree for a full score

    def samples(self) -> list[Sample]:
        samples = super().samples()
        if self.modality == "image" and not any(sample.images for sample in samples):
            raise ValueError(f"{self.source}: no line has an image; use the task local_text")
        return samples

    def sample(self, line: QuestionLine, name: str, folder: Path) -> Sample:
        names, answers = listed(line.image), listed(line.answers)
        for key, texts in {"question": [line.question], "kind": [line.kind or "-"], "answers": answers or [""]}.items():
            if any(map(text_problem, texts)):
                raise ValueError(f"{key} must be a text that is not empty, got {getattr(line, key)!r}")
        check_word("metric", line.metric, RULES)
        if line.metric == "vqa" and len(answers) < self.people:
            raise ValueError(f"metric vqa needs {self.people} people's answers or more, got {len(answers)}")
        placed = are_placed([line.question], len(names))
        return Sample(
            name,
            line.question if placed else f"{IMAGE_MARK}\n" * len(names) + line.question,
            {"answers": answers, "metric": line.metric},
            self.images(names, folder),
            max_new_tokens=self.max_new_tokens,
            kind=line.kind or line.metric,
        )
