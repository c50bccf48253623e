"""Files of compressed caches: damaged, and forged ones whose checksum is right."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hostile.case import Case, Expect, Place
from tests.hostile.known import Format, change, misplaced
from tests.hostile.pool import CACHES, asked_model
from tests.hostile.references import made
from tests.hostile.tensor_files import FILES, REFUSED_TENSORS, STRANGE_NAMES, canary_pickle
from tests.hostile.values import HUGE, NAN, damaged, no_file, written

FAR = (-1, -(2**31), 2**31 - 1, 2**62)
INVALID: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("version",): (0, -1, 5, 99, "1", None, 1.0, True, HUGE),
    ("dtype",): ("float16", "os", 5, None),
    ("model",): (5, None, [], {}),
    ("model", "weights"): (5, None, "0" * 64, ""),
    ("model", "adapter"): (5, "0" * 64, []),
    ("model", "tokenizer"): (5, None, "0" * 64, []),
    ("model", "backbone", "digest"): (5, None, "0" * 64, ""),
    ("reducer",): (5, None, [], {}, {"name": "nope"}),
    ("compression", "keep"): (0.25, NAN, "x", None, HUGE),
    ("compression", "eviction"): ({"name": "nope"}, 5, "os.system"),
    ("frames",): (5, None, [], [5], [{}]),
    ("contexts",): (5, None, [], [5], ["a"] * 7),
    ("report",): (5, None, {}),
    ("report", "payload_bytes"): (0, -1, "x", 2**62, HUGE, NAN),
    ("report", "ledger"): (5, None, {}),
    ("packed",): (5, None, [], {}),
    ("packed", "prompt_length"): (0, -1, 2**40, "x", NAN, None),
    ("packed", "layers"): (5, None, [], [{}], [[]], [{"blocks": []}] * 4),
    ("packed", "layers", 0, "blocks"): (5, None, [], [{}]),
    ("packed", "layers", 0, "fill"): ("nope", 5, "stored"),
    ("packed", "layers", 0, "blocks", 0, "parts"): (5, None, [], [{}]),
    ("packed", "layers", 0, "blocks", 0, "page_size"): (4, 0, -1, "x"),
    ("packed", "layers", 0, "blocks", 0, "page_count"): (4, 0, -1, "x"),
}


FORM = Format(
    legal={
        "model.backbone.path": lambda value: isinstance(value, str),
        "model.backbone.revision": lambda value: value is None or isinstance(value, str),
        "report.kept_entries": lambda value: value is None or (not isinstance(value, str) and 0 <= value <= 1),
    },
    unsaid=(
        *("report.ledger.shape.*", "reducer.*", "compression.*", "compression.eviction.*"),
        *("packed.layers.*.blocks.*.page_size", "packed.layers.*.blocks.*.page_count"),  # null, or gone: no pages
    ),
    exact=("version", "dtype", "model.*", "model.backbone.digest", "model.backbone.model_type", "contexts.*"),
)


@cache
def model(pool: Path, name: str) -> Any:
    """The model of a cache, loaded once in a process."""
    return asked_model(pool, name)


def forged(path: Path, record: Any, tensors: dict[str, Tensor]) -> None:
    """Write a file whose checksum is right."""
    from subtoken_train.inference import cache_file

    text = record if isinstance(record, str) else written(record)
    save_file(tensors, path, cache_file.sealed(text, tensors))


def _value(draw: random.Random, record: Any, tensors: dict[str, Tensor]) -> tuple[Any, str, Expect]:
    return misplaced(draw, record, INVALID)


def _mutated(draw: random.Random, record: Any, tensors: dict[str, Tensor]) -> tuple[Any, str, Expect]:
    content, what, expect = change(draw, record, FORM)
    return content, f"record: {what}", expect


def _tensor(draw: random.Random, record: Any, tensors: dict[str, Tensor]) -> tuple[Any, str, Expect]:
    """A tensor that is none of the cache's; numbers that point far away where it holds places."""
    name = draw.choice(sorted(tensors))
    kinds = ["shape", "one more", "empty", "gone", "more"]
    codes = name.endswith(("keys", "values", "index"))  # of which any is as good as another
    kinds += ["nan", "inf", "integer"] if tensors[name].is_floating_point() else [] if codes else ["far"] * 3
    kind = draw.choice(kinds)
    if kind == "gone":
        del tensors[name]
    elif kind == "more":
        tensors[draw.choice(STRANGE_NAMES)] = torch.zeros(2, 2)
    elif kind == "far":
        tensors[name] = tensors[name].clone()
        limits = torch.iinfo(tensors[name].dtype) if tensors[name].dtype != torch.bool else None
        value = draw.choice(FAR) if limits is None else max(limits.min, min(limits.max, draw.choice(FAR)))
        tensors[name].view(-1)[draw.randrange(max(1, tensors[name].numel()))] = value
    else:
        tensors[name] = REFUSED_TENSORS[kind](draw, tensors[name])
    return record, f"{name}: {kind}", Expect.REFUSED


@cache
def right_answer(pool: Path, name: str) -> Any:
    """What the model says on its own cache as it was saved."""
    loaded = model(pool, name)
    loaded.load_cache(pool / f"caches/{name}.safetensors")
    return loaded.ask(None, ["what ?"], max_new_tokens=3)


def make(draw: random.Random, place: Place) -> Case:
    """A cache file with one thing wrong in it."""
    name = draw.choice(list(CACHES))
    path = place.copy(f"caches/{name}.safetensors", "a.safetensors")
    kind = draw.choice(
        ("value", "value", "mutated", "tensor", "tensor", "tensor", "file", "bytes", "header", "control")
    )
    expect = Expect.REFUSED
    if kind in ("value", "mutated", "tensor"):
        with safe_open(path, "pt") as file:
            record = json.loads(file.metadata()["subtoken_cache"].partition(" ")[2])
        tensors = load_file(path)
        spoil = {"value": _value, "mutated": _mutated, "tensor": _tensor}[kind]
        content, what, expect = spoil(draw, record, tensors)
        forged(path, content, {key: tensor.contiguous() for key, tensor in tensors.items()})
    elif kind == "file":
        what = no_file(draw, path)
    elif kind == "bytes":  # a sum is over all of them
        spoilt, what = damaged(draw, path.read_bytes()) if draw.random() < 0.8 else (canary_pickle(), "a pickle")
        if spoilt == path.read_bytes():
            expect = Expect.TAKEN
        path.write_bytes(spoilt)
    elif kind == "header":
        what, expect = draw.choice(list(FILES.values()))(draw, path, "next_position")
        expect = Expect.REFUSED
    else:
        what, expect = "as it was saved", Expect.TAKEN

    def call() -> Any:
        loaded = model(place.pool, name)
        loaded.load_cache(path)
        return loaded.ask(None, ["what ?"], max_new_tokens=3)

    return Case(f"cache {name} {what}", call, expect, reference=made(lambda: right_answer(place.pool, name)))
