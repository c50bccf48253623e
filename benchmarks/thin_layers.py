"""A decoding step and a prompt's pass of a real model, whose layers are thin: routed, with whole values, and dense.

    OMP_NUM_THREADS=1 python -m benchmarks.thin_layers checkpoints/smollm2
    OMP_NUM_THREADS=2 python -m benchmarks.thin_layers checkpoints/smollm2 --entries --prefill 2048
    OMP_NUM_THREADS=1 python -m benchmarks.thin_layers checkpoints/smollm2 --entries --prefill 2048 --evictions
    CC=none OMP_NUM_THREADS=1 python -m benchmarks.thin_layers checkpoints/smollm2    # as without a C compiler

*routed* keeps K of S groups of every value but the last 64 (at random: time does not depend on which), *same tokens*
all of them, *dynamic* is transformers' DynamicCache in its own forward. Caches are filled with random states of the
model's shape and grow by a token a step. *calls* are the operations that torch dispatches for one layer's attention,
which no neighbour on the machine touches. With one thread seconds are the process's own, with more they are the
clock's. ``--prefill`` also times a prompt's pass: packed with routers, packed without, and transformers' own; with
``--evictions`` it times each method's statistics, plan and packing at half of the entries instead of the routers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.decode import filled
from benchmarks.pairs import cell, hardware, interleaved, ratio, write
from benchmarks.real_text import NETS
from subtoken_train.benchmarking.sides import DenseSide, PackedSide
from subtoken_train.benchmarking.synthetic_prompts import draw_prompts, prompt_parts
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.text import TextFamily
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode
from subtoken_train.kernels.choice import compiler
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks/results/speed/thin_layers.json"
QUESTION = 64  # last entries, whose values stay whole
OTHERS = ("same tokens", "dynamic")
METHODS = (
    "streaming_llm",
    "random",
    "knorm",
    "keydiff",
    "tova",
    "snapkv",
    "pyramidkv",
    "lagkv",
    "expected_attention",
    "compactor",
    "elastic",
    "prefixkv",
    "h2o",
    "kvcompose",
    "ada(snapkv)",
    "critical(expected_attention)",
    "pooled(compactor)",
)
"""Evictions of a text's pass; KVzip, which reads it twice and asks in words, stands in ``peers.py``."""


class Calls(TorchDispatchMode):
    """Counts the operations that are dispatched inside it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, count it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


class Steps:
    """A model, and a token's step on each kind of cache."""

    def __init__(self, family: TextFamily, groups: tuple[int, int]) -> None:
        self.family, self.groups = family, groups
        self.backbone = CompressedBackbone(family, build_reducer("none")).eval()
        self.plain = family.decoder.config._attn_implementation
        self.token = torch.zeros(1, 1, dtype=torch.long)

    def states(self, entries: int) -> tuple[Tensor, Tensor]:
        """Random keys and values of a layer."""
        shape = self.family.shape
        key, value = torch.randn(2, 1, shape.num_kv_heads, entries, shape.head_dim).unbind(0)
        return key, value

    def packed(self, entries: int, groups: tuple[int, int] | None, room: int) -> PackedCache:
        """A filled cache with room for answers."""
        cache = filled(self.family.shape.num_layers, groups, self.states, entries, QUESTION)
        cache.reserve(room)
        return cache

    def dense(self, entries: int) -> DynamicCache:
        """Transformers' own cache of as many entries."""
        cache = DynamicCache(config=self.family.decoder.config)
        for layer in range(self.family.shape.num_layers):
            cache.update(*self.states(entries), layer)
        return cache

    def dense_step(self, cache: DynamicCache) -> None:
        """A step of transformers' own forward."""
        self.family.decoder.config._attn_implementation = self.plain
        self.family.model(input_ids=self.token, **{CACHE: cache}, use_cache=True)

    def calls(self, cache: PackedCache) -> int:
        """Operations of one layer's attention."""
        config = self.family.decoder.config
        query = torch.randn(1, config.num_attention_heads, 1, self.family.shape.head_dim)
        with Calls() as counted:
            cache.layers[0].attend(query, 1.0)
        return counted.count

    def measure(self, entries: int, pairs: int, clock: Callable[[], float]) -> dict[str, Any]:
        """Milliseconds of steps, and the ratios of the routed one to the others."""
        room = pairs + 2
        packed = {"routed": self.packed(entries, self.groups, room), "same tokens": self.packed(entries, None, room)}
        dense = self.dense(entries)
        actions: dict[str, Callable[[], object]] = {
            name: lambda cache=cache: decode(self.backbone, self.token, cache)  # type: ignore[misc]
            for name, cache in packed.items()
        }
        seconds = interleaved(actions | {"dynamic": lambda: self.dense_step(dense)}, pairs, clock=clock)
        return {
            "entries": entries,
            "step_ms": {name: round(1000 * sorted(each)[len(each) // 2], 2) for name, each in seconds.items()},
            "step": _ratios(seconds),
            "calls": {name: self.calls(cache) for name, cache in packed.items()},
        }


def _ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(each, 3) for each in ratio(seconds, "routed", name)] for name in OTHERS}


def prompt_passes(family: TextFamily, groups: tuple[int, int], tokens: int, pairs: int, clock: Any) -> dict[str, Any]:
    """Ratios of a prompt's pass: packed with routers and without, over transformers' own."""
    torch.manual_seed(0)
    bank = RouterBank(RoutingConfig(num_groups=groups[0], kept_groups=groups[1]), family.hidden_size, family.shape)
    prompts, none = draw_prompts(family, prompt_parts(family, tokens), 1), build_reducer("none")
    sides = {
        "routed": PackedSide("routed", "", family, prompts, none, bank.eval(), Compression()),
        "same tokens": PackedSide("same tokens", "", family, prompts, none, None, Compression()),
        "dynamic": DenseSide("dynamic", "", family, prompts, lambda: DynamicCache(config=family.decoder.config)),
    }

    seconds = _passes(sides, pairs, clock)
    middle_ms = {name: round(1000 * sorted(each)[len(each) // 2], 1) for name, each in seconds.items()}
    return {"tokens": tokens, "pass_ms": middle_ms, "pass": _ratios(seconds)}


def _passes(sides: Mapping[str, PackedSide | DenseSide], pairs: int, clock: Any) -> dict[str, list[float]]:
    """Time the sides' passes in turns."""

    def run(side: PackedSide | DenseSide) -> None:
        with side.turn():
            side.prefill()

    return interleaved({n: lambda s=s: run(s) for n, s in sides.items()}, pairs, warmup=1, clock=clock)


def eviction_passes(family: TextFamily, model: str, tokens: int, pairs: int, clock: Any) -> dict[str, Any]:
    """Ratios of a prompt's pass to transformers' own: packed whole, and with each method at half of the entries."""
    torch.manual_seed(0)
    prompts, none = draw_prompts(family, prompt_parts(family, tokens), 1), build_reducer("none")
    methods = {"nothing": Compression()} | {name: Compression(build_eviction(name), 0.5) for name in METHODS}
    if (nets := NETS / f"{model}.json").exists():
        methods["kvzap"] = Compression(build_eviction("kvzap", calibration=str(nets)), 0.5)
    sides: dict[str, PackedSide | DenseSide] = {
        name: PackedSide(name, "", family, prompts, none, None, method) for name, method in methods.items()
    }
    sides["dynamic"] = DenseSide("dynamic", "", family, prompts, lambda: DynamicCache(config=family.decoder.config))
    seconds = _passes(sides, pairs, clock)
    found = {name: [round(each, 3) for each in ratio(seconds, name, "dynamic")] for name in methods}
    return {"tokens": tokens, "evictions": found}


def table(runs: list[dict[str, Any]]) -> str:
    """A row per model, threads and entries, then one per prompt's pass."""
    lines = ["| model | by | threads | | routed | routed / same tokens | routed / dynamic | calls, same tokens' |"]
    lines.append("|---" * 8 + "|")
    for run in runs:
        head = f"| {run['model']} | {run['by']} | {run['hardware']['threads']} |"
        for row in run["steps"]:
            ratios = " | ".join(cell(tuple(row["step"][name])) for name in OTHERS)
            calls = " | ".join([f"{row['calls']['routed']}, {row['calls']['same tokens']}"])
            lines.append(
                f"{head} step, {row['entries']:,} entries | {row['step_ms']['routed']} ms | {ratios} | {calls} |"
            )
        for row in [row for row in run["passes"] if "pass" in row]:
            ratios = " | ".join(cell(tuple(row["pass"][name])) for name in OTHERS)
            lines.append(f"{head} prompt, {row['tokens']:,} tokens | {row['pass_ms']['routed']:,} ms | {ratios} | |")
    return "\n".join(lines)


def eviction_table(runs: list[dict[str, Any]]) -> str:
    """Write a row per eviction, a column per model: its pass over transformers' own."""
    rows = {run["model"]: row for run in runs for row in run["passes"] if "evictions" in row}
    heads = [f"{name}, {row['tokens']:,} tokens" for name, row in rows.items()]
    lines = [f"| eviction | {' | '.join(heads)} |"]
    lines.append("|---" * (1 + len(rows)) + "|")
    for name in dict.fromkeys(name for row in rows.values() for name in row["evictions"]):
        cells = [cell(tuple(row["evictions"][name])) if name in row["evictions"] else "" for row in rows.values()]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


@torch.no_grad()
def main() -> None:
    """Measure, print, and put the run in the place of an earlier one of the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a transformers folder of a language model")
    parser.add_argument("--entries", nargs="*", type=int, default=[560, 2048, 8192])
    parser.add_argument("--groups", nargs=2, type=int, default=[16, 12], metavar=("S", "K"))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--prefill", nargs="*", type=int, default=[], help="tokens of prompts")
    parser.add_argument("--evictions", action="store_true", help="time evictions in these passes, not routers")
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    torch.manual_seed(0)
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    family, groups = TextFamily(model, None), (args.groups[0], args.groups[1])
    steps, passes = Steps(family, groups), []
    measured = []
    for entries in args.entries:
        measured.append(steps.measure(entries, args.pairs, clock))
        print(json.dumps(measured[-1]), flush=True)
    rounds = max(3, args.pairs // 6)
    for tokens in args.prefill:
        if args.evictions:
            passes.append(eviction_passes(family, args.folder.name, tokens, rounds, clock))
        else:
            passes.append(prompt_passes(family, groups, tokens, rounds, clock))
        print(json.dumps(passes[-1]), flush=True)
    run = {"model": args.folder.name, "by": "torch" if compiler() is None else "C", "groups": groups}
    run |= {"hardware": hardware(), "load": round(os.getloadavg()[0], 1), "steps": measured, "passes": passes}
    runs = json.loads(args.out.read_text()) if args.out.exists() else []
    write([each for each in runs if _what(each) != _what(run)] + [run], args.out)
    print(eviction_table([run]) if args.evictions else table([run]))


def _what(run: dict[str, Any]) -> tuple[object, ...]:
    """What a run measured, of which the last one is kept."""
    kinds = [name for name in ("steps", "passes") if run[name]]
    kinds += ["evictions" for row in run["passes"] if "evictions" in row]
    return run["model"], run["by"], run["hardware"]["threads"], tuple(kinds)


if __name__ == "__main__":
    main()
