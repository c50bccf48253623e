"""Evictions of the matrix of packed = truth that are not registered: made for it, and wrappers with settings.

Legend: h key-value heads, N rows.
"""

import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.asking_rows import QuestSteps
from subtoken_train.evictions.base import Eviction
from subtoken_train.families.family import shapes_digest
from subtoken_train.reducers.fitprune import PruneSchedules
from subtoken_train.types import Identity, Region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View
from tests.support.kvzap_files import written
from tests.support.truth_models import family_of

KV_HEADS = [2]  # heads of the model under test; a method does not see the model


@dataclass(frozen=True)
class SharedSet(Eviction):
    """Test only: entries at random, one set for all heads, layers with unequal counts."""

    name: ClassVar[str] = "shared_set"

    def score(self, view: View) -> Scores:
        generator = torch.Generator().manual_seed(view.layer)
        scores = torch.rand(view.regions_BN.shape, generator=generator)[:, None].to(view.regions_BN.device)
        protected = torch.zeros_like(view.entries_BN)
        for sample, row in enumerate(view.last_rows(2)):
            protected[sample, row[row >= 0]] = True
        return Scores(scores, protected)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        step = torch.arange(len(scores), device=candidates.budget_LB.device) - len(scores) // 2
        return (candidates.budget_LB + 2 * step[:, None]).clamp(min=1)


@dataclass(frozen=True)
class OwnSets(SharedSet):
    """Test only: every head has entries of its own, and its own number of them."""

    name: ClassVar[str] = "own_sets"

    def keep(self, scores: list[Scores], candidates: Candidates) -> list[Tensor]:
        kept, heads = [], KV_HEADS[0]
        for layer, regions in enumerate(candidates.regions_LBN):
            generator = torch.Generator().manual_seed(100 + layer)
            draws = torch.rand(len(regions), heads, regions.shape[1], generator=generator).to(regions.device)
            share = torch.linspace(0.2, 0.8, heads, device=regions.device)[:, None]
            best = torch.zeros_like(draws).scatter_(-1, draws.argmax(-1, keepdim=True), 1).bool()
            chosen = (draws < share) | best | scores[layer].protected_BN[:, None]
            chosen |= ~candidates.competes_LBN[layer][:, None]
            kept.append(chosen & (regions != Region.PADDING)[:, None])
        return kept


@dataclass(frozen=True)
class Emptied(SharedSet):
    """Test only: every second layer keeps nothing of what competes, nor does the first head of the others."""

    name: ClassVar[str] = "emptied"

    @property
    def may_empty(self) -> bool:
        return True

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        count = candidates.budget_LB[..., None].repeat(1, 1, KV_HEADS[0])
        count[::2], count[..., 0] = 0, 0
        return count


CHAINS = {
    "ada(knorm)": {},
    "ada(critical(h2o))": {"recent_share": 0.25},
    "chunk(snapkv)": {"length": 2, "window": 2},
    "per_layer(ada(random))": {"shares": (3, 1, 2, 2)},
    "pooled(knorm)": {},
}
"""Wrappers, with settings that leave them a choice in short prompts: heads, entries in runs, and layers differ."""
SHORT = {
    "duo_attention": {"sinks": 1, "recent": 3},
    "simlayerkv": {"sinks": 1, "recent": 3},
    "cur": {"sinks": 1, "local": 4},
}
"""Settings of methods whose defaults are made for longer prompts than these."""
OWN = {
    "shared_set": SharedSet,
    "own_sets": OwnSets,
    "emptied": Emptied,
    "read_pages": partial(QuestSteps, page_size=4, least_pages=1, dense_layers=1),
}
PAST = {"threshold(random)": 0.5, "threshold(kvzap)": 0.0}
"""Thresholds in the place of a budget, which half of the scores reach in every family, however few entries there are.

Attention and angles hang on their number: ``tests/inference/test_threshold_budgets.py`` tries those methods.
"""
RECENT = 3
READING = ("read_pages", "quest_steps")
"""What frees nothing and reads pages."""


@cache
def schedules_of(name: str) -> str:
    """The file of a family: a row that drops a third after layer 0 and half in the end, and one that drops more."""
    family = family_of(name)
    depth = family.shape.num_layers
    rows = [[1.0, *[0.66] * (depth - 2), 0.5], [1.0, *[0.3] * (depth - 2), 0.2]]
    made_on = Identity(name, None, str(family.model.config.model_type), shapes_digest(family))
    folder = Path(tempfile.mkdtemp(prefix="schedules-"))
    return written(folder / f"{name}.json", "fitprune", PruneSchedules(rows), made_on)
