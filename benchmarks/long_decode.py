"""A long answer in bounded memory: 16,384 generated tokens with ``eviction_every`` beside plain generation.

    OMP_NUM_THREADS=1 python benchmarks/long_decode.py

A random Llama (d = 256, 2 layers, 4 heads of 64 on 2 key-value heads, 32,768 positions) reads a prompt of 1,024
tokens and goes on greedily, without an end of text. *plain* evicts nothing; *prompt* cuts the prompt to the budget and
appends; the other arms cut the whole cache back to the budget after every 128 tokens. Bytes are those of all tensors
that a cache holds, statistics and slack included, noted every 128 tokens; the arms go on in turns, as many tokens at a
time. An arm whose budget holds everything must say the same tokens as *plain*. *step*: what keeping the queries costs a
step, interleaved, at the same cache.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.pairs import hardware, interleaved, ratio, write
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.families.text import TextFamily
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, prefill
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Batch, Region

ROOT = Path(__file__).resolve().parents[1]
PROMPT, TOKENS, BUDGET, EVERY, STEPS = 1024, 16384, 512, 128, 100
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt": {"method": "snapkv", "keep": BUDGET},
    **{name: {"method": name, "keep": BUDGET, "every": EVERY} for name in ("streaming_llm", "tova", "h2o", "snapkv")},
    "kvcompose": {"method": "kvcompose", "keep": BUDGET, "every": EVERY},
    "holds all": {"method": "snapkv", "keep": 2 * (PROMPT + TOKENS), "every": EVERY},
}


def random_backbone() -> CompressedBackbone:
    """The model; its attention is far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        initializer_range=0.06,
    )
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints/tiny-llama")
    return CompressedBackbone(TextFamily(LlamaForCausalLM(config).eval(), tokenizer), build_reducer("none", 1.0)).eval()


def prompt_batch() -> Batch:
    """A context and 32 tokens that ask."""
    ids = torch.randint(3, 512, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    regions = torch.full_like(ids, int(Region.CONTEXT))
    regions[:, 0], regions[:, -32:] = int(Region.SYSTEM), int(Region.QUERY)
    none = torch.zeros(1, dtype=torch.long)
    return Batch(ids, torch.full_like(ids, -100), regions, none + PROMPT - 1, None, none, ["prompt"])


def compression_of(arm: dict[str, Any]) -> Compression:
    """What an arm does; windows observe 32 rows."""
    if not arm:
        return Compression()
    options = {"window": 32} if arm["method"] == "snapkv" else {}
    return Compression(build_eviction(arm["method"], **options), arm["keep"], "tokens", every=arm.get("every"))


def held_bytes(cache: PackedCache) -> int:
    """Bytes of all tensors of a cache."""
    records = sum(layer.eviction_state.nbytes for layer in cache.layers if layer.eviction_state is not None)
    return records + sum(layer.payload_bytes + layer.index_bytes + sum(layer.tail_bytes) for layer in cache.layers)


class Answer:
    """One arm's growing answer, the bytes of its cache after every stretch of it, and the seconds that it took."""

    def __init__(self, backbone: CompressedBackbone, arm: dict[str, Any]) -> None:
        self.backbone, self.cache = backbone, PackedCache(backbone.family.shape.num_layers)
        self.token = prefill(backbone, prompt_batch(), self.cache, compression_of(arm)).logits_BV.argmax(-1)
        self.said, self.sizes, self.seconds = [int(self.token)], [held_bytes(self.cache)], 0.0

    @torch.no_grad()
    def go_on(self, tokens: int) -> None:
        """Say so many more tokens."""
        start = time.perf_counter()
        for _ in range(tokens):
            self.token = decode(self.backbone, self.token[:, None], self.cache).argmax(-1)
            self.said.append(int(self.token))
        self.seconds += time.perf_counter() - start
        self.sizes.append(held_bytes(self.cache))

    def figures(self, plain: list[int]) -> dict[str, Any]:
        """What is recorded of it."""
        unlike = (i for i, (ours, theirs) in enumerate(zip(self.said, plain, strict=True)) if ours != theirs)
        return {
            "tokens_per_second": round((len(self.said) - 1) / self.seconds, 1),
            "largest_bytes": max(self.sizes),
            "last_bytes": self.sizes[-1],
            "evictions": 0 if self.cache.evictor is None else self.cache.evictor.evictions,
            "first_tokens_of_plain": next(unlike, len(plain)),
            "bytes": self.sizes,
        }


@torch.no_grad()
def step_cost(backbone: CompressedBackbone) -> tuple[float, float, float]:
    """A step that keeps its query over one that does not, on like caches of the budget, both growing."""
    caches = {}
    for name, every in (("with", EVERY), ("without", None)):
        caches[name] = PackedCache(backbone.family.shape.num_layers)
        arm = {"method": "h2o", "keep": BUDGET, "every": every}
        prefill(backbone, prompt_batch(), caches[name], compression_of(arm))
    token = torch.full((1, 1), 7)
    actions = {name: lambda cache=cache: decode(backbone, token, cache) for name, cache in caches.items()}
    return ratio(interleaved(actions, STEPS), "with", "without")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/long_decode.json")
    args = parser.parse_args()
    backbone = random_backbone()
    settings = {"prompt": PROMPT, "tokens": args.tokens, "budget": BUDGET, "every": EVERY}
    record: dict[str, Any] = {"hardware": hardware(), **settings, "step": step_cost(backbone), "arms": {}}
    answers = {name: Answer(backbone, arm) for name, arm in ARMS.items()}
    for turn in range(args.tokens // EVERY):
        for name in list(ARMS) if turn % 2 == 0 else list(ARMS)[::-1]:
            answers[name].go_on(EVERY)
    for name, answer in answers.items():
        record["arms"][name] = answer.figures(answers["plain"].said)
        print(name, {key: value for key, value in record["arms"][name].items() if key != "bytes"}, flush=True)
    write(record, args.out)


if __name__ == "__main__":
    main()
