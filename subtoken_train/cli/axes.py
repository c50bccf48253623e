"""``subtoken-train axes``: a copy of a model whose value channels are ordered by what they add to the output."""

import argparse
import os
from pathlib import Path

from subtoken_train.cli.terminal import counter, quiet_libraries
from subtoken_train.errors import MAX_COUNT, check_range, refuse
from subtoken_train.outputs import check_place, new_folder

HELP = """Write a copy of a model that gives the same answers, and whose value groups lose less.

The copy's value channels are rotated to axes that are measured on some prompts. The first axes hold most of what values
add to a layer's output. The copy runs as fast, and is a plain transformers folder: train, ask and serve it like the
model. An adapter or a calibration fits either the model or the copy, never both.

  subtoken-train axes checkpoints/smollm2 runs/smollm2-axes --data book.txt
  subtoken-train generate --backbone runs/smollm2-axes --groups 16,8 ...

A language model reads randomly drawn recall contexts, the prompts of --data FILE.jsonl or the text of --data FILE.txt;
a model that takes images the records of --data FILE."""

CONTEXT_LENGTH = 704
"""Tokens of a stretch of text, or of a drawn context, as ``calibrate kvzap`` reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backbone", metavar="PATH", help="a backbone: folder or Hub id")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--data", metavar="FILE", help="prompts, a text, or records with images (default: recall)")
    parser.add_argument("--samples", type=int, default=16, metavar="N", help="prompts that are read (default: 16)")
    parser.add_argument("--dtype", default="float32", metavar="D", help="of the weights, read and written (float32)")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:0", help="where it runs (default: auto)")


def run(args: argparse.Namespace) -> int:
    out, samples = Path(args.out), args.samples
    refuse((os.path.lexists(out), f"{out} exists; name another folder, or remove it"))
    check_place(out)
    check_range("--samples", samples, 1, MAX_COUNT)
    quiet_libraries()
    from subtoken_train.artifact.hub import find_adapter
    from subtoken_train.calibrating.base import calibration_prompts
    from subtoken_train.calibrating.turned_values import check_foldable, turn_values
    from subtoken_train.inference.pool import load_backbone

    if find_adapter(args.backbone) is not None:
        raise ValueError(f"{args.backbone} is an adapter; name its backbone, and train on what is written")
    backbone = load_backbone(args.backbone, device=args.device, loading={"dtype": args.dtype})
    family, show = backbone.family, counter("prompts")
    check_foldable(family)
    source = calibration_prompts(family, args.data, samples, 1, CONTEXT_LENGTH, 0, answers=False, any_text=True)
    turned = turn_values(backbone, source.batches, lambda done: show(done, samples))
    with new_folder(out) as temporary:
        backbone.model.save_pretrained(temporary)
        family.processor.save_pretrained(temporary)
    moved = f"{out} answers as {args.backbone} does (its last states moved by {turned.apart:.2g} of their length)"
    held = f"Half of the value channels hold {turned.after:.0%} of what values add to the output"
    print(f"{moved}. {held}, mean over layers on prompts of {source.name}; before: {turned.before:.0%}")
    return 0
