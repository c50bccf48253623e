"""Which model answers, and how its prompts are compressed, as somebody wrote it: one set of options and of rules.

A command's flags, a grid's YAML and a harness's ``key=value`` are front ends: each turns its own form into an
``ArmSpec`` and says how its options are spelled in messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from subtoken_train.artifact.hub import adapter_folder
from subtoken_train.documents import check_file_name
from subtoken_train.errors import check_word
from subtoken_train.evictions import build_eviction, innermost
from subtoken_train.families.backbone_config import DTYPES, BackboneConfig
from subtoken_train.inference.compression import Compression, parse_keep
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.pool import load_backbone
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Protocol

DRAWING = ("random", "static")
"""Reducers, selectors and evictions of these names take a seed."""
Written = Literal["key", "flag", "argument"]
"""How an option is spelled: ``eviction: snapkv``, ``--eviction snapkv`` or ``eviction=snapkv``."""
NUMBERS = (
    ("keep_ratio", (int, float), "a number"),
    ("key_channels", (int, float), "a number"),
    ("eviction_every", (int,), "a whole number of tokens"),
    ("max_pixels", (int,), "a whole number of pixels"),
)
"""Options that are numbers, and of which types."""
_TEXTS = (
    "adapter",
    "backbone",
    "name",
    "reducer",
    "selector",
    "eviction",
    "scope",
    "kv_dtype",
    "merge",
    "protocol",
    "dtype",
)


@dataclass(frozen=True)
class ArmSpec:
    """One arm.

    Attributes:
        adapter: folder or Hub id of an adapter; None: ``backbone`` alone.
        backbone: path or Hub id; with ``adapter``: where its backbone is.
        name: None: made of the other attributes.
        reducer: token reducer; None: the adapter's own (a backbone alone: none). Another one than the adapter was
            trained under makes the arm untrained, and tables say so.
        keep_ratio: share of the tokens that the reducer keeps; None: the adapter's own.
        reducer_options: further settings of the reducer, see its class.
        selector: what chooses value groups: None: the adapter's own; ``none``: nothing, all groups stay; or a
            router-free selector (``value_norm``, ``random``, ...) at the adapter's S and K.
        eviction: KV eviction after the prompt; None: none.
        eviction_keep: what it keeps: ``0.1`` of the entries, ``256tokens`` per layer, ``20MB``.
        eviction_every: evict again after this many generated tokens; None: only after the prompt.
        eviction_options: settings of the eviction.
        scope: what it chooses among, ``context`` (the default, also ``visual``) or ``all``.
        kv_dtype: precision of the stored prompt: ``model``, ``int8`` or ``int4``.
        key_channels: share of the channels that stay of the keys in scope; 1 cuts none.
        merge: what becomes of evicted entries: ``none``, ``weighted``, ``pivot`` or ``position``; None: what the
            eviction does of itself.
        protocol: ``query_aware``: the question is there when the cache is compressed; ``context_first``: the context is
            compressed before the question is read.
        prefill_chunk: rows of a prompt that run through a layer at a time; None: all.
        rerotate: turn the keys that an eviction leaves to closed-up positions.
        dtype: of the frozen weights, ``float32``, ``bfloat16`` or ``float16``; None: the adapter's, or fp32.
        max_pixels: cap of an image, where images keep their own size; None: the adapter's, or the family's.
        seed: of the reducer, selector or eviction ``random``, or of the selector ``static``; None: what they have.
        written: how messages spell the options.
    """

    adapter: str | None = None
    backbone: str | None = None
    name: str | None = None
    reducer: str | None = None
    keep_ratio: float | None = None
    reducer_options: Mapping[str, Any] = field(default_factory=dict)
    selector: str | None = None
    eviction: str | None = None
    eviction_keep: str | float | None = None
    eviction_every: int | None = None
    eviction_options: Mapping[str, Any] = field(default_factory=dict)
    scope: Any = None
    kv_dtype: Any = "model"
    key_channels: float = 1.0
    merge: Any = None
    protocol: Protocol = "query_aware"
    prefill_chunk: int | None = None
    rerotate: bool = False
    dtype: Any = None
    max_pixels: int | None = None
    seed: int | None = None
    written: Written = field(default="key", compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self._check_types()
        say = self.spelled
        if self.adapter is None and self.backbone is None:
            raise ValueError(f"give {say('adapter', 'DIR')}, or {say('backbone', 'PATH')} for a model without one")
        check_word("protocol", self.protocol, get_args(Protocol))
        if self.dtype is not None:
            check_word("dtype", self.dtype, DTYPES)
        if self.adapter is None:
            self._check_reducer()
            if self.selector is not None:
                raise ValueError(
                    f"arm {self.backbone}: selector {self.selector!r} needs an adapter, whose S and K it takes"
                )
        given = self.eviction_keep is not None or self.eviction_every is not None or self.eviction_options or self.scope
        if self.eviction is None and given:
            names = ("eviction_keep", "eviction_every", "eviction_options")
            options = f"{', '.join(map(say, names))} and {say('scope')}"
            raise ValueError(f"{options} need {say('eviction', 'NAME')}, for instance snapkv")
        if self.eviction is not None and self.eviction_keep is None:
            example = "for instance 0.1, 256tokens or 20MB"
            raise ValueError(f"{say('eviction', self.eviction)} needs {say('eviction_keep')}, {example}")

    def spelled(self, option: str, value: str | None = None) -> str:
        """An option, with a value or alone, as its front end writes it."""
        if self.written == "flag":
            option = option.replace("options", "option")  # each is given by a flag of its own
            flag = f"--{option.replace('_', '-')}"
            return flag if value is None else f"{flag} {value}"
        return option if value is None else f"{option}{': ' if self.written == 'key' else '='}{value}"

    def _check_reducer(self) -> None:
        if (self.reducer is None) != (self.keep_ratio is None):
            say, place = self.spelled, f"arm {self.backbone}: " if self.written == "key" else ""
            example = f"{say('reducer', 'fastv')} and {say('keep_ratio', '0.25')}"
            raise ValueError(f"{place}{say('reducer')} and {say('keep_ratio')} go together, for instance {example}")

    def _check_types(self) -> None:
        """A file may hold anything."""
        place = " of an arm" if self.written == "key" else ""
        for key in _TEXTS:
            value = getattr(self, key)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{self.spelled(key)}{place} must be text; got {value!r}")
        if self.name is not None:
            check_file_name(self.name, "name of an arm")
        if not isinstance(self.rerotate, bool):
            raise ValueError(f"rerotate{place} must be true or false; got {self.rerotate!r}")
        for key, kinds, kind in NUMBERS:
            value = getattr(self, key)
            if type(value) not in kinds and (value is not None or key == "key_channels"):
                raise ValueError(f"{self.spelled(key)}{place} must be {kind}; got {value!r}")
        if self.seed is not None and (type(self.seed) is not int or not self.drawing | set(DRAWING) & {self.selector}):
            raise ValueError(
                f"seed {self.seed!r} must be a whole number, of a reducer, selector or eviction that draws: "
                f"{' or '.join(DRAWING)}"
            )
        for key in ("reducer_options", "eviction_options"):
            if not isinstance(getattr(self, key), Mapping):
                raise ValueError(f"{key}{place} must be a mapping of settings; got {getattr(self, key)!r}")

    def compression(self, round_up: bool = False) -> Compression:
        """Eviction and precision; ``round_up`` is for anchors.

        Raises:
            ValueError: names or settings that do not exist.
        """
        options = dict(self.eviction_options)
        if self.seed is not None and self.eviction is not None and (drawn := innermost(self.eviction)) in DRAWING:
            options[f"{drawn}.seed"] = self.seed
        try:
            method = None if self.eviction is None else build_eviction(self.eviction, **options)
        except TypeError as error:  # a text where a number belongs
            raise ValueError(f"eviction_options of {self.eviction}: {error}") from None
        keep, unit = parse_keep(str(1 if self.eviction_keep is None else self.eviction_keep))
        return Compression(
            method,
            keep,
            unit,
            self.scope,
            self.kv_dtype,
            round_up,
            self.key_channels,
            self.merge,
            every=self.eviction_every,
            prefill_chunk=self.prefill_chunk,
            rerotate=self.rerotate,
        )

    def load(
        self, device: str | None = None, revision: str | None = None, backbone: BackboneConfig | None = None
    ) -> SubTokenModel:
        """The model in evaluation mode: an adapter under its own reducer and routers, or a backbone alone.

        Args:
            device: where it runs, as ``SubTokenModel.from_pretrained`` takes it.
            revision: branch, tag or commit of a Hub id.
            backbone: how to load the backbone; None: as the adapter (or the default) says.

        Raises:
            ValueError: another reducer for an adapter, or what ``SubTokenModel.from_pretrained`` refuses.
        """
        self._check_reducer()
        compression = self.compression()
        # what is no adapter would be taken for a backbone
        path = adapter_folder(self.adapter, revision) if self.adapter is not None else str(self.backbone)
        ratio = 1.0 if self.keep_ratio is None else self.keep_ratio
        reducer = None if self.reducer is None else build_reducer(self.reducer, ratio, **self.reducer_options)
        where = backbone or (self.backbone if self.adapter is not None else None)
        loaded = load_backbone(path, revision if self.adapter is None else None, where, reducer, device, self.loading)
        return SubTokenModel.around(loaded, compression)

    @property
    def loading(self) -> dict[str, Any]:
        """What is said of how the backbone is loaded."""
        given = {"dtype": self.dtype, "max_pixels": self.max_pixels}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def drawing(self) -> set[str]:
        """Its reducer and its eviction, of ``DRAWING``: what takes the seed whatever selects groups."""
        eviction = None if self.eviction is None else innermost(self.eviction)
        return {name for name in (self.reducer, eviction) if name in DRAWING}

    @property
    def overrides(self) -> bool:
        """Whether reducer or selector are others than the adapter was trained under."""
        return self.adapter is not None and any(
            (self.reducer, self.keep_ratio is not None, self.reducer_options, self.selector)
        )


ARM_OPTIONS = tuple(option.name for option in fields(ArmSpec) if option.name != "written")
"""What may be written of an arm."""
