"""What a prompt's positions, filled groups, first visual layers and cuts are, written out for the truth.

Legend: B batch, M rows of a stretch of layers, N rows of a sample, h key-value heads, d head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import PromptPass
from subtoken_train.families.family import Family
from subtoken_train.reducers.base import RankingReducer
from subtoken_train.reducers.staged import Cut, DecoderReducer
from subtoken_train.types import Batch, Region
from tests.support.helpers import only_sample


def prompt_positions(family: Family, prompts: Batch, sample: int) -> Tensor:
    """Positions of a sample's real tokens, [n], or [3, n]: a picture's tokens are a grid, what follows is beyond it.

    A video's layers lie behind one another in time, for Qwen2.5-VL by its seconds (two steps each); for Qwen3-VL each
    is a picture of its own behind text.
    """
    ids = prompts.input_ids_BN[sample, prompts.regions_BN[sample] != Region.PADDING].tolist()
    if family.tower_positions != "mrope":
        return torch.arange(len(ids))
    first = int(prompts.images_per_sample_B[:sample].sum())
    grids = [] if prompts.image_grid_I3 is None else prompts.image_grid_I3[first:].tolist()
    seconds = [0.5] * len(grids) if prompts.seconds_I is None else prompts.seconds_I[first:].tolist()
    shown = [(*grid, int(2 * second)) for grid, second in zip(grids, seconds, strict=True)]
    if family.name.startswith(("qwen3_vl", "glm4v")):
        shown = [(1, high, wide, 1) for layers, high, wide, _ in shown for _ in range(layers)]
    visual = (family.model.config.image_token_id, family.model.config.video_token_id)
    placed: list[tuple[int, int, int]] = []
    start = 0
    while len(placed) < len(ids):
        if ids[len(placed)] not in visual:
            placed.append((start, start, start))
            start += 1
            continue
        layers, high, wide, step = shown.pop(0)
        cells = [(row, column) for row in range(high // 2) for column in range(wide // 2)]
        placed += [(start + step * t, start + row, start + column) for t in range(layers) for row, column in cells]
        start += max(high, wide) // 2
    return torch.tensor(placed).T


def plain_window(config, layer: int) -> int | None:
    """Positions that a row of the layer sees, its own included; None: all before it."""
    kinds = getattr(config, "layer_types", None)
    slides = not kinds or config.model_type == "mistral" or kinds[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


SIDE_BY_SIDE = ("cohere", "glm4")
"""Models whose channels turn in pairs 0 and 1, 2 and 3, ...; in others the first half goes with the second."""


def moved_keys(key: Tensor, entries_hN: Tensor, position_N: Tensor, frequencies: Tensor, model_type: str) -> Tensor:
    """Keys [1, h, n, d] whose kept entries are turned on from their own places to 0, 1, 2, ..., head by head."""
    moved, pairs = key.clone(), len(frequencies)
    one, other = slice(0, pairs), slice(pairs, 2 * pairs)
    if model_type in SIDE_BY_SIDE:
        one, other = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    for head, kept_N in enumerate(entries_hN):
        own = kept_N.nonzero()[:, 0]
        angle = (torch.arange(len(own)) - position_N[own])[:, None] * frequencies
        first, second = key[0, head, own, one], key[0, head, own, other]
        moved[0, head, own, one] = first * angle.cos() - second * angle.sin()
        moved[0, head, own, other] = second * angle.cos() + first * angle.sin()
    return moved


@dataclass
class PlainFill:
    """The mean of the values of ``rows_N``; zero where it is None."""

    rows_N: Tensor | None = None

    def under(self, value_1hMd: Tensor, factor_hNd: Tensor) -> Tensor:
        """What the first rows' values leave to it, [1, h, N, d]: all where their factor is 0, nothing where it is 1."""
        if self.rows_N is not None:
            own = torch.stack([value_1hMd[0, :, row].float() for row in self.rows_N.nonzero()[:, 0].tolist()])
            fill_hd = own.mean(0)
        else:
            return torch.zeros_like(value_1hMd[:, :, : factor_hNd.shape[1]])
        return (fill_hd.to(value_1hMd.dtype)[:, None] * (1 - factor_hNd.to(value_1hMd.dtype)))[None]


def plain_fill(backbone: CompressedBackbone, layer: int, routed_N: Tensor, mask: Tensor | None) -> PlainFill:
    """Of a layer that routes these rows, or (no mask) none."""
    if mask is None:
        return PlainFill()
    mean = backbone.bank.config.fill == "mean" and bool(routed_N.any())
    return PlainFill(rows_N=routed_N) if mean else PlainFill()


@torch.no_grad()
def deep_rows(
    family: Family, prompts: Batch, sample: int, places_N: Tensor, joins_N: Tensor | None = None
) -> tuple[Tensor, list[Tensor]] | None:
    """Which rows, at places of a sample's prompt, are visual, and their features of each of the first layers.

    ``joins_N``: the place that each place of the prompt joined, whose features are the mean of those that did.
    """
    if not family.name.startswith("qwen3_vl") or not int(prompts.images_per_sample_B[sample]):
        return None
    alone, config = only_sample(prompts, sample), family.model.config
    made = family.model.model.visual(alone.pixel_values.to(family.model.dtype), grid_thw=alone.image_grid_I3)
    ids = alone.input_ids_BN[0]
    visual = (ids == config.image_token_id) | (ids == config.video_token_id)
    number, shown = visual.cumsum(0) - 1, visual[places_N]
    places = places_N[shown]
    who = [place[None] if joins_N is None else (joins_N == place).nonzero()[:, 0] for place in places]
    return shown, [
        torch.stack([features[number[joined]].mean(0) for joined in who]) for features in made.deepstack_features
    ]


def deep_inputs(deep: tuple[Tensor, list[Tensor]] | None, hidden_1ND: Tensor) -> dict[str, object]:
    """Of Qwen3-VL's decoder: no token after the rows is visual."""
    if deep is None:
        return {}
    shown, features = deep
    visual_1N = torch.zeros(hidden_1ND.shape[:2], dtype=torch.bool)
    visual_1N[0, : len(shown)] = shown
    return {"visual_pos_masks": visual_1N, "deepstack_visual_embeds": features}


@contextmanager
def noting_cuts(backbone: CompressedBackbone, made: dict[int, Cut]) -> Iterator[None]:
    """Note the cuts of the passes inside the block by their layers, 0 at the embeddings; later ones write over it."""
    method, name = type(backbone.reducer), "select" if backbone.reducer.stage == "embeds" else "cut"
    if not issubclass(method, (DecoderReducer, RankingReducer)):
        yield
        return
    decides = getattr(method, name)

    def noted(self, view):
        decided = decides(self, view)
        made[view.layer if name == "cut" else 0] = decided if name == "cut" else Cut(*decided)
        return decided

    own = name in vars(method)
    setattr(method, name, noted)
    try:
        yield
    finally:
        if own:
            setattr(method, name, decides)
        else:
            delattr(method, name)


def joined_places(made: dict[int, Cut], sample: int, start: int) -> Tensor | None:
    """The place of the prompt that each place joined before layer 0, from its first token on; None where none did."""
    joins_BN = made[0].joins_BM if 0 in made else None
    return None if joins_BN is None else joins_BN[sample, start:] - start


def joined_targets(
    result: PromptPass, made: dict[int, Cut], sample: int, layer: int, origin_N: Tensor
) -> Tensor | None:
    """The row [N] that each row joins before ``layer``; None where none does."""
    before = [rows for _, stop, rows in result.spans if stop == layer]
    if layer not in made or made[layer].joins_BM is None or not before:
        return None
    place = {int(row): i for i, row in enumerate(origin_N)}
    index_M, real_M = before[0].index_BM[sample], before[0].visible_BM[sample]
    targets_N = torch.arange(len(origin_N))
    for row in real_M.nonzero()[:, 0].tolist():
        targets_N[place[int(index_M[row])]] = place[int(index_M[made[layer].joins_BM[sample, row]])]
    return targets_N


def counted_anew(made: dict[int, Cut], layer: int, seen_N: Tensor, position: Tensor) -> Tensor | None:
    """Positions [N] of what ``layer`` sees, the last row where it stood in ``position``; None where all stay there."""
    if position.dim() > 1 or not any(cut.policy == "renumber" for start, cut in made.items() if start <= layer):
        return None
    return position[len(seen_N) - 1] - int(seen_N.sum()) + seen_N.long().cumsum(0)


@contextmanager
def cut_layers(family: Any, made: list[tuple[Tensor | None, Tensor | None]], position: Tensor) -> Iterator[None]:
    """Around a decoder's own forward on one sample: rows are joined, and stand elsewhere, from a layer on.

    Args:
        family: the backbone.
        made: of every layer the row [N] that each prompt row joins before it, and where these stand in it; None where
            nothing changes.
        position: of all rows.
    """

    def entering(targets: Tensor | None, own: Tensor | None) -> Callable[..., tuple[Any, Any]]:
        def hook(_, args, options):
            hidden = args[0]
            if targets is not None:
                states, rows = hidden[0, : len(targets)], targets.unique()
                hidden = hidden.clone()
                hidden[0, rows] = torch.stack([states[targets == row].float().mean(0) for row in rows]).to(hidden.dtype)
            if own is not None:
                places = torch.cat([own, position[len(own) :]])
                options["position_embeddings"] = family.decoder.rotary_emb(hidden, places[None])
            return (hidden, *args[1:]), options

        return hook

    layers = zip(family.decoder.layers, made, strict=True)
    handles = [layer.register_forward_pre_hook(entering(*each), with_kwargs=True) for layer, each in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
