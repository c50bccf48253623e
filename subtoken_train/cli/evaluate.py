"""``subtoken-train evaluate``: score adapters, or a backbone alone, on a data file or over a grid of tasks."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.cli import command_line
from subtoken_train.cli.terminal import counter, quiet_libraries
from subtoken_train.errors import check_word, plain, refuse, shell_words
from subtoken_train.outputs import check_place
from subtoken_train.settings import FLAGGED
from subtoken_train.version import __version__

if TYPE_CHECKING:
    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.runner.data_file import Run
    from subtoken_train.evaluation.runner.spec import Grid
    from subtoken_train.inference.arm_spec import ArmSpec


HELP = """Score adapters, or a backbone alone, with reducer, routers and KV eviction.

  --data FILE          questions in LLaVA's instruction format: a table on the terminal
  --tasks NAME,NAME    benchmarks, from files on disk or the Hub: writes one record per sample to a folder, which a
  --config GRID.yaml   second call continues and 'subtoken-train report' reads; a grid has many arms
  --suite mini         the embedded models, minutes on two cores

--data asks the last turn of every record. Scores are exact match (F1 of the objects for scene descriptions), token
accuracy and log-likelihood of the reference answers.
On several devices: torchrun --nproc-per-node N -m subtoken_train evaluate --config GRID.yaml ..."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--adapter", action="append", default=[], metavar="DIR|ID", help="adapter: folder or Hub id; repeatable")
    command_line.add_settings(parser, "backbone")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="FILE", help="questions (JSON list or JSON lines)")
    what.add_argument("--tasks", metavar="NAME,...", help="benchmarks by name")
    what.add_argument("--config", metavar="FILE", help="a grid: arms x tasks; a file, or a name of recipes/eval")
    what.add_argument("--suite", metavar="NAME", help="a grid that ships with its models: mini")
    add("--image-folder", metavar="DIR", help="--data: where image paths start (default: its folder)")
    command_line.add_compression_options(parser)
    add("--batch-size", type=int, help="prompts decoded together (default: 64; grids: 16)")
    add("--max-new-tokens", type=int, help="--data: cap on an answer (default: 64)")
    add("--max-length", type=int, help="prompt tokens (default: 2048; grids: what the model allows)")
    add("--limit", type=int, help="only the first N questions (of each task)")
    out = "--data: a JSON file; others: a folder (results/NAME); a second call continues it"
    add("--out", metavar="PATH", help=out)
    add("--data-root", metavar="DIR", help="one folder per task (default: data/benchmarks)")
    command_line.add_settings(parser, "protocol")
    add("--anchors", metavar="auto|none", help="matched token-only anchors (default: auto)")
    checked = "show what the grid would run and what is missing; reads no weights and no files"
    add("--check", action="store_true", help=checked)
    price = "--check: what a GPU costs an hour; the sum is printed"
    add("--price", type=command_line.hourly_price, metavar="P", help=price)
    add("--device", help="cuda:0, cpu, ...; auto: several GPUs if needed (default: the first GPU, if any)")


def run(args: argparse.Namespace) -> int:
    command_line.check_counts(args, "batch_size", "max_new_tokens", "max_length", "limit")
    mode = next(name for name in ("data", "tasks", "config", "suite") if getattr(args, name) is not None)
    strangers: list[str] = [*(GRID_ONLY if mode == "data" else FILE_ONLY), *(["check"] if mode == "suite" else [])]
    command_line.check_unused(args, strangers, f"does not apply to --{mode}; leave it out")
    if mode in ("config", "suite"):
        words = f"does not apply to --{mode}, whose arms say it; leave it out"
        command_line.check_unused(args, map(command_line.flag_name, FLAGGED), words)
    refuse((args.price is not None and not args.check, "--price needs --check, which predicts the GPU hours"))
    return _run_grids(args) if args.data is None else _run_file(args)


def _run_file(args: argparse.Namespace) -> int:
    if args.out:
        refuse((os.path.lexists(args.out), f"{args.out} exists; choose another --out"))
        check_place(Path(args.out))
    refuse(
        (Path(args.data).is_dir(), f"data file {args.data} is a folder; name a file"),
        (not Path(args.data).is_file(), f"data file {args.data} does not exist; check the path"),
    )
    adapters = args.adapter or [None]
    arms = [command_line.flagged_arm(args, adapter=adapter) for adapter in adapters]
    quiet_libraries()
    from subtoken_train.artifact.card import printed, score_rows
    from subtoken_train.benchmarking.comparison import aligned_columns
    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.intervals import bootstrap_interval
    from subtoken_train.evaluation.runner.data_file import column_of, write_runs, written_run

    records, asked = InstructionRecords(args.data, args.image_folder), Path(args.data).read_bytes()
    held = [Path(f"{args.out}.part{number}") if args.out else None for number in range(len(arms))]
    try:
        runs = [_answer(arm, records, asked, args, part) for arm, part in zip(arms, held, strict=True)]
    except KeyboardInterrupt:
        lost = "nothing was written; the same command starts again from the first question, with --out FILE from there"
        kept = f"the answers so far are beside {args.out}; run the same command to continue from there"
        _say(f"\n{kept if args.out else lost}")
        raise
    print("in %, 95 % interval; KV nominal before eviction; KV bytes of the dense cache; log_likelihood: nats a token")
    print(*map(plain, aligned_columns(score_rows([column_of(run) for run in runs]))), sep="\n")
    for adapter, run in zip(adapters, runs, strict=True):
        print(f"{run['arm']}: {adapter or args.backbone}")
    if args.out:
        write_runs([written_run(run, data=Path(args.data).name) for run in runs], Path(args.out))
        for part in filter(None, held):
            part.unlink()
        print(f"records written to {args.out}")
    first, *others = runs
    for other in others:
        pairs = [mine - its for mine, its in zip(first["scores"], other["scores"], strict=True)]
        found = sum(pairs) / len(pairs), *bootstrap_interval(pairs)
        mean, low, high = (printed("score", value, "+") for value in found)
        where = f"points on the same {len(pairs):,} questions (95 % interval)"
        print(f"{first['arm']} less {other['arm']}: {mean} [{low}, {high}] {where}")
    return 0


def _answer(arm: ArmSpec, records: InstructionRecords, data: bytes, args: argparse.Namespace, part: Path | None) -> Run:
    from subtoken_train.artifact.folder import model_identity
    from subtoken_train.datasets.unknown_tokens import say_unknown
    from subtoken_train.evaluation.runner.arms import adapter_name
    from subtoken_train.evaluation.runner.data_file import answer_records, go_on
    from subtoken_train.inference.compression import method_record, settings_record

    model, name = arm.load(), Path(str(arm.backbone)).name if arm.adapter is None else adapter_name(arm.adapter)
    if line := say_unknown(model.tokenizer, records.some_texts(args.limit), f"{name}: {args.data}"):
        _say(line)
    how: dict[str, Any] = {"limit": args.limit, "max_new_tokens": args.max_new_tokens or 64}
    how |= {"max_length": args.max_length or 2048, "batch_size": args.batch_size or 64}
    digest, reducer = hashlib.sha256(data).hexdigest(), method_record(model.backbone.reducer)
    kind = {"data": digest, "images": args.image_folder, "reducer": reducer, "dtype": str(model.dtype), **how}
    kind |= {"version": __version__, "compression": settings_record(model.compression)}
    held = part and partial(go_on, part, kind | {"model": asdict(model_identity(model.backbone))})
    how |= {"progress": counter("questions"), "compression": model.compression, "held": held}
    return {"arm": name, **answer_records(model.backbone, records, **how), "data_sha256": digest}


GRID_ONLY = ("protocol", "data_root", "anchors", "device", "check")
FILE_ONLY = ("image_folder", "max_new_tokens")


def _run_grids(args: argparse.Namespace) -> int:
    from subtoken_train.evaluation.runner.spec import SUITES

    if args.suite is not None:
        check_word("suite", args.suite, SUITES)
    command_line.check_output(None if args.check else args.out)
    grids = [] if args.suite else _grids(args)  # a mistake in one is said before torch is loaded
    quiet_libraries()
    if args.check:
        from subtoken_train.cli.run_plan import plan_of_grid
        from subtoken_train.evaluation.runner.dry_run import check_lines, dry_run, planned_adapter

        lines = check_lines(grids[0], checked := dry_run(grids[0], planned_adapter))
        if args.config is not None and any(what.startswith("adapter ") for what, _ in checked.wanted):
            sweep = f"subtoken-train sweep --grid {shell_words(args.config)} (--dry-run: the hours)"
            lines.append(f"  all of these adapters: {sweep}")
        lines += ["", "what it needs (a prediction)"]
        print(*lines, *(f"  {line}" for line in plan_of_grid(checked).lines(args.price)), sep="\n")
        return 0
    from subtoken_train.evaluation.runner.cell import Processes
    from subtoken_train.evaluation.runner.run import run_grid
    from subtoken_train.inference.pool import device_of

    if args.device is not None:
        device_of(args.device)  # before a suite writes its data
    grids = grids or _grids(args)
    with Processes.from_environment() as processes:
        for grid in grids:
            try:
                run_grid(grid, processes=processes, device=args.device, say=_say, counter=counter)
            except KeyboardInterrupt:
                if processes.first:
                    _say(f"\nthe answers so far are in {grid.out}; run the same command to continue from there")
                raise
    if processes.first:  # after the group's end: metrics would wait for the other processes
        from subtoken_train.cli.report import print_summary
        from subtoken_train.evaluation.reporting.report import make_report

        out = grids[0].out
        print_summary(make_report([out]))
        command = f"subtoken-train report {shell_words(out)}"
        print(f"records are in {out}; '{command}' makes tables, curves and a page from them")
    return 0


def _grids(args: argparse.Namespace) -> list[Grid]:
    from subtoken_train.evaluation.runner.spec import Grid, TaskSpec, expand_arms, read_grid, suite

    shared: dict[str, Any] = {name: getattr(args, name) for name in ("limit", "batch_size", "max_length", "anchors")}
    shared["data_root"] = None if args.data_root is None else Path(args.data_root)
    out = None if args.out is None else Path(args.out)
    if args.config is not None:
        return [read_grid(Path(args.config), out=out, **shared)]
    if args.suite is not None:
        return suite(args.suite, out or Path("results") / args.suite, **shared)
    settings = {key: value for key, value in shared.items() if value is not None}
    tasks = tuple(TaskSpec(name.strip()) for name in args.tasks.split(","))
    adapter = {"adapter": args.adapter} if args.adapter else {}
    arms = tuple(expand_arms({**adapter, **command_line.arm_options(args)}, "flag"))
    grid = Grid(arms=arms, tasks=tasks, out=out or Path("results"), **settings)
    if out is not None:
        return [grid]
    quiet_libraries()
    from subtoken_train.evaluation.runner.arms import arm_name

    return [replace(grid, out=grid.out / arm_name(arms[0]))]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
