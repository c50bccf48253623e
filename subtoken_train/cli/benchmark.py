"""``subtoken-train benchmark``: times, peak memory and cache bytes, beside anchor and full cache."""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.cli.arm_flags import add_compression_options
from subtoken_train.cli.command_line import check_counts
from subtoken_train.outputs import check_new, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from subtoken_train.benchmarking.comparison import Subject
    from subtoken_train.benchmarking.synthetic_prompts import PromptParts, Shrink
    from subtoken_train.cli.benchmark_source import BenchmarkSource

HELP = """Time prompts and decoding on this machine, and count bytes.

  subtoken-train benchmark --adapter DIR
  subtoken-train benchmark --config RECIPE --random --lengths 2048 8192 --batch-sizes 1 8 --device cuda
  subtoken-train benchmark --model llava-hf/llava-1.5-7b-hf --random --table8 --device cuda --out table8.json
  subtoken-train benchmark --model meta-llama/Llama-2-7b-hf --random --peak-memory --device cuda --out memory.json

Times an adapter, a recipe (with untrained routers) or a backbone alone. In the same process and in turns with it, it
also times the same tokens without routing, the matched token-only anchor, and transformers' DynamicCache and
StaticCache on the whole prompt (on a GPU the latter's steps are compiled). Prompts are random words and pictures;
every step runs, whether or not the model would have ended its answer. It prints medians and ratios with 95 % intervals
over rounds; --out writes every figure as JSON. The time left is shown after the first run; Ctrl-C keeps the rounds
that are finished."""

NEW_TOKENS, PAIRS = 32, 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--adapter", metavar="DIR|ID", help="adapter: folder or Hub id")
    parser.add_argument("--config", "-c", metavar="RECIPE", help="recipe; its routers and LoRA are untrained")
    parser.add_argument("--model", metavar="ID|PATH", help="a backbone alone")
    parser.add_argument("--backbone", metavar="PATH", help="with --adapter: where its backbone is")
    parser.add_argument(
        "--random", action="store_true", help="initialise the backbone's weights at random instead of reading them"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="with --random: number of layers of the language model")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="prompt length in tokens (default: one image, or 2048 for text)",
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", metavar="B", help="prompts at a time (default: 1)")
    parser.add_argument("--new-tokens", type=int, metavar="T", help=f"decoding steps (default: {NEW_TOKENS})")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"rounds (default: {PAIRS})")
    parser.add_argument(
        "--table8",
        action="store_true",
        help="the paper's Table 8: FastV and VisionZip at 25 and 12.5 %%, S16K4, 256 steps in bfloat16; without a GPU "
        "scaled down, which is said",
    )
    parser.add_argument(
        "--peak-memory",
        action="store_true",
        help="the peak memory of the paper's appendix C.1: a language model's prefix of 2,048 tokens and a suffix of "
        "one, whole, under Quest at 25 and 12.5 %%, and each with routing, in bfloat16; without a GPU scaled down",
    )
    parser.add_argument(
        "--share-of-copy", action="store_true", help="one layer's rate of reading its cache over a device copy's"
    )
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:0", help="where it runs (default: auto)")
    parser.add_argument("--out", metavar="JSON", help="write the record")
    parser.add_argument("--overwrite", action="store_true", help="replace it")
    add_compression_options(parser)


def run(args: argparse.Namespace) -> int:
    """Check, lay out, load, measure, print, write."""
    _check(args)
    from subtoken_train.cli.terminal import quiet_libraries

    quiet_libraries()
    from subtoken_train.benchmarking.comparison import Subject
    from subtoken_train.benchmarking.paper_protocols import check_protocol
    from subtoken_train.benchmarking.synthetic_prompts import check_positions, prompt_parts
    from subtoken_train.cli.benchmark_source import source_of
    from subtoken_train.inference.pool import device_of
    from subtoken_train.kernels.choice import choose_kernel

    device = device_of(args.device)
    choose_kernel(device.type)  # a forced path that cannot run
    source = source_of(args, _settle(args, device.type == "cuda"))
    if args.table8:
        check_protocol(source.layout.family)
    if args.peak_memory:
        return _peak_memory(args, source, device)
    prompts = [prompt_parts(source.layout.family, length) for length in args.lengths or [None]]
    for parts in prompts:
        check_positions(source.layout.family, parts, args.new_tokens)
    subject = Subject.of(source.load(device), source.compression)
    record = _head(args, source, subject)
    print(record["title"], flush=True)
    if args.table8:
        from subtoken_train.benchmarking.paper_protocols import departures

        record["departures"] = departures(
            subject.family,
            source.backbone.path,
            prompts[0],
            args.new_tokens,
            source.backbone.dtype,
            source.backbone.quantization,
        )
        print(_protocol_line("Table 8 of the paper", record["departures"]), flush=True)
    _keep(args, record, _rows(args, source, subject, prompts))
    return 0


def _keep(args: argparse.Namespace, record: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Put rows into the record, and write it after each: what was measured stays, whatever comes after it."""
    out, ours = args.out, args.overwrite
    try:
        for row in rows:
            record["rows"].append(row)
            if out:
                write_whole(Path(out), json.dumps(record, indent=1) + "\n", overwrite=ours)
                ours = True
            if row["interrupted"]:
                raise KeyboardInterrupt
    finally:
        if out and record["rows"] and ours:
            print(f"written to {out}", flush=True)


def _protocol_line(protocol: str, departures: list[str]) -> str:
    return f"{protocol}, scaled: {'; '.join(departures)}" if departures else f"{protocol}, as it is described"


def _peak_memory(args: argparse.Namespace, source: BenchmarkSource, device: torch.device) -> int:
    from subtoken_train.benchmarking.comparison import Subject
    from subtoken_train.benchmarking.paper_protocols import (
        PEAK_GB,
        measure_memory,
        memory_prompt,
        other_machine,
        peak_lines,
    )
    from subtoken_train.benchmarking.synthetic_prompts import check_positions
    from subtoken_train.cli.terminal import counter

    check_positions(source.layout.family, memory_prompt(source.layout.family), 0)
    subject = Subject.of(source.load(device), source.compression)
    backbone = source.backbone
    record = _head(args, source, subject)
    print(record["title"], flush=True)
    record["departures"] = other_machine(subject.family, backbone.path, PEAK_GB, backbone.dtype, backbone.quantization)
    print(_protocol_line("peak memory of the paper's appendix C.1", record["departures"]), flush=True)
    row = measure_memory(subject, counter("arms", timed=True))
    print("", *peak_lines(row, backbone.path), sep="\n")
    _keep(args, record, [row])
    return 0


def _rows(
    args: argparse.Namespace, source: BenchmarkSource, subject: Subject, prompts: list[PromptParts]
) -> Iterator[dict[str, Any]]:
    from subtoken_train.benchmarking.comparison import row_lines, run_row
    from subtoken_train.benchmarking.paper_protocols import overhead_line, protocol_subjects
    from subtoken_train.cli.terminal import counter

    subjects = protocol_subjects(subject) if args.table8 else [("", subject)]
    cells = list(product(subjects, prompts, args.batch_sizes))
    for number, ((label, arm), parts, batch_size) in enumerate(cells, start=1):
        show = counter("runs" if len(cells) == 1 else f"runs of row {number} of {len(cells)}", timed=True)
        try:
            row = run_row(arm, parts, batch_size, args.new_tokens, args.pairs, args.share_of_copy, show)
        except (RuntimeError, MemoryError) as error:  # on a CPU torch has no error type for it
            words = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
            if not isinstance(error, MemoryError) and not any(each in str(error) for each in words):
                raise
            raise ValueError(
                f"batch size {batch_size} of {parts.length} tokens does not fit into the memory here; give "
                "smaller --batch-sizes or shorter --lengths"
            ) from error
        lines = row_lines(row)
        if args.table8:
            row["table8"] = label
            lines.append(overhead_line(label, row, source.backbone.path))
        print("", *lines, sep="\n", flush=True)
        yield row


def _head(args: argparse.Namespace, source: BenchmarkSource, subject: Subject) -> dict[str, Any]:
    from subtoken_train.benchmarking.rounds import PEAK_ELSEWHERE, PEAK_ON_GPU, hardware
    from subtoken_train.cli.env import environment

    family, dtype = subject.family, source.backbone.dtype
    on_gpu, layers = family.device.type == "cuda", family.shape.num_layers
    weights = "random weights" if args.random else "its own weights"
    protocol = "Table 8" if args.table8 else "appendix C.1" if args.peak_memory else None
    arm = subject.words if protocol is None else f"the arms of {protocol}"
    lora = "with LoRA" if protocol or hasattr(family.model, "peft_config") else "without LoRA"
    place, cut = hardware(), "" if args.layers is None else " (--layers)"
    return {
        "title": f"{source.words}: {arm}; {weights}, {lora}, {layers} layers{cut}, {dtype} on "
        f"{place['gpu'] if on_gpu else place['cpu']}",
        "hardware": place,
        "versions": environment(),
        "device": str(family.device),
        "dtype": dtype,
        "random": args.random,
        "layers": layers,
        "peak_bytes_are": PEAK_ON_GPU if on_gpu else PEAK_ELSEWHERE,
        "rows": [],
    }


def _check(args: argparse.Namespace) -> None:
    if args.backbone and not args.adapter:
        raise ValueError("--backbone says where an adapter's backbone is; write --model for a backbone alone")
    given = [f"--{name}" for name in ("adapter", "config", "model") if getattr(args, name)]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise ValueError(f"give one of --adapter DIR, --config RECIPE and --model PATH; got {found}")
    check_counts(args, "new_tokens", "layers", "pairs")
    for name in ("lengths", "batch_sizes"):
        if wrong := [number for number in getattr(args, name) or [] if number < 1]:
            raise ValueError(f"--{name.replace('_', '-')} {wrong[0]} must be at least 1")
    if args.layers is not None and (not args.random or args.adapter):
        raise ValueError("--layers shortens a randomly initialised backbone: it needs --random, and no --adapter")
    if args.table8 and args.peak_memory:
        raise ValueError("--table8 and --peak-memory are protocols of their own; leave one of them out")
    if args.table8 or args.peak_memory:
        _check_protocol_options(args)
    if args.out is not None:
        check_new([Path(args.out)], args.overwrite)


def _check_protocol_options(args: argparse.Namespace) -> None:
    sizes, kept = (
        ("lengths", "batch_sizes", "reducer", "keep_ratio", "selector", "groups"),
        ("eviction", "key_channels", "key_axes", "merge", "rerotate"),
    )
    timed = {"new_tokens": None, "pairs": PAIRS, "share_of_copy": False} if args.peak_memory else {}
    given = [
        name for name in (*sizes, *kept, "kv_dtype", "prefill_chunk") if getattr(args, name) not in (None, "model")
    ]
    given += [name for name, default in timed.items() if getattr(args, name) != default]
    protocol = "--peak-memory" if args.peak_memory else "--table8"
    if given:
        raise ValueError(f"--{given[0].replace('_', '-')} is set by {protocol}; leave one of them out")


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
        return Shrink(args.layers or protocol.SCALED_LAYERS, protocol.SCALED_NARROWER)
    return Shrink(args.layers)
