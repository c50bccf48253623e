"""Settings of a prompt's compression, as objects, keywords or text (``0.1``, ``256tokens``, ``20MB``, ``window=32``).

Legend: B batch, M rows of a layer.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, TypedDict, get_args

import torch
from torch import Tensor

from subtoken_train.errors import check_together, check_word, refuse, unknown_name
from subtoken_train.evictions import build_eviction, check_online, setting_fields
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.observers import unasked
from subtoken_train.evictions.thresholds import Threshold, written_threshold
from subtoken_train.families.family import Family, check_calibration
from subtoken_train.families.positions import rotary_kind
from subtoken_train.functional.gather import last_marked
from subtoken_train.functional.merging import Merge
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.ledger.kv_budget import check_share, kept_channels
from subtoken_train.reducers.base import Reducer
from subtoken_train.settings import KeepUnit, KVDtype, check_amount, parse_keep
from subtoken_train.typed import Written, shown, written_as
from subtoken_train.types import Batch, KeyAxes, Region, in_compressed_region
from subtoken_train.view.view import Scope

_READS_QUESTION = "scores by the question after the context"
_READS_IMAGE, _FOR_TEXT = "reads the attention between text and image", "snapkv, h2o, kvcompose or another for text"


@dataclass(frozen=True)
class Compression:
    """Settings of a prompt's compression, once its cache is filled; those not named here as ``settings.py`` has them.

    Attributes:
        keep: share of the entries in scope that the token reducer left, a number of them per layer and sample, or bytes
            of a sample's whole prompt cache, text included.
        round_up: round the number of entries that a share keeps up (matched anchors) instead of down.
        key_window: last entries of a prompt, whose queries choose the channels and whose own keys stay whole.
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
        words: dict[str, Any] = {"unit": KeepUnit, "key_axes": KeyAxes, "merge": Merge, "scope": Scope}
        for name, kinds in words.items():
            if (value := getattr(self, name)) is not None or name in ("unit", "key_axes"):
                check_word("unit of eviction_keep" if name == "unit" else name, value, get_args(kinds))
        check_word("kv_dtype", self.kv_dtype, FORMATS)
        check_share("key_channels", self.key_channels)
        self._check_amount()
        no_cut = self.key_axes != "own" and not self.said["cuts"]
        refuse(
            (no_cut, f"key_axes={self.key_axes!r} turns keys to cut channels; give key_channels, for instance 0.75"),
            (self.key_window < 1, f"key_window={self.key_window} must be at least 1: the last rows choose channels"),
            (not isinstance(self.rerotate, bool), f"rerotate={self.rerotate!r} must be true or false"),
        )
        check_online(self.eviction, self.every, int(self.keep) if self.unit == "tokens" else None)
        self._check_chunk()
        self._check_pairs()

    def _check_amount(self) -> None:
        check_amount(self.keep, self.unit)
        keep, fraction, threshold = self.keep, self.unit == "fraction", self.threshold
        if self.eviction is None:
            needs = "needs an eviction method, for instance eviction="
            refuse(
                (keep != 1, f"eviction_keep={keep} {needs}'snapkv'"),
                (self.merge not in (None, "none"), f"merge {self.merge!r} {needs}'snapkv'"),
                (self.rerotate, "rerotate needs an eviction; use streaming_llm, snapkv or h2o"),
                (threshold, f"eviction_keep {threshold and threshold.label} {needs}'kvzip'"),
            )
        elif threshold is not None:
            own = method_record(self.eviction)
            found = own if threshold.record is None else threshold.record.numbers.eviction
            both = f"eviction_keep is a threshold or an amount ({keep:g} {self.unit}), and both are given; leave one"
            of = f"the threshold {threshold.value:g} was found for eviction {shown(found)}, and this is {shown(own)}"
            instead = "make its own: subtoken-train calibrate threshold"
            refuse((keep != 1 or not fraction, both), (found != own, f"{of}; {instead}"))
            threshold.check(self.eviction)

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

    def _check_pairs(self) -> None:
        says, form, name = self.said, FORMATS[self.kv_dtype], f"kv_dtype {self.kv_dtype}"
        mixing, sharing = (name if there else "" for there in (form.mixes, form.run > 1))
        alone, shared = "use int4 or int8", f"there the keys of {form.run} entries share scales"
        threshold = "" if self.threshold is None else f"eviction_keep {self.threshold.label}"
        equal, instead = "equally many entries must stay in every", "use streaming_llm, snapkv or h2o"
        check_together(
            (says["cuts"], mixing, f"it mixes the channels of a key; {alone}"),
            (says["reads"], mixing, f"it mixes the channels by which pages are read; {alone}"),
            (says["every"], sharing, f"{shared}, and single entries would go; {alone}"),
            (says["reads"], sharing, f"{shared}, and single pages are read; {alone}"),
            (says["turns"], threshold, f"{equal} head; give a share, for instance eviction_keep=0.2"),
            (says["turns"], says["divides"], f"{equal} layer; {instead}"),
            (says["turns"], says["reads"], f"that evicts nothing and leaves no gap to close; {instead}"),
            (says["turns"], says["every"], "that opens new gaps while tokens are decoded"),
            (says["turns"], says["cuts"], "pairs of key channels are rotated, and single ones cut"),
            (says["turns"], says["merges"], "a key is rotated by its position, and a merged one has several"),
        )

    def _check_chunk(self) -> None:
        chunk, method, says = self.prefill_chunk, self.eviction, self.said
        wrong = chunk is not None and (type(chunk) is not int or chunk < 1)
        refuse((wrong, f"prefill_chunk={chunk!r} must be a whole number of at least 1, for instance 4096"))
        if chunk is None or method is None:
            return
        rows, evicts, divides = method.observing_rows, says["evicts"], says["divides"] if self.threshold is None else ""
        instead = "of which each layer is packed before the next one runs; use snapkv, h2o or one that decides by layer"
        number = "it must cover the rows observed, of which a share says no number; give window as a whole number"
        check_together(
            (says["chunk"], divides, f"it divides its budget over a prompt, {instead}"),
            (says["chunk"], evicts if "second_pass" in method.needs else "", f"it runs a prompt twice, {instead}"),
            (says["chunk"], evicts if rows is None else "", number),
        )
        few = rows is not None and chunk < rows
        refuse((few, f"prefill_chunk={chunk} is smaller than the {rows} rows observed by {evicts}; use {rows}"))

    def check(self, family: Family) -> None:
        """Raise a worded ``ValueError`` where the settings do not fit the backbone."""
        says, sees = self.said, family.image_token_id is not None
        windows = f"the sliding windows of {family.decoder.config.model_type}" if any(family.windows) else ""
        angles = rotary_kind(family.decoder.rotary_emb) if family.length_dependent else ""
        grids = f"the image grids of {family.name}" if family.tower_positions == "mrope" else ""
        whole = says["reads"] or says["turns"] or says["every"]
        check_together(
            (whole, windows, "it needs layers that see the whole cache; use a model without windows"),
            (says["turns"], angles and f"positions of kind {angles!r}", "their angles depend on a prompt's length"),
            (says["turns"], grids, "a grid has gaps that cannot be closed"),
        )
        shape, form = family.shape, FORMATS[self.kv_dtype]
        width, kept = shape.head_dim, kept_channels(shape.head_dim, self.key_channels)
        more = f"use key_channels={-(-kept // form.per_code) * form.per_code / width:.6g}, or kv_dtype int8"
        form.check_width(kept, f"key_channels={self.key_channels} keeps {kept} of {width}; {more}")
        if (method := self.eviction) is None:
            needs = "needs an eviction method, for instance eviction='snapkv', or an adapter with gates"
            refuse((self.every is not None, f"eviction_every={self.every} {needs}"))
            return
        for each in (method, *method.inside):
            check_calibration(each.calibrated, family)
        check_calibration(None if self.threshold is None else self.threshold.record, family)
        method.check_shape(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        lacks, scope = f"{family.name} sees no images", "use scope 'context' or 'all'"
        refuse(
            (method.needs_image and not sees, f"{says['evicts']} {_READS_IMAGE} and {lacks}; use {_FOR_TEXT}"),
            (self.scope == "visual" and not sees, f"scope 'visual': {lacks}; {scope}"),
        )

    def check_prompts(self, prompts: Batch) -> None:
        """Raise a worded ``ValueError`` where the method needs an image or a question and a prompt has none."""
        method = self.eviction
        if method is not None and method.needs_image:
            lacking_B, why = prompts.images_per_sample_B == 0, (_READS_IMAGE, "has no image", _FOR_TEXT)
        elif method is not None and method.needs_question:
            instead = "kvzip, compactor or another method that asks nothing"
            lacking_B, why = unasked(prompts.regions_BN), (_READS_QUESTION, "ends with its context", instead)
        else:
            return
        for name, lacking in zip(prompts.record_ids, lacking_B.tolist(), strict=True):
            refuse((lacking, f"eviction {method.name!r} {why[0]} and {name!r} {why[1]}; use {why[2]}"))

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
        """Share of the entries in scope that an eviction keeps; of a threshold the recorded mean; None: unknown."""
        return self.threshold.mean if self.threshold is not None else self.keep if self.unit == "fraction" else None

    def cuts_keys(self, regions_BM: Tensor) -> Tensor:
        """Mark the kept entries whose keys are cut, bool [B, M]: those in scope, but not the last of a prompt.

        Along principal axes its first stays whole too: its key lies far from all others.
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
        """Mark the rows that the scope names, bool [B, M]."""
        return regions_BM != Region.PADDING if self.scope == "all" else in_compressed_region(regions_BM)


def written_keep(written: object) -> dict[str, Any]:
    """Return the fields of a ``Compression`` for a written budget or threshold."""
    if (threshold := written_threshold(written)) is not None:
        return {"threshold": threshold}
    return dict(zip(("keep", "unit"), parse_keep(str(written)), strict=True))


def parse_settings(method: str | None, settings: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` settings of an eviction method, each as the type of the method's default."""
    return dict.fromkeys(settings) if method is None else read_settings(setting_fields(method), method, settings)


_KINDS = {"int": int, "float": float, "bool": bool, "int | float": int | float, "Sequence[float]": tuple[float, ...]}


def read_settings(fields: Mapping[str, Field[Any]], name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` settings of a dataclass, each as its field's type (``4:3:2`` a tuple); others stay texts."""
    read: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        refuse(
            (not equals or not key, f"setting {setting!r} of {name} must be written key=value"),
            (key in read, f"setting {key!r} of {name} is given twice"),
        )
        declared = fields[key].type if key in fields else str
        name_of = declared.__name__ if type(declared) is type else str(declared)
        kind: Any = _KINDS.get(name_of.removeprefix("collections.abc.").removesuffix(" | None"), str)
        listed = f"[{text.replace(':', ', ')}]" if kind == _KINDS["Sequence[float]"] else text
        read[key] = text if kind is str else written_as(kind, Written(listed), f"{name} {key}")
    return read


class CompressionSettings(TypedDict, total=False):
    """Compression by keyword: what ``SubTokenModel`` and ``SubTokenModel.from_pretrained`` take beside the model.

    ``settings.py`` explains each. An ``eviction`` may also be built (``build_eviction``), an ``eviction_keep`` be a
    text as on the command line (``"64tokens"``), or ``{"threshold": -4, "window": 128}``.
    """

    eviction: str | Eviction | None
    eviction_keep: float | str | Mapping[str, Any]
    eviction_every: int | None
    eviction_options: dict[str, Any] | None
    scope: Scope | None
    kv_dtype: KVDtype
    key_channels: float
    key_axes: KeyAxes
    merge: Merge | None
    prefill_chunk: int | None
    rerotate: bool


def compression_of(settings: CompressionSettings, beside: Collection[str] = ()) -> Compression:
    """Build the compression that settings ask for; ``beside`` are the call's other ones, named in errors."""
    given: dict[str, Any] = dict(settings)
    for name in sorted(given.keys() - CompressionSettings.__optional_keys__):
        names = sorted(CompressionSettings.__optional_keys__.union(beside))
        raise unknown_name("setting", name, names, ", ".join(names))
    if "eviction_keep" in given:
        keep = given.pop("eviction_keep")
        given |= written_keep(keep) if isinstance(keep, str | Mapping) else {"keep": keep}
    method, options, every = (given.pop(name, None) for name in ("eviction", "eviction_options", "eviction_every"))
    built = isinstance(method, Eviction) and f"go with a name; {method.name} is built, with settings of its own"
    why = built or "need an eviction, for instance eviction='snapkv'"
    refuse((options and not isinstance(method, str), f"eviction_options={options!r} {why}"))
    refuse((not isinstance(options, Mapping | None), f"eviction_options={options!r} must be a dict of settings"))
    method = build_eviction(method, **(options or {})) if isinstance(method, str) else method
    kind = f"eviction is of type {type(method).__name__}; give a name, or what build_eviction returns"
    refuse((not isinstance(method, Eviction | None), kind))
    return Compression(method, every=every, **given)


def settings_record(compression: Compression) -> dict[str, Any]:
    """Return a compression as plain values, equal for two that leave the same cache.

    A calibration is told by its file's digest; ``prefill_chunk`` is left out, and so is what earlier versions did not
    have where it does nothing.
    """
    record: dict[str, Any] = {field.name: getattr(compression, field.name) for field in fields(compression)}
    gone = ["prefill_chunk", *(["key_axes"] if compression.key_axes == "own" else [])]
    if (threshold := record.pop("threshold")) is not None:
        record["threshold"] = [threshold.value, threshold.window]
    record |= {"scope": "all" if compression.scope == "all" else "context", "merge": compression.merging}
    record["eviction"] = None if compression.eviction is None else method_record(compression.eviction)
    return _as_read({name: value for name, value in record.items() if name not in gone})


def method_record(method: Eviction | Reducer) -> dict[str, Any]:
    """Return a method's name and settings as a record."""
    record: dict[str, Any] = {field.name: getattr(method, field.name) for field in fields(method)}  # type: ignore[arg-type]
    for key, value in record.items():
        if isinstance(value, Eviction):
            record[key] = method_record(value)
        elif key == "calibration" and method.calibrated is not None:
            record[key] = method.calibrated.digest
    return _as_read({"name": method.name, **method.left, **record})


def _as_read(record: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(record)))
