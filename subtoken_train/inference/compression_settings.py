"""What a caller says of a cache's compression, by keyword, and the ``Compression`` that it is."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, TypedDict

from subtoken_train.errors import check_word, clipped
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.layer_views import Scope
from subtoken_train.functional.merging import Merge
from subtoken_train.inference.compression import Compression, KeepUnit, KVDtype
from subtoken_train.inference.written_settings import parse_keep
from subtoken_train.reducers.base import Reducer


class CompressionSettings(TypedDict, total=False):
    """How caches are compressed: what ``SubTokenModel`` and ``SubTokenModel.from_pretrained`` take beside the model.

    Attributes:
        eviction: name of an eviction method; None: none.
        eviction_keep: what stays, see ``Compression.keep``, or as the command line has it (``"64tokens"``,
            ``"20MB"``); by default all.
        eviction_unit: of an ``eviction_keep`` that is a number: ``fraction``, ``tokens`` or ``bytes``.
        eviction_every: evict again whenever this many tokens were generated; None: only the prompt is compressed.
        eviction_options: settings of the method, by name.
        scope: what the eviction chooses among: ``context`` (None: visual tokens, or a text's context) or ``all``.
        kv_dtype: ``model``, ``int8`` or ``int4``.
        key_channels: share of the channels that stay of the keys in scope; by default all.
        merge: ``none``, ``weighted``, ``pivot`` or ``position``; None: what the eviction does of itself.
        prefill_chunk: rows of a prompt that run through a layer at a time, see ``Compression``; None: all.
        rerotate: turn the keys that the eviction leaves to closed-up positions, where what follows goes on.
    """

    eviction: str | None
    eviction_keep: float | str
    eviction_unit: KeepUnit
    eviction_every: int | None
    eviction_options: dict[str, Any] | None
    scope: Scope | None
    kv_dtype: KVDtype
    key_channels: float
    merge: Merge | None
    prefill_chunk: int | None
    rerotate: bool


_FIELDS = {"eviction_keep": "keep", "eviction_unit": "unit", "eviction_every": "every"}
"""Settings that ``Compression`` calls otherwise."""


def compression_of(settings: CompressionSettings) -> Compression:
    """The compression that settings ask for.

    Raises:
        ValueError: settings, or a method, that do not exist, or that do not go together.
    """
    given: dict[str, Any] = dict(settings)
    for name in given:
        check_word("setting", name, CompressionSettings.__optional_keys__)
    if isinstance(keep := given.get("eviction_keep"), str):
        if "eviction_unit" in given:
            raise ValueError(
                f"eviction_keep={clipped(keep, 40)!r} says its unit itself; leave eviction_unit out, or give a number"
            )
        given["eviction_keep"], given["eviction_unit"] = parse_keep(keep)
    name, options = given.pop("eviction", None), given.pop("eviction_options", None)
    if name is None and options:
        raise ValueError(f"eviction_options={options!r} need an eviction, for instance eviction='snapkv'")
    method = None if name is None else build_eviction(name, **(options or {}))
    return Compression(method, **{_FIELDS.get(key, key): value for key, value in given.items()})


def settings_record(compression: Compression) -> dict[str, Any]:
    """All that a compression is, as plain values that compare equal where two leave the same cache.

    A calibration is told by its file's digest, wherever the file lies; how many rows ran at a time is left out.
    """
    names = [field.name for field in fields(compression) if field.name != "prefill_chunk"]
    record = {name: getattr(compression, name) for name in names}
    record |= {"scope": "all" if compression.scope == "all" else "context", "merge": compression.merging}
    record["eviction"] = None if compression.eviction is None else method_record(compression.eviction)
    return _as_read(record)


def method_record(method: Eviction | Reducer) -> dict[str, Any]:
    """A method's name and settings, alike."""
    record: dict[str, Any] = {field.name: getattr(method, field.name) for field in fields(method)}  # type: ignore[arg-type]
    for key, value in record.items():
        if isinstance(value, Eviction):
            record[key] = method_record(value)
        elif key == "calibration" and method.calibrated is not None:
            record[key] = method.calibrated.digest
    return _as_read({"name": method.name, **record})


def _as_read(record: dict[str, Any]) -> dict[str, Any]:
    """As a file gives it back."""
    read: dict[str, Any] = json.loads(json.dumps(record))
    return read
