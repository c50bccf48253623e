"""``subtoken-train benchmark``: times, peak memory and cache bytes, beside anchor and full cache."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.cli.command_line import add_compression_options, check_counts, check_unused, flagged_arm
from subtoken_train.cli.terminal import counter, quiet_libraries
from subtoken_train.errors import refuse
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.outputs import check_new, write_whole

if TYPE_CHECKING:
    import torch

    from subtoken_train.benchmarking.comparison import Subject
    from subtoken_train.benchmarking.synthetic_prompts import PromptParts, Shrink
    from subtoken_train.engine.compressed_backbone import CompressedBackbone
    from subtoken_train.inference.arm_spec import ArmSpec
    from subtoken_train.inference.compression import Compression

HELP = """Time prompts and decoding on this machine, and count bytes.

  subtoken-train benchmark --adapter DIR
  subtoken-train benchmark --config RECIPE --random --lengths 2048 8192 --batch-sizes 1 8 --device cuda
  subtoken-train benchmark --model llava-hf/llava-1.5-7b-hf --random --table8 --device cuda --out table8.json
  subtoken-train benchmark --model meta-llama/Llama-2-7b-hf --random --peak-memory --device cuda --out memory.json

Times an adapter, a recipe (with untrained routers) or a backbone alone. In turns with it, in the same process, it times
the same tokens without routing, the matched token-only anchor, and transformers' DynamicCache and StaticCache on the
whole prompt. Prompts are random words and pictures, and every step runs. It prints medians and ratios with 95 %
intervals over rounds; --out writes every figure as JSON after each length and batch size."""

NEW_TOKENS, PAIRS = 32, 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--adapter", metavar="DIR|ID", help="adapter: folder or Hub id")
    add("--config", "-c", metavar="RECIPE", help="recipe; its routers and LoRA are untrained")
    add("--model", metavar="ID|PATH", help="a backbone alone")
    add("--backbone", metavar="PATH", help="with --adapter: where its backbone is")
    add("--random", action="store_true", help="initialise the backbone's weights at random instead of reading them")
    lengths = "prompt length in tokens (default: one image, or 2048 for text)"
    add("--lengths", type=int, nargs="+", metavar="N", help=lengths)
    add("--batch-sizes", type=int, nargs="+", metavar="B", help="prompts at a time (default: 1)")
    add("--new-tokens", type=int, metavar="T", help=f"decoding steps (default: {NEW_TOKENS})")
    add("--pairs", type=int, default=PAIRS, metavar="N", help=f"rounds (default: {PAIRS})")
    table8 = "the paper's Table 8: FastV and VisionZip at 25 and 12.5 %%, S16K4, 256 steps in bfloat16"
    add("--table8", action="store_true", help=f"{table8}; without a GPU it is scaled down, and says so")
    memory = "the peak memory of the paper's appendix C.1: a language model's prefix of 2,048 tokens and a suffix of"
    arms = "one, whole, under Quest at 25 and 12.5 %%, and each with routing, in bfloat16; without a GPU scaled down"
    add("--peak-memory", action="store_true", help=f"{memory} {arms}")
    add("--device", default="auto", metavar="auto|cpu|cuda:0", help="where it runs (default: auto)")
    add("--out", metavar="JSON", help="write the record")
    add("--overwrite", action="store_true", help="replace it")
    add_compression_options(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    backbone = args.backbone if args.adapter else args.model
    spec = None if args.config else flagged_arm(args, adapter=args.adapter, backbone=backbone)
    quiet_libraries()
    from subtoken_train.benchmarking import paper_protocols as paper
    from subtoken_train.benchmarking.comparison import Subject
    from subtoken_train.benchmarking.synthetic_prompts import check_positions, prompt_parts
    from subtoken_train.inference.pool import device_of
    from subtoken_train.kernels.choice import choose_kernel

    device = device_of(args.device)
    choose_kernel(device.type)  # a forced path that cannot run
    shrink = _settle(args, device.type == "cuda")
    source = _recipe(args, shrink) if spec is None else _named(args, shrink, spec)
    source.compression.check(source.layout.family)
    family = source.layout.family
    if args.table8:
        paper.check_protocol(family)
    lengths = args.lengths or [None]
    prompts = [paper.memory_prompt(family)] if args.peak_memory else [prompt_parts(family, each) for each in lengths]
    for parts in prompts:
        check_positions(family, parts, 0 if args.peak_memory else args.new_tokens)
    subject = Subject.of(source.load(device), source.compression)
    record = _head(args, source, subject)
    print(record["title"], flush=True)
    if args.table8 or args.peak_memory:
        of, settings = (subject.family, source.backbone.path), (source.backbone.dtype, source.backbone.quantization)
        words, made = "peak memory of the paper's appendix C.1", paper.other_machine(*of, paper.PEAK_GB, *settings)
        if args.table8:
            words, made = "Table 8 of the paper", paper.departures(*of, prompts[0], args.new_tokens, *settings)
        record["departures"] = made
        print(f"{words}, scaled: {'; '.join(made)}" if made else f"{words}, as it is described", flush=True)
    for row in _rows(args, source, subject, prompts):
        record["rows"].append(row)
        if args.out:  # after each: what was measured stays, whatever comes after it
            text = json.dumps(record, indent=1) + "\n"
            write_whole(Path(args.out), text, overwrite=args.overwrite or len(record["rows"]) > 1)
    if args.out:
        print(f"written to {args.out}", flush=True)
    return 0


def _rows(
    args: argparse.Namespace, source: BenchmarkSource, subject: Subject, prompts: list[PromptParts]
) -> Iterator[dict[str, Any]]:
    from subtoken_train.benchmarking import paper_protocols as paper
    from subtoken_train.benchmarking.comparison import row_lines, run_row

    if args.peak_memory:
        row = paper.measure_memory(subject, counter("arms", timed=True))
        print("", *paper.peak_lines(row, source.backbone.path), sep="\n")
        yield row
        return
    subjects = paper.protocol_subjects(subject) if args.table8 else [("", subject)]
    cells = list(product(subjects, prompts, args.batch_sizes))
    for number, ((label, arm), parts, batch_size) in enumerate(cells, start=1):
        show = counter("runs" if len(cells) == 1 else f"runs of row {number} of {len(cells)}", timed=True)
        try:
            row = run_row(arm, parts, batch_size, args.new_tokens, args.pairs, show)
        except (RuntimeError, MemoryError) as error:  # on a CPU torch has no error type for it
            words = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
            if not isinstance(error, MemoryError) and not any(each in str(error) for each in words):
                raise
            size = f"batch size {batch_size} of {parts.length} tokens does not fit into the memory here"
            raise ValueError(f"{size}; give smaller --batch-sizes or shorter --lengths") from error
        lines = row_lines(row)
        if args.table8:
            row["table8"] = label
            lines.append(paper.overhead_line(label, row, source.backbone.path))
        print("", *lines, sep="\n", flush=True)
        yield row


def _head(args: argparse.Namespace, source: BenchmarkSource, subject: Subject) -> dict[str, Any]:
    from subtoken_train.benchmarking.rounds import PEAK_ELSEWHERE, PEAK_ON_GPU, hardware
    from subtoken_train.cli.check import environment

    family, dtype = subject.family, source.backbone.dtype
    on_gpu, layers = family.device.type == "cuda", family.shape.num_layers
    weights = "random weights" if args.random else "its own weights"
    protocol = "Table 8" if args.table8 else "appendix C.1" if args.peak_memory else None
    arm = subject.words if protocol is None else f"the arms of {protocol}"
    lora, place = "with LoRA" if protocol or hasattr(family.model, "peft_config") else "without LoRA", hardware()
    where = place["gpu"] if on_gpu else place["cpu"]
    return {
        "title": f"{source.words}: {arm}; {weights}, {lora}, {layers} layers, {dtype} on {where}",
        "hardware": place,
        "versions": environment(),
        **{"device": str(family.device), "dtype": dtype, "random": args.random, "layers": layers},
        "peak_bytes_are": PEAK_ON_GPU if on_gpu else PEAK_ELSEWHERE,
        "rows": [],
    }


def _check(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in ("adapter", "config", "model") if getattr(args, name)]
    found = " and ".join(given) or "none"
    backbone = "--backbone says where an adapter's backbone is; write --model for a backbone alone"
    refuse(
        (args.backbone and not args.adapter, backbone),
        (len(given) != 1, f"give one of --adapter DIR, --config RECIPE and --model PATH; got {found}"),
    )
    check_counts(args, "new_tokens", "pairs", "lengths", "batch_sizes")
    together = "--table8 and --peak-memory are protocols of their own; leave one of them out"
    refuse((args.table8 and args.peak_memory, together))
    if args.table8 or args.peak_memory:
        fixed = ["lengths", "batch_sizes", "reducer", "keep_ratio", "selector", "groups", "eviction", "key_channels"]
        fixed += ["byte_share", "key_axes", "merge", "rerotate", "kv_dtype", "prefill_chunk"]
        fixed += ["new_tokens", "pairs"] if args.peak_memory else []
        protocol = "--peak-memory" if args.peak_memory else "--table8"
        check_unused(args, fixed, f"is set by {protocol}; leave one of them out", pairs=PAIRS)
    if args.out is not None:
        check_new([Path(args.out)], args.overwrite)


def _settle(args: argparse.Namespace, on_gpu: bool) -> Shrink:
    """Fill in defaults, and say what is taken off a model of a protocol that runs without a GPU."""
    from subtoken_train.benchmarking import paper_protocols as protocol
    from subtoken_train.benchmarking.synthetic_prompts import Shrink

    follows = args.table8 or args.peak_memory
    args.batch_sizes = args.batch_sizes or [1]
    if args.table8:
        args.new_tokens = args.new_tokens or (protocol.NEW_TOKENS if on_gpu else protocol.SCALED_TOKENS)
    if follows:
        args.dtype = args.dtype or (protocol.DTYPE if on_gpu else protocol.SCALED_DTYPE)
    args.new_tokens = args.new_tokens or NEW_TOKENS
    if follows and args.random and not on_gpu:
        return Shrink(protocol.SCALED_LAYERS, protocol.SCALED_NARROWER)
    return Shrink()


@dataclass(frozen=True)
class BenchmarkSource:
    """A model that can be looked at without its weights: laid out, identity and shapes checked; ``load`` loads it."""

    words: str
    backbone: BackboneConfig
    layout: CompressedBackbone
    compression: Compression
    load: Callable[[torch.device], CompressedBackbone]


def _named(args: argparse.Namespace, shrink: Shrink, spec: ArmSpec) -> BenchmarkSource:
    """Return an adapter, or a backbone alone."""
    from subtoken_train.artifact.config import read_config
    from subtoken_train.artifact.hub import adapter_folder
    from subtoken_train.benchmarking.synthetic_prompts import DrawnPool, Shrink
    from subtoken_train.evaluation.runner.arms import load_arm
    from subtoken_train.inference.pool import adapter_backbone

    if replace(spec, byte_share=None).overrides:
        words = "is an adapter with its own reducer and routers; leave --reducer, --keep-ratio and --selector out"
        raise ValueError(f"{args.adapter} {words}")
    drawn = shrink if args.random and args.model else Shrink()
    if args.adapter:
        config = read_config(folder := adapter_folder(args.adapter))
        source = adapter_backbone(folder, config, args.backbone)
        words = f"adapter {config.training.get('name', args.adapter)} on {args.backbone or config.backbone.path}"
    else:
        source, words = BackboneConfig(path=args.model), f"backbone {args.model}"

    def load(device: torch.device) -> CompressedBackbone:
        return load_arm(spec, DrawnPool(drawn, device)) if args.random else spec.load(str(device)).backbone

    layout = load_arm(spec, DrawnPool(drawn, "meta"))
    return BenchmarkSource(words, replace(source, **spec.loading), layout, spec.compression(), load)


def _recipe(args: argparse.Namespace, shrink: Shrink) -> BenchmarkSource:
    import torch

    from subtoken_train.benchmarking.synthetic_prompts import random_family
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.families.load import layout_family
    from subtoken_train.training.preflight import lay_out

    own = ("reducer", "keep_ratio", "selector", "groups", "layout", "byte_share")
    check_unused(args, own, "is not read: the recipe names its own reducer and routers; leave it out")
    loading = {name: value for name in ("dtype", "max_pixels") if (value := getattr(args, name)) is not None}
    overrides = [f"--model.backbone.{name}={value}" for name, value in loading.items()]
    module = RecipeCLI(["--config", args.config, *overrides]).model
    backbone = module.backbone_config
    compression = flagged_arm(args, backbone=backbone.path).compression()

    def load(device: torch.device) -> CompressedBackbone:
        drawn = module.lay_out(random_family(backbone, shrink, device))[0] if args.random else None
        parts: CompressedBackbone = module.parts if drawn is None else drawn
        return parts.to(device).eval()

    if args.random:
        with torch.device("meta"):
            layout = module.lay_out(layout_family(backbone, shrink.apply))[0]
    else:
        layout = lay_out(module)
    return BenchmarkSource(f"recipe {args.config}, untrained, on {backbone.path}", backbone, layout, compression, load)
