"""``subtoken-train diagnose``: what an adapter's routers do with their budget, or a KV eviction with its own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.cli.command_line import EVICTION_SETTINGS, add_settings, check_counts, check_output, flagged_arm
from subtoken_train.cli.terminal import counter, quiet_libraries
from subtoken_train.errors import check_package, refuse
from subtoken_train.outputs import check_place, new_folder

if TYPE_CHECKING:
    import pandas as pd

    from subtoken_train.engine.compressed_backbone import CompressedBackbone
    from subtoken_train.families.family import Family
    from subtoken_train.inference.arm_spec import ArmSpec
    from subtoken_train.types import Batch

SCENES = "data/scenes/dev.json"
NEW_TOKENS = 16
PRINTED = ["layer", "kept", "kept_share", "prompt_sparsity", "generated_sparsity", "hit_rate", "attention_kept"]
PRINTED += ["body_attention"]

HELP = """Show what an adapter's routers, or a KV eviction, do with their budget on real prompts.

Without --eviction it writes the paper's Figure 1 (how many groups K_j tokens keep under a global budget, and K_j beside
the mean attention of the query region to a token) and how much each group is used in each layer, as CSV and PNG.

With --eviction NAME it shows for each layer: the budget, how sparse attention is in the prompt and while generating,
how much of it goes to the image or context, and how well the method predicts what generated tokens read (the share of
the most-read entries that it keeps, and of the attention). Nothing is evicted; --backbone is enough.

A vision-language model reads the prompts of a data file; a language model reads questions about facts in English."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--adapter", metavar="DIR|ID", help="adapter; with routing, unless an eviction is shown")
    add_settings(parser, "backbone")
    add("--data", metavar="FILE", help=f"prompts with images (default: {SCENES})")
    add("--out", metavar="DIR", help="new folder for the files (default: runs/diagnostics/NAME)")
    add("--limit", type=int, default=256, help="only the first N prompts (default: 256)")
    add_settings(parser, *EVICTION_SETTINGS)
    add("--protocol", metavar="query_aware|context_first", help="whether the eviction sees the question")


def run(args: argparse.Namespace) -> int:
    check_counts(args, "limit")
    check_output(args.out)
    refuse((args.eviction is None and args.protocol, "--protocol needs --eviction NAME, for instance snapkv"))
    check_package("matplotlib", "report", "drawing a diagnosis")
    spec = flagged_arm(args, adapter=args.adapter)
    if args.adapter is None and args.eviction is None:
        raise ValueError("a backbone alone has no routers to show: add --eviction NAME, for instance vl_cache")
    quiet_libraries()
    from subtoken_train.artifact.config import read_config
    from subtoken_train.artifact.hub import adapter_folder

    spec.compression()  # what is wrong with it comes out before weights are read
    name = Path(str(spec.backbone)).name
    if args.adapter is not None:
        adapter = adapter_folder(args.adapter)
        name = read_config(adapter).training.get("name", adapter.name)
    folder = Path(args.out or f"runs/diagnostics/{name}{'' if args.eviction is None else f'-{args.eviction}'}")
    refuse((folder.exists(), f"{folder} exists; choose another --out"))
    check_place(folder)
    backbone = spec.load("cpu").backbone
    prompts = _prompts(backbone.family, args.data, args.limit)
    from subtoken_train.benchmarking.comparison import aligned_columns

    if args.eviction is None:
        table, note = _routers(backbone, prompts, folder)
    else:
        table, note = _eviction(backbone, spec, prompts, folder)
    heads = [column.replace("_", " ") for column in table.columns]
    cells = [[str(layer), *(f"{value:.3f}" for value in values)] for layer, *values in table.itertuples(index=False)]
    print(*aligned_columns([heads, *cells]), sep="\n")
    print(f"{note}{', '.join(sorted(path.name for path in folder.iterdir()))} written to {folder}")
    return 0


def _routers(backbone: CompressedBackbone, prompts: Iterator[Batch], folder: Path) -> tuple[pd.DataFrame, str]:
    from subtoken_train.evaluation.diagnostics import diagnose, draw_figures, layer_table, write_tables

    diagnosis = diagnose(backbone, prompts)
    assert backbone.bank is not None
    routing = backbone.bank.config
    with new_folder(folder) as partial:
        write_tables(diagnosis, routing, partial)
        draw_figures(diagnosis, routing, partial)
    note = f"Figure 1 shows these routers under a global budget; the adapter's own is {routing.budget}.\n"
    return layer_table(diagnosis, routing), "" if routing.budget == "global" else note


def _eviction(
    backbone: CompressedBackbone, spec: ArmSpec, prompts: Iterator[Batch], folder: Path
) -> tuple[pd.DataFrame, str]:
    from subtoken_train.evaluation import diagnostics as watched

    compression = spec.compression()
    compression.check(backbone.family)
    rows = watched.diagnose_eviction(backbone.eval(), prompts, compression, spec.protocol, NEW_TOKENS)
    with new_folder(folder) as partial:
        watched.write_eviction_tables(rows, partial)
        watched.draw_eviction(rows, compression.label, partial)
    phases = watched.phase_correlation(rows)
    kept = f"{compression.label}: what it would keep, beside what up to {NEW_TOKENS} tokens read of the whole cache."
    note = f"{kept}\nSparsity of prompt and generated tokens correlates over layers: {phases:.3f} (Pearson).\n"
    return watched.eviction_layers(rows)[PRINTED], note


def _prompts(family: Family, data: str | None, limit: int) -> Iterator[Batch]:
    from subtoken_train.calibrating.base import recall_prompts, record_prompts
    from subtoken_train.datasets.records import InstructionRecords

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
