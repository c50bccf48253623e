"""Tensors of the wrong kind, bytes that are none, and pickles that would run something."""

import json
import pickle
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from tests.hostile.case import Expect, Spoilt
from tests.hostile.grammar import INFINITY, NAN, TRIES, NoDocument, damaged, parsed_json


class Touch:
    """Its pickle makes the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("../CANARY", "w"))


def canary_pickle(protocol: int = 2) -> bytes:
    return pickle.dumps(Touch(), protocol=protocol)


def with_one(draw: random.Random, tensor: Tensor, *values: float) -> Tensor:
    """A copy with another number at one place."""
    tensor = tensor.clone()
    tensor.view(-1)[draw.randrange(max(1, tensor.numel()))] = draw.choice(values)
    return tensor


Change = Callable[[random.Random, Tensor], Tensor]
REFUSED_TENSORS: dict[str, Change] = {
    "nan": lambda draw, tensor: with_one(draw, tensor, NAN, INFINITY, -INFINITY),
    "integer": lambda draw, tensor: tensor.to(draw.choice((torch.int8, torch.int64, torch.uint8, torch.bool))),
    "shape": lambda draw, tensor: torch.zeros(*tensor.shape, 1), "one more": lambda draw, tensor: tensor[None],
    "scalar": lambda draw, tensor: torch.tensor(1.0),
    "empty": lambda draw, tensor: torch.zeros(0, *tensor.shape[1:]),
}  # fmt: skip
STRANGE_NAMES = ("x", "../../x", "", "a" * 2000, "\x1b[31m")
OFFSETS = ([0, 2**62], [10, 0], [-5, 5], [0, 0], "x", None)


def odd_tensor(draw: random.Random, tensors: dict[str, Tensor], kinds: Sequence[str]) -> str:
    name, kind = draw.choice(sorted(tensors)), draw.choice(kinds)
    if kind == "gone":
        del tensors[name]
    elif kind == "more":
        tensors[draw.choice(STRANGE_NAMES)] = torch.zeros(2, 2)
    else:
        tensors[name] = REFUSED_TENSORS[kind](draw, tensors[name])
    return f"{name}: {kind}"


def spoil_tensors(draw: random.Random, path: Path, more: bool = True) -> Spoilt:
    """Tensors that do not belong there, or bytes that are no tensors; ``more``: whether one too many is wrong."""
    content, kind = path.read_bytes(), draw.choice(("tensor", "tensor", "pickle", "length", "header", "damage"))
    size = struct.unpack("<Q", content[:8])[0]
    what, expect = kind, Expect.REFUSED
    if kind == "tensor":
        tensors = load(content)
        what = odd_tensor(draw, tensors, (*REFUSED_TENSORS, "gone", *(["more"] if more else [])))
        save_file({key: value.contiguous() for key, value in tensors.items()}, path, {"format": "pt"})
        return what, expect
    if kind == "pickle":
        content = canary_pickle(draw.choice((0, 2, 4)))
    elif kind == "length":
        content = struct.pack("<Q", draw.choice((0, 1, 2**63, 2**40, len(content) * 2, 10**8))) + content[8:]
    elif kind == "header":
        header = json.loads(content[8 : 8 + size])
        header[draw.choice(sorted(header.keys() - {"__metadata__"}))]["data_offsets"] = draw.choice(OFFSETS)
        text = json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + content[8 + size :]
    else:
        content, what, expect = damaged_tensors(draw, content)
    path.write_bytes(content)
    return what, expect


def damaged_tensors(draw: random.Random, content: bytes) -> tuple[bytes, str, Expect]:
    """Damage after which they are none, not finite, of another shape or type, or the same; never other numbers."""
    before = load(content)
    for _ in range(TRIES):
        spoilt, what = damaged(draw, content)
        try:
            parsed_json(spoilt[8 : 8 + int.from_bytes(spoilt[:8], "little")])
            after = load(spoilt)
        except (SafetensorError, NoDocument, KeyError):
            return spoilt, what, Expect.REFUSED
        alike = after.keys() == before.keys() and all(
            after[name].shape == before[name].shape and after[name].dtype == before[name].dtype for name in before
        )
        if not alike or not all(torch.isfinite(each).all() for each in after.values()):
            return spoilt, what, Expect.REFUSED
        if all(torch.equal(after[name], before[name]) for name in before):
            return spoilt, what, Expect.TAKEN
    raise AssertionError("nothing is known of these tensors")
