"""Random tiny models of every family, made once, and prompts for them."""

import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.queries import QuestSteps
from subtoken_train.families.family import Family, shapes_digest
from subtoken_train.reducers.staged import PruneSchedules
from subtoken_train.types import Batch, Identity, Region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View
from tests.support.prompt_views import written
from tests.support.tiny import TinyPicture, assembled, tiny_families

TINY = tiny_families()
FAMILIES = [name for name, tiny in TINY.items() if tiny.crossed]
TEXT = [name for name, tiny in TINY.items() if tiny.picture is None]
OF_TEXT = ("quest", "compactor", "expected_attention")  # reducers of a language model's context
SAMPLES = {
    "one": [(1, 6)], "three": [(1, 6), (2, 9), (1, 4)], "text": [(1, 6), (0, 7), (2, 9)],
    "last": [(1, 0), (2, 5), (2, 0)],
}  # fmt: skip
"""Per sample (images, text tokens after them); language models read (contexts, query tokens). In ``last``
two prompts end with their image."""
CONTEXT = 24  # context tokens that stand for an image in a language model's prompt


@cache
def family_of(name: str, dtype: torch.dtype = torch.float32) -> Family:
    family = TINY[name].build()
    family.model.to(dtype)
    return family


def prompts(family: Family, kind: str, pad_left: bool, seed: int = 0, videos: bool = False) -> Batch:
    """Prompts without answers, see ``SAMPLES``; the tokens are at random. ``videos``: of a family that tells frames."""
    generator = torch.Generator().manual_seed(seed)
    draw = TINY[family.name].picture if family.name in TINY else None
    rows, codes, pictures = [], [], []
    for sample, (images, text) in enumerate(SAMPLES[kind]):
        ids, regions = _drawn(generator, 2), [Region.SYSTEM] * 2
        for image in range(images):
            if draw is None:
                ids += _drawn(generator, CONTEXT + 9 * sample)
                regions += [Region.CONTEXT] * (CONTEXT + 9 * sample)
                continue
            number = (1, 0) if videos else (sample, image)  # in these places they draw one
            shown = draw(family, generator, *number, images)
            after = shown.after if text or image + 1 < images else []
            ids += shown.before + shown.visual + after
            regions += [Region.QUERY if image else Region.SYSTEM] * len(shown.before)
            visual = family.is_visual(torch.tensor(shown.visual)).tolist()
            regions += [Region.VISUAL if each else Region.QUERY for each in visual]
            regions += [Region.QUERY] * len(after)
            pictures.append(shown)
        ids += _drawn(generator, text)
        regions += [Region.QUERY] * text
        rows.append(torch.tensor(ids))
        codes.append(torch.tensor(regions))
    return _padded(family, rows, codes, [n for n, _ in SAMPLES[kind]], pictures, pad_left)


def _drawn(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(10, 60, (count,), generator=generator).tolist()


def _padded(family, rows, codes, images, pictures: list[TinyPicture], pad_left: bool) -> Batch:
    sees = family.image_token_id is not None
    ranks = [len(row) - 1 if count or not sees else -1 for row, count in zip(rows, images, strict=True)]
    grids = [shown.grid for shown in pictures if shown.grid is not None]
    seconds = [shown.seconds for shown in pictures if shown.seconds is not None]
    more = {
        "pixel_values": torch.cat([shown.pixels for shown in pictures]) if pictures else None,
        "image_grid_I3": torch.tensor(grids) if grids else None,
        "seconds_I": torch.tensor(seconds) if any(seconds) else None,
    }
    counts = images if sees else [0] * len(rows)
    return assembled(rows, codes, ranks, pad_left, counts, family.tokenizer.pad_token_id, **more)


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
    "ada(knorm)": {}, "ada(critical(h2o))": {"recent_share": 0.25}, "chunk(snapkv)": {"length": 2, "window": 2},
    "per_layer(ada(random))": {"shares": (3, 1, 2, 2)}, "pooled(knorm)": {}, "lkv(knorm)": {},
}  # fmt: skip
"""Wrappers, with settings that leave them a choice in short prompts: heads, entries in runs, and layers differ."""
SHORT = {
    "duo_attention": {"sinks": 1, "recent": 3},
    "simlayerkv": {"sinks": 1, "recent": 3},
    "cur": {"sinks": 1, "local": 4},
}
"""Settings of methods whose defaults are made for longer prompts than these."""
OWN = {
    "shared_set": SharedSet, "own_sets": OwnSets, "emptied": Emptied,
    "read_pages": partial(QuestSteps, page_size=4, least_pages=1, dense_layers=1),
}  # fmt: skip
PAST = {"threshold(random)": 0.5, "threshold(kvzap)": 0.0}
"""Thresholds in the place of a budget, which half of the scores reach in every family, whatever their number."""
RECENT = 3
READING = ("read_pages", "quest_steps")  # what frees nothing and reads pages


@cache
def schedules_of(name: str) -> str:
    """The file of a family: a row that drops a third after layer 0 and half in the end, and one that drops more."""
    family = family_of(name)
    depth = family.shape.num_layers
    rows = [[1.0, *[0.66] * (depth - 2), 0.5], [1.0, *[0.3] * (depth - 2), 0.2]]
    made_on = Identity(name, None, str(family.model.config.model_type), shapes_digest(family))
    folder = Path(tempfile.mkdtemp(prefix="schedules-"))
    return written(folder / f"{name}.json", "fitprune", PruneSchedules(rows), made_on)
