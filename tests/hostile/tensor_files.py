"""Tensor files that are damaged, hold what no weight is, or are pickles that run something."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hostile.case import Expect, Spoilt
from tests.hostile.grammar import NoDocument, parsed_json
from tests.hostile.values import INFINITY, NAN, damaged

INTEGERS = (torch.int8, torch.int64, torch.uint8, torch.bool)
STRANGE_NAMES = ("x", "../../x", "", "a" * 2000, "\x1b[31m")
OFFSETS = ([0, 2**62], [10, 0], [-5, 5], [0, 0], "x", None)


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
    "nan": lambda draw, tensor: with_one(draw, tensor, NAN),
    "inf": lambda draw, tensor: with_one(draw, tensor, INFINITY, -INFINITY),
    "integer": lambda draw, tensor: tensor.to(draw.choice(INTEGERS)),
    "shape": lambda draw, tensor: torch.zeros(*tensor.shape, 1), "one more": lambda draw, tensor: tensor[None],
    "scalar": lambda draw, tensor: torch.tensor(1.0),
    "empty": lambda draw, tensor: torch.zeros(0, *tensor.shape[1:]),
}  # fmt: skip
ODD_TENSORS: dict[str, Change] = {
    "other floats": lambda draw, tensor: tensor.to(draw.choice((torch.float16, torch.bfloat16))),
    "huge": lambda draw, tensor: torch.full_like(tensor, 3e38),
}


def spoil_tensors(draw: random.Random, path: Path) -> Spoilt:
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    kind = draw.choice((*REFUSED_TENSORS, *ODD_TENSORS, "gone", "more", *FILES))
    if kind in FILES:
        return FILES[kind](draw, path, name)
    if kind == "gone":
        del tensors[name]
    elif kind == "more":
        tensors[draw.choice(STRANGE_NAMES)] = torch.zeros(2, 2)
    else:
        tensors[name] = {**REFUSED_TENSORS, **ODD_TENSORS}[kind](draw, tensors[name])
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return f"{name}: {kind}", Expect.TAKEN if kind in ODD_TENSORS else Expect.REFUSED


def _as_pickle(draw: random.Random, path: Path, name: str) -> Spoilt:
    path.write_bytes(canary_pickle(draw.choice((0, 2, 4))))
    return "a pickle with a tensor file's name", Expect.REFUSED


def _length(draw: random.Random, path: Path, name: str) -> Spoilt:
    content = path.read_bytes()
    length = draw.choice((0, 1, 2**63, 2**40, len(content) * 2, 10**8))
    path.write_bytes(struct.pack("<Q", length) + content[8:])
    return f"length of the header {length}", Expect.REFUSED


def _header(draw: random.Random, path: Path, name: str) -> Spoilt:
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header[name]["data_offsets"] = draw.choice(OFFSETS)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return f"header of {name}", Expect.REFUSED


def _damage(draw: random.Random, path: Path, name: str) -> Spoilt:
    before = decoded(path.read_bytes())
    content, what = damaged(draw, path.read_bytes())
    path.write_bytes(content)
    assert before is not None
    after, right = decoded(content), False
    if after is not None and before.keys() == after.keys():
        pairs = [(before[key], after[key]) for key in before]
        alike = (one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)
        right = all(alike) and all(np.isfinite(other).all() for _, other in pairs)
    return what, Expect.TAKEN if right else Expect.REFUSED


_TYPES = dict(zip("F64 F32 F16 I64 I32 I16 I8 U8 BOOL".split(), "<f8 <f4 <f2 <i8 <i4 <i2 i1 u1 ?".split(), strict=True))


def decoded(content: bytes) -> dict[str, Any] | None:
    """The arrays of a safetensors file, read by the letter of the format; None where it is none.

    The length of the header in 8 bytes, the header in JSON, then the bytes of all tensors without a hole.
    """
    size = int.from_bytes(content[:8], "little")
    try:
        header = parsed_json(content[8 : 8 + size])
        body, found, ends = content[8 + size :], {}, []
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if entry["dtype"] == "BF16":
                array = (np.frombuffer(body[start:end], "<u2").astype("<u4") << 16).view("<f4")
            else:
                array = np.frombuffer(body[start:end], _TYPES[entry["dtype"]])
            found[name] = array.reshape(entry["shape"])
            ends.append((start, end))
    except (NoDocument, KeyError, TypeError, ValueError, AttributeError):
        return None
    ends.sort()
    whole = [0, *(end for _, end in ends)] == [*(start for start, _ in ends), len(body)]
    return found if whole and content[8:9] == b"{" else None


FILES = {"pickle": _as_pickle, "length": _length, "header": _header, "damage": _damage, "more damage": _damage}
