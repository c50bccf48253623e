"""The side of ``subtoken-train generate`` that answers a file of prompts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from subtoken_train.cli.arm_flags import arm_options
from subtoken_train.cli.command_line import check_counts
from subtoken_train.documents import real_path
from subtoken_train.errors import plain

_OF_FILES = ("prompts", "output", "batch_size", "images_outside_folder")
_OF_ONE_PROMPT = ("prompt", "image", "video", "context_length", "temperature", "show", "show_layers")
_DEFAULTS = {"num_beams": 1, "frames": 8, "fps": 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of files alone."""
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines of prompts to answer; --output takes the answers")
    parser.add_argument("--output", metavar="FILE", help="where the answers to --prompts go, as JSON lines")
    parser.add_argument("--batch-size", type=int, metavar="N", help="of --prompts answered together (default: 1)")
    parser.add_argument(
        "--images-outside-folder", action="store_true", help="let image paths lead out of the folder of --prompts"
    )


def asked(args: argparse.Namespace) -> bool:
    """Whether the options speak of a file."""
    return any(getattr(args, name) for name in _OF_FILES if name != "batch_size") or args.batch_size is not None


def run(args: argparse.Namespace) -> int:
    """Check, answer, say where the answers are."""
    _check(args)
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from subtoken_train.cli.terminal import counter
    from subtoken_train.evaluation.prompt_file import answer_file
    from subtoken_train.inference.arm_spec import ArmSpec
    from subtoken_train.inference.pool import device_of

    try:
        count = answer_file(
            Path(args.prompts),
            Path(args.output),
            ArmSpec(adapter=args.adapter or None, **arm_options(args), written="flag"),
            device=str(device_of(args.device)),
            batch_size=1 if args.batch_size is None else args.batch_size,
            max_new_tokens=args.max_new_tokens,
            images_outside_folder=args.images_outside_folder,
            progress=counter("prompts"),
        )
    except KeyboardInterrupt:
        if Path(args.output).exists():
            print(
                plain(f"\nwhat was answered is in {args.output}; the same command goes on from there"), file=sys.stderr
            )
        raise
    print(plain(f"{count:,} answers are in {args.output}"))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Mistakes that need no model to be seen."""
    for name, other in (("prompts", "output"), ("output", "prompts")):
        if not getattr(args, name):
            given = next(option for option in _OF_FILES if getattr(args, option))
            raise ValueError(f"--{given.replace('_', '-')} needs --{name} FILE.jsonl beside --{other} FILE.jsonl")
    strangers = [name for name in _OF_ONE_PROMPT if getattr(args, name) not in (None, [], 0.0)]
    strangers += [name for name, default in _DEFAULTS.items() if getattr(args, name) != default]
    if strangers:
        raise ValueError(
            f"--{strangers[0].replace('_', '-')} is of one prompt, and --prompts FILE has many: answers are greedy, "
            "and a line names its own images"
        )
    check_counts(args, "max_new_tokens", "batch_size")
    if Path(args.output).suffix.lower() != ".jsonl":
        raise ValueError(f"--output {args.output} must end in .jsonl")
    if real_path(args.output) == real_path(args.prompts):
        raise ValueError(f"--output {args.output} is the file of the prompts; name another")
