"""``subtoken-train evaluate``: score adapters on a data file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.answer import Answers
    from subtoken_train.evaluation.report import ArmFacts

HELP = """Answer the questions of a data file greedily, with reducer and routers active, and score them.

The file is in LLaVA's instruction format; the last turn of every record is asked. Scores are exact match (F1 of the
described objects for scene descriptions). Several adapters give several rows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--adapter", action="append", required=True, metavar="DIR", help="adapter folder; repeatable")
    parser.add_argument("--data", required=True, metavar="FILE", help="questions (JSON list or JSON lines)")
    parser.add_argument("--image-folder", metavar="DIR", help="where image paths start (default: the file's folder)")
    parser.add_argument("--backbone", metavar="PATH", help="load the backbone from here instead of where it was")
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
    if args.out and Path(args.out).exists():
        raise ValueError(f"{args.out} exists; choose another --out")
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from rich.console import Console

    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.report import run_record, score_table, write_record

    records = InstructionRecords(args.data, args.image_folder)
    arms = [_answer(Path(folder), records, args) for folder in args.adapter]
    Console(width=None if sys.stdout.isatty() else 40 + 40 * len(arms)).print(score_table(arms))
    for folder, (facts, _) in zip(args.adapter, arms, strict=True):
        print(f"{facts.name}: {folder}")
    if args.out:
        rows = [run_record(facts, answers, Path(args.data).read_bytes(), {}) for facts, answers in arms]
        write_record({"runs": rows}, Path(args.out))
        print(f"records written to {args.out}")
    return 0


def _answer(folder: Path, records: InstructionRecords, args: argparse.Namespace) -> tuple[ArmFacts, Answers]:
    """One adapter's facts and answers."""
    from dataclasses import replace

    from subtoken_train.artifact.folder import read_adapter, read_config
    from subtoken_train.cli.progress import counter
    from subtoken_train.evaluation.answer import answer_all
    from subtoken_train.evaluation.report import arm_facts

    source = replace(read_config(folder).backbone, path=args.backbone) if args.backbone else None
    config, backbone, _ = read_adapter(folder, source)
    answers = answer_all(
        backbone, records, args.max_length, args.batch_size, args.max_new_tokens, args.limit, counter("questions")
    )
    return arm_facts(str(config.training.get("name", folder.name)), backbone, answers), answers
