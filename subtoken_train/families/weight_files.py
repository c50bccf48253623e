"""A backbone's weights by the headers of their files: what holds them, whether it is whole, and which shapes it has.

A header is some kilobytes, whatever the weights take. No tensor is read, and no pickle is opened.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from subtoken_train.documents import check_regular, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""Bytes of a header at most; safetensors reads no longer one."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LAYER = re.compile(r"(.*\blayers\.)(\d+)\..+")
_TOWER = re.compile("vision|visual|tower")


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Read the names, shapes and dtypes of a folder's weights, as tensors on the meta device.

    Raises:
        ValueError: there are no safetensors, a file is cut off or its header is none, or a name is there twice.
    """
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        header = _header(path)
        if twice := found.keys() & header.keys():
            raise ValueError(f"{path.name} holds {sorted(twice)[0][:120]}, which another file holds, too")
        found.update(header)
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights, in transformers' order of preference.

    Raises:
        ValueError: there are none; pickles alone, which may hold code.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        return [folder / name for name in sorted(set(map(str, index["weight_map"].values())))]
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ValueError(
            f"{pickles[0]} is a pickle, which may hold code and is not read, and there is no {WEIGHTS}; take the model "
            "in safetensors, or convert it once with transformers' save_pretrained"
        )
    raise ValueError(f"there is no {WEIGHTS} in it; the download is incomplete")


def _header(path: Path) -> dict[str, Tensor]:
    size = check_regular(path)
    with path.open("rb") as file:
        begin = file.read(8)
    length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size
    if not 2 <= length <= min(size - 8, MAX_HEADER):
        raise ValueError(f"{path.name} is no safetensors file, or cut off: a header of {length:,} in {size:,} bytes")
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            kinds = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(
            f"{path.name} is not a whole safetensors file (truncated download?): {str(error)[:160]}"
        ) from None
    if unknown := [name for name, (_, dtype) in kinds.items() if dtype not in _DTYPES]:
        raise ValueError(f"{path.name}: tensor {unknown[0][:120]} is of type {kinds[unknown[0]][1]}, which is not read")
    return {name: torch.empty(shape, dtype=_DTYPES[dtype], device="meta") for name, (shape, dtype) in kinds.items()}


def whole_numbers(headers: Mapping[str, Tensor]) -> str | None:
    """Say which weight or bias of an unquantised model is of whole numbers or booleans; None where none is."""
    for name, tensor in sorted(headers.items()):
        if name.endswith((".weight", ".bias")) and not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            return (
                f"are no weights: {name[:120]} is of {kind}, and its config.json names no quantisation; get the "
                "backbone anew"
            )
    return None


def misfit(report: Mapping[str, Any], own: Collection[str]) -> str | None:
    """Say where weights do not fit a configuration; None where they do.

    Args:
        report: what transformers' ``from_pretrained`` says of loading.
        own: names of the model's tensors.
    """
    if mismatched := sorted(report["mismatched_keys"], key=str):
        name, theirs, ours = mismatched[0]
        return (
            f"do not fit its config.json: {len(mismatched)} tensors have another shape, first {name[:120]}: "
            f"{list(theirs)} in the file, {list(ours)} by the configuration"
        )
    if missing := sorted(report["missing_keys"]):  # transformers would draw them at random
        return f"are not whole: {len(missing)} tensors are missing, first {missing[0][:120]}"
    stacks = {found[1] for name in own if (found := _LAYER.fullmatch(name))}
    for name in sorted(report["unexpected_keys"]):
        found = _LAYER.fullmatch(name)
        if found is not None and found[1] in stacks and not _TOWER.search(name):
            layer = f"{found[1]}{found[2]}."
            if not any(other.startswith(layer) for other in own):
                return f"do not fit its config.json: they hold layer {found[2]} ({name[:120]}), which it leaves out"
    return None
