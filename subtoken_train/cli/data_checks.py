"""Check a public data set on disk by listings and counts, and a benchmark by its rows, ids and a few opened images.

Nothing is written but the list of missing images.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from subtoken_train.datasets.image_sources import FolderImages, count_named, missing_images
from subtoken_train.datasets.known_files import MIX665K
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.documents import parse_yaml
from subtoken_train.errors import plain
from subtoken_train.outputs import write_whole

if TYPE_CHECKING:
    from subtoken_train.evaluation.tasks.task import Sample, Task

MIX665K_RECORDS = 665_298
MIX665K_SOURCES = {
    MIX665K: f"hf download liuhaotian/LLaVA-Instruct-150K {MIX665K} --repo-type dataset --local-dir ROOT",
    "images/coco/train2017": "http://images.cocodataset.org/zips/train2017.zip",
    "images/gqa/images": "https://downloads.cs.stanford.edu/nlp/data/gqa/images.zip",
    "images/ocr_vqa/images": "https://ocr-vqa.github.io (its download program; .gif and .png are found, too)",
    "images/textvqa/train_images": "https://dl.fbaipublicfiles.com/textvqa/images/train_val_images.zip",
    "images/vg/VG_100K": "https://cs.stanford.edu/people/rak248/VG_100K_2/images.zip",
    "images/vg/VG_100K_2": "https://cs.stanford.edu/people/rak248/VG_100K_2/images2.zip",
}
WIKITEXT = "wikitext-103-raw-v1"
WIKITEXT_ROWS = {"train": 1_801_350, "validation": 3_760, "test": 4_358}
_FIRST = 3  # missing images printed per folder


def check_llava665k(root: Path, missing_list: Path | None) -> str:
    """Print where the parts come from and what is there; returns the last line."""
    width = max(map(len, MIX665K_SOURCES))
    print(f"LLaVA-v1.5 instruction data below {root}:")
    for part, source in MIX665K_SOURCES.items():
        print(f"  {part:<{width}}  {source.replace('ROOT', str(root))}")
    print()
    records = index(root / MIX665K, root / "images")
    if len(records) != MIX665K_RECORDS:
        raise ValueError(
            f"{records.path} holds {len(records):,} records, not the {MIX665K_RECORDS:,} of LLaVA-v1.5's mix665k; "
            "fetch it again"
        )
    return check_images(records, missing_list)


def check_wikitext103(root: Path) -> str:
    """Print the rows of each split; returns the last line."""
    folder = root / WIKITEXT
    command = f"hf download Salesforce/wikitext --include '{WIKITEXT}/*' --repo-type dataset --local-dir {root}"
    print(f"WikiText-103 (raw) below {folder}:\n  {command}\n")
    for split, expected in WIKITEXT_ROWS.items():
        files = sorted(folder.glob(f"{split}-*.parquet"))
        shards = int(files[0].stem.rpartition("-")[2]) if files else 1
        if len(files) != shards:
            raise ValueError(f"{folder} has {len(files)} of {shards} files of the split {split}; fetch it: {command}")
        try:
            rows = sum(pq.read_metadata(path).num_rows for path in files)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}, split {split}: cannot be read as Parquet ({error}); fetch it again") from None
        if rows != expected:
            raise ValueError(f"{folder}, split {split}: {rows:,} rows, not {expected:,}; fetch it again: {command}")
        print(f"  {split:<10}  {rows:>9,} rows in {len(files)} file{'s' if len(files) > 1 else ''}")
    return f"complete; in a recipe: train: {{name: {folder}, documents: wikitext}}"


def index(file: Path, image_folder: Path) -> InstructionRecords:
    """Index a data file and print what is in it."""
    clock = time.perf_counter()
    records = InstructionRecords(file, image_folder)
    texts = int((records.sizes()[:, 0] == 0).sum())
    print(f"{file}: {len(records):,} records, {texts:,} without an image ({time.perf_counter() - clock:.1f} s)")
    return records


def check_images(records: InstructionRecords, missing_list: Path | None) -> str:
    """Print which of the images that records name are there; returns the last line."""
    folders = records.compare_images()
    print(*map(plain, _image_lines(folders, records.image_folder)), sep="\n")
    names = [name for folder in folders for name in folder.missing]
    if missing_list is not None:
        write_whole(missing_list, "".join(f"{name}\n" for name in names))
        print(f"{len(names):,} names written to {missing_list}")
    if error := missing_images(folders, records.path, records.image_folder):
        raise error
    return f"complete: {len(records):,} records, {count_named(folders)}"


def _image_lines(folders: Sequence[FolderImages], image_folder: Path) -> Iterator[str]:
    width = max((len(folder.folder) for folder in folders), default=0)
    yield f"images below {image_folder}:"
    for folder in folders:
        missing = f"{len(folder.missing):,} missing" if folder.missing else "all there"
        renamed = f", {folder.renamed:,} under another suffix" if folder.renamed else ""
        yield f"  {folder.folder or '.':<{width}}  {folder.named:>9,} named, {missing}{renamed}"
        yield from (f"    {name}" for name in folder.missing[:_FIRST])
        if len(folder.missing) > _FIRST:
            yield f"    ... and {len(folder.missing) - _FIRST:,} more"


_KINDS = 8  # shown


def check_task(name: str, root: Path | None, options: Sequence[str], limit: int | None = None) -> str:
    """Print where a benchmark comes from and, with its folder, what is there; returns the last line.

    With a ``limit`` of samples the set need not be whole, and only they are checked.
    """
    import datasets

    from subtoken_train.evaluation.tasks import build_task
    from subtoken_train.evaluation.tasks.files import check_complete, check_samples, open_some

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
