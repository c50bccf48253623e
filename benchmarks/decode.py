"""Decoding on a packed cache: routed (S16K4) against token-only, at the same kept tokens and at the same bytes.

    OMP_NUM_THREADS=1 python benchmarks/decode.py                   # CPU, fp32
    python benchmarks/decode.py --device cuda --dtype bfloat16      # a GPU

A random LLaMA-shaped model (d = 1024, 8 layers, 8 heads of 128) decodes one token after N packed entries of random keys
and values. Everything is timed in turns in one process. *attention*: the attention of one layer alone, against SDPA on
a dense cache of the same N entries. *step*: a whole decoding step, against our own packed cache without routing (same
entries; and 0.625 N entries, the same bytes) and against transformers' DynamicCache with SDPA.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.pairs import cell, hardware, interleaved, markdown, ratio, write
from benchmarks.shaped import HEAD_DIM, HEADS, llama_config
from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.key_basis import BalancedBasis
from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.families.decoder import CACHE
from subtoken_train.kernels.formats import MODEL, Format

ROOT = Path(__file__).resolve().parents[1]
LAYERS, VOCABULARY = 8, 4096
GROUPS, KEPT = 16, 4
ENTRIES = (256, 1024, 2048, 8192, 32768)
CALLS = 10  # of one layer's attention, which takes microseconds, for a step's round


class Decoder:
    """The model, and one step on a cache that is left as it was."""

    def __init__(self, device: str, dtype: torch.dtype, layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        config = llama_config(layers, 2 * ENTRIES[-1], VOCABULARY)
        self.model = LlamaForCausalLM(config).to(device, dtype).eval()
        use_packed_attention(self.model.config)
        self.device, self.dtype = device, dtype
        self.token = torch.zeros(1, 1, dtype=torch.long, device=device)

    def states(self, entries: int) -> tuple[Tensor, Tensor]:
        """Random keys and values, [1, h, N, d] each."""
        shape = (1, HEADS, entries, HEAD_DIM)
        key, value = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        return key, value

    def packed(self, entries: int, routed: bool, form: Format = MODEL) -> PackedCache:
        """A filled cache of one sample; the groups of every entry are chosen at random."""
        cache, marks, device = PackedCache(self.model.config.num_hidden_layers), None, self.device
        for layer in cache.layers:
            key, value = self.states(entries)
            if routed:
                chosen = torch.rand(1, entries, GROUPS, device=device).argsort(-1)[..., :KEPT]
                marks = torch.zeros(1, entries, GROUPS, dtype=torch.bool, device=device).scatter_(2, chosen, True)
            keep = torch.ones(1, 1, entries, dtype=torch.bool, device=device)
            basis = BalancedBasis.of(key, keep) if form.rotates else None
            key = key if basis is None else basis.keys(key)
            blocks = pack_layer(key, value, layer_plan(keep, marks), Packing(form=form))
            layer.store_prompt(blocks, entries, key, basis=basis)
        cache.next_position = torch.tensor([[entries]], device=device)
        cache.origin_B = torch.zeros(1, dtype=torch.long, device=device)
        cache.appends = True  # by transformers' own forward, which is timed here
        return cache

    def dense(self, entries: int) -> DynamicCache:
        """Transformers' own cache of as many entries."""
        cache = DynamicCache()
        for layer in range(self.model.config.num_hidden_layers):
            cache.update(*self.states(entries), layer)
        return cache

    def step(self, cache: Any) -> Tensor:
        """Logits of one more token; the token is removed from the cache again."""
        position = torch.tensor([[cache.get_seq_length()]], device=self.device)
        out = self.model(input_ids=self.token, **{CACHE: cache}, position_ids=position, use_cache=True).logits
        cache.crop(-1)
        return out


@torch.no_grad()
def measure(decoder: Decoder, entries: int, pairs: int) -> dict[str, Any]:
    """One row: seconds and ratios at ``entries``."""
    same_bytes = int(entries * (1 + KEPT / GROUPS) / 2)
    caches = {
        "routed": decoder.packed(entries, routed=True), "token_only": decoder.packed(entries, routed=False),
        "same_bytes": decoder.packed(same_bytes, routed=False), "dynamic": decoder.dense(entries),
    }  # fmt: skip
    alone = decoder.device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    steps = interleaved(
        {name: lambda cache=cache: decoder.step(cache) for name, cache in caches.items()}, pairs, clock=clock
    )
    first = {name: cache.layers[0] for name, cache in caches.items() if name != "dynamic"}
    key, value = decoder.states(entries)
    query = torch.randn(1, HEADS, 1, HEAD_DIM, device=decoder.device, dtype=decoder.dtype)
    attends = {name: lambda layer=layer: layer.attend(query, HEAD_DIM**-0.5) for name, layer in first.items()}
    attends["sdpa"] = lambda: F.scaled_dot_product_attention(query, key, value)
    attention = interleaved(attends, CALLS * pairs, clock=clock)
    return {
        "entries": entries,
        "step_ms": {name: round(1000 * sorted(values)[len(values) // 2], 3) for name, values in steps.items()},
        "attention_ms": {name: round(1000 * sorted(values)[len(values) // 2], 3) for name, values in attention.items()},
        "attention_vs_sdpa": ratio(attention, "routed", "sdpa"),
        "attention_vs_token_only": ratio(attention, "routed", "token_only"),
        "step_vs_token_only": ratio(steps, "routed", "token_only"),
        "step_vs_same_bytes": ratio(steps, "routed", "same_bytes"),
        "step_vs_dynamic": ratio(steps, "routed", "dynamic"),
        "index_share": first["routed"].index_bytes / first["routed"].payload_bytes,
    }


def table(record: dict[str, Any]) -> str:
    """Make the table of ``docs/speed.md``."""
    columns = (
        "attention_vs_sdpa", "attention_vs_token_only", "step_vs_token_only", "step_vs_same_bytes", "step_vs_dynamic",
    )  # fmt: skip
    rows = [
        [f"{row['entries']:,}", *(cell(tuple(row[name])) for name in columns), f"{row['index_share']:.2%}"]
        for row in record["rows"]
    ]
    return markdown(["entries", *(name.replace("_", " ") for name in columns), "index"], rows)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--entries", nargs="+", type=int, default=list(ENTRIES))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/speed/decode-<device>-<dtype>.json")
    args = parser.parse_args()
    decoder = Decoder(args.device, getattr(torch, args.dtype))
    rows = []
    for entries in args.entries:
        rows.append(measure(decoder, entries, args.pairs))
        print(table({"rows": rows[-1:]}).splitlines()[-1], flush=True)
    record = {"hardware": hardware(), "dtype": args.dtype, "pairs": args.pairs, "rows": rows}
    write(record, args.out or ROOT / f"benchmarks/results/speed/decode-{args.device.split(':')[0]}-{args.dtype}.json")
    print(table(record))


if __name__ == "__main__":
    main()
