"""``model_args`` of a harness, ``adapter=DIR,eviction=snapkv,eviction_keep=0.1``, as a model."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from subtoken_train.artifact.config import read_config
from subtoken_train.artifact.identity import adapter_digest
from subtoken_train.artifact.source import adapter_folder
from subtoken_train.errors import unknown_name
from subtoken_train.evictions.base import Scope
from subtoken_train.families.load import BackboneConfig
from subtoken_train.inference.compression import KVDtype
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.written_settings import parse_keep, parse_settings
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Protocol

PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)


@dataclass(frozen=True)
class ModelArguments:
    """What a harness's command line says of the model; all texts as they were written.

    Attributes:
        adapter: folder or Hub id.
        backbone: a backbone alone (folder or Hub id); with an adapter: where its backbone is.
        revision: branch, tag or commit of a Hub id.
        dtype: of the backbone's weights; None: the adapter's own, float32 for a backbone alone.
        reducer: token reducer of a backbone alone; an adapter has its own.
        keep_ratio: share of the tokens that ``reducer`` keeps.
        eviction: KV eviction after the prompt.
        eviction_keep: what it keeps: ``0.1`` of the entries, ``256tokens`` per layer, or ``20MB``.
        eviction_options: its settings, ``key=value`` separated by ``;``.
        scope: what it chooses among, ``context`` (the default, also ``visual``) or ``all``.
        kv_dtype: ``model``, ``int8`` or ``int4``.
        protocol: ``query_aware``: the prompt is read in one pass, then compressed; ``context_first``: the context is
            compressed before the question is read.
        context: language models, what may be compressed. ``auto``: the prompt up to its last blank line, else all but
            its last 64 tokens; a number N: all but its last N tokens.
        batch_size: prompts run together.
        device: ``auto``: the first GPU where there is one.
    """

    adapter: str | None = None
    backbone: str | None = None
    revision: str | None = None
    dtype: str | None = None
    reducer: str | None = None
    keep_ratio: float | None = None
    eviction: str | None = None
    eviction_keep: str | None = None
    eviction_options: str | None = None
    scope: Scope | None = None
    kv_dtype: KVDtype = "model"
    protocol: Protocol = "query_aware"
    context: str = "auto"
    batch_size: str = "1"
    device: str = "auto"

    @property
    def query_tokens(self) -> int | None:
        """Last prompt tokens that are not compressed; None: by ``auto``."""
        return None if self.context == "auto" else int(self.context)

    @property
    def prompts_together(self) -> int:
        """``batch_size`` as a number."""
        return int(self.batch_size)

    @property
    def settings(self) -> dict[str, Any]:
        """What differs from the defaults, and what the adapter holds, for result files."""
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        if self.adapter:
            given["adapter_sha256"] = adapter_digest(adapter_folder(self.adapter, self.revision))
        return given

    def load(self) -> SubTokenModel:
        """The model, in evaluation mode on ``device``.

        Raises:
            ValueError: what ``SubTokenModel.from_pretrained`` refuses.
        """
        keep, unit = parse_keep(self.eviction_keep or "1")
        options = [] if self.eviction_options is None else self.eviction_options.split(";")
        return SubTokenModel.from_pretrained(
            # what is no adapter would be taken for a backbone
            adapter_folder(self.adapter, self.revision) if self.adapter else str(self.backbone),
            revision=None if self.adapter else self.revision,
            backbone=self._backbone(),
            reducer=None if self.reducer is None else build_reducer(self.reducer, float(self.keep_ratio or 1)),
            eviction=self.eviction,
            eviction_keep=keep,
            eviction_unit=unit,
            eviction_options=None if self.eviction is None else parse_settings(self.eviction, options),
            scope=self.scope,
            kv_dtype=self.kv_dtype,
            device_map=self.device,
        )

    def _backbone(self) -> BackboneConfig | str | None:
        """How the backbone is loaded, where that differs from what the adapter (or the default) says."""
        if not self.adapter:
            return None if self.dtype is None else BackboneConfig(dtype=self.dtype)
        if self.dtype is None:
            return self.backbone
        own = read_config(adapter_folder(self.adapter, self.revision)).backbone
        moved = own if self.backbone is None else replace(own, path=self.backbone, revision=None)
        return replace(moved, dtype=self.dtype)


def read_arguments(given: Mapping[str, Any], unavailable: Collection[str] = ()) -> ModelArguments:
    """Check the arguments of a harness, whose parser may have made numbers of some.

    Args:
        given: by name; None is what was not given.
        unavailable: names that this harness has no use for.

    Raises:
        ValueError: an unknown name, a value that is not allowed, or one that needs another which is missing.
    """
    known = [field.name for field in fields(ModelArguments) if field.name not in unavailable]
    texts = {name: str(value) for name, value in given.items() if value is not None}
    for name in texts:
        if name not in known:
            raise unknown_name("model argument", name, known)
    ratio = texts.pop("keep_ratio", None)
    arguments = ModelArguments(**texts, keep_ratio=None if ratio is None else _number("keep_ratio", ratio))  # type: ignore[arg-type]
    _check(arguments)
    return arguments


def _check(arguments: ModelArguments) -> None:
    if not arguments.adapter and not arguments.backbone:
        raise ValueError("give adapter=DIR, or backbone=PATH for a model without one, in the model arguments")
    if (arguments.reducer is None) != (arguments.keep_ratio is None):
        raise ValueError("reducer and keep_ratio go together, for instance reducer=fastv,keep_ratio=0.25")
    if arguments.eviction is None:
        for name in ("eviction_keep", "eviction_options", "scope"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"{name} needs eviction=NAME, for instance eviction=snapkv,eviction_keep=0.1")
    elif arguments.eviction_keep is None:
        raise ValueError(f"eviction={arguments.eviction} needs eviction_keep, for instance 0.1, 256tokens or 20MB")
    if arguments.protocol not in PROTOCOLS:
        raise unknown_name("protocol", arguments.protocol, PROTOCOLS)
    if arguments.context != "auto":
        _whole("context", arguments.context, "auto, or the number of last prompt tokens that are not compressed")
    _whole("batch_size", arguments.batch_size, "the number of prompts run together (automatic sizes are not offered)")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "started in several processes, each of which would answer everything; start one, or use "
            "subtoken-train evaluate, which divides the samples"
        )


def _whole(name: str, text: str, meaning: str) -> None:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text} must be a whole number of at least 1: {meaning}")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text} must be a number, for instance 0.25") from None
