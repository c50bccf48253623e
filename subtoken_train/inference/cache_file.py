"""A compressed cache as one safetensors file, so that a context is compressed once and used for days.

Its metadata hold as JSON a ``CacheHeader``, a record of the tensors, and a SHA-256 of both. Reading any bytes gives the
cache that was written, for the model and the settings that wrote it, or one worded ``ValueError``. The checksum finds
damage, not a forger: hence all other checks. Nothing is unpickled, no path in the file is opened, and nothing larger
than the file is allocated.
"""

import json
import os
import struct
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from subtoken_train.artifact.folder import ModelIdentity, check_same_model, model_identity
from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_record import PackedRecord, PackedShape, packed_cache, packed_tensors
from subtoken_train.documents import check_regular, parse_json
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning, at_place, check_range, refuse
from subtoken_train.functional.hashing import digest_of
from subtoken_train.inference.cache_report import CacheReport
from subtoken_train.inference.compression import Compression, method_record, settings_record
from subtoken_train.inference.text_prompts import QuestionFrame
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.ledger.kv_budget import mirror_count
from subtoken_train.outputs import check_file, whole_file
from subtoken_train.typed import checked, shown, typed

VERSION = 4
"""1, of version 0.2, noted no tokenizer; it is read with a warning. Up to 2 every rounded value group had a scale; up
to 3 all entries were in one format."""
MAX_HEADER = 2**26
"""Bytes of a file's header at most: names and places of its tensors, and the record."""
_RECORD = "subtoken_cache"


@dataclass(frozen=True)
class CacheHeader:
    """Description of a file's tensors; ``frames`` are the texts around the questions of each context."""

    model: ModelIdentity
    dtype: str
    reducer: dict[str, Any]
    compression: dict[str, Any]
    frames: list[QuestionFrame]
    contexts: list[str]
    report: CacheReport


@dataclass(frozen=True)
class _CacheRecord(CacheHeader):
    version: int
    packed: PackedRecord


def made_by(
    backbone: CompressedBackbone, compression: Compression
) -> tuple[ModelIdentity, str, dict[str, Any], dict[str, Any]]:
    """Return the first fields of a ``CacheHeader``: the model and the settings that make a cache."""
    dtype = str(backbone.model.dtype).removeprefix("torch.")
    return model_identity(backbone), dtype, method_record(backbone.reducer), settings_record(compression)


def write_cache(path: Path, head: CacheHeader, cache: PackedCache, shape: PackedShape, overwrite: bool = False) -> Path:
    """Write a cache to which nothing was appended, whole or not at all."""
    check_file(path)
    refuse((not overwrite and os.path.lexists(path), f"{path} exists; name another file, or pass overwrite=True"))
    packed, tensors = packed_tensors(cache)
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():  # safetensors takes none that is a part of another
        tensors[name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    try:
        packed_cache(packed, tensors, shape, [torch.device("cpu")] * len(packed.layers))
    except ValueError as error:
        words = f"the cache is not saved, because it could not be read back: {error}"
        raise ValueError(f"{words}; compress in the model's own dtype, without torch.autocast") from error
    record = {"version": VERSION, **asdict(head), "packed": asdict(packed)}
    text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    with whole_file(path) as temporary:
        save_file(tensors, temporary, sealed(text, tensors))
    return path


def read_cache(path: Path, backbone: CompressedBackbone, compression: Compression) -> tuple[CacheHeader, PackedCache]:
    """Read a cache for the model, onto its devices, and its header."""
    try:
        digest, text = _metadata(path)
        content = checked(dict[str, Any], parse_json(text, str(path)), str(path))
        version = checked(int, content.get("version"), f"{path}: version")
        refuse((not 1 <= version <= VERSION, f"{path} has version {version}; 1 to {VERSION} are read: please upgrade"))
        with safe_open(path, "pt") as file:
            # copies: what is read is a map of the file, which somebody may change or cut
            tensors = {name: file.get_tensor(name).clone() for name in list(file.keys())}
    except OSError as error:
        raise ValueError(f"{path} cannot be read; check the path ({error.strerror or type(error).__name__})") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {str(error)[:160]}") from error
    if digest != digest_of(text, sorted(tensors.items())).hexdigest():
        raise ValueError(f"{path} is damaged: its content is not what was written (SHA-256 differs); compress again")
    record = typed(_CacheRecord, content, str(path))
    routed = any(part.routed for layer in record.packed.layers for block in layer.blocks for part in block.parts)
    old = record.version < 3 and routed and FORMATS[compression.kv_dtype].rounds
    words = f"{path} has version {record.version}, whose {compression.kv_dtype} value groups have a scale each"
    refuse((old, f"{words}; since version 3 those of an entry's head share one: compress the context again"))
    with at_place(f"{path} is not a cache of this model: "):
        refuse((record.version > 1 and record.model.tokenizer is None, "its model names no tokenizer"))
        _check_made_by(record, backbone, compression)
        shape = shape_of(len(record.contexts), backbone, compression)
        devices = [next(layer.parameters()).device for layer in backbone.family.decoder.layers]
        cache = packed_cache(record.packed, tensors, shape, devices)
        check_range("its report's kept_entries", record.report.kept_entries, 0, 1)
        for name in ("payload_bytes", "index_bytes"):
            found, said = sum(getattr(layer, name) for layer in cache.layers), getattr(record.report, name)
            unlike = found != said and (name == "payload_bytes" or found > said)  # indices of version 0.4 took more
            refuse((unlike, f"its report says {name} is {said:,}, but it is {found:,}"))
    if record.model.tokenizer is None:
        words = f"{path} was saved by version 0.2, which did not note the tokenizer; with another one than the model's"
        warnings.warn(f"{words} the answers are meaningless: if unsure, compress again", SubTokenWarning, stacklevel=4)
    cache.prepare()
    return record, cache


def sealed(record: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a file's metadata: one entry with the record behind its checksum; safetensors orders several at random."""
    return {_RECORD: f"{digest_of(record, sorted(tensors.items())).hexdigest()} {record}"}


def _metadata(path: Path) -> tuple[str, str]:
    """Checksum and record; only the header is read, once its length is known to be sensible."""
    size = check_regular(path)
    with path.open("rb") as file:
        head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
    long = length > min(MAX_HEADER, size - 8)
    refuse((long, f"{path} is not a whole safetensors file: its header has {length:,} bytes"))
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    strange = metadata.keys() != {_RECORD}
    refuse((strange, f"{path} was not written by cache.save after ask(...): it has no record of a cache"))
    digest, _, text = metadata[_RECORD].partition(" ")
    return digest, text


def _check_made_by(record: CacheHeader, backbone: CompressedBackbone, compression: Compression) -> None:
    contexts, frames = len(record.contexts), len(record.frames)
    model, dtype, *ours = made_by(backbone, compression)
    uneven = f"it has {contexts} contexts and {frames} frames of questions"
    other = f"the cache is in {shown(record.dtype)} and the model in {dtype}; load the model in the cache's dtype"
    refuse((not contexts or frames != contexts, uneven), (record.dtype != dtype, other))
    check_same_model(record.model, model)
    settings = {"token reducer": (record.reducer, ours[0]), "compression": (record.compression, ours[1])}
    for what, (theirs, here) in settings.items():
        for name in sorted(theirs.keys() | here.keys()):
            its, own = shown(theirs.get(name)), shown(here.get(name))
            words = f"the cache was made with another {what}: {name[:40]} {its}, and this model has {own}"
            unlike = theirs.get(name) != here.get(name)
            refuse((unlike, f"{words}; build the model with the cache's settings, or compress again"))


def shape_of(contexts: int, backbone: CompressedBackbone, compression: Compression) -> PackedShape:
    """Return the shape that a cache of so many contexts must have."""
    family = backbone.family
    width, axes = family.shape.head_dim, 3 if family.tower_positions == "mrope" else 1
    mirrors = 0 if compression.key_axes == "own" else mirror_count(width, compression.key_channels)
    form = family.model.dtype, FORMATS[compression.kv_dtype]
    return PackedShape(contexts, family.shape.num_kv_heads, width, *form, family.windows, axes, mirrors)
