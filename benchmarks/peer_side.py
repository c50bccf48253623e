"""What both sides of ``peers.py`` share: the model, the prompt, and the answers to what the driver asks.

Each side runs in a process and an environment of its own, so this file imports torch and transformers alone, in either
version. Seconds are the processor's (one thread): other programs on the machine do not count.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128,
    "initializer_range": 0.06,  # attention that is far from uniform
}  # fmt: skip
KEPT = 0.5
"""Share of the entries, or of the key channels, that stay."""


class Side(Protocol):
    """A library: fills caches and decodes on them."""

    model: Any

    def fill(self, method: str, ids_1N: Tensor) -> Any:
        """The cache that a method leaves of a context."""

    def step(self, cache: Any, ids_11: Tensor, place: int) -> Tensor:
        """Logits after one more token at position ``place``, [1, V]; the cache grows."""

    def crop(self, cache: Any, count: int) -> None:
        """Forget the last tokens."""

    def held(self, cache: Any) -> int:
        """Bytes of all that the cache holds."""


def config(length: int) -> LlamaConfig:
    """Of the model; a second pass takes positions after the context."""
    return LlamaConfig(**SHAPE, max_position_embeddings=2 * length + 64)


def random_weights(length: int, folder: Path) -> None:
    """Write the weights that both sides load, and a tokenizer of bytes: KVzip asks for the context in words."""
    torch.manual_seed(0)
    torch.save(LlamaForCausalLM(config(length)).state_dict(), folder / "weights.pt")
    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    by_byte = Tokenizer(models.BPE(alphabet, []))
    by_byte.pre_tokenizer, by_byte.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=by_byte).save_pretrained(folder)


def load(length: int, folder: Path) -> Any:
    """The model with these weights."""
    model = LlamaForCausalLM(config(length)).eval()
    model.load_state_dict(torch.load(folder / "weights.pt"))
    model.config._name_or_path = str(folder)  # where KVzip's press finds the tokenizer
    return model


def context(length: int) -> Tensor:
    """The same random tokens on both sides, [1, N]."""
    return torch.randint(3, SHAPE["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))


class Answers:
    """What a side answers; the cache that each method filled last is kept for the steps."""

    def __init__(self, side: Side, length: int) -> None:
        self.side, self.ids_1N, self.caches = side, context(length), dict[str, Any]()

    def fill(self, method: str) -> dict[str, float]:
        """Seconds of the context's pass with its compression, and the bytes that its cache holds."""
        self.caches.pop(method, None)
        start = time.process_time()
        self.caches[method] = cache = self.side.fill(method, self.ids_1N)
        return {"seconds": time.process_time() - start, "bytes": self.side.held(cache)}

    def decode(self, method: str, steps: int) -> float:
        """Seconds of a step, mean over ``steps`` in a row; the cache is as before afterwards."""
        cache, place = self.caches[method], self.ids_1N.shape[1]
        start = time.process_time()
        for number in range(steps):
            self.side.step(cache, self.ids_1N[:, number : number + 1], place + number)
        seconds = time.process_time() - start
        self.side.crop(cache, steps)
        return seconds / steps

    def logits(self, method: str) -> list[float]:
        """Of the first token after the context."""
        cache = self.caches[method]
        found: list[float] = self.side.step(cache, self.ids_1N[:, :1], self.ids_1N.shape[1])[0].tolist()
        self.side.crop(cache, 1)
        return found


@torch.no_grad()
def serve(build: Callable[[Any], Side], versions: dict[str, str]) -> None:
    """Answer until the input ends; arguments of the program: tokens of the context, the weights' folder."""
    torch.set_num_threads(1)
    length, folder = int(sys.argv[-2]), Path(sys.argv[-1])
    answers = Answers(build(load(length, folder)), length)
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(answers, asked.pop("do"))(**asked)
        except Exception as error:  # the driver records it and goes on
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
