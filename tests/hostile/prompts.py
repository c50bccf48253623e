"""Prompts that are long, odd or empty, on models of every kind of position: the tokens are transformers'."""

from __future__ import annotations

import json
import random
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hostile.case import Case, Expect, Place
from tests.hostile.references import made

ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}  # fmt: skip
LENGTHS = (1, 2, 63, 64, 65, 255, 256, 257, 700, 1024, 1025, 1500)
TEXTS = (
    "<image>", "<image><image>", "</s>", "<s>", "[INST]", "x " * 40, "\N{GRINNING FACE}", "a\nb",
    "\ufeffwhat ?", "{{7*7}}", "<video>", "=1+1", "e\u0301", "\u00e9", "what " * 300,
)  # fmt: skip
REFUSED = ("", " ", "\u202e", "\u200b", "\n\n", "\ud800", "what \ud800 ?")
NEW = 3


def folder_of(pool: Path, rope: str) -> Path:
    """The tiny Llama with other positions; its weights are the pool's."""
    folder = pool.parent / f"ropes/{rope}"
    if not folder.exists():
        folder.mkdir(parents=True)
        for path in (pool / "backbones/tiny-llama").iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path)
        config = json.loads((pool / "backbones/tiny-llama/config.json").read_text())
        config["rope_parameters"] |= ROPES[rope]
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def models(pool: Path, rope: str) -> tuple[Any, Any, Any]:
    """Ours, transformers' and its tokenizer."""
    from subtoken_train import SubTokenModel

    folder = folder_of(pool, rope)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    return SubTokenModel.from_pretrained(folder), theirs, AutoTokenizer.from_pretrained(folder)


def tokens_of(pool: Path, rope: str, ids: torch.Tensor) -> Any:
    """What transformers answers; a new model each time, since a dynamic one remembers the longest it has read."""
    theirs = AutoModelForCausalLM.from_pretrained(folder_of(pool, rope)).eval() if rope == "dynamic" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (theirs or models(pool, rope)[1]).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
        )


def make(draw: random.Random, place: Place) -> Case:
    """A prompt to a language model without compression."""
    kind = draw.choice(("length", "length", "text", "text", "refused"))
    rope = draw.choice(list(ROPES)) if kind == "length" else "plain"
    ours, _, tokenizer = models(place.pool, rope)
    if kind == "length":
        length = draw.choice(LENGTHS)
        ids = torch.tensor([[draw.randrange(5, 1280) for _ in range(length)]])
        what = f"{length} tokens on {rope} positions"
    else:
        text = draw.choice(TEXTS if kind == "text" else REFUSED)
        what = repr(text[:40])
        if kind == "refused":
            return Case(f"prompt {what}", lambda: answered(ours, ours.inputs(text)), Expect.REFUSED)
        ids = tokenizer(text, return_tensors="pt")["input_ids"]

        def call() -> Any:
            return answered(ours, ours.inputs(text))

        return Case(f"prompt {what}", call, Expect.TAKEN, reference=made(lambda: tokens_of(place.pool, rope, ids)))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    reference = made(lambda: tokens_of(place.pool, rope, ids))
    return Case(f"prompt {what}", lambda: answered(ours, inputs), Expect.TAKEN, reference=reference)


def answered(ours: Any, inputs: dict[str, Any]) -> Any:
    """Our tokens."""
    return ours.generate(**inputs, max_new_tokens=NEW, do_sample=False)
