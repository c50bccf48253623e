"""``subtoken-train evaluate``: score adapters, or a backbone alone, on a data file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.cli.compression import add_compression_options

if TYPE_CHECKING:
    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.answer import Answers
    from subtoken_train.evaluation.report import ArmFacts

HELP = """Answer the questions of a data file greedily, with reducer, routers and KV eviction, and score them.

The file is in LLaVA's instruction format; the last turn of every record is asked. Scores are exact match (F1 of the
described objects for scene descriptions). Several adapters give several rows; --backbone alone gives one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="DIR|ID", help="adapter: folder or Hub id; repeatable"
    )
    parser.add_argument("--backbone", metavar="PATH", help="a backbone alone; with --adapter: where its backbone is")
    parser.add_argument("--data", required=True, metavar="FILE", help="questions (JSON list or JSON lines)")
    parser.add_argument("--image-folder", metavar="DIR", help="where image paths start (default: the file's folder)")
    add_compression_options(parser)
    parser.add_argument("--batch-size", type=int, default=64, help="prompts decoded together (default: 64)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="cap on an answer (default: 64)")
    parser.add_argument("--max-length", type=int, default=2048, help="prompt tokens (default: 2048)")
    parser.add_argument("--limit", type=int, help="only the first N questions")
    parser.add_argument("--out", metavar="FILE", help="write the records of all arms as a JSON list")


def run(args: argparse.Namespace) -> int:
    """Load, answer, print."""
    for name in ("batch_size", "max_new_tokens", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
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
        print(f"{facts.name}: {adapter or args.backbone}")
    if args.out:
        named = {"data": Path(args.data).name}
        rows = [run_record(facts, answers, Path(args.data).read_bytes(), named) for facts, answers in arms]
        write_record({"runs": rows}, Path(args.out))
        print(f"records written to {args.out}")
    return 0


def _answer(adapter: str | None, records: InstructionRecords, args: argparse.Namespace) -> tuple[ArmFacts, Answers]:
    """The facts and answers of one adapter, or of the backbone."""
    from subtoken_train.artifact.folder import read_config
    from subtoken_train.artifact.source import adapter_folder
    from subtoken_train.cli.compression import load_model
    from subtoken_train.cli.progress import counter
    from subtoken_train.evaluation.answer import answer_all
    from subtoken_train.evaluation.report import arm_facts

    name = Path(args.backbone).name if adapter is None else Path(adapter).name
    if adapter is not None:
        name = str(read_config(adapter_folder(adapter)).training.get("name", name))
    model = load_model(args, adapter)
    answers = answer_all(
        model.backbone,
        records,
        args.max_length,
        args.batch_size,
        args.max_new_tokens,
        args.limit,
        counter("questions"),
        model.compression,
    )
    return arm_facts(name, model.backbone, answers), answers
