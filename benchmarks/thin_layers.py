"""A decoding step and a prompt's pass of a real model, whose layers are thin: routed, with whole values, and dense.

    OMP_NUM_THREADS=2 python -m benchmarks.thin_layers checkpoints/smollm2 --prefill 2048

*routed* keeps K of S groups of every value but the last 64 (at random: time does not depend on which), *same tokens*
all of them; *dynamic* and *static* are transformers' DynamicCache, and its StaticCache with room for these steps, in
its own forward. Caches are filled with random states of the model's shape and grow by a token a step. With one thread
seconds are the process's own, with more they are the clock's.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, StaticCache

from benchmarks.decode import filled
from benchmarks.pairs import cell, hardware, interleaved, markdown, ratio, write
from subtoken_train.benchmarking.sides import DenseSide, PackedSide
from subtoken_train.benchmarking.synthetic_prompts import draw_prompts, prompt_parts
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.text import TextFamily
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank

RECORD = Path(__file__).with_name("results") / "speed/thin_layers.json"
GROUPS = (16, 12)
QUESTION = 64  # last entries, whose values stay whole
OTHERS = ("same tokens", "dynamic", "static")


def steps(family: TextFamily, entries: int, pairs: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of steps, and the ratios of the routed one to the others."""
    backbone, token = CompressedBackbone(family, build_reducer("none")).eval(), torch.zeros(1, 1).long()
    shape, config = family.shape, family.decoder.config
    plain = config._attn_implementation

    def states(entries: int) -> tuple[Tensor, Tensor]:
        key, value = torch.randn(2, 1, shape.num_kv_heads, entries, shape.head_dim).unbind(0)
        return key, value

    def dense_step(cache: Cache) -> None:
        config._attn_implementation = plain
        family.model(input_ids=token, **{CACHE: cache}, use_cache=True)

    packed = {
        name: filled(shape.num_layers, groups, states, entries, QUESTION)
        for name, groups in (("routed", GROUPS), ("same tokens", None))
    }
    room = pairs + 2
    dense = {
        "dynamic": DynamicCache(config=config),
        "static": StaticCache(config=config, max_cache_len=entries + room),
    }
    for cache in packed.values():
        cache.reserve(room)
    for cache in dense.values():
        for layer in range(shape.num_layers):
            cache.update(*states(entries), layer)
    actions: dict[str, Callable[[], object]] = {
        name: partial(decode, backbone, token, cache) for name, cache in packed.items()
    }
    actions |= {name: partial(dense_step, cache) for name, cache in dense.items()}
    seconds = interleaved(actions, pairs, clock=clock)
    return {"entries": entries, "step_ms": _middle(seconds), "step": _ratios(seconds)}


def prompt_passes(family: TextFamily, tokens: int, pairs: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Ratios of a prompt's pass: packed with routers over packed without, and transformers' own."""
    torch.manual_seed(0)
    bank = RouterBank(RoutingConfig(num_groups=GROUPS[0], kept_groups=GROUPS[1]), family.hidden_size, family.shape)
    prompts, none = draw_prompts(family, prompt_parts(family, tokens), 1), build_reducer("none")
    sides: dict[str, PackedSide | DenseSide] = {
        "routed": PackedSide("routed", "", family, prompts, none, bank.eval(), Compression()),
        "same tokens": PackedSide("same tokens", "", family, prompts, none, None, Compression()),
        "dynamic": DenseSide("dynamic", "", family, prompts, lambda: DynamicCache(config=family.decoder.config)),
    }

    def run(side: PackedSide | DenseSide) -> None:
        with side.turn():
            side.prefill()

    seconds = interleaved({name: partial(run, side) for name, side in sides.items()}, pairs, warmup=1, clock=clock)
    return {"tokens": tokens, "pass_ms": _middle(seconds), "pass": _ratios(seconds)}


def _middle(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(1000 * sorted(each)[len(each) // 2], 2) for name, each in seconds.items()}


def _ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    there = [name for name in OTHERS if name in seconds]
    return {name: [round(each, 3) for each in ratio(seconds, "routed", name)] for name in there}


def table(runs: list[dict[str, Any]]) -> str:
    """A row per model, threads and entries, then one per prompt's pass."""
    rows = []
    for run in runs:
        for row in [*run["steps"], *run["passes"]]:
            kind, length = ("step", "entries") if "step" in row else ("pass", "tokens")
            ratios = [cell(tuple(row[kind][name])) if name in row[kind] else "" for name in OTHERS]
            what = f"{'step' if kind == 'step' else 'prompt'}, {row[length]:,} {length}"
            head = [run["model"], str(run["hardware"]["threads"]), what, f"{row[f'{kind}_ms']['routed']:,} ms"]
            rows.append([*head, *ratios])
    return markdown(["model", "threads", "", "routed", *(f"routed / {name}" for name in OTHERS)], rows)


@torch.no_grad()
def main() -> None:
    """Measure, print, and put the run in the place of an earlier one of the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a transformers folder of a language model")
    parser.add_argument("--entries", nargs="*", type=int, default=[560, 2048, 8192])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--prefill", nargs="*", type=int, default=[], help="tokens of prompts")
    args = parser.parse_args()
    torch.manual_seed(0)
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    family = TextFamily(AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval(), None)
    run = {"model": args.folder.name, "by": "C", "groups": GROUPS, "hardware": hardware()}
    run["steps"] = [steps(family, entries, args.pairs, clock) for entries in args.entries]
    run["passes"] = [prompt_passes(family, tokens, max(3, args.pairs // 6), clock) for tokens in args.prefill]
    run["load"] = round(os.getloadavg()[0], 1)
    earlier = json.loads(RECORD.read_text())
    write([*(each for each in earlier if not _same(each, run)), run], RECORD)
    print(table([run]))


def _same(*runs: dict[str, Any]) -> bool:
    """Whether runs measured the same: steps of a model, by C or not, with so many threads."""
    first, other = ((run["model"], run["by"], run["hardware"]["threads"], bool(run["steps"])) for run in runs)
    return first == other


if __name__ == "__main__":
    main()
