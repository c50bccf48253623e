"""How a prompt's cache is compressed after prefill: the eviction method, how much stays, and the precision.

Legend: B batch, L layers, M rows of a layer, h key-value heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from subtoken_train.artifact.identity import check_calibration
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.errors import check_word, unknown_name
from subtoken_train.evictions.base import Candidates, Eviction, LayerScores
from subtoken_train.evictions.layer_views import LayerView, Scope, TaskView
from subtoken_train.evictions.observers import last_marked
from subtoken_train.evictions.task_plan import TaskPlan
from subtoken_train.families.family import Family
from subtoken_train.functional.gather import take_rows
from subtoken_train.functional.merging import Merge
from subtoken_train.inference.byte_budget import entries_for_bytes, largest_choice, prompt_bytes
from subtoken_train.ledger.kv_budget import KVBudget, check_key_channels, kept_channels
from subtoken_train.types import Batch, Layout, Region, in_compressed_region

KeepUnit = Literal["fraction", "tokens", "bytes"]
KVDtype = Literal["model", "int8", "int4"]
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
        if self.unit == "fraction" and not 0 < self.keep <= 1:
            raise ValueError(f"eviction_keep={self.keep} must lie in (0, 1]; 0.1 keeps a tenth of the cached entries")
        if self.unit != "fraction" and (self.keep < 1 or self.keep != int(self.keep)):
            raise ValueError(f"eviction_keep={self.keep} {self.unit} must be a whole number of at least 1")
        if self.eviction is None and self.keep != 1:
            raise ValueError(f"eviction_keep={self.keep} needs an eviction method, for instance eviction='snapkv'")

    def check(self, family: Family) -> None:
        """Raise a worded ``ValueError`` where the settings do not fit the backbone."""
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
            merged = [] if self.merge is None else [f"merge {self.merge}"]
            parts = [self.eviction.name, amount, *(["all"] if self.scope == "all" else []), *merged, *parts]
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


class EvictionPass:
    """The observer of one prompt pass: scores layer after layer, then says what stays.

    ``again_B`` marks the samples whose entries a second pass scores (``inference/second_pass.py``), ``tasks`` are its
    rows; none where no sample is marked.

    Args:
        compression: with an eviction.
        family: the backbone.
        prompts: whole, or their first part (``followed``), whose last rows may be dropped.
    """

    def __init__(self, compression: Compression, family: Family, prompts: Batch) -> None:
        assert compression.eviction is not None
        self.compression, self.method, self.family, self.shape = compression, compression.eviction, family, family.shape
        self.followed = prompts.followed
        self.again_B = self.method.second_pass(prompts.regions_BN)
        self.tasks = self.method.tasks(prompts.regions_BN) if bool(self.again_B.any()) else []
        assert not self.tasks or "second_pass" in self.method.needs
        self.scores: dict[int, LayerScores] = {}
        self.rows: dict[int, Rows] = {}

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
        """Score one layer, see ``PromptObserver``."""
        self.rows[layer] = rows
        self.scores[layer] = self.method.score(
            LayerView(
                layer,
                query,
                key,
                value,
                rows.regions_BM,
                scale,
                self.method.needs,
                self.compression.in_scope(rows.regions_BM),
                position=rows.position,
                next_position=rows.next_position,
                rotate=self.family.rotation,
                output_weight=partial(self.family.output_weight, layer),
            )
        )

    def observe_task(
        self, plan: TaskPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows_BS: Tensor
    ) -> None:
        """Score what a task is about in one layer again, see ``TaskObserver``."""
        rows, first = self.rows[layer], self.scores[layer]
        about_BM = rows.visible_BM if plan.about_BN is None else take_rows(plan.about_BN, rows.index_BM)
        view = TaskView(layer, query, key, value, rows.regions_BM, rows_BS, scale, about_BM & rows.visible_BM)
        replaced_B1M = self.again_B[:, None, None] & view.about_BN[:, None]
        first.scores_BhN = torch.where(replaced_B1M, self.method.score_task(view), first.scores_BhN)

    def keep(
        self, groups: KVBudget, masks: Mapping[int, Tensor] | None = None, layout: Layout = "contiguous"
    ) -> list[Tensor]:
        """Entries that stay, per layer bool [B, h, M] (h = 1: one set for all heads).

        Args:
            groups: what a routed entry stores; what a budget in bytes counts with.
            masks: value groups of the rows of the layers that route, bool [B, M, S]: what a budget in bytes holds.
            layout: of the groups.

        Raises:
            ValueError: a budget that does not hold what never competes.
        """
        order = sorted(self.scores)
        regions = [self.rows[layer].regions_BM for layer in order]
        competes = [self.compression.in_scope(x) & ~self._last_row(x) for x in regions]
        exact = torch.stack([self._exact(x, choose, groups) for x, choose in zip(regions, competes, strict=True)])
        most = torch.stack([choose.sum(-1) for choose in competes])
        # the decimal that was written, not its binary neighbours
        whole = torch.ceil(exact - 1e-9) if self.compression.round_up else torch.floor(exact + 1e-9)
        budget = torch.minimum(whole.long().clamp(min=1), most)
        exact, scores = torch.minimum(exact.clamp(min=0), most), [self.scores[layer] for layer in order]

        def choose(most_B: Tensor | None) -> list[Tensor]:
            caps = (budget, exact) if most_B is None else (budget.minimum(most_B), exact.minimum(most_B))
            return self.method.keep(scores, Candidates(regions, competes, *caps))

        if self.compression.unit != "bytes" or not masks:
            return choose(None)
        bytes_of = partial(
            prompt_bytes,
            masks=[masks.get(layer) for layer in order],
            cuts_LBM=[self.compression.cuts_keys(x) for x in regions],
            key_channels=self.compression.key_channels,
            shape=self.shape,
            layout=layout,
        )
        return largest_choice(choose, bytes_of, budget.amax(0), self.compression.keep)

    def _last_row(self, regions_BM: Tensor) -> Tensor:
        """The last row of each prompt, which the next token is read from, bool [B, M]."""
        return last_marked(regions_BM != Region.PADDING, int(not self.followed))

    def _exact(self, regions_BM: Tensor, competes_BM: Tensor, groups: KVBudget) -> Tensor:
        """Competing entries that may stay in a layer, fp64 [B]; a last row that is in scope takes one of them."""
        keep = self.compression.keep
        count_B = self.compression.in_scope(regions_BM).sum(-1)
        if self.compression.unit == "bytes":  # which count what always stays themselves
            budget = replace(groups, key_channels=self.compression.key_channels)
            cut_BM = self.compression.cuts_keys(regions_BM)
            return entries_for_bytes(keep, self.shape, regions_BM, competes_BM, cut_BM, budget).double()
        share_B = (
            count_B.double() * keep if self.compression.unit == "fraction" else torch.full_like(count_B, int(keep))
        )
        return share_B.double() - (count_B - competes_BM.sum(-1))
