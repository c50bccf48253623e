"""VisionZip (Yang et al., 2024): keep the tokens that the vision tower itself attends to, merge the others.

Acts in the tower, per image, before the language model. An image's count is split into contextual tokens (10 of 64,
rounded down) and dominant ones, among them the class token where the tower has one. Dominant tokens receive the most
attention; of the rest, every few tokens one is a target, the others join the target with the most similar key, and each
target becomes target + mean of those that joined it (a sum, as released). Emitted in order: class token, dominant,
contextual (CLIP, renumbered positions); or in raster order at their own positions (Qwen2.5-VL), where the last token of
a prompt that ends with its image is a dominant one.

A picture in tiles (LLaVA-NeXT) is zipped tile by tile, each by its own class token, without its newlines, as released
(read in the copy Fanziyang-v/VisionZip at 0247897). There every tile keeps as many tokens; here the kept count is that
of all placeholders, shared out over the tiles by their patches that show the picture. Without a class token
(LLaVA-OneVision) the picture is zipped as one.

Legend: T tokens of one image, I tiles, C tower width, k kept tokens (of the functions: k dominant, c contextual
tokens), d key width, R = T - k the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from subtoken_train.functional.masks import top_indices
from subtoken_train.reducers.base import TowerReducer
from subtoken_train.types import MergedStates, VisualStates


def dominant_tokens(received_T: Tensor, count: int) -> Tensor:
    """Indices [k] of the ``count`` tokens that receive the most attention, ascending; ties go to the lower index."""
    return top_indices(received_T, count).sort().values


def contextual_targets(rest: int, count: int) -> Tensor:
    """Places [c] of the targets among the ``rest`` tokens: evenly spaced from the first (``count`` <= ``rest``)."""
    return torch.arange(0, rest, max(1, rest // max(1, count)))[:count]


def contextual_tokens(tokens_RC: Tensor, keys_Rd: Tensor, targets_c: Tensor) -> Tensor:
    """Merge the rest into its targets by the cosine of keys, [c, C]."""
    if not len(targets_c):
        return tokens_RC[:0]
    is_target = torch.zeros(len(tokens_RC), dtype=torch.bool, device=tokens_RC.device)
    is_target[targets_c] = True
    keys = F.normalize(keys_Rd.float(), dim=-1)
    with torch.autocast(keys.device.type, enabled=False):
        joined = (keys[~is_target] @ keys[is_target].T).argmax(-1)
    sums_cC = tokens_RC.new_zeros(len(targets_c), tokens_RC.shape[-1], dtype=torch.float32)
    sums_cC.index_add_(0, joined, tokens_RC[~is_target].float())
    members_c = torch.bincount(joined, minlength=len(targets_c)).clamp(min=1)
    return tokens_RC[is_target] + (sums_cC / members_c[:, None]).to(tokens_RC.dtype)


_CONTEXTUAL_OF_64 = 10


def zipped(
    tokens_TC: Tensor, received_T: Tensor, keys_Td: Tensor, kept: int, classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose and merge, for ``kept`` tokens of which ``classes`` (0 or 1) is the class token.

    Returns:
        (places of the dominant tokens, ascending; places of the targets; merged tokens [c, C] of these).
    """
    contextual = kept * _CONTEXTUAL_OF_64 // 64
    dominant = dominant_tokens(received_T, kept - contextual - classes)
    rest = torch.ones(len(tokens_TC), dtype=torch.bool, device=tokens_TC.device)
    rest[dominant] = False
    targets = contextual_targets(int(rest.sum()), contextual).to(tokens_TC.device)
    merged_cC = contextual_tokens(tokens_TC[rest], keys_Td[rest], targets)
    return dominant, rest.nonzero()[targets, 0], merged_cC


def tile_shares(patches: list[int], kept: int) -> list[int]:
    """``kept`` shared out over tiles by their patches (``kept`` <= all of them); roundings go to the first tiles."""
    ends = [-(-kept * done // sum(patches)) for done in accumulate(patches, initial=0)]
    return [after - before for before, after in pairwise(ends)]


def zipped_tiles(
    tokens_TC: Tensor, received_T: Tensor, keys_Td: Tensor, cls_IC: Tensor, tiles_T: Tensor, kept: int
) -> Tensor:
    """Zip each tile of a picture by itself, [k, C], in the release's order.

    The whole's class token, dominant and contextual ones; dominant ones of the other tiles in the order of their
    placeholders; class tokens, tile after tile; contextual ones, alike. Newlines only stay beyond all patches.
    """
    patches = torch.bincount(tiles_T[tiles_T >= 0], minlength=len(cls_IC)).tolist()
    newlines = kept - min(kept, sum(patches))
    rows, places, classes, merged = [], [], [], []
    for tile, share in enumerate(tile_shares(patches, kept - newlines)):
        if share:
            own = (tiles_T == tile).nonzero()[:, 0]
            dominant, _, merged_cC = zipped(tokens_TC[own], received_T[own], keys_Td[own], share, 1)
            if tile == 0:
                rows = [cls_IC[:1], tokens_TC[own[dominant]], merged_cC]
            else:
                places.append(own[dominant])
                classes.append(cls_IC[tile : tile + 1])
                merged.append(merged_cC)
    if places:
        rows += [tokens_TC[torch.cat(places).sort().values], *classes, *merged]
    return torch.cat([*rows, tokens_TC[tiles_T < 0][:newlines]])


@dataclass(frozen=True, kw_only=True)
class VisionZip(TowerReducer):
    """VisionZip with ``keep_ratio`` tokens per image."""

    name: str = "visionzip"

    @torch.no_grad()
    def merge(self, states: VisualStates, read: list[Tensor]) -> MergedStates:
        counts = zip(self.image_counts(states), read, strict=True)
        merged = [self._merge_image(states, image, kept, read_T) for image, (kept, read_T) in enumerate(counts)]
        return MergedStates([tokens for tokens, _ in merged], [slots for _, slots in merged])

    def _merge_image(self, states: VisualStates, image: int, kept: int, read_T: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [k, C] and the placeholders [T] they take."""
        assert states.received is not None
        assert states.keys is not None
        tokens_TC, keys_Td = states.tokens[image], states.keys[image]
        if not kept:
            return tokens_TC[:0], torch.zeros_like(read_T)
        if states.cls is None:
            received_T = states.received[image].masked_fill(read_T, torch.inf)
            newline_T = torch.zeros_like(read_T) if states.tiles is None else (states.tiles[image] < 0) & ~read_T
            own, newlines = (~newline_T).nonzero()[:, 0], newline_T.nonzero()[:, 0]
            count = min(kept, len(own))
            dominant, places, merged_cC = zipped(tokens_TC[own], received_T[own], keys_Td[own], count, 0)
            slots = torch.zeros_like(read_T)
            slots[own[dominant]] = slots[own[places]] = slots[newlines[: kept - count]] = True
            return tokens_TC.index_copy(0, own[places], merged_cC)[slots], slots
        slots = torch.arange(len(tokens_TC), device=tokens_TC.device) < kept
        if states.tiles is not None:
            given = (tokens_TC, states.received[image], keys_Td, states.cls[image])
            return zipped_tiles(*given, states.tiles[image], kept), slots
        dominant, _, merged_cC = zipped(tokens_TC, states.received[image], keys_Td, kept, 1)
        return torch.cat([states.cls[image][None], tokens_TC[dominant], merged_cC]), slots
