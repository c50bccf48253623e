"""How a prompt's cache is compressed after prefill: the eviction method, how much stays, and the precision.

Legend: B batch, M rows of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from subtoken_train.errors import check_word, unknown_name
from subtoken_train.evictions import check_online
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.layer_views import Scope
from subtoken_train.evictions.observers import last_marked
from subtoken_train.families.family import Family
from subtoken_train.families.positions import rotary_kind
from subtoken_train.families.shapes import check_calibration
from subtoken_train.functional.merging import Merge
from subtoken_train.ledger.kv_budget import check_key_channels, kept_channels
from subtoken_train.types import Batch, Region, in_compressed_region

KeepUnit = Literal["fraction", "tokens", "bytes"]
KVDtype = Literal["model", "int8", "int4"]
MOST = 2**53
"""Tokens or bytes of a budget: what a float still counts one by one."""
BITS: dict[KVDtype, int] = {"model": 0, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class Compression:
    """What happens to a prompt's cache once it is there.

    Attributes:
        eviction: the method; None evicts nothing.
        keep: what stays of the entries in scope: a share of those that the token reducer left, a number of them per
            layer and sample, or bytes of a sample's whole prompt cache, text included.
        unit: of ``keep``.
        scope: what competes: ``context`` (None, ``visual``), the visual tokens of a model that sees images and the
            context of a text, or ``all``. The last row of a prompt always stays; in scope, it counts in the budget.
        kv_dtype: ``model`` stores the model's dtype; ``int8`` and ``int4`` round, with a scale per key head and value
            piece.
        round_up: round the number of entries that a share keeps up (matched anchors) instead of down.
        key_channels: share of the channels that stay of the keys in scope, with an eviction or without one (ThinK); 1
            cuts none.
        merge: what becomes of evicted entries: ``none`` lets them go; ``weighted``, ``pivot`` and ``position`` merge
            them into entries that stay (``functional/merging.py``). None: what the method does of itself.
        key_window: last entries of a prompt, whose queries choose the channels and whose own keys stay whole.
        every: evict again whenever this many tokens were generated, see ``online_eviction.py``; None: only the prompt.
        prefill_chunk: rows of a prompt that run through a layer at a time. Every layer is then packed before the next
            one runs, so that one layer's dense keys and values exist; what stays is the same. None: all rows.
        rerotate: turn the keys that stay to closed-up positions, see ``inference/rerotation.py``.
    """

    eviction: Eviction | None = None
    keep: float = 1.0
    unit: KeepUnit = "fraction"
    scope: Scope | None = None
    kv_dtype: KVDtype = "model"
    round_up: bool = False
    key_channels: float = 1.0
    merge: Merge | None = None
    key_window: int = 32
    prefill_chunk: int | None = None
    rerotate: bool = False
    every: int | None = None

    def __post_init__(self) -> None:
        check_word("unit of eviction_keep", self.unit, get_args(KeepUnit))
        check_word("kv_dtype", self.kv_dtype, BITS)
        check_key_channels(self.key_channels)
        if self.merge is not None:
            check_word("merge", self.merge, get_args(Merge))
        if self.merge not in (None, "none") and self.eviction is None:
            raise ValueError(f"merge {self.merge!r} needs an eviction method, for instance eviction='snapkv'")
        if self.key_window < 1:
            raise ValueError(f"key_window={self.key_window} must be at least 1; 32 last rows choose the key channels")
        if self.scope is not None and self.scope not in get_args(Scope):
            raise unknown_name("scope", self.scope, get_args(Scope))
        if not isinstance(self.rerotate, bool):
            raise ValueError(f"rerotate={self.rerotate!r} must be true or false")
        self._check_keep()
        check_online(self.eviction, self.every, int(self.keep) if self.unit == "tokens" else None)
        if self.prefill_chunk is not None:
            self._check_chunk(self.prefill_chunk)
        if self.rerotate:
            self._check_rerotation()

    def _check_keep(self) -> None:
        if type(self.keep) not in (int, float):
            raise ValueError(f"eviction_keep={self.keep!r} must be a number; 0.1 keeps a tenth of the cached entries")
        if self.unit == "fraction" and not 0 < self.keep <= 1:
            raise ValueError(f"eviction_keep={self.keep} must lie in (0, 1]; 0.1 keeps a tenth of the cached entries")
        if self.unit != "fraction" and not (1 <= self.keep <= MOST and self.keep == int(self.keep)):
            raise ValueError(
                f"eviction_keep={self.keep} {self.unit} must be a whole number of at least 1, and at most {MOST:,}"
            )
        if self.eviction is None and self.keep != 1:
            raise ValueError(f"eviction_keep={self.keep} needs an eviction method, for instance eviction='snapkv'")

    def _check_rerotation(self) -> None:
        if self.eviction is None or self.eviction.across_layers:
            reason = "needs an eviction"
            if self.eviction is not None:
                reason = f"needs as many entries in every layer, and eviction {self.eviction.name!r} divides them"
            raise ValueError(f"rerotate {reason}; take for instance streaming_llm, snapkv or h2o")
        if self.eviction.reads:
            raise ValueError(
                f"rerotate closes positions that an eviction opens, and {self.eviction.name!r} evicts nothing; leave "
                "rerotate out, or take for instance streaming_llm, snapkv or h2o"
            )
        if self.every is not None:
            raise ValueError(
                f"rerotate closes the positions of a prompt, and eviction_every={self.every} opens them again while "
                "tokens are decoded; leave one out"
            )
        if self.key_channels < 1:
            raise ValueError("rerotate turns pairs of key channels, and key_channels cuts single ones; leave one out")
        if self.merging != "none":
            raise ValueError(
                f"rerotate turns a key by one position, and merge {self.merging!r} makes keys of several; leave one out"
            )

    def _check_chunk(self, chunk: int) -> None:
        if type(chunk) is not int or chunk < 1:
            raise ValueError(f"prefill_chunk={chunk!r} must be a whole number of at least 1, for instance 4096")
        method = self.eviction
        if method is None:
            return
        if method.across_layers or "second_pass" in method.needs:
            reason = "divides its budget between layers" if method.across_layers else "runs a prompt twice"
            raise ValueError(
                f"prefill_chunk={chunk}: eviction {method.name!r} {reason} and in chunks a layer is packed before the "
                "next one runs; leave prefill_chunk out, or take snapkv, h2o or another method that decides by layer"
            )
        if method.observing_rows is None:
            raise ValueError(
                f"prefill_chunk={chunk} must hold the window in which eviction {method.name!r} observes, and a share "
                "of the budget says no number of rows; give window as a whole number, or leave prefill_chunk out"
            )
        if chunk < method.observing_rows:
            raise ValueError(
                f"prefill_chunk={chunk} is smaller than the window of {method.observing_rows} rows in which eviction "
                f"{method.name!r} observes; take at least {method.observing_rows}"
            )

    def check(self, family: Family) -> None:
        """Raise a worded ``ValueError`` where the settings do not fit the backbone."""
        if any(family.windows):
            self._check_windows(family)
        if self.rerotate and family.length_dependent:
            kind = rotary_kind(family.decoder.rotary_emb)
            raise ValueError(
                f"rerotate: {family.name} has positions of kind {kind!r}, whose angles depend on a prompt's length; "
                "leave rerotate out"
            )
        if self.rerotate and family.tower_positions == "mrope":
            raise ValueError(
                f"rerotate: {family.name} gives the tokens of an image places in a grid, which cannot be closed up; "
                "leave rerotate out"
            )
        width, kept = family.shape.head_dim, kept_channels(family.shape.head_dim, self.key_channels)
        if self.kv_dtype == "int4" and kept % 2:
            raise ValueError(
                f"int4 stores two channels a byte, but key_channels={self.key_channels} keeps {kept} of {width}; take "
                f"key_channels={(kept + 1) / width:.6g}, or kv_dtype int8"
            )
        if self.eviction is None:
            return
        check_calibration(self.eviction.calibrated, family)
        self.eviction.check_shape(family.shape.num_layers, family.shape.num_kv_heads, family.shape.head_dim)
        if family.image_token_id is not None:
            return
        if self.eviction.needs_image:
            raise ValueError(
                f"eviction {self.eviction.name!r} reads the attention between text and image and {family.name} sees no "
                "images; take snapkv, h2o, kvcompose or another method for text"
            )
        if self.scope == "visual":
            raise ValueError(f"scope 'visual': {family.name} sees no images; take scope 'context' or 'all'")

    def _check_windows(self, family: Family) -> None:
        """What does not go with sliding windows: it moves positions, or looks at a cache that tokens have grown."""
        method, kind = self.eviction, family.decoder.config.model_type
        refused = "rerotate" if self.rerotate else None if self.every is None else "eviction_every"
        if method is not None and method.reads:
            refused = f"eviction {method.name!r}"
        if refused is not None:
            raise ValueError(
                f"{refused} does not go with the sliding windows of {kind}; leave it out, or take a model without them"
            )

    def check_prompts(self, prompts: Batch) -> None:
        """Raise a worded ``ValueError`` where the method needs an image and a prompt has none."""
        if self.eviction is None or not self.eviction.needs_image:
            return
        for name, images in zip(prompts.record_ids, prompts.images_per_sample_B.tolist(), strict=True):
            if not images:
                raise ValueError(
                    f"eviction {self.eviction.name!r} reads the attention between text and image and {name!r} has no "
                    "image; take snapkv, h2o, kvcompose or another method for text"
                )

    @property
    def label(self) -> str:
        """What a table says of it: ``snapkv 0.1 int8``; ``-`` where nothing is compressed."""
        parts = [] if self.key_channels == 1 else [f"keys {self.key_channels:.6g}"]
        parts += [] if self.kv_dtype == "model" else [self.kv_dtype]
        if self.eviction is not None:
            amount = f"{self.keep:.6g}" if self.unit == "fraction" else f"{int(self.keep):,} {self.unit}"
            amount = f"reads {amount}" if self.eviction.reads else amount
            merged = [] if self.merge is None else [f"merge {self.merge}"]
            words = [word for word, said in (("all", self.scope == "all"), ("rerotated", self.rerotate)) if said]
            parts = [self.eviction.name, amount, *words, *merged, *parts]
        parts += [] if self.every is None else [f"every {self.every:,}"]
        return " ".join(parts) or "-"

    def cuts_keys(self, regions_BM: Tensor) -> Tensor:
        """Entries whose keys are cut where they stay, bool [B, M]: those in scope, but for the last of a prompt."""
        if self.key_channels == 1:
            return torch.zeros_like(regions_BM, dtype=torch.bool)
        return self.in_scope(regions_BM) & ~last_marked(regions_BM != Region.PADDING, self.key_window)

    @property
    def merging(self) -> Merge:
        """What becomes of evicted entries."""
        own: Merge = "none" if self.eviction is None else self.eviction.merges
        return own if self.merge is None else self.merge

    def in_scope(self, regions_BM: Tensor) -> Tensor:
        """Rows that the scope names, bool [B, M]."""
        if self.scope == "all":
            return regions_BM != Region.PADDING
        return in_compressed_region(regions_BM)
