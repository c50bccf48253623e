"""Benchmarks' own files: tables, questions and answers that ``data NAME --root`` and ``evaluate --tasks`` read."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.hostile.case import Case, Expect, Place
from tests.hostile.values import damaged, mutated, no_file, written

TEXTS = (".json", ".jsonl", ".csv", ".tsv", ".txt")


def make(draw: random.Random, place: Place) -> Case:
    """A benchmark's folder with one file spoilt."""
    layout = draw.choice(("own", "parquet"))
    name = draw.choice(sorted(path.name for path in (place.pool / "benchmarks" / layout).iterdir()))
    folder = place.copy(f"benchmarks/{layout}/{name}", name)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw.choice([file for file in files if file.suffix in (*TEXTS, ".parquet")] * 3 + files)
    kind = draw.choice(("content", "content", "content", "damage", "damage", "file", "control"))
    expect = Expect.EITHER
    if kind == "content" and path.suffix in (".json", ".jsonl"):
        what = _content(draw, path)
    elif kind == "file":
        what = no_file(draw, path)
    elif kind == "control":
        what, expect = "whole", Expect.TAKEN
    else:
        content, what = damaged(draw, path.read_bytes())
        path.write_bytes(content)
    told = f"{name} {path.relative_to(folder)}: {what}"
    if draw.random() < 0.3:
        from subtoken_train.evaluation.tasks import build_task
        from subtoken_train.evaluation.tasks.whole_set import check_samples

        def read() -> None:
            task = build_task(name, folder)
            check_samples(task, task.samples())

        return Case(f"build_task {told}", read, expect)
    return Case(f"data {told}", ["data", name, "--root", name, "--limit", "2"], expect)


def _content(draw: random.Random, path: Path) -> str:
    """Something odd in a file of questions."""
    text = path.read_text()
    try:
        rows = json.loads(text)
    except json.JSONDecodeError:  # one object a line
        lines = text.splitlines()
        place = draw.randrange(len(lines))
        row, what = mutated(draw, json.loads(lines[place]))
        lines[place] = written(row)
        path.write_text("\n".join(lines) + "\n")
        return what
    rows, what = mutated(draw, rows)
    path.write_text(written(rows))
    return what
