"""``subtoken-train data``: make the embedded data sets."""

from __future__ import annotations

import argparse

HELP = """Make a data set that recipes name.

  scenes   digit scenes with questions in LLaVA's instruction format (the tiny VLM recipes' data); made here, from 1,797
           embedded handwritten digits, the same files for the same seed
  english  the embedded English (prose of Python's reference manual) as train, dev and test.jsonl, one document a line,
           for the perplexity of the tiny language model; --train, --dev, --test and --seed mean nothing here

data/README.md says where to get what cannot be made."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("name", choices=["scenes", "english"], help="which data set")
    parser.add_argument("--out", default=None, help="folder to write (default: data/scenes, data/english_text)")
    parser.add_argument("--train", type=int, default=12800, help="training records (default: 12800)")
    parser.add_argument("--dev", type=int, default=800, help="records for choices (default: 800)")
    parser.add_argument("--test", type=int, default=4800, help="records looked at once (default: 4800)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")


def run(args: argparse.Namespace) -> int:
    """Write the files."""
    if args.name == "english":
        from subtoken_train.datasets.english import write_english

        out = args.out or "data/english_text"
        write_english(out, overwrite=args.overwrite)
    else:
        from subtoken_train.datasets.scene_files import write_scenes

        out = args.out or "data/scenes"
        write_scenes(out, train=args.train, dev=args.dev, test=args.test, seed=args.seed, overwrite=args.overwrite)
    print(f"written to {out}")
    return 0
