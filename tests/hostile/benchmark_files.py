"""Benchmarks' own files: tables, questions and answers that ``data NAME --root`` and ``evaluate --tasks`` read."""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.hostile.case import Answer, Case, Expect, Place
from tests.hostile.known import Format, NoDocument, change, damage, parsed_json, parsed_lines
from tests.hostile.own_folders import parsed_text
from tests.hostile.references import same
from tests.hostile.values import no_file, written

TEXTS = (".json", ".jsonl", ".csv", ".tsv", ".txt")


READ: dict[str, tuple[str, ...]] = {
    "testdev_balanced_questions.json": ("*", "*.question", "*.answer", "*.imageId"),
    "v2_OpenEnded_mscoco_val2014_questions.json": ("questions", "questions.*", "questions.*.question"),
    "v2_mscoco_val2014_annotations.json": ("annotations", "annotations.*", "annotations.*.answers"),
    "TextVQA_0.5.1_val.json": ("data", "data.*", "data.*.answers"),
    "llava_textvqa_val_v051_ocr.jsonl": ("*", "*.image", "*.text"),
    "pid_splits.json": ("test", "test.*"),
    "problems.json": ("*", "*.question", "*.choices", "*.answer"),
    **{
        f"coco_pope_{name}.json": ("*", "*.image", "*.text", "*.label") for name in ("adversarial", "random", "popular")
    },
}
"""Places of the files that are read, and what stands there is of one kind."""
UNREAD = "the damage lies in a column, or behind a limit, that nobody reads here"


def make(draw: random.Random, place: Place) -> Case:
    """A benchmark's folder with one file spoilt."""
    layout = draw.choice(("own", "parquet"))
    name = draw.choice(sorted(path.name for path in (place.pool / "benchmarks" / layout).iterdir()))
    folder = place.copy(f"benchmarks/{layout}/{name}", name)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in (*TEXTS, ".parquet"))
    path = draw.choice(files)
    kind = draw.choice(("content", "content", "content", "damage", "damage", "damage", "file", "control"))
    if kind == "content" and path.name in READ:
        what, expect = _content(draw, path)
    elif kind == "file":
        what, expect = no_file(draw, path), Expect.REFUSED
    elif kind == "control":
        what, expect = "whole", Expect.TAKEN
    else:
        content, what, expect = _damage(draw, path)
        path.write_bytes(content)
    files: dict[str, str | bytes | None] = {}
    if (layout, name, kind, what) == ("own", "mme", "file", "absent"):  # one picture's questions; any may be there
        expect, files = Expect.TAKEN, {f"{name}/{path.relative_to(folder)}": None}
    told = f"{name} {path.relative_to(folder)}: {what}"
    why = UNREAD if expect is Expect.EITHER else ""
    if draw.random() < 0.3:

        def reference(answer: Answer) -> str | None:
            right = whole_samples(place.pool / "benchmarks" / layout / name, name)
            right = [each for each in right if not (files and f"/{path.stem}.jpg" in each[0])]
            return None if answer.value == right else "other samples than the original's"

        return Case(f"build_task {told}", lambda: samples(folder, name), expect, reference=reference, why=why)
    words = ["data", name, "--root", name, "--limit", "2"]
    return Case(f"data {told}", words, expect, reference=same(place, words, files=files), why=why)


def samples(folder: Path, name: str) -> list[Any]:
    """Id, prompt and reference of every sample of a benchmark."""
    from subtoken_train.evaluation.tasks import build_task
    from subtoken_train.evaluation.tasks.file_rows import check_samples

    task = build_task(name, folder)
    found = task.samples()
    check_samples(task, found)
    return [(each.id, each.prompt, each.reference) for each in found]


@cache
def whole_samples(folder: Path, name: str) -> list[Any]:
    """Those of the original."""
    return samples(folder, name)


def _content(draw: random.Random, path: Path) -> tuple[str, Expect]:
    """Something of another kind in a file of questions, or a key less."""
    form = Format(only=READ[path.name], unsaid=("*", "*s.*", "data.*"))  # rows more or fewer
    lines = path.read_text().splitlines()
    by_line = len([line for line in lines if line.strip()]) > 1
    tree = parsed_lines(path.read_bytes()) if by_line else parsed_json(path.read_bytes())
    tree, what, expect = change(draw, tree, form)
    path.write_text(
        "".join(written(row) + "\n" for row in tree) if by_line and isinstance(tree, list) else written(tree)
    )
    return what, expect


def _damage(draw: random.Random, path: Path) -> tuple[bytes, str, Expect]:
    """Bytes that a disk has spoilt."""
    whole = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        by_line = len(whole.strip().splitlines()) > 1
        return damage(draw, whole, parsed_lines if by_line else parsed_json, Format(only=()))
    if path.suffix == ".parquet":
        content, what, expect = damage(draw, whole, parsed_parquet, Format(only=()), broken=Expect.EITHER)
        try:
            pq.ParquetFile(io.BytesIO(content))
        except Exception:  # no table at all
            expect = Expect.REFUSED
        return content, what, expect
    broken = Expect.EITHER if path.suffix == ".tsv" else Expect.REFUSED  # of many rows a limit looks at two
    return damage(draw, whole, parsed_text, Format(only=()), broken=broken)


def parsed_parquet(content: bytes) -> Any:
    """Every column of a table."""
    try:
        table = pq.read_table(io.BytesIO(content))
        return [table.to_pylist(), repr(table.schema.metadata)]  # which the library datasets reads, too
    except Exception as error:
        raise NoDocument(str(error)) from None
