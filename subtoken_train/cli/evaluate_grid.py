"""The grid side of ``subtoken-train evaluate``: options to a grid, and what is printed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.cli.arm_flags import arm_options
from subtoken_train.documents import read_yaml
from subtoken_train.errors import plain, unknown_name
from subtoken_train.resources import named_recipe

if TYPE_CHECKING:
    from subtoken_train.evaluation.runner.spec import Grid

ARM_OPTIONS = (
    "adapter", "backbone", "reducer", "keep_ratio", "selector", "eviction", "eviction_keep", "eviction_every",
    "eviction_option", "scope", "key_channels", "merge", "protocol", "prefill_chunk", "rerotate", "dtype",
    "max_pixels",
)  # fmt: skip
"""Options that say who answers; a grid file says it itself."""
GRID_KEYS = ("arms", "tasks", "out", "data_root", "limit", "batch_size", "max_length", "anchors")
GRID_ONLY = ("selector", "protocol", "data_root", "anchors", "device", "check")
FILE_ONLY = ("image_folder", "max_new_tokens")


def add_grid_options(parser: argparse.ArgumentParser) -> None:
    """Options of grids alone."""
    parser.add_argument("--data-root", metavar="DIR", help="one folder per task (default: data/benchmarks)")
    parser.add_argument(
        "--selector", metavar="NAME", help="untrained control: none, value_norm, random, ... instead of the routers"
    )
    parser.add_argument(
        "--protocol",
        metavar="NAME",
        help="query_aware (default), or context_first: the context is compressed before the question is seen",
    )
    parser.add_argument("--anchors", metavar="auto|none", help="matched token-only anchors (default: auto)")
    parser.add_argument(
        "--check", action="store_true", help="say what the grid would run and what it wants; no weights, no files read"
    )
    parser.add_argument(
        "--device",
        help="cuda:0, cpu, ...; auto: several GPUs if need be (default: the first GPU, if any)",
    )


def check_modes(args: argparse.Namespace) -> None:
    """Raise a worded ``ValueError`` for options that mean nothing to what is evaluated."""
    mode = next(name for name in ("data", "tasks", "config", "suite") if getattr(args, name) is not None)
    strangers: tuple[str, ...] = GRID_ONLY if mode == "data" else FILE_ONLY
    if mode in ("config", "suite"):
        strangers = (*FILE_ONLY, *ARM_OPTIONS, *(("check",) if mode == "suite" else ()))
    for name in strangers:
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} means nothing to --{mode}; leave it out")
    if mode in ("config", "suite") and args.kv_dtype != "model":
        raise ValueError(f"--kv-dtype means nothing to --{mode}; write kv_dtype into its arms")


def run_grids(args: argparse.Namespace) -> int:
    """Run the grid, or the suite's, and print where the scores stand."""
    if args.config is not None:  # what is no grid at all is said before anything heavy is imported
        content = read_yaml(path := named_recipe(args.config, "grid"))
        for key in content if isinstance(content, dict) else ():
            if key not in GRID_KEYS:
                raise unknown_name(f"key of {path}", key, GRID_KEYS)
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    if args.check:
        from subtoken_train.cli.grid_check import print_check

        return print_check(*_grids(args))
    from subtoken_train.cli.terminal import counter
    from subtoken_train.evaluation.runner.processes import Processes
    from subtoken_train.evaluation.runner.run import run_grid
    from subtoken_train.inference.pool import device_of

    if args.device is not None:
        device_of(args.device)  # before a suite writes its data
    grids = _grids(args)
    with Processes.from_environment() as processes:
        for grid in grids:
            try:
                run_grid(grid, processes=processes, device=args.device, say=_say, counter=counter)
            except KeyboardInterrupt:
                if processes.first:
                    _say(f"\nwhat was answered is in {grid.out}; the same command goes on from there")
                raise
    if processes.first:  # after the group's end: metrics would wait for the other processes
        from subtoken_train.cli.report import print_summary
        from subtoken_train.evaluation.reporting.report import make_report

        out = grids[0].out
        print_summary(make_report([out]))
        print(f"records are in {out}; 'subtoken-train report {out}' makes tables, curves and a page of them")
    return 0


def _grids(args: argparse.Namespace) -> list[Grid]:
    from subtoken_train.evaluation.runner.arms import arm_name
    from subtoken_train.evaluation.runner.spec import Grid, TaskSpec, expand_arms, read_grid, suite

    shared: dict[str, Any] = {name: getattr(args, name) for name in ("limit", "batch_size", "max_length", "anchors")}
    shared["data_root"] = None if args.data_root is None else Path(args.data_root)
    out = None if args.out is None else Path(args.out)
    if args.config is not None:
        return [read_grid(named_recipe(args.config, "grid"), out=out, **shared)]
    if args.suite is not None:
        return suite(args.suite, out or Path("results") / args.suite, **shared)
    settings = {key: value for key, value in shared.items() if value is not None}
    tasks = tuple(TaskSpec(name.strip()) for name in args.tasks.split(","))
    named = {"adapter": args.adapter} if args.adapter else {}
    arms = tuple(expand_arms({**named, **arm_options(args)}, "flag"))
    return [Grid(arms=arms, tasks=tasks, out=out or Path("results") / arm_name(arms[0]), **settings)]


def _say(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)
