"""``subtoken-train diagnose``: what an adapter's routers do with their budget."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.cli.command_line import check_counts

if TYPE_CHECKING:
    from rich.table import Table

    from subtoken_train.evaluation.diagnostics_files import LayerRow
    from subtoken_train.families.family import Family
    from subtoken_train.types import Batch

SCENES = "data/scenes/dev.json"

HELP = """What an adapter's routers do with their budget, on prompts.

Writes, as CSV tables and PNG pictures: the paper's Figure 1 (how many groups K_j tokens keep under a global budget, and
how K_j goes with relevance, the mean attention of the query region on a token), the use of every group per layer with
its entropy, and how far the choice agrees with the groups of largest value norm.

A vision-language adapter reads the prompts of a data file; a language model's, questions about facts in English that
ships with the project (512 tokens of context)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--adapter", required=True, metavar="DIR|ID", help="adapter with routing")
    parser.add_argument("--data", metavar="FILE", help=f"prompts with images (default: {SCENES})")
    parser.add_argument("--out", metavar="DIR", help="new folder for the files (default: runs/diagnostics/NAME)")
    parser.add_argument("--limit", type=int, default=256, help="only the first N prompts (default: 256)")


def run(args: argparse.Namespace) -> int:
    """Load, run the prompts, write and print."""
    check_counts(args, "limit")
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from rich.console import Console

    from subtoken_train.artifact.config import read_config
    from subtoken_train.artifact.folder import read_adapter
    from subtoken_train.artifact.source import adapter_folder
    from subtoken_train.evaluation.diagnostics import diagnose
    from subtoken_train.evaluation.diagnostics_files import draw_figures, layer_rows, write_tables

    adapter = adapter_folder(args.adapter)
    name = read_config(adapter).training.get("name", adapter.name)
    folder = Path(args.out or f"runs/diagnostics/{name}")
    if folder.exists():
        raise ValueError(f"{folder} exists; choose another --out")
    config, backbone, _ = read_adapter(adapter)
    diagnosis = diagnose(backbone, _prompts(backbone.family, args.data, args.limit))
    routing = config.routing
    assert routing is not None
    folder.mkdir(parents=True)
    write_tables(diagnosis, routing, folder)
    draw_figures(diagnosis, routing, folder)
    Console(width=None if sys.stdout.isatty() else 100).print(_table(layer_rows(diagnosis, routing)))
    if routing.budget != "global":
        print(f"Figure 1 shows these routers under a global budget; the adapter's own is {routing.budget}.")
    print(f"{', '.join(sorted(path.name for path in folder.iterdir()))} written to {folder}")
    return 0


def _prompts(family: Family, data: str | None, limit: int) -> Iterator[Batch]:
    """Batches of prompts, counted on stderr."""
    from subtoken_train.cli.terminal import counter
    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.runner.batches import recall_prompts, record_prompts

    if family.image_token_id is None:
        if data is not None:
            raise ValueError(f"--data {data} has prompts with images, but {family.name} reads text; leave --data out")
        total, batches = limit, recall_prompts(family, limit)
    else:
        records = InstructionRecords(data or SCENES)
        total, batches = min(limit, len(records)), record_prompts(family, records, limit)
    done, show = 0, counter("prompts")
    for batch in batches:
        yield batch
        done += len(batch.record_ids)
        show(done, total)


def _table(rows: list[LayerRow]) -> Table:
    """The rows of ``layers.csv``."""
    from rich.table import Table

    table = Table()
    for column in rows[0]._fields:
        table.add_column(column.replace("_", " "), justify="right")
    for layer, *values in rows:
        table.add_row(str(layer), *[f"{value:.3f}" for value in values])
    return table
