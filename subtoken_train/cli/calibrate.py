"""``subtoken-train calibrate``: numbers that a method needs of a backbone, found once and kept in a file."""

import argparse
import dataclasses
from pathlib import Path

from subtoken_train.calibrating import CALIBRATORS
from subtoken_train.cli.command_line import add_settings, flagged_arm
from subtoken_train.cli.terminal import counter, quiet_libraries
from subtoken_train.errors import check_word
from subtoken_train.outputs import check_new

HELP = """Measure the numbers that a method needs for a backbone, and write them to a file.

  prefixkv        what share of its entries each layer keeps at a tenth to nine tenths of the cache
  duo_attention   how much each head needs its whole cache: trained (language models, on recall)
  headkv          how much each head attends to what an answer repeats (language models, on recall)
  sparsemm        how much each head attends to what an answer tells of a picture (models that take images)
  q_filter        where the queries of each head point
  triattention    where the queries of each head lie before their rotary embedding
  kvzap           nets that predict KVzip's scores from what each layer reads
  lkv             what share of a budget each head gets: trained, on the scores of a method (language models)
  fitprune        what share of the visual tokens each layer needs (models that take images)
  threshold       the score that entries must reach so that a mean budget is met

  subtoken-train calibrate duo_attention --backbone PATH --out duo.json
  subtoken-train generate --backbone PATH --eviction duo_attention --eviction-option calibration=duo.json ...

  subtoken-train calibrate threshold --backbone PATH --option eviction=kvzip --option keep=0.25 --out kvzip.json
  subtoken-train generate --backbone PATH --eviction kvzip --eviction-keep threshold:kvzip.json ...

A language model reads randomly drawn recall contexts (--data recall, the default) or the prompts of --data FILE.jsonl,
as generate --prompts does (not for duo_attention and headkv). kvzap and lkv also read a text, --data FILE.txt. A model
that takes images reads the records of --data FILE; sparsemm draws its own scenes. The file is valid for the backbone
that it names, with any adapter, and for no other.

--option KEY=VALUE takes these options, shown with their defaults:
  all             samples=10 (duo_attention: 200, kvzap: 16, lkv: 100, sparsemm: 50), batch_size=2 (kvzap, lkv: 1),
                  context_length=512 (kvzap: 704, lkv: 256), seed=0
  prefixkv        scope=context, sinks=1, recent=1
  duo_attention   sinks=4, recent=28, learning_rate=0.02, regularisation=0.05
  kvzap           ridge=0.1, hidden=0 (width between two layers), positions=0 (entries of a batch, 0: all),
                  targets= (a folder that keeps them)
  lkv             eviction=kvzip, eviction_options=, keep=0.125, following=64, learning_rate=0.1
  threshold       samples=16, eviction=kvzip, eviction_options= (its settings: KEY=VALUE,KEY=VALUE), keep=0.5,
                  window=128, scope=context, protocol=query_aware"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", metavar="METHOD", help=", ".join(CALIBRATORS))
    add_settings(parser, "adapter", "backbone")
    read = "recall, a .jsonl file of texts, a text (kvzap, lkv), or records with images"
    parser.add_argument("--data", metavar="NAME|FILE", help=read)
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="a setting; repeatable")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:0", help="where it runs (default: auto)")


def run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    check_word(CALIBRATORS.kind, args.method, CALIBRATORS)
    check_new([out], args.overwrite)
    arm = flagged_arm(args, adapter=args.adapter)
    quiet_libraries()
    from subtoken_train.artifact.config import read_config
    from subtoken_train.artifact.folder import identify
    from subtoken_train.artifact.hub import adapter_folder
    from subtoken_train.calibrations import write_calibration
    from subtoken_train.families.backbone_config import BackboneConfig
    from subtoken_train.inference.compression import read_settings

    kind = CALIBRATORS.find(args.method)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    settings = read_settings(fields, args.method, args.option)
    for name in settings:
        check_word(f"option of {args.method}", name, fields)
    calibrator, backbone = kind(**settings), arm.load(args.device).backbone
    if args.adapter is None:
        identity = identify(backbone.family, BackboneConfig(path=args.backbone))
    else:
        identity = read_config(adapter_folder(args.adapter)).identity
    calibration = calibrator.run(backbone, identity, args.data, counter("prompts"))
    write_calibration(out, calibration, args.overwrite)
    read = calibration.data
    print(f"{calibration.numbers.words()}\n{read.samples} prompts of {read.name}, {read.tokens:,} tokens")
    print(f"calibration of {args.method} written to {out}")
    return 0
