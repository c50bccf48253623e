"""How a prompt's cache is compressed after prefill: the eviction method, how much stays, and the precision.

Legend: B batch, L layers, M rows of a layer, h key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.errors import check_word, unknown_name
from subtoken_train.evictions.base import Candidates, Eviction, LayerScores
from subtoken_train.evictions.layer_views import LayerView, Scope, TaskView
from subtoken_train.evictions.observers import last_marked
from subtoken_train.evictions.task_plan import TaskPlan
from subtoken_train.families.family import Family
from subtoken_train.functional.gather import take_rows
from subtoken_train.ledger.kv_budget import (
    KVBudget,
    channel_index_bytes,
    check_key_channels,
    entry_bytes,
    kept_channels,
)
from subtoken_train.types import Batch, Region, in_compressed_region

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
        key_window: last entries of a prompt, whose queries choose the channels and whose own keys stay whole.
    """

    eviction: Eviction | None = None
    keep: float = 1.0
    unit: KeepUnit = "fraction"
    scope: Scope | None = None
    kv_dtype: KVDtype = "model"
    round_up: bool = False
    key_channels: float = 1.0
    key_window: int = 32

    def __post_init__(self) -> None:
        check_word("unit of eviction_keep", self.unit, get_args(KeepUnit))
        check_word("kv_dtype", self.kv_dtype, BITS)
        check_key_channels(self.key_channels)
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
            parts = [self.eviction.name, amount, *(["all"] if self.scope == "all" else []), *parts]
        return " ".join(parts) or "-"

    def cuts_keys(self, regions_BM: Tensor) -> Tensor:
        """Entries whose keys are cut where they stay, bool [B, M]: those in scope, but for the last of a prompt."""
        if self.key_channels == 1:
            return torch.zeros_like(regions_BM, dtype=torch.bool)
        return self.in_scope(regions_BM) & ~last_marked(regions_BM != Region.PADDING, self.key_window)

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

    def keep(self, groups: KVBudget) -> list[Tensor]:
        """Entries that stay, per layer bool [B, h, M] (h = 1: one set for all heads).

        Args:
            groups: what a routed entry stores; what a budget in bytes counts with.

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
        candidates = Candidates(regions, competes, budget, torch.minimum(exact.clamp(min=0), most))
        return self.method.keep([self.scores[layer] for layer in order], candidates)

    def _last_row(self, regions_BM: Tensor) -> Tensor:
        """The last row of each prompt, which the next token is read from, bool [B, M]."""
        return last_marked(regions_BM != Region.PADDING, int(not self.followed))

    def _exact(self, regions_BM: Tensor, competes_BM: Tensor, groups: KVBudget) -> Tensor:
        """Competing entries that may stay in a layer, fp64 [B]; a last row that is in scope takes one of them."""
        keep = self.compression.keep
        count_B = self.compression.in_scope(regions_BM).sum(-1)
        if self.compression.unit == "bytes":  # which count what always stays themselves
            return self._budget_of_bytes(regions_BM, competes_BM, groups).double()
        share_B = (
            count_B.double() * keep if self.compression.unit == "fraction" else torch.full_like(count_B, int(keep))
        )
        return share_B.double() - (count_B - competes_BM.sum(-1))

    def _budget_of_bytes(self, regions_BM: Tensor, competes_BM: Tensor, groups: KVBudget) -> Tensor:
        channels, in_region_BM = self.compression.key_channels, in_compressed_region(regions_BM)
        cuts_BM = self.compression.cuts_keys(regions_BM)
        cost_BM = torch.zeros(regions_BM.shape, dtype=torch.float64, device=regions_BM.device)
        for cut_BM, share in ((~cuts_BM, 1.0), (cuts_BM, channels)):
            for marked_BM, budget in ((in_region_BM, groups), (~in_region_BM, KVBudget())):
                cost_BM[cut_BM & marked_BM] = entry_bytes(self.shape, replace(budget, key_channels=share))
        cost_BM = cost_BM.masked_fill(regions_BM == Region.PADDING, 0)
        named_B = channel_index_bytes(self.shape, channels) * cuts_BM.any(-1)
        fixed_B = (cost_BM * ~competes_BM).sum(-1) + named_B
        # entries of unlike cost: the dearest are counted first, so that the bytes are never exceeded
        sums_BM = (cost_BM * competes_BM).sort(-1, descending=True).values.cumsum(-1)
        budget_B = (sums_BM <= (self.compression.keep / self.shape.num_layers - fixed_B)[:, None]).sum(-1)
        needed_B = fixed_B + (cost_BM * competes_BM).amax(-1)
        if bool((needed_B * self.shape.num_layers > self.compression.keep).any()):
            needed = int((needed_B.max() * self.shape.num_layers).ceil())
            raise ValueError(
                f"eviction_keep={int(self.compression.keep)} bytes cannot hold the entries that always stay (text, and "
                f"at least one other entry per layer); {needed} bytes would"
            )
        return budget_B
