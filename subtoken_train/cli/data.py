"""``subtoken-train data``: make the embedded data set."""

from __future__ import annotations

import argparse

HELP = """Make a data set that recipes name.

  scenes   digit scenes with questions in LLaVA's instruction format (the tiny recipes' data); made here, from 1,797
           embedded handwritten digits, the same files for the same seed

data/README.md says where to get what cannot be made."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("name", choices=["scenes"], help="which data set")
    parser.add_argument("--out", default="data/scenes", help="folder to write (default: data/scenes)")
    parser.add_argument("--train", type=int, default=12800, help="training records (default: 12800)")
    parser.add_argument("--dev", type=int, default=800, help="records for choices (default: 800)")
    parser.add_argument("--test", type=int, default=4800, help="records looked at once (default: 4800)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")


def run(args: argparse.Namespace) -> int:
    """Write the files."""
    from subtoken_train.datasets.scene_files import write_scenes

    write_scenes(args.out, train=args.train, dev=args.dev, test=args.test, seed=args.seed, overwrite=args.overwrite)
    print(f"written to {args.out}")
    return 0
