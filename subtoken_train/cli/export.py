"""``subtoken-train export``: any checkpoint or adapter as an adapter folder, merged weights, or a Hub repository."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.cli.command_line import ALLOW_CODE
from subtoken_train.errors import UncutError

if TYPE_CHECKING:
    from subtoken_train.artifact.hub import Destination

HELP = """Write an adapter folder from a run, one of its checkpoints, or an adapter, and publish it on request.

  subtoken-train export runs/mine OUT                                 the run's adapter, else its newest checkpoint
  subtoken-train export runs/mine/checkpoints/step-500 OUT            any checkpoint, whatever strategy wrote it
  subtoken-train export runs/mine OUT --push-to-hub user/name --metrics scores.json
  subtoken-train export runs/mine OUT --merge-lora                    a plain transformers checkpoint, and the routers

The backbone's weights are read for --merge-lora alone. Name, token and permission are checked before anything is
written, and a push that fails leaves OUT."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("source", metavar="RUN_OR_CKPT", help="run, checkpoint or adapter folder")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the adapter folder OUT")
    parser.add_argument(
        "--backbone", metavar="PATH", help="Hub id or folder to name as the backbone; its shapes must fit"
    )
    parser.add_argument("--metrics", metavar="FILE", help="scores for the model card, from evaluate --out")
    parser.add_argument("--merge-lora", action="store_true", help="merge the LoRA into the backbone's weights")
    parser.add_argument(ALLOW_CODE, action="store_true", help="let the run's recipe name code (docs/recipe_safety.md)")
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="publish OUT there")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to (default: main)")
    parser.add_argument("--message", metavar="TEXT", help="message of the commit")


def run(args: argparse.Namespace) -> int:
    """Check, read, write, publish."""
    from subtoken_train.artifact.whole_folder import check_target
    from subtoken_train.cli.export_source import find_source
    from subtoken_train.cli.recipe_source import read_source

    _check_options(args)
    out, source = Path(args.out), find_source(Path(args.source))
    words = [] if source.recipe is None else ["--config", str(source.recipe)]
    recipe = read_source([*words, ALLOW_CODE] if args.allow_code else words)
    check_target(out, args.overwrite)
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from subtoken_train.artifact.folder import write_adapter, write_merged
    from subtoken_train.artifact.hub import Destination, check_destination, check_published
    from subtoken_train.cli.export_parts import backbone_of, read_parts, with_weights
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.cli.run_scores import card_sections

    cli = None if source.recipe is None else RecipeCLI(recipe)
    destination = None
    if args.push_to_hub is not None:
        destination = Destination(args.push_to_hub, args.private, args.revision, args.message)
        if not args.merge_lora:  # a merged folder holds its own
            check_published(args.backbone or backbone_of(source, cli))
        check_destination(destination)
    config, parts, peft_model = read_parts(source, cli, args.backbone)
    name = str(config.training.get("name", source.folder.name))
    sections = card_sections(cli, parts, source.recipe, name, args.metrics, args.push_to_hub)
    sections = replace(sections, picture=source.picture())
    if args.merge_lora:
        parts, peft_model = with_weights(config, parts, peft_model)
        write_merged(out, config, parts, peft_model, args.overwrite, sections)
    else:
        write_adapter(out, config, parts, peft_model, args.overwrite, sections)
    print(f"{'merged checkpoint' if args.merge_lora else 'adapter folder'}: {out}")
    if destination is not None:
        publish(out, destination, _retry(args))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    for option in ("private", "revision", "message"):
        if getattr(args, option) and not args.push_to_hub:
            raise ValueError(f"--{option} says how to publish; add --push-to-hub user/name, or leave it out")


def publish(folder: Path, destination: Destination, retry: list[str]) -> None:
    """Push a folder that is safely on disk, and say where it is; or how to try again.

    Raises:
        ValueError: the push failed; the folder stays, and the message ends with the command ``retry``.
    """
    from subtoken_train.artifact.hub import push_folder

    try:
        address = push_folder(folder, destination)
    except ValueError as error:
        raise UncutError(
            f"{folder} is written, but not published: {error}. Try again with: {shlex.join(retry)}"
        ) from error
    print(f"published: {address}")


def _retry(args: argparse.Namespace) -> list[str]:
    """The same command again, over what it wrote."""
    words = ["subtoken-train", "export", args.source, args.out, "--overwrite", "--push-to-hub", args.push_to_hub]
    for option in ("backbone", "metrics", "revision", "message"):
        if value := getattr(args, option):
            words += [f"--{option}", value]
    flags = ("merge-lora", "private", "allow-code")
    return words + [f"--{flag}" for flag in flags if getattr(args, flag.replace("-", "_"))]
