"""What a program may hand to ``SubTokenModel``: odd ids, masks and settings, and prompts on every kind of position."""

from __future__ import annotations

import json
import os
import random
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hostile.case import VLM, Case, Expect, Place
from tests.hostile.references import made
from tests.hostile.values import NAN

COUNT = (0, -1, 1.5, "x")
REFUSED: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (*COUNT, NAN), "num_beams": COUNT, "temperature": (-1.0, NAN, "x"),
    "guidance_scale": (2.0, 7.5), "context_length": (-1, 1.5, "x", 10**6),
    "position_ids": (torch.arange(6)[None], torch.arange(6)[None] + 5), "assistant_model": ("x",),
    "unknown_setting": (1,), "num_return_sequences": (0, -1, 2), "cache_implementation": ("static", "nope"),
}  # fmt: skip
TAKEN = ({"max_new_tokens": 3}, {"num_beams": 3}, {"repetition_penalty": 1.5}, {"bad_words_ids": [[20]]})
"""What is taken gives transformers' own tokens, as the last two of the ids and three of the masks do."""
IDS = {
    "one dimension": lambda ids: ids[0], "three dimensions": lambda ids: ids[None], "no rows": lambda ids: ids[:0],
    "no columns": lambda ids: ids[:, :0], "floats": lambda ids: ids.float(), "booleans": lambda ids: ids.bool(),
    "negative": lambda ids: -ids, "beyond the vocabulary": lambda ids: ids + 10**6,
    "a list": lambda ids: ids.tolist(), "nothing": lambda ids: None, "a text": lambda ids: "what ?",
    "as they were": lambda ids: ids, "one token": lambda ids: ids[:, :1],
}  # fmt: skip
MASKS = {
    "all zeros": torch.zeros_like, "one row": lambda mask: mask[0], "too short": lambda mask: mask[:, :-1],
    "too long": lambda mask: torch.cat([mask, mask], 1), "too many rows": lambda mask: torch.cat([mask, mask]),
    "four dimensions": lambda mask: mask[:, None, None], "twos": lambda mask: mask * 2,
    "NaN": lambda mask: mask * NAN, "a list": lambda mask: mask.tolist(), "of floats": lambda mask: mask.float(),
    "of booleans": lambda mask: mask.bool(),
    "a pad before": lambda mask: torch.cat([mask[:, :1] * 0, mask[:, 1:]], 1),
}  # fmt: skip
RIGHT = ("as they were", "one token", "of floats", "of booleans", "a pad before")
GOOD = {"max_new_tokens": 1, "do_sample": False}


@cache
def model(folder: Path) -> Any:
    from subtoken_train.inference.model import SubTokenModel

    return SubTokenModel.from_pretrained(folder)


@cache
def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def calls(draw: random.Random, place: Place) -> Case:
    vision = draw.random() < 0.4
    folder = place.pool / ("adapters" if vision else "backbones") / (VLM if vision else "tiny-llama")
    here, ids, expect = model(folder), torch.tensor([[5, 6, 7, 8, 9, 10]]), Expect.REFUSED
    good: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GOOD}
    asked, settings = dict(good), dict[str, Any]()
    kind = draw.choice(("settings", "settings", "ids", "ids", "masks", "masks", "pixels", "inputs"))
    if kind == "settings":
        name = draw.choice((*REFUSED, *TAKEN))
        settings = name if isinstance(name, dict) else {name: draw.choice(REFUSED[name])}
        expect = Expect.TAKEN if isinstance(name, dict) else Expect.REFUSED
        asked |= {**settings, "do_sample": name == "temperature"}
        what = f"{settings}"
    elif kind == "ids":
        what = draw.choice(list(IDS))
        asked["input_ids"] = IDS[what](ids)
        if what in ("no columns", "no rows", "one token"):
            asked["attention_mask"] = torch.ones_like(asked["input_ids"])
    elif kind == "masks":
        what = draw.choice(list(MASKS))
        asked["attention_mask"] = MASKS[what](asked["attention_mask"])
    elif kind == "pixels":
        one = torch.zeros(1, 3, 96, 96)
        values = (one, torch.full_like(one, NAN), one[0], "x", torch.zeros(1, 1, 4, 4))
        asked["pixel_values"], what = draw.choice(values), "pixels without a placeholder"
    else:
        images = draw.choice((["x"], [None], [5], "x"))
        return Case(f"inputs: images {images!r}", lambda: here.inputs("<image> what ?", images), Expect.REFUSED)
    expect = Expect.TAKEN if what in RIGHT else expect

    def call() -> Any:
        before = here.generate(**good)
        try:
            return here.generate(**asked)
        finally:
            assert torch.equal(here.generate(**good), before), "the object answers otherwise than before"

    if not vision:
        right = (
            {**asked, "attention_mask": torch.as_tensor(asked["attention_mask"]).long()}
            if expect is Expect.TAKEN
            else {}
        )
        reference = made(lambda: theirs(folder).generate(**right))
        return Case(f"generate LM {kind}: {what}", call, expect, reference=reference)
    if expect is Expect.TAKEN and (settings or what in ("one token", "a pad before")):
        return calls(draw, place)  # nobody else to ask
    return Case(f"generate VLM {kind}: {what}", call, expect, reference=made(lambda: here.generate(**good)))


ROPES: dict[str, dict[str, Any]] = {
    "plain": {}, "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "linear": {"rope_type": "linear", "factor": 4.0}, "dynamic": {"rope_type": "dynamic", "factor": 4.0},
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
NO_PROMPT = ("", " ", "\u202e", "\u200b", "\n\n", "\ud800", "what \ud800 ?")
SHORT = {"max_new_tokens": 3, "do_sample": False}


@cache
def with_rope(pool: Path, rope: str) -> Path:
    folder = pool.parent / f"ropes-{os.getpid()}/{rope}"
    folder.mkdir(parents=True)
    for path in (pool / "backbones/tiny-llama").iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((pool / "backbones/tiny-llama/config.json").read_text())
    config["rope_parameters"] |= ROPES[rope]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tokens_of(pool: Path, rope: str, inputs: dict[str, torch.Tensor]) -> Any:
    """What transformers answers; a new model each time where it remembers the longest it has read."""
    load = theirs.__wrapped__ if rope == "dynamic" else theirs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(with_rope(pool, rope)).generate(**inputs, **SHORT)


def prompts(draw: random.Random, place: Place) -> Case:
    kind = draw.choice(("length", "length", "text", "text", "refused"))
    rope = draw.choice(list(ROPES)) if kind == "length" else "plain"
    folder = with_rope(place.pool, rope)
    ours, text = model(folder), draw.choice(NO_PROMPT if kind == "refused" else TEXTS)
    if kind == "refused":
        return Case(f"prompt {text!r}", lambda: ours.generate(**ours.inputs(text), **SHORT), Expect.REFUSED)
    if kind == "length":
        ids = torch.tensor([[draw.randrange(5, 1280) for _ in range(draw.choice(LENGTHS))]])
    else:
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def call() -> Any:
        return ours.generate(**(inputs if kind == "length" else ours.inputs(text)), **SHORT)

    what = f"{ids.shape[1]} tokens on {rope} positions" if kind == "length" else repr(text[:40])
    return Case(f"prompt {what}", call, Expect.TAKEN, reference=made(lambda: tokens_of(place.pool, rope, inputs)))
