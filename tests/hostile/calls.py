"""What a program may hand to ``SubTokenModel``: ids, masks and settings of the wrong kind, shape or range."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.hostile.case import Case, Expect, Place, Reference
from tests.hostile.pool import VLM
from tests.hostile.references import equals, made
from tests.hostile.values import NAN

SETTINGS: tuple[tuple[str, tuple[Any, ...], Expect], ...] = (
    ("max_new_tokens", (0, -1, 1.5, "x", NAN), Expect.REFUSED),
    ("num_beams", (0, -1, 1.5, "x"), Expect.REFUSED),
    ("temperature", (-1.0, NAN, "x"), Expect.REFUSED),
    ("guidance_scale", (2.0, 7.5), Expect.REFUSED),
    ("context_length", (-1, 1.5, "x", 10**6), Expect.REFUSED),
    ("position_ids", (torch.arange(6)[None], torch.arange(6)[None] + 5), Expect.REFUSED),
    ("assistant_model", ("x",), Expect.REFUSED),
    ("unknown_setting", (1,), Expect.REFUSED),
    ("num_return_sequences", (0, -1, 2), Expect.REFUSED),
    ("cache_implementation", ("static", "nope"), Expect.REFUSED),
    ("max_new_tokens", (3,), Expect.TAKEN),
    ("num_beams", (3,), Expect.TAKEN),
    ("repetition_penalty", (1.5,), Expect.TAKEN),
    ("bad_words_ids", ([[20]],), Expect.TAKEN),
)
"""What is taken gives transformers' own tokens."""
IDS: tuple[tuple[str, Callable[[torch.Tensor], Any], Expect], ...] = (
    ("one dimension", lambda ids: ids[0], Expect.REFUSED),
    ("three dimensions", lambda ids: ids[None], Expect.REFUSED),
    ("no rows", lambda ids: ids[:0], Expect.REFUSED),
    ("no columns", lambda ids: ids[:, :0], Expect.REFUSED),
    ("floats", lambda ids: ids.float(), Expect.REFUSED),
    ("booleans", lambda ids: ids.bool(), Expect.REFUSED),
    ("negative", lambda ids: -ids, Expect.REFUSED),
    ("beyond the vocabulary", lambda ids: ids + 10**6, Expect.REFUSED),
    ("a list", lambda ids: ids.tolist(), Expect.REFUSED),
    ("nothing", lambda ids: None, Expect.REFUSED),
    ("a text", lambda ids: "what ?", Expect.REFUSED),
    ("as they were", lambda ids: ids, Expect.TAKEN),
    ("one token", lambda ids: ids[:, :1], Expect.TAKEN),
)
MASKS: tuple[tuple[str, Callable[[torch.Tensor], Any], Expect], ...] = (
    ("all zeros", torch.zeros_like, Expect.REFUSED),
    ("one row", lambda mask: mask[0], Expect.REFUSED),
    ("too short", lambda mask: mask[:, :-1], Expect.REFUSED),
    ("too long", lambda mask: torch.cat([mask, mask], 1), Expect.REFUSED),
    ("too many rows", lambda mask: torch.cat([mask, mask]), Expect.REFUSED),
    ("four dimensions", lambda mask: mask[:, None, None], Expect.REFUSED),
    ("twos", lambda mask: mask * 2, Expect.REFUSED),
    ("NaN", lambda mask: mask * NAN, Expect.REFUSED),
    ("a list", lambda mask: mask.tolist(), Expect.REFUSED),
    ("floats", lambda mask: mask.float(), Expect.TAKEN),
    ("booleans", lambda mask: mask.bool(), Expect.TAKEN),
    ("a pad before", lambda mask: torch.cat([mask[:, :1] * 0, mask[:, 1:]], 1), Expect.TAKEN),
)
"""What is taken means what transformers reads in it."""


@cache
def model(folder: Path) -> Any:
    """The adapter's model, loaded once in a process."""
    from subtoken_train.inference.model import SubTokenModel

    return SubTokenModel.from_pretrained(folder)


@cache
def theirs(folder: Path) -> Any:
    """The same backbone in transformers."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def as_transformers(folder: Path, inputs: dict[str, Any], settings: dict[str, Any]) -> Reference:
    """The call must return what transformers' own ``generate`` does of the same arguments."""

    def right() -> Any:
        return theirs(folder).generate(**{**inputs, "attention_mask": inputs["attention_mask"].long()}, **settings)

    return made(right)


def make(draw: random.Random, place: Place) -> Case:
    """A call with one odd argument; afterwards the same object must answer a good call as before."""
    vision = draw.random() < 0.4
    folder = place.pool / ("adapters" if vision else "backbones") / (VLM if vision else "tiny-llama")
    here = model(folder)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
    good_settings = dict(settings)
    good = {**inputs, **settings}
    kind = draw.choice(("settings", "settings", "ids", "ids", "masks", "masks", "pixels", "inputs"))
    expect = Expect.REFUSED
    if kind == "settings":
        name, values, expect = draw.choice(SETTINGS)
        value = draw.choice(values)
        settings[name], what = value, f"{name}={value!r}"
        if name == "temperature":
            settings["do_sample"] = True
    elif kind == "ids":
        what, change, expect = draw.choice(IDS)
        inputs["input_ids"], what = change(ids), f"ids: {what}"
        if what.endswith(("columns", "rows", "token")):
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    elif kind == "masks":
        what, change, expect = draw.choice(MASKS)
        inputs["attention_mask"], what = change(inputs["attention_mask"]), f"mask: {what}"
    elif kind == "pixels":
        one = torch.zeros(1, 3, 96, 96)
        values = (one, torch.full_like(one, NAN), one[0], "x", torch.zeros(1, 1, 4, 4))
        inputs["pixel_values"], what = draw.choice(values), "pixels without a placeholder"
    else:
        images = draw.choice((["x"], [None], [5], "x"))
        return Case(f"inputs: images {images!r}", lambda: here.inputs("<image> what ?", images), Expect.REFUSED)

    def call() -> Any:
        before = here.generate(**good)
        try:
            return here.generate(**inputs, **settings)
        finally:
            assert torch.equal(here.generate(**good), before), "the object answers otherwise than before"

    if vision and expect is Expect.TAKEN:  # the same object, asked as it likes to be
        right = here.generate(**good)
        simple = settings == good_settings and what not in ("ids: one token", "mask: a pad before")
        if not simple:
            return make(draw, place)
        return Case(f"generate VLM {what}", call, expect, reference=equals(right))
    reference = as_transformers(folder, inputs, settings) if expect is Expect.TAKEN else None
    return Case(f"generate {'VLM' if vision else 'LM'} {what}", call, expect, reference=reference)
