"""Settings of a prompt's compression: eviction method, how much stays, precision; as objects, keywords or text.

``CompressionSettings`` is what a caller passes by keyword; ``parse_keep`` and ``parse_settings`` read what is written
on a command line: ``0.1``, ``256tokens``, ``20MB``, ``window=32``.

Legend: B batch, M rows of a layer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from subtoken_train.errors import check_together, check_word, clipped, refuse, unknown_name
from subtoken_train.evictions import build_eviction, check_online, setting_fields
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.observers import unasked
from subtoken_train.evictions.thresholds import Threshold, written_threshold
from subtoken_train.families.family import Family, check_calibration
from subtoken_train.families.positions import rotary_kind
from subtoken_train.functional.gather import last_marked
from subtoken_train.functional.merging import Merge
from subtoken_train.kernels.formats import FORMATS, KVDtype
from subtoken_train.ledger.kv_budget import check_share, kept_channels
from subtoken_train.reducers.base import Reducer
from subtoken_train.typed import shown
from subtoken_train.types import Batch, KeyAxes, Region, in_compressed_region
from subtoken_train.view.view import Scope

KeepUnit = Literal["fraction", "tokens", "bytes"]
MOST = 2**53
"""Tokens or bytes of a budget: what a float still counts one by one."""


@dataclass(frozen=True)
class Compression:
    """Settings of a prompt's compression, once its cache is filled; those not named here as in ``CompressionSettings``.

    Attributes:
        keep: what stays of the entries in scope: a share of those that the token reducer left, a number of them per
            layer and sample, or bytes of a sample's whole prompt cache, text included.
        round_up: round the number of entries that a share keeps up (matched anchors) instead of down.
        key_window: last entries of a prompt, whose queries choose the channels and whose own keys stay whole.
        every: evict again whenever this many tokens were generated; None: only the prompt.
        threshold: in the place of ``keep``: what an entry's score must reach, whatever that leaves.
    """

    eviction: Eviction | None = None
    keep: float = 1.0
    unit: KeepUnit = "fraction"
    scope: Scope | None = None
    kv_dtype: KVDtype = "model"
    round_up: bool = False
    key_channels: float = 1.0
    key_axes: KeyAxes = "own"
    merge: Merge | None = None
    key_window: int = 32
    prefill_chunk: int | None = None
    rerotate: bool = False
    every: int | None = None
    threshold: Threshold | None = None

    def __post_init__(self) -> None:
        check_word("unit of eviction_keep", self.unit, get_args(KeepUnit))
        check_word("kv_dtype", self.kv_dtype, FORMATS)
        check_share("key_channels", self.key_channels)
        check_word("key_axes", self.key_axes, get_args(KeyAxes))
        for name, value, allowed in (("merge", self.merge, get_args(Merge)), ("scope", self.scope, get_args(Scope))):
            if value is not None:
                check_word(name, value, allowed)
        fraction, number, says = self.unit == "fraction", type(self.keep) in (int, float), self.said
        needs = "needs an eviction method, for instance eviction='snapkv'"
        refuse(
            (not number, f"eviction_keep={self.keep!r} must be a number; 0.1 keeps a tenth of the cached entries"),
            (
                self.key_axes != "own" and not says["cuts"],
                f"key_axes={self.key_axes!r} turns keys so that channels can be cut, and key_channels=1 cuts none; "
                "give key_channels, for instance 0.75, or leave key_axes out",
            ),
            (self.merge not in (None, "none") and self.eviction is None, f"merge {self.merge!r} {needs}"),
            (
                self.key_window < 1,
                f"key_window={self.key_window} must be at least 1; with 32, the last 32 rows choose the key channels",
            ),
            (not isinstance(self.rerotate, bool), f"rerotate={self.rerotate!r} must be true or false"),
            (
                number and fraction and not 0 < self.keep <= 1,
                f"eviction_keep={self.keep} must lie in (0, 1]; 0.1 keeps a tenth of the cached entries",
            ),
            (
                number and not fraction and not (1 <= self.keep <= MOST and self.keep == int(self.keep)),
                f"eviction_keep={self.keep} {self.unit} must be a whole number of at least 1, and at most {MOST:,}",
            ),
            (self.eviction is None and self.keep != 1, f"eviction_keep={self.keep} {needs}"),
            (self.rerotate and self.eviction is None, "rerotate needs an eviction; use streaming_llm, snapkv or h2o"),
        )
        self._check_format()
        if self.threshold is not None:
            self._check_threshold(self.threshold)
        check_online(self.eviction, self.every, int(self.keep) if self.unit == "tokens" else None)
        if self.prefill_chunk is not None:
            self._check_chunk(self.prefill_chunk)
        self._check_rerotation()

    @property
    def said(self) -> dict[str, str]:
        """Settings in words, by what they do; empty where they do nothing."""
        method = self.eviction
        evicts = "" if method is None else f"eviction {method.name!r}"
        return {
            "evicts": evicts,
            "reads": evicts if method is not None and method.reads else "",
            "divides": evicts if method is not None and method.across_layers else "",
            "cuts": "" if self.key_channels == 1 else f"key_channels={self.key_channels}",
            "merges": "" if self.merging == "none" else f"merge {self.merging!r}",
            "every": "" if self.every is None else f"eviction_every={self.every}",
            "turns": "rerotate" if self.rerotate else "",
            "chunk": "" if self.prefill_chunk is None else f"prefill_chunk={self.prefill_chunk}",
        }

    def _check_format(self) -> None:
        form, says, name = FORMATS[self.kv_dtype], self.said, f"kv_dtype {self.kv_dtype}"
        mixing, sharing = (name if there else "" for there in (form.rotates, form.run > 1))
        alone, shared = "use int4 or int8", f"there the keys of {form.run} entries share scales"
        check_together(
            (says["cuts"], mixing, f"it mixes the channels of a key; {alone}"),
            (says["reads"], mixing, f"it mixes the channels by which pages are read; {alone}"),
            (says["every"], sharing, f"{shared}, and single entries would go; {alone}"),
            (says["reads"], sharing, f"{shared}, and single pages are read; {alone}"),
        )

    def _check_threshold(self, threshold: Threshold) -> None:
        if self.eviction is None:
            raise ValueError(f"eviction_keep {threshold.label} needs an eviction method, for instance eviction='kvzip'")
        own = method_record(self.eviction)
        found = own if threshold.record is None else threshold.record.numbers.eviction
        refuse(
            (
                self.keep != 1 or self.unit != "fraction",
                f"eviction_keep is a threshold or an amount ({self.keep:g} {self.unit}), and both are given; leave one",
            ),
            (
                found != own,
                f"the threshold {threshold.value:g} was found for eviction {shown(found)}, and this is {shown(own)}; "
                "make its own: subtoken-train calibrate threshold",
            ),
        )
        threshold.check(self.eviction)

    def _check_rerotation(self) -> None:
        says, threshold = self.said, "" if self.threshold is None else f"eviction_keep {self.threshold.label}"
        equal, instead = "equally many entries must stay in every", "use streaming_llm, snapkv or h2o"
        check_together(
            (says["turns"], threshold, f"{equal} head; give a share, for instance eviction_keep=0.2"),
            (says["turns"], says["divides"], f"{equal} layer; {instead}"),
            (says["turns"], says["reads"], f"that evicts nothing and leaves no gap to close; {instead}"),
            (says["turns"], says["every"], "that opens new gaps while tokens are decoded"),
            (says["turns"], says["cuts"], "pairs of key channels are rotated, and single ones cut"),
            (says["turns"], says["merges"], "a key is rotated by its position, and a merged one has several"),
        )

    def _check_chunk(self, chunk: int) -> None:
        if type(chunk) is not int or chunk < 1:
            raise ValueError(f"prefill_chunk={chunk!r} must be a whole number of at least 1, for instance 4096")
        method, says = self.eviction, self.said
        if method is None:
            return
        rows, instead = method.observing_rows, "use snapkv, h2o or another method that decides by layer"
        check_together(
            (
                says["chunk"],
                says["divides"] if self.threshold is None else "",
                f"it divides its budget between layers, of which each is packed before the next one runs; {instead}",
            ),
            (
                says["chunk"],
                says["evicts"] if "second_pass" in method.needs else "",
                f"it runs a prompt twice, of which each layer is packed before the next one runs; {instead}",
            ),
            (
                says["chunk"],
                says["evicts"] if rows is None else "",
                "it must cover the rows observed, of which a share says no number; give window as a whole number",
            ),
        )
        if rows is not None and chunk < rows:
            raise ValueError(
                f"prefill_chunk={chunk} is smaller than the {rows} rows observed by eviction {method.name!r}; use at "
                f"least {rows}"
            )

    def check(self, family: Family) -> None:
        """Raise a worded ``ValueError`` where the settings do not fit the backbone."""
        says, sees = self.said, family.image_token_id is not None
        windows = f"the sliding windows of {family.decoder.config.model_type}" if any(family.windows) else ""
        angles = rotary_kind(family.decoder.rotary_emb) if family.length_dependent else ""
        grids = f"the image grids of {family.name}" if family.tower_positions == "mrope" else ""
        check_together(
            (
                says["reads"] or says["turns"] or says["every"],
                windows,
                "it needs layers that see the whole cache; use a model without windows",
            ),
            (says["turns"], angles and f"positions of kind {angles!r}", "their angles depend on a prompt's length"),
            (says["turns"], grids, "a grid has gaps that cannot be closed"),
        )
        width, kept = family.shape.head_dim, kept_channels(family.shape.head_dim, self.key_channels)
        form = FORMATS[self.kv_dtype]
        more = -(-kept // form.per_code) * form.per_code / width
        form.check_width(
            kept,
            f"key_channels={self.key_channels} keeps {kept} of {width}; use key_channels={more:.6g}, or kv_dtype int8",
        )
        if self.eviction is None:
            return
        check_calibration(self.eviction.calibrated, family)
        check_calibration(None if self.threshold is None else self.threshold.record, family)
        self.eviction.check_shape(family.shape.num_layers, family.shape.num_kv_heads, family.shape.head_dim)
        refuse(
            (
                self.eviction.needs_image and not sees,
                f"eviction {self.eviction.name!r} reads the attention between text and image and {family.name} sees no "
                "images; use snapkv, h2o, kvcompose or another method for text",
            ),
            (
                self.scope == "visual" and not sees,
                f"scope 'visual': {family.name} sees no images; use scope 'context' or 'all'",
            ),
        )

    def check_prompts(self, prompts: Batch) -> None:
        """Raise a worded ``ValueError`` where the method needs an image or a question and a prompt has none."""
        method = self.eviction
        if method is not None and method.needs_image:
            lacking_B = prompts.images_per_sample_B == 0
            reads, lacks = "reads the attention between text and image", "has no image"
            instead = "snapkv, h2o, kvcompose or another method for text"
        elif method is not None and method.needs_question:
            lacking_B = unasked(prompts.regions_BN)
            reads, lacks = "scores by the question after the context", "ends with its context"
            instead = "kvzip, compactor or another method that asks nothing"
        else:
            return
        for name, lacking in zip(prompts.record_ids, lacking_B.tolist(), strict=True):
            if lacking:
                raise ValueError(f"eviction {method.name!r} {reads} and {name!r} {lacks}; use {instead}")

    @property
    def label(self) -> str:
        """Short form for tables: ``snapkv 0.1 int8``; ``-`` where nothing is compressed."""
        parts = [] if self.key_channels == 1 else [f"keys {self.key_channels:.6g}"]
        parts += [] if self.key_axes == "own" else [self.key_axes]
        parts += [] if self.kv_dtype == "model" else [self.kv_dtype]
        if self.eviction is not None:
            amount = f"{self.keep:.6g}" if self.unit == "fraction" else f"{int(self.keep):,} {self.unit}"
            amount = amount if self.threshold is None else self.threshold.label
            amount = f"reads {amount}" if self.eviction.reads else amount
            merged = [] if self.merge is None else [f"merge {self.merge}"]
            words = [word for word, said in (("all", self.scope == "all"), ("rerotated", self.rerotate)) if said]
            parts = [self.eviction.name, amount, *words, *merged, *parts]
        parts += [] if self.every is None else [f"every {self.every:,}"]
        return " ".join(parts) or "-"

    @property
    def share(self) -> float | None:
        """Share of the entries in scope that an eviction keeps, as far as it is known before a prompt is there.

        Of a threshold the recorded mean, which no single prompt promises; None where nothing is known.
        """
        if self.threshold is not None:
            return self.threshold.mean
        return self.keep if self.unit == "fraction" else None

    def cuts_keys(self, regions_BM: Tensor) -> Tensor:
        """Entries whose keys are cut where they stay, bool [B, M]: those in scope, but for the last of a prompt.

        Along principal axes its first stays whole too: all tokens look at it, and its key lies far from all others.
        """
        if self.key_channels == 1:
            return torch.zeros_like(regions_BM, dtype=torch.bool)
        visible_BM = regions_BM != Region.PADDING
        cut_BM = self.in_scope(regions_BM) & ~last_marked(visible_BM, self.key_window)
        return cut_BM if self.key_axes == "own" else cut_BM & (visible_BM.cumsum(-1) > 1)

    @property
    def merging(self) -> Merge:
        """Treatment of evicted entries, the method's own if none is set."""
        own: Merge = "none" if self.eviction is None else self.eviction.merges
        return own if self.merge is None else self.merge

    def in_scope(self, regions_BM: Tensor) -> Tensor:
        """Rows that the scope names, bool [B, M]."""
        if self.scope == "all":
            return regions_BM != Region.PADDING
        return in_compressed_region(regions_BM)


def written_keep(written: object) -> dict[str, Any]:
    """Return the fields of a ``Compression`` for what stays, as it is written: see ``parse_keep``, or a threshold."""
    if (threshold := written_threshold(written)) is not None:
        return {"threshold": threshold}
    keep, unit = parse_keep(str(written))
    return {"keep": keep, "unit": unit}


BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
SWITCHES = {"true": True, "false": False}


def parse_keep(text: str) -> tuple[float, KeepUnit]:
    """Return a budget's number and its unit.

    A bare number is a fraction; others name ``tokens``, ``B``, ``kB``, ``MB`` or ``GB``, in any case.
    """
    found = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or not math.isfinite(float(found[1]) * max(BYTES.values())):
        raise ValueError(
            f"{clipped(repr(text), 60)} is not a budget; write a fraction (0.1), tokens (256tokens) or bytes (20MB)"
        )
    number, unit = float(found[1]), found[2].lower()
    if not unit:
        return number, "fraction"
    if unit == "tokens":
        return number, "tokens"
    if unit not in BYTES:
        raise unknown_name("unit of a budget", found[2], ["tokens", "B", "kB", "MB", "GB"])
    return round(number * BYTES[unit]), "bytes"


def parse_settings(method: str | None, settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` settings of an eviction method, read as what the method's own defaults are.

    Unknown keys are left for ``build_eviction`` to refuse, settings of no method for ``ArmSpec``.

    Args:
        method: as it is written, wrappers included.
        settings: ``epsilon=0.01``, or ``expected_attention.epsilon=0.01`` where several methods have it.
    """
    if method is None:
        return dict.fromkeys(settings)
    return read_settings(setting_fields(method), method, settings)


def read_settings(fields: Mapping[str, Field[Any]], name: str, settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` settings of a dataclass, each read as what its field is; keys of no field stay texts."""
    read: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"setting {setting!r} of {name} must be written key=value")
        if key in read:
            raise ValueError(f"setting {key!r} of {name} is given twice")
        kind, default = (str, None) if key not in fields else (_kind(fields[key]), fields[key].default)
        read[key] = _as(kind, text, f"{name} {key}", default)
    return read


def _kind(field: Field[Any]) -> Callable[[str], object]:
    """Return the type of a setting: its default's, or (where that is None) the one its annotation names, else text."""
    if str(field.type) == "int | float":
        return lambda text: int(text) if re.fullmatch(r"[-+]?\d+", text.strip()) else float(text)
    if isinstance(field.default, bool | int | float | tuple):
        return type(field.default)
    named = re.search(r"\b(int|float)\b", str(field.type))
    return str if named is None else {"int": int, "float": float}[named[0]]


def _as(kind: Callable[[str], object], text: str, name: str, default: object) -> object:
    if kind is bool:
        check_word(f"value of {name}", text, SWITCHES)
        return SWITCHES[text]
    if kind is str:
        return text
    try:
        return tuple(map(float, text.split(":"))) if kind is tuple else kind(text)
    except ValueError:
        if kind is tuple:
            raise ValueError(f"{name}={text!r} must be numbers between colons, for instance 4:3:2:1") from None
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}={text!r} must be {what}; its default is {default}") from None


class CompressionSettings(TypedDict, total=False):
    """Compression by keyword: what ``SubTokenModel`` and ``SubTokenModel.from_pretrained`` take beside the model.

    Attributes:
        eviction: name of an eviction method, or one that is built (``build_eviction``); None: none.
        eviction_keep: what stays, see ``Compression.keep``, or as the command line has it (``"64tokens"``,
            ``"20MB"``), or ``{"threshold": -4, "window": 128}``, see ``Threshold``; by default all.
        eviction_unit: of an ``eviction_keep`` that is a number: ``fraction``, ``tokens`` or ``bytes``.
        eviction_every: evict again whenever this many tokens were generated; None: only the prompt is compressed.
        eviction_options: settings of the method, by name.
        scope: what competes: ``context`` (None, ``visual``), the visual tokens of a model that sees images and the
            context of a text, or ``all``. The last row of a prompt always stays; in scope, it counts in the budget.
        kv_dtype: ``model`` stores the model's dtype; ``int8`` and ``int4`` round, with a scale per head of a key and of
            a value, which all of its stored groups share. ``int4_rotated`` is ``int4`` of keys that are centred,
            balanced and rotated first (``cache/key_basis.py``). ``int8_channel``, ``kivi4`` and ``kivi2`` round keys by
            channel and values by entry, but not the latest entries (``kernels/formats.py``).
        key_channels: share of the channels that stay of the keys in scope, with an eviction or without one (ThinK); by
            default all.
        key_axes: along which they are cut: ``own``, the channels that the model gives keys; ``pca``, their principal
            axes, to which the keys of a layer are turned first (RotateK, ``functional/key_axes.py``).
        merge: what becomes of evicted entries: ``none`` lets them go; ``average``, ``weighted``, ``pivot`` and
            ``position`` merge them into entries that stay (``functional/merging.py``). None: what the method does.
        prefill_chunk: rows of a prompt that run through a layer at a time. Every layer is then packed before the next
            one runs, so that one layer's dense keys and values exist; what stays is the same. None: all rows.
        rerotate: turn the keys that the eviction leaves to closed-up positions, where what follows goes on.
    """

    eviction: str | Eviction | None
    eviction_keep: float | str | Mapping[str, Any]
    eviction_unit: KeepUnit
    eviction_every: int | None
    eviction_options: dict[str, Any] | None
    scope: Scope | None
    kv_dtype: KVDtype
    key_channels: float
    key_axes: KeyAxes
    merge: Merge | None
    prefill_chunk: int | None
    rerotate: bool


_FIELDS = {"eviction_keep": "keep", "eviction_unit": "unit", "eviction_every": "every"}
"""Settings that ``Compression`` calls otherwise."""


def compression_of(settings: CompressionSettings) -> Compression:
    """The compression that settings ask for."""
    given: dict[str, Any] = dict(settings)
    for name in given:
        check_word("setting", name, CompressionSettings.__optional_keys__)
    if isinstance(keep := given.get("eviction_keep"), str | Mapping):
        if "eviction_unit" in given:
            raise ValueError(
                f"eviction_keep={clipped(str(keep), 40)!r} already has a unit; leave eviction_unit out, or give a "
                "number"
            )
        del given["eviction_keep"]
        given |= written_keep(keep)
    name, options = given.pop("eviction", None), given.pop("eviction_options", None)
    if name is None and options:
        raise ValueError(f"eviction_options={options!r} need an eviction, for instance eviction='snapkv'")
    if isinstance(name, Eviction) and options:
        raise ValueError(f"eviction_options={options!r} go with a name; {name.name} is built, with settings of its own")
    method = build_eviction(name, **(options or {})) if isinstance(name, str) else name
    if not isinstance(method, Eviction | None):
        raise ValueError(f"eviction is of type {type(name).__name__}; give a name, or what build_eviction returns")
    return Compression(method, **{_FIELDS.get(key, key): value for key, value in given.items()})


def settings_record(compression: Compression) -> dict[str, Any]:
    """Return a compression as plain values, equal for two that leave the same cache.

    A calibration is told by its file's digest, wherever the file lies; how many rows ran at a time is left out, and so
    is what earlier versions did not have where it is as they had it.
    """
    apart = ("prefill_chunk", "threshold", "key_axes")
    record = {field.name: getattr(compression, field.name) for field in fields(compression) if field.name not in apart}
    if compression.key_axes != "own":
        record["key_axes"] = compression.key_axes
    if compression.threshold is not None:
        record["threshold"] = [compression.threshold.value, compression.threshold.window]
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
    read: dict[str, Any] = json.loads(json.dumps(record))
    return read
