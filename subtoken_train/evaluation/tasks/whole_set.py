"""Check that a benchmark is whole, before a run and for ``subtoken-train data NAME``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from subtoken_train.datasets.image_sources import PictureSource, VideoSource, compare_images, first_frame, open_image
from subtoken_train.evaluation.tasks.file_rows import unique_ids
from subtoken_train.evaluation.tasks.task import Sample, Task

_PLACEHOLDER = "<image>"
_OPENED = 5
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?:-[0-9a-f]+)?\.parquet")


def check_complete(task: Task, samples: Sequence[Sample], limit: int | None) -> None:
    """Refuse a part of a set as if it were the set, unless a run asks for no more samples than its files hold."""
    if not samples:
        raise ValueError(f"task {task.name}: {task.source or task.hub_id} holds no sample. {task.where}")
    found, expected = len(samples), task.expected_rows
    if expected is None or found == expected or (limit is not None and found >= limit):
        return
    missing = missing_shards(Path(task.source)) if task.source is not None else []
    hint = f" Missing: {', '.join(missing)}." if missing else ""
    raise ValueError(
        f"task {task.name} has {found:,} of {expected:,} samples in {task.source or task.hub_id}.{hint} "
        f"Get the rest, or limit the run. {task.where}"
    )


def missing_shards(folder: Path) -> list[str]:
    """Find Parquet shards below ``folder`` that others' names promise (``-00000-of-00003``) but that are not there."""
    present: dict[tuple[Path, str, int], set[int]] = {}
    for path in folder.rglob("*.parquet"):
        if match := _SHARD.fullmatch(path.name):
            key = (path.parent.relative_to(folder), match["stem"], int(match["total"]))
            present.setdefault(key, set()).add(int(match["number"]))
    return [
        (parent / f"{stem}-{number:05}-of-{total:05}.parquet").as_posix()
        for (parent, stem, total), numbers in sorted(present.items())
        for number in sorted(set(range(total)) - numbers)
    ]


def check_samples(task: Task, samples: Sequence[Sample]) -> None:
    """Check every sample, of a task of one's own too."""
    unique_ids((sample.id, f"task {task.name}, sample {n:,}") for n, sample in enumerate(samples, 1))
    for sample in samples:
        written = sample.prompt.count(_PLACEHOLDER) if task.modality == "image" else len(sample.images)
        if written != len(sample.images):
            raise ValueError(
                f"task {task.name}, sample {sample.id!r}: {written} {_PLACEHOLDER} in the prompt for "
                f"{len(sample.images)} images; write one for each"
            )
        if sample.context_characters is not None and not 0 <= sample.context_characters <= len(sample.prompt):
            raise ValueError(
                f"task {task.name}, sample {sample.id!r}: context_characters {sample.context_characters} lies outside "
                f"its prompt of {len(sample.prompt)}"
            )
    named = dict.fromkeys(str(path) for sample in samples for image in sample.images for path in _files(image))
    missing = [name for folder in compare_images(named, Path(), outside=True) for name in folder.missing]
    if missing:
        raise ValueError(
            f"task {task.name}: {len(missing):,} of {len(named):,} images are missing (first: {missing[0]}). "
            f"{task.where}"
        )


def _files(image: PictureSource) -> tuple[Path, ...]:
    """Return what must be there: a file, the files of a video or their folder."""
    if isinstance(image, VideoSource):
        return (image.frames,) if isinstance(image.frames, Path) else image.frames
    return (image,) if isinstance(image, Path) else ()


def open_some(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Open a few images, spread over the samples; their widths and heights in pixels."""
    seen = [sample for sample in samples if sample.images]
    step = max(1, len(seen) // _OPENED)
    return [open_image(first_frame(sample.images[0])).size for sample in seen[::step][:_OPENED]]
