"""What 665k instruction records cost: seconds to index and to open, and the memory of a process and its two workers.

    python benchmarks/data_index.py [--records 665298] [--folder FOLDER] [--out FILE]

The records are made up: one JSON list on one line, with the parts of LLaVA-v1.5's mix665k in their numbers, turns and
lengths about theirs, and no images (none is opened). Every figure comes from a process of its own. Memory is what
/proc/self/smaps_rollup says: *private* pages are this process's alone, *shared* ones are counted in every process that
maps them. A forked worker shares its parent's pages until one of them writes there (Python counts references in them),
so that shared turns into private while nothing is added; what a worker holds is the sum.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
from torch.utils.data import DataLoader, get_worker_info

from benchmarks.pairs import hardware, write
from subtoken_train.datasets.record_index import open_index
from subtoken_train.datasets.records import InstructionRecords

OUT = Path(__file__).resolve().parent / "results" / "data" / "index.json"
MIX = {  # records, exchanges, words of an answer; what the public file counts by its `image` keys
    "coco/train2017": (364_100, (1, 6), 16),
    "vg/VG_100K": (86_417, (6, 12), 5),
    "gqa/images": (72_140, (5, 16), 2),
    "ocr_vqa/images": (80_000, (4, 6), 6),
    "textvqa/train_images": (21_953, (1, 2), 14),
    "": (40_688, (2, 6), 130),
}
_WORDS = 'a the of red small bus street man holding sign with écran 東京 white under left right two 7 book "quoted"'
_IMAGES = 120_000  # of a folder; the largest, COCO's train2017, has 118,287
WORKERS = 2


def make_records(path: Path, count: int, seed: int = 0) -> None:
    """Write ``count`` records of the mix, shuffled, as one JSON list on one line."""
    rng = random.Random(seed)
    folders, weights = list(MIX), [records for records, *_ in MIX.values()]
    texts = {words: [" ".join(rng.choices(_WORDS.split(), k=words)) for _ in range(997)] for *_, words in MIX.values()}
    with path.open("w", encoding="utf-8") as file:
        for place in range(count):
            folder = rng.choices(folders, weights)[0]
            row = _record(place, folder, texts[MIX[folder][2]], texts[16], rng)
            file.write(("[" if place == 0 else ", ") + json.dumps(row, ensure_ascii=place % 8 > 0))
        file.write("]")


def _record(place: int, folder: str, answers: list[str], questions: list[str], rng: random.Random) -> dict[str, Any]:
    exchanges = rng.randint(*MIX[folder][1])
    turns = []
    for exchange in range(exchanges):
        question = rng.choice(questions)
        turns.append({"from": "human", "value": f"<image>\n{question}" if folder and not exchange else question})
        turns.append({"from": "gpt", "value": rng.choice(answers)})
    name = {"image": f"{folder}/{rng.randrange(_IMAGES):012d}.jpg"} if folder else {"model": ""}
    return {"id": place if place % 3 else f"{place:09d}", **name, "conversations": turns}


def make_images(path: Path, folder: Path) -> Path:
    """An empty file for every image that the records name."""
    for part in InstructionRecords(path, folder).compare_images():
        (folder / part.folder).mkdir(parents=True)
        for name in part.missing:
            (folder / name).touch()
    return folder


def memory() -> dict[str, float]:
    """This process's memory in MiB: ``private`` and ``shared``."""
    pages = {"private": 0, "shared": 0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        kind = name.partition("_")[0].lower()
        if kind in pages and name.endswith(("Clean", "Dirty")):
            pages[kind] += int(rest.split()[0])
    return {kind: round(kibibytes / 1024, 1) for kind, kibibytes in pages.items()}


def measured(action: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run ``action`` in a fresh process: what it returns, its seconds, and its memory before and after.

    The machine may be shared: ``cpu_seconds`` are the process's own (its workers' are not counted).
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, action, str(datasets.config.HF_DATASETS_CACHE), arguments))
    process.start()
    result: dict[str, Any] = receiver.recv()
    process.join()
    return result


def _send(sender: Any, action: Callable[..., dict[str, Any]], cache: str, arguments: tuple[Any, ...]) -> None:
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    before, clock, cpu = memory(), time.perf_counter(), time.process_time()
    result = action(*arguments)
    seconds = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu}
    rounded = {name: round(value, 3) for name, value in seconds.items()}
    sender.send({**rounded, "before_mib": before, "after_mib": memory(), **result})


def index(path: Path) -> dict[str, Any]:
    """Open the index, which makes it the first time; a view of it dies with the process."""
    return {"records": len(open_index(path))}


def compare(path: Path, image_folder: Path) -> dict[str, Any]:
    """Look for all images in the listings of their folders."""
    folders = InstructionRecords(path, image_folder).compare_images()
    missing = sum(len(folder.missing) for folder in folders)
    return {"images": sum(folder.named for folder in folders), "missing": missing}


def parse_whole(path: Path) -> dict[str, Any]:
    """What holding the parsed file would take; the rows live until memory is read."""
    global _ROWS  # noqa: PLW0603
    _ROWS = json.loads(path.read_text(encoding="utf-8"))
    return {"records": len(_ROWS)}


def iterate(path: Path) -> dict[str, Any]:
    """Every record once, in random order, read by two forked workers; the memory of each at the end."""
    records = InstructionRecords(path)
    loader: DataLoader[Any] = DataLoader(
        records,
        batch_size=512,
        shuffle=True,
        num_workers=WORKERS,
        collate_fn=_worker_memory,
        multiprocessing_context="fork",
    )
    seen, last = 0, {}
    for count, worker, state in loader:
        seen += count
        last[worker] = state
    assert seen == len(records)
    return {"records": seen, "workers_mib": [last[worker] for worker in sorted(last)]}


def _worker_memory(records: list[Any]) -> tuple[int, int, dict[str, float]]:
    info = get_worker_info()
    assert info is not None
    return len(records), info.id, memory()


def record_of(folder: Path, count: int) -> dict[str, Any]:
    """Everything that is measured, on ``count`` records below ``folder``; the cache lies there, too."""
    path, load = folder / "records.json", round(os.getloadavg()[0], 1)
    make_records(path, count)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    first, few = measured(index, path), folder / "few.json"
    make_records(few, min(count, 2000))
    rows = {
        "index": first,
        "open": measured(index, path),
        "compare": measured(compare, path, make_images(path, folder / "images")),
        "iterate": measured(iterate, path),
        "iterate few": measured(iterate, few),
        "parse whole": measured(parse_whole, path),
    }
    size = round(path.stat().st_size / 2**20, 1)
    return {"records": count, "file_mib": size, "hardware": {**hardware(), "load": load}, "rows": rows}


def table(record: Mapping[str, Any]) -> str:
    """The record as a Markdown table."""
    rows = record["rows"]
    made = [rows[name]["workers_mib"] for name in ("iterate", "iterate few")]
    workers = [" and ".join(f"{sum(state.values()):,.0f}" for state in states) for states in made]
    main = [sum(rows[name]["after_mib"].values()) for name in ("iterate", "iterate few")]
    whole = sum(rows["parse whole"]["after_mib"].values())
    steps = {
        "make the index, once": "index",
        "open it": "open",
        f"look for {rows['compare']['images']:,} images": "compare",
    }
    lines = [
        f"| {record['records']:,} records, {record['file_mib']:,.0f} MiB | seconds | of them computing |",
        "|---|---|---|",
        *(
            f"| {words} | {rows[name]['seconds']:.2f} | {rows[name]['cpu_seconds']:.2f} |"
            for words, name in steps.items()
        ),
        "",
        f"| resident memory, MiB | all records | {rows['iterate few']['records']:,} records |",
        "|---|---|---|",
        f"| main process, after two workers read all in random order | {main[0]:,.0f} | {main[1]:,.0f} |",
        f"| each of the two workers | {workers[0]} | {workers[1]} |",
        f"| a process that parsed the whole file | {whole:,.0f} | |",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=sum(records for records, *_ in MIX.values()))
    parser.add_argument(
        "--folder", type=Path, default=None, help="for the file (about a GiB); default: a temporary one"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        record = record_of(Path(folder), args.records)
    write(record, args.out)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
