"""Folders in the benchmarks' own layouts and the Hub's, reference cases, and a few answers for every metric."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Image
from PIL import Image as Pictures

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.task import Sample, Task
from tests.support.places import ROOT
from tests.support.run_folders import encoded

Row = Mapping[str, Any]

TEXTVQA_QUESTIONS, TEXTVQA_ANSWERS = "llava_textvqa_val_v051_ocr.jsonl", "TextVQA_0.5.1_val.json"
MMLU_CHOICES = ["one", "two", "three", "four"]


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def write_jsonl(folder: Path, file: str, lines: Sequence[Row]) -> Path:
    return write_files(folder, {file: "".join(json.dumps(line) + "\n" for line in lines)})


def gqa_parquet(folder: Path, documents: Sequence[Row], pictures: Mapping[str, bytes] | None = None) -> Path:
    """Questions and images are two configurations."""
    pictures = {"n1": picture(0), "n2": picture(1)} if pictures is None else pictures
    given = {"imageId": "n2", "answer": "no", "fullAnswer": "No, it is clear.", "isBalanced": True, "image": None}
    rows = [{"id": str(n), **given, **document} for n, document in enumerate(documents)]
    write_rows(folder, "testdev_balanced_instructions/testdev-00000-of-00001", rows)
    images = [{"id": name, "image": {"bytes": content, "path": None}} for name, content in pictures.items()]
    return write_rows(folder, "testdev_balanced_images/testdev-00000-of-00001", images)


MMBENCH_ROW = {
    "question": "What is it?", "hint": "nan", "A": "cat", "B": "a\tdog", "C": "nan", "D": "nan", "answer": "B",
    "category": "object",
}  # fmt: skip


def mmbench_parquet(folder: Path, documents: Sequence[Row], language: str = "en") -> Path:
    rows = [{"index": n, **MMBENCH_ROW, **document} for n, document in enumerate(documents)]
    return write_rows(folder, f"{language}/dev-00000-of-00001", rows)


def mme_parquet(folder: Path, documents: Sequence[Row]) -> Path:
    given = {"question_id": "code_reasoning/0020.png", "category": "code_reasoning", "answer": "Yes"}
    return write_rows(folder, "data/test-00000-of-00001", [{**given, **document} for document in documents])


def pope_parquet(folder: Path, documents: Sequence[Row], file: str = "data/test-00000-of-00001") -> Path:
    given = {"question": "Is there a dog?", "answer": "no", "category": "random", "image_source": "x"}
    rows = [{"id": str(n), "question_id": str(n + 1), **given, **document} for n, document in enumerate(documents)]
    return write_rows(folder, file, rows)


def pope_own(folder: Path, lines: Sequence[Row], category: str = "random") -> Path:
    """JSON lines, in spite of the name; images are in ``val2014/``."""
    given = {"question_id": 1, "image": "COCO_val2014_000000310196.jpg", "text": "Is there a dog?", "label": "no"}
    return write_jsonl(folder, f"coco_pope_{category}.json", [{**given, **line} for line in lines])


SCIENCEQA_PROBLEM = {
    "question": "Which is farthest north?", "choices": ["Ohio", "Utah"], "answer": 1, "hint": "Look at the map.",
    "subject": "social science",
}  # fmt: skip


def scienceqa_parquet(folder: Path, documents: Sequence[Row], subset: str = "IMG") -> Path:
    rows = [{**SCIENCEQA_PROBLEM, **document} for document in documents]
    return write_rows(folder, f"ScienceQA-{subset}/test-00000-of-00001-f0e719df791966ff", rows)


def textvqa_parquet(folder: Path, documents: Sequence[Row]) -> Path:
    rows = [{"question_id": n, "answers": ["x"] * 10, **document} for n, document in enumerate(documents)]
    return write_rows(folder, "data/validation-00000-of-00001", rows)


def textvqa_llava(folder: Path, lines: Sequence[Row], data: Sequence[Row], pictures: Mapping[str, bytes]) -> Path:
    """LLaVA's questions, and the answers of the challenge."""
    write_jsonl(folder, TEXTVQA_QUESTIONS, lines)
    answers = {TEXTVQA_ANSWERS: json.dumps({"dataset_type": "val", "data": data}).encode()}
    return write_files(folder, answers | {f"train_images/{name}.jpg": content for name, content in pictures.items()})


def people(*texts: str) -> list[dict[str, Any]]:
    return [{"answer": text, "answer_confidence": "yes", "answer_id": n + 1} for n, text in enumerate(texts)]


def vqav2_parquet(folder: Path, documents: Sequence[Row]) -> Path:
    given = {"answers": people(*["yes"] * 9, "no"), "answer_type": "yes/no"}
    rows = [{"question_id": n, **given, **document} for n, document in enumerate(documents)]
    return write_rows(folder, "data/validation-00000-of-00001", rows)


Solved = Sequence[tuple[str, int]]


def mmlu_letters(folder: Path, subject: str, splits: Mapping[str, Solved]) -> Path:
    """The authors' CSV: no header, letters; ``splits`` are (question, index of the answer)."""
    return _mmlu_table(folder, subject, splits, lambda answer: "ABCD"[answer], "")


def mmlu_numbers(folder: Path, subject: str, splits: Mapping[str, Solved]) -> Path:
    """CSV with a header and the answers' indices."""
    return _mmlu_table(folder, subject, splits, str, "question,choice0,choice1,choice2,choice3,answer\n")


def mmlu_parquet(folder: Path, subject: str, splits: Mapping[str, Solved]) -> Path:
    (folder / "all").mkdir(parents=True, exist_ok=True)
    for split, content in splits.items():
        given = {"subject": subject, "choices": MMLU_CHOICES}
        table = [{"question": question, "answer": answer, **given} for question, answer in content]
        Dataset.from_list(table).to_parquet(folder / "all" / f"{split}-00000-of-00001.parquet")
    return folder


def _mmlu_table(
    folder: Path, subject: str, splits: Mapping[str, Solved], written: Callable[[int], str], header: str
) -> Path:
    for split, content in splits.items():
        lines = [",".join([question, *MMLU_CHOICES, written(answer)]) for question, answer in content]
        write_files(folder, {f"{split}/{subject}_{split}.csv": (header + "\n".join(lines)).encode()})
    return folder


def reference_cases(shared: Path, name: str) -> list[dict[str, Any]]:
    """All lines of ``golden_eval/NAME`` of the reference material."""
    if not (paths := sorted((shared / "golden_eval" / name).glob("set_*.jsonl"))):
        pytest.skip(f"reference material (golden_eval/{name}) is absent")
    cases = [case for path in paths for case in _lines(path)]
    assert cases
    return cases


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(json.loads, file)


def mean_of(cases: list[float]) -> Any:
    return pytest.approx(sum(cases) / len(cases), abs=1e-6)


def picture(shade: int = 0) -> bytes:
    return encoded(Pictures.new("RGB", (2, 2), (shade, 0, 0)))


def write_rows(folder: Path, file: str, rows: list[dict[str, Any]]) -> Path:
    """Write a Parquet shard as the Hub has it; ``image``: an encoded picture (row n has shade n) unless given."""
    path = folder / f"{file}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = [{"image": {"bytes": picture(n % 256), "path": None}, **row} for n, row in enumerate(rows)]
    Dataset.from_list(whole).cast_column("image", Image()).to_parquet(path)
    return folder


@dataclass
class Birds(Task):
    name = "birds"
    modality = "image"
    hub_id = "lmms-lab/birds"
    rows = 3
    primary = "accuracy"
    where = "hf download lmms-lab/birds --repo-type dataset --local-dir DIR"

    def samples(self) -> list[Sample]:
        return []


def refused(words: str, name: str, source: Path | str | None = None, **options: Any) -> None:
    """Check that a task's files are not read, in words that match a pattern; its options are allowed."""
    task = build_task(name, source, **options)
    with pytest.raises(ValueError, match=words):
        task.samples()


def listed(name: str) -> list[Any]:
    """The cases of a test, from the file beside the tests of tasks."""
    return json.loads((ROOT / "tests/evaluation/tasks/cases.json").read_text(encoding="utf-8"))[name]


def prompts_of(task: Task) -> list[str]:
    return [sample.prompt for sample in task.samples()]


def reference_prompts(shared: Path, task: str, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The documents of ``golden_eval/prompts`` of one task, and the prompts that they must give."""
    cases = [
        case
        for case in reference_cases(shared, "prompts")
        if case["task"] == task and all(case[name] == value for name, value in options.items())
    ]
    assert cases
    return [case["doc"] for case in cases], [f"<image>\n{case['prompt']}" for case in cases]


def real_lines(shared: Path, *parts: str, room: str = "realdata") -> list[dict[str, Any]]:
    path = shared.joinpath(room, *parts)
    if not path.is_file():
        pytest.skip(f"reference material ({'/'.join(parts)}) is absent")
    return list(_lines(path))


def real_answers(shared: Path, name: str) -> list[dict[str, Any]]:
    return real_lines(shared, "real_llava15", f"{name}.jsonl", room="golden_eval")


def expected_scores(shared: Path, name: str) -> dict[str, Any]:
    scores: dict[str, Any] = json.loads((shared / "golden_eval" / "real_llava15" / "expected.json").read_text())[name]
    return scores


Answered = Sequence[tuple[Any, Mapping[str, Any]]]  # predictions with the references of their samples


def _rows(fields: str, *rows: tuple[Any, ...], **same: Any) -> Answered:
    return [(said, same | dict(zip(fields.split(), values, strict=True))) for said, *values in rows]


def _letters(task: str) -> Answered:
    return _rows("answer", ("B", "B"), ("b. x", "A"), ("It is C", "C"), task=task)


def _mathematics(harness: str) -> Answered:
    rows = [(r"So it is $\boxed{\frac{1}{2}}$.", "0.5"), ("$7$", "7"), ("It is 70.", "70"), ("", "3")]
    return [(text, {"answer": right, "solution": rf"\boxed{{{right}}}", "harness": harness}) for text, right in rows]


def _scenes(kind: str, *answers: str) -> Answered:
    return [(answers[0], {"kind": kind, "answer": answer}) for answer in answers]


_PEOPLE = _rows(
    "answers", ("0.28", ["0.28"]), ("itc", ["ITC Limited", "itc ltd"]), ("cat", ["dog"]),
    ("new  york", ["new york"] * 3),
)  # fmt: skip
_CAPTIONS = _rows(
    "captions", ("a dog runs", ["a dog runs fast", "the dog"]), ("ein Hündchen", ["a cat"]),
    ("", ["two red cars", "cars"]),
)  # fmt: skip
_LOCAL = _rows(
    "metric", ("a cat.", "exact_match"), ("not it", "contains"), ("9", "relaxed"), ("a cta", "anls"), answers=["a cat"]
)
_MMBENCH = _rows(
    "index answer", ("A", 1, "A"), ("B. red dog", 2, "B"), ("a red dog", 1_000_001, "B"), ("B", 1_000_002, "A"),
    ("?", 3, "A"), options={"A": "cat", "B": "red dog"},
)  # fmt: skip
_RULER = _rows("task", ("AB and CD", "vt"), ("AB", "vt"), ("cd", "qa_1"), ("nothing", "cwe"), answers=["AB", "CD"])
_CLOZES = [([-2.5, -9.0, 1.0, 0.0], {}), ([-1.0, -4.5, 1.0, 1.0], {}), ([-8.0, -8.5, 0.0, 0.0], {})]
CASES: dict[str, Answered] = {
    "ai2d": _letters("ai2d"), "aime25": _mathematics("aime"),
    "chartqa": _rows(
        "answer kind", ("1", "1", "human"), ("2", "9", "human"), ("3%", "0.03", "human"), ("4", "4", "augmented")
    ),
    "coco_caption": _CAPTIONS, "docvqa": _PEOPLE,
    "gqa": _rows("answer", ("Surfing.", "surfing"), ('"no"', "no"), ("a", "b")), "infographicvqa": _PEOPLE,
    "local": _LOCAL, "local_text": _LOCAL,
    "longbench": _rows(
        "set answers", ("a cat", "qasper", ["the cat", "?"]), ("A cat. It ran.\n", "samsum", ["a cat ran", "?"]),
        ("  x = 1", "lcc", ["  x = 2", "?"]),
    ),
    "longbench_v2": _rows(
        "difficulty length", ("The correct answer is (B).", "easy", "short"),
        ("The correct answer is B", "hard", "long"), ("The correct answer is ", "easy", "long"), answer="B",
    ),
    "math500": _mathematics("hendrycks_math"),
    "mathvista": _rows(
        "answer_type precision answer", ("1.23", "float", 1.0, "1.2"), ("it is 7", "integer", None, "7"),
        ("none", "list", None, "[1, 2]"), choices=None, question_type="free_form",
    ),
    "mmbench": _MMBENCH, "mmbench_cn": _MMBENCH, "mmbench_video": [("a man", {}), ("", {}), ("B", {})],
    "mme": _rows(
        "answer category pair", ("Yes", "yes", "count", "count/1"), ("no", "no", "OCR", "OCR/1"),
        ("No, it is", "yes", "count", "count/1"), ("yes.", "no", "OCR", "OCR/1"), ("NO", "no", "OCR", "OCR/2"),
    ),
    "mmlu": _rows("answer", ([-1.0, -2.0], 0), ([-1.0, -2.0], 1), ([-3.0, -2.0], 1)),
    "mmmu": _rows(
        "options answers", ("B", ["x", "y"], ["B"]), ("It is 1,000", [], ["1000"]), ("no", [], ["7", "seven"]),
        ("?", ["x"], ["A"]),
    ),
    "mmstar": _rows(
        "l2_category", ("A", "geometry"), ("B.", "geometry"), ("the answer is A", "localization"), ("", "recognition"),
        answer="A",
    ),
    "needle_map": _RULER, "ocrbench": _rows("formula", ("cafe 24!", 0), ("x", 1), answers=["Cafe 24"]),
    "pope": _rows(
        "label category", ("Yes", "yes", "random"), ("no", "no", "random"), ("No, it is", "yes", "popular"),
        ("yes.", "no", "popular"), ("NO", "no", "adversarial"),
    ),
    "realworldqa": _letters("realworldqa"),
    "recall": _rows("codes", (" baran amber falcon.", {"baran": "amber falcon", "calek": "icy owl"}), ("", {"a": "b"})),
    "ruler": _RULER, "ruler_synthetic": _RULER,
    "scienceqa": _rows(
        "image", ("A", True), ("b", True), ("B. x", False), ("The answer is B.", True), ("", False), answer=1, choices=3
    ),
    "scenes_caption": _scenes("describe", "A1 red 7", "A1 red 7 B2 blue 3"),
    "scenes_gqa": _scenes("color", "red", "blue"), "scenes_mmbench": _scenes("choice", "A", "B"),
    "scenes_pope": _scenes("exists", "yes", "no"), "scenes_textvqa": _scenes("read", "red 7", "red 8"),
    "seedbench": _letters("seedbench"), "textcaps": _CAPTIONS, "textvqa": _PEOPLE, "video_tt": [("A", {}), ("", {})],
    "vizwiz": _PEOPLE, "vqav2": _PEOPLE,
    "facts": _rows("answers", ("Lisbon.", ["Lisbon"]), ("oslo", ["Oslo"]), ("Rome", ["Lima"]), formula=False),
    "code_lines": _CLOZES, "manual_qa": _CLOZES,
    "text_loss": _rows("words bytes", ([-9.5], 2, 9), ([-3.0], 1, 5), ([-40.0], 8, 41)),
    "wikitext": _rows("words bytes", ([-9.5], 2, 9), ([-3.0], 1, 5), ([-40.0], 8, 41)),
}  # fmt: skip
