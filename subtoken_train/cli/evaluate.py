"""``subtoken-train evaluate``: score adapters, or a backbone alone, on a data file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.cli.compression import add_compression_options
from subtoken_train.cli.evaluate_grid import add_grid_options, check_modes, run_grids
from subtoken_train.errors import plain

if TYPE_CHECKING:
    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.answer import Answers
    from subtoken_train.evaluation.report import ArmFacts

HELP = """Score adapters, or a backbone alone, with reducer, routers and KV eviction.

  --data FILE          questions in LLaVA's instruction format: a table on the terminal
  --tasks NAME,NAME    benchmarks, from files on disk or the Hub: a folder of records, one per sample, that a second
  --config GRID.yaml   call continues and 'subtoken-train report' reads; a grid has many arms
  --suite mini         the embedded models, minutes on two cores

With --data the last turn of every record is asked; scores are exact match (F1 of the described objects for scene
descriptions). On several devices: torchrun --nproc-per-node N -m subtoken_train evaluate --config GRID.yaml ..."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="DIR|ID", help="adapter: folder or Hub id; repeatable"
    )
    parser.add_argument("--backbone", metavar="PATH", help="a backbone alone; with --adapter: where its backbone is")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="FILE", help="questions (JSON list or JSON lines)")
    what.add_argument("--tasks", metavar="NAME,...", help="benchmarks by name")
    what.add_argument("--config", metavar="FILE", help="a grid: arms x tasks (recipes/eval)")
    what.add_argument("--suite", metavar="NAME", help="a grid that ships with its models: mini")
    parser.add_argument("--image-folder", metavar="DIR", help="--data: where image paths start (default: its folder)")
    add_compression_options(parser)
    parser.add_argument("--batch-size", type=int, help="prompts decoded together (default: 64; grids: 16)")
    parser.add_argument("--max-new-tokens", type=int, help="--data: cap on an answer (default: 64)")
    parser.add_argument("--max-length", type=int, help="prompt tokens (default: 2048; grids: what the model allows)")
    parser.add_argument("--limit", type=int, help="only the first N questions (of each task)")
    parser.add_argument(
        "--out", metavar="PATH", help="--data: write the records as one JSON file; others: their folder (results/NAME)"
    )
    add_grid_options(parser)


def run(args: argparse.Namespace) -> int:
    """Load, answer, print."""
    for name in ("batch_size", "max_new_tokens", "max_length", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    check_modes(args)
    if args.data is None:
        return run_grids(args)
    return _run_file(args)


def _run_file(args: argparse.Namespace) -> int:
    """One data file, all adapters, a table."""
    if not args.adapter and not args.backbone:
        raise ValueError("give --adapter DIR, or --backbone PATH for a model without one")
    if args.out and Path(args.out).exists():
        raise ValueError(f"{args.out} exists; choose another --out")
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from rich.console import Console

    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.report import run_record, score_table, write_record

    records = InstructionRecords(args.data, args.image_folder)
    adapters = args.adapter or [None]
    arms = [_answer(adapter, records, args) for adapter in adapters]
    Console(width=None if sys.stdout.isatty() else 40 + 40 * len(arms)).print(score_table(arms))
    for adapter, (facts, _) in zip(adapters, arms, strict=True):
        print(plain(f"{facts.name}: {adapter or args.backbone}"))
    if args.out:
        named = {"data": Path(args.data).name}
        rows = [run_record(facts, answers, Path(args.data).read_bytes(), named) for facts, answers in arms]
        write_record({"runs": rows}, Path(args.out))
        print(f"records written to {args.out}")
    return 0


def _answer(adapter: str | None, records: InstructionRecords, args: argparse.Namespace) -> tuple[ArmFacts, Answers]:
    """The facts and answers of one adapter, or of the backbone."""
    from subtoken_train.artifact.config import read_config
    from subtoken_train.artifact.source import adapter_folder
    from subtoken_train.cli.compression import load_model
    from subtoken_train.cli.terminal import counter
    from subtoken_train.datasets.unknown_tokens import say_unknown
    from subtoken_train.evaluation.answer import answer_all
    from subtoken_train.evaluation.report import arm_facts

    name = Path(args.backbone).name if adapter is None else Path(adapter).name
    if adapter is not None:
        name = str(read_config(adapter_folder(adapter)).training.get("name", name))
    model = load_model(args, adapter)
    if line := say_unknown(model.tokenizer, records.some_texts(args.limit), f"{name}: {args.data}"):
        print(line, file=sys.stderr)
    answers = answer_all(
        model.backbone,
        records,
        args.max_length or 2048,
        args.batch_size or 64,
        args.max_new_tokens or 64,
        args.limit,
        counter("questions"),
        model.compression,
    )
    return arm_facts(name, model.backbone, answers), answers
