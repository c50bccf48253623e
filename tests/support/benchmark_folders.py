"""Folders in the benchmarks' own layouts: the Parquet form with its columns, and the form that the authors give out.

Every writer takes the rows' values that matter to its test, fills in the others, and returns ``folder``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from tests.support.vqa_cases import picture, write_rows

Row = Mapping[str, Any]

TEXTVQA_QUESTIONS, TEXTVQA_ANSWERS = "llava_textvqa_val_v051_ocr.jsonl", "TextVQA_0.5.1_val.json"
MMLU_CHOICES = ["one", "two", "three", "four"]


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_json(folder: Path, file: str, content: object) -> Path:
    return write_files(folder, {file: json.dumps(content).encode()})


def write_jsonl(folder: Path, file: str, lines: Sequence[Row]) -> Path:
    return write_files(folder, {file: "".join(json.dumps(line) + "\n" for line in lines).encode()})


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
    write_json(folder, TEXTVQA_ANSWERS, {"dataset_type": "val", "data": data})
    return write_files(folder, {f"train_images/{name}.jpg": content for name, content in pictures.items()})


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
