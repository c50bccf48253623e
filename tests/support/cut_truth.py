"""What a reducer decided between decoder layers, for the truth: who joins whom, and where the rows stand from there on.

Legend: B batch, M rows of a stretch of layers, N prompt rows of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import PromptPass
from subtoken_train.reducers.base import RankingReducer
from subtoken_train.reducers.staged import Cut, DecoderReducer


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
