"""Reference cases of image questions, and small sets in the benchmarks' own formats."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Image
from PIL import Image as Pictures

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.task import Sample, Task


def reference_cases(shared: Path, name: str) -> list[dict[str, Any]]:
    """All lines of ``golden_eval/NAME`` of the reference material."""
    paths = sorted((shared / "golden_eval" / name).glob("set_*.jsonl"))
    if not paths:
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
    content = BytesIO()
    Pictures.new("RGB", (2, 2), (shade, 0, 0)).save(content, "PNG")
    return content.getvalue()


def write_rows(folder: Path, file: str, rows: list[dict[str, Any]]) -> Path:
    """A Parquet shard as the Hub has it: ``image`` is an encoded picture (row n has shade n) unless a row says else.

    Returns:
        ``folder``.
    """
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


def real_lines(shared: Path, *parts: str) -> list[dict[str, Any]]:
    path = shared.joinpath("realdata", *parts)
    if not path.is_file():
        pytest.skip(f"reference material ({'/'.join(parts)}) is absent")
    return list(_lines(path))


def real_answers(shared: Path, name: str) -> list[dict[str, Any]]:
    path = shared / "golden_eval" / "real_llava15" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"reference material (real_llava15/{name}) is absent")
    return list(_lines(path))


def expected_scores(shared: Path, name: str) -> dict[str, Any]:
    scores: dict[str, Any] = json.loads((shared / "golden_eval" / "real_llava15" / "expected.json").read_text())[name]
    return scores
