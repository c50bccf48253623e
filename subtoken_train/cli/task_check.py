"""What of a benchmark is on disk: its rows, ids and images, of which a few are opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from subtoken_train.documents import parse_yaml
from subtoken_train.errors import plain
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.evaluation.tasks.whole_set import check_complete, check_samples, open_some

_KINDS = 8  # shown


def check_task(name: str, root: Path | None, options: Sequence[str], limit: int | None = None) -> str:
    """Print where a benchmark comes from and, with its folder, what is there; returns the last line.

    Args:
        name: of ``TASKS``.
        root: folder (for one's own questions: or file) with its files; None: nothing is read, unless the task makes
            its texts itself.
        options: ``key=value`` each, values in YAML.
        limit: samples that a run will ask for; with one the set need not be whole, and only they are checked.

    Raises:
        ValueError: files are missing or broken, or the set is not complete and has fewer samples than ``limit``.
    """
    datasets.disable_progress_bars()
    task = build_task(name, root, **dict(map(_option, options)))
    rows = "any number of" if task.expected_rows is None else f"{task.expected_rows:,}"
    print(f"{name}: {rows} samples, score {task.primary}; asked: {task.asks}\n  {task.where}\n")
    if root is not None and not task.needs_files:
        raise ValueError(f"task {name} makes its samples itself; leave --root out")
    if root is None and task.needs_files:
        return f"check a folder: subtoken-train data {name} --root DIR"
    samples = task.samples()
    print(*map(plain, _lines(task, samples)), sep="\n")
    check_complete(task, samples, limit)
    samples = samples[:limit]
    check_samples(task, samples)
    sizes = open_some(samples)
    if sizes:
        opened = ", ".join(f"{width} x {height}" for width, height in sizes)
        print(f"  {len(sizes)} images opened: {opened}")
    task.check_requirements()
    if limit is not None:
        return f"enough for a limit of {limit:,}: {len(samples):,} samples"
    return f"complete: {len(samples):,} samples" if task.expected_rows else f"readable: {len(samples):,} samples"


def _lines(task: Task, samples: Sequence[Sample]) -> list[str]:
    """What is in the files, in words."""
    if not samples:
        return []
    images = sum(len(sample.images) for sample in samples)
    kinds = Counter(sample.kind for sample in samples).most_common()
    shown = ", ".join(f"{kind} {count:,}" for kind, count in kinds[:_KINDS])
    more = f", and {len(kinds) - _KINDS} more" if len(kinds) > _KINDS else ""
    asked = samples[0].prompt
    return [
        f"{task.source or task.name}: {len(samples):,} samples, {images:,} images",
        f"  kinds: {shown}{more}",
        f"  first, {samples[0].id!r}: {asked if len(asked) <= 300 else asked[:150] + ' ... ' + asked[-150:]!r}",
    ]


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--option {text!r} must be written KEY=VALUE")
    return key, parse_yaml(value, f"--option {key}")
