"""What compression adds to a prompt's pass: routers, eviction statistics, packing.

    OMP_NUM_THREADS=1 python benchmarks/prefill.py                   # CPU, fp32
    python benchmarks/prefill.py --device cuda --dtype bfloat16      # a GPU

A random LLaMA-shaped stack (d = 1024, 8 heads of 128; few layers, because a prompt of 8,192 tokens takes a CPU core
half a minute) runs a prompt whose tokens are all in the compressed region but the last 32. Everything is timed in turns
in one process: the plain pass with its dense cache; the same packed (*unrouted*), and with routers (S16K4) and packed
(*routed*); with the statistics of an eviction at a tenth of the entries, its plan and packing; FastV's scout at layer 2
beside the layers that it runs. The shapes of all layers are read at once, as a prompt's pass does it. On a CPU the
seconds are the processor's; on CUDA all must run on a fused attention kernel, or torch's error ends the program.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask

from benchmarks.pairs import cell, hardware, interleaved, markdown, ratio, write
from benchmarks.shaped import HEAD_DIM, llama_config
from subtoken_train.cache.pack import Packing, pack_layer, read_counts
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.attention_rows import scouted_row
from subtoken_train.engine.prompt_pass import layer_plans
from subtoken_train.evictions import build_eviction
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.text import TextFamily
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank, RoutingState
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View

ROOT = Path(__file__).resolve().parents[1]
WINDOWED = ("streaming_llm", "snapkv", "pyramidkv", "knorm")
OTHERS = ("h2o", "elastic", "prefixkv", "aircache", "vl_cache", "tgv_kv", "kvcompose")
KEEP = 0.1
SCOUTED = 2  # the layer whose attention a scout looks at, FastV's own; the last one of a stack that has no such
LONG = 4096  # tokens from which a pass takes a CPU core many seconds


class Prompt:
    """The stack, a prompt, and its passes."""

    def __init__(self, config: LlamaConfig, length: int, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        layers, width, kv_heads = config.num_hidden_layers, config.hidden_size, config.num_key_value_heads
        whole = LlamaForCausalLM(config).to(device, dtype).eval()
        self.model, self.family, self.kv_heads = whole.model, TextFamily(whole, None), kv_heads
        use_packed_attention(self.model.config)
        self.scouted = min(SCOUTED, layers - 1)
        self.bank = RouterBank(RoutingConfig(), width, KVShape(layers, kv_heads, HEAD_DIM)).to(device).eval()
        attention = [layer.self_attn for layer in self.model.layers]
        self.bank.attach([part.v_proj for part in attention], [part.o_proj for part in attention])
        self.hidden = torch.randn(1, length, width, device=device, dtype=dtype)
        self.position = torch.arange(length, device=device)[None]
        self.regions = torch.full((1, length), int(Region.VISUAL), device=device)
        self.regions[:, :8], self.regions[:, -32:] = int(Region.SYSTEM), int(Region.QUERY)

    def run(self, **options: Any) -> DynamicCache:
        """The plain pass."""
        cache, hidden, visible = DynamicCache(config=self.model.config), self.hidden, torch.ones_like(self.regions)
        rotary = self.model.rotary_emb(hidden, self.position)
        mask = create_causal_mask(self.model.config, hidden, visible, cache, position_ids=self.position)
        for layer in self.model.layers:
            hidden = layer(
                hidden, attention_mask=mask, position_ids=self.position, **{CACHE: cache}, position_embeddings=rotary,
                **options,
            )  # fmt: skip
        return cache

    def routed(self) -> None:
        """With routers; packed."""
        visual, seed = self.regions == Region.VISUAL, torch.zeros(1, dtype=torch.long, device=self.regions.device)
        state = RoutingState(visual, self.regions == Region.QUERY, self.position, seed)
        with self.bank.routing(state):
            cache = self.run()
        self.packed(cache, [torch.ones_like(visual)[:, None]] * len(cache.layers), state.masks)

    def unrouted(self) -> None:
        """The same tokens without routers; packed."""
        cache = self.run()
        self.packed(cache, [torch.ones_like(self.regions).bool()[:, None]] * len(cache.layers))

    def packed(self, cache: DynamicCache, keep: list[Tensor], masks: dict[int, Tensor] | None = None) -> None:
        """Plan and pack all layers."""
        plans = layer_plans(keep, masks or {}, [None] * len(keep))
        packing = Packing()
        counts = read_counts(plans, self.kv_heads, HEAD_DIM, packing.layout, [packing.form] * len(plans))
        for layer, plan, own in zip(cache.layers, plans, counts, strict=True):
            pack_layer(layer.keys, layer.values, plan, packing, None, own)

    def scout(self) -> None:
        """What FastV at the embeddings runs before the prompt's own pass."""
        last = torch.tensor([self.position.shape[1] - 1], device=self.position.device)
        scouted_row(self.family, self.scouted, self.hidden, torch.ones_like(self.regions).bool(), self.position, last)

    def below(self) -> None:
        """The layers of the scout alone."""
        self.family.run_layers(self.hidden, torch.ones_like(self.regions).bool(), self.position, stop=self.scouted)

    def evicted(self, name: str) -> None:
        """With an eviction's statistics, plan and packing."""
        method, scores = build_eviction(name), []

        def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
            scores.append(method.score(View(layer, query, key, value, self.regions, scale, method.needs)))

        cache = self.run(observer=observe)
        competes = [torch.ones_like(self.regions).bool() for _ in cache.layers]
        budget = torch.full((len(competes), 1), int(KEEP * self.regions.shape[1]), device=self.regions.device)
        keep = method.keep(scores, Candidates([self.regions] * len(competes), competes, budget))
        self.packed(cache, keep)


@torch.no_grad()
def measure(
    config: LlamaConfig, length: int, pairs: int, methods: list[str], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Ratios to the plain pass, and of what stands beside each other."""
    prompt = Prompt(config, length, device, dtype)
    timed = {"plain": prompt.run, "unrouted": prompt.unrouted, "routed": prompt.routed}
    timed |= {name: lambda name=name: prompt.evicted(name) for name in methods}
    beside = {"scout": prompt.scout, "its layers": prompt.below}
    fused = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
    cuda = prompt.hidden.is_cuda
    with fused if cuda else nullcontext():
        seconds = interleaved(timed | beside, pairs, 1, clock=time.perf_counter if cuda else time.process_time)
    return {
        "length": length, "layers": config.num_hidden_layers, "width": config.hidden_size, "pairs": pairs,
        "plain_seconds": sorted(seconds["plain"])[pairs // 2], "kv_heads": config.num_key_value_heads,
        "ratios": {name: ratio(seconds, name, "plain") for name in timed if name != "plain"},
        "beside": {f"{a} / {b}": ratio(seconds, a, b) for a, b in (("routed", "unrouted"), ("scout", "its layers"))},
    }  # fmt: skip


def times(record: dict[str, Any]) -> str:
    """A row per prompt length, a column per method."""
    names, rows = list(record["rows"][0]["ratios"]), []
    for row in record["rows"]:
        cells = [cell(tuple(row["ratios"][name])) if name in row["ratios"] else "" for name in names]
        rows.append([f"{row['length']:,}", str(row["pairs"]), f"{row['plain_seconds']:.2f} s", *cells])
    return markdown(["tokens", "rounds", "plain pass", *names], rows)


def recipe(record: dict[str, Any]) -> str:
    """A row per model; the record joins those of ``subtoken-train benchmark``. Bytes: a share of a bf16 cache."""
    parts, rows = (("prefill", "dynamic"), ("step", "dynamic"), ("step", "anchor")), []
    for row in record["rows"]:
        held, dense = (row["sides"][side]["prompt_bytes"]["total"] for side in ("routed", "dynamic"))
        rows.append([row["model"], f"{2 * held / dense:.1%}", *(cell(row["ratios"][a][b]) for a, b in parts)])
    return markdown(["model", "bytes", *map(" / ".join, parts)], rows)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--methods", nargs="+", help="default: all below 4,096 tokens, else the windowed")
    args = parser.parse_args()
    rows = []
    for length in args.lengths:
        methods = args.methods or [*WINDOWED, *(OTHERS if length < LONG else ())]
        config = llama_config(args.layers, length, vocabulary=64)
        rows.append(measure(config, length, args.pairs, methods, args.device, getattr(torch, args.dtype)))
        for name, figures in [*rows[-1]["ratios"].items(), *rows[-1]["beside"].items()]:
            print(f"| {length:,} | {name} | {cell(figures)} |", flush=True)
    record = {"hardware": hardware(), "dtype": args.dtype, "rows": rows}
    write(record, ROOT / f"benchmarks/results/speed/prefill-{args.device.split(':')[0]}-{args.dtype}.json")
    print(times(record))


if __name__ == "__main__":
    main()
