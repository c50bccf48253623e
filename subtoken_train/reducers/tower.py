"""Reducers that act on a vision tower's tokens: VisionZip, PruneSID, PruMerge, FasterVLM and VisPruner.

Legend: T tokens of one image, I tiles, C tower width, k kept tokens (of functions: k dominant, c contextual tokens), d
key width, R = T - k the rest, P principal components.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subtoken_train.functional.diversity import unit_rows, without_doubles
from subtoken_train.functional.gather import keep_best, plain_product
from subtoken_train.functional.masks import top_indices
from subtoken_train.reducers.base import TowerChoice, TowerReducer
from subtoken_train.types import MergedStates, TowerStatistics, VisualStates
from subtoken_train.view.method import by_settings, setting


def dominant_tokens(received_T: Tensor, count: int) -> Tensor:
    """Return the indices [k] of the ``count`` tokens with most attention, ascending; ties go to the lower index."""
    return top_indices(received_T, count).sort().values


def contextual_targets(rest: int, count: int) -> Tensor:
    """Space ``count`` targets evenly among the ``rest`` tokens, from the first; places [c] (``count`` <= ``rest``)."""
    return torch.arange(0, rest, max(1, rest // max(1, count)))[:count]


def contextual_tokens(tokens_RC: Tensor, keys_Rd: Tensor, targets_c: Tensor) -> Tensor:
    """Merge the rest into its targets by the cosine of keys, [c, C]."""
    if not len(targets_c):
        return tokens_RC[:0]
    is_target = torch.zeros(len(tokens_RC), dtype=torch.bool, device=tokens_RC.device)
    is_target[targets_c] = True
    keys = F.normalize(keys_Rd.float(), dim=-1)
    joined = plain_product(keys[~is_target], keys[is_target].T).argmax(-1)
    sums_cC = tokens_RC.new_zeros(len(targets_c), tokens_RC.shape[-1], dtype=torch.float32)
    sums_cC.index_add_(0, joined, tokens_RC[~is_target].float())
    members_c = torch.bincount(joined, minlength=len(targets_c)).clamp(min=1)
    return tokens_RC[is_target] + (sums_cC / members_c[:, None]).to(tokens_RC.dtype)


_CONTEXTUAL_OF_64 = 10
Choose = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]


def tile_shares(patches: list[int], kept: int) -> list[int]:
    """Divide ``kept`` among tiles by their patches (``kept`` <= all of them); roundings go to the first tiles."""
    ends = [-(-kept * done // sum(patches)) for done in accumulate(patches, initial=0)]
    return [after - before for before, after in pairwise(ends)]


def zipped_tiles(
    tokens_TC: Tensor, received_T: Tensor, keys_Td: Tensor, cls_IC: Tensor, tiles_T: Tensor, kept: int, choose: Choose
) -> Tensor:
    """Zip each tile of a picture by itself, [k, C], in the release's order.

    The whole's class token, dominant and contextual ones; dominant ones of the other tiles in the order of their
    placeholders; class tokens, tile after tile; contextual ones, alike. Newlines stay only beyond all patches.
    """
    patches = torch.bincount(tiles_T[tiles_T >= 0], minlength=len(cls_IC)).tolist()
    newlines = kept - min(kept, sum(patches))
    rows, places, classes, merged = [], [], [], []
    for tile, share in enumerate(tile_shares(patches, kept - newlines)):
        if share:
            own = (tiles_T == tile).nonzero()[:, 0]
            dominant, _, merged_cC = choose(tokens_TC[own], received_T[own], keys_Td[own], share, 1)
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
    """VisionZip (Yang et al., 2024): keep the tokens that the tower attends to, merge the others.

    An image's count is split into contextual tokens (10 of 64, rounded down) and dominant ones, among them the class
    token where the tower has one. Dominant tokens receive the most attention; of the rest, every few tokens one is a
    target, the others join the target with the most similar key, and each target becomes target + mean of those that
    joined it (a sum, as released). Emitted in order: class token, dominant, contextual (CLIP, renumbered positions); or
    in raster order at their own positions (Qwen2.5-VL).

    A picture in tiles (LLaVA-NeXT) is zipped tile by tile, each by its own class token, without its newlines, as
    released (read in the copy Fanziyang-v/VisionZip at 0247897). There every tile keeps as many tokens; here the kept
    count is shared out over the tiles by their patches that show the picture. Without a class token (LLaVA-OneVision)
    the picture is zipped as one.
    """

    name: str = "visionzip"

    @torch.no_grad()
    def merge(self, states: VisualStates, read: list[Tensor]) -> MergedStates:
        counts = zip(self.image_counts(states), read, strict=True)
        merged = [self._merge_image(states, image, kept, read_T) for image, (kept, read_T) in enumerate(counts)]
        return MergedStates([tokens for tokens, _ in merged], [slots for _, slots in merged])

    def choose(
        self, tokens_TC: Tensor, received_T: Tensor, keys_Td: Tensor, kept: int, classes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose ``kept`` tokens, class tokens among them: places that stay, places of merged ones, these [c, C]."""
        contextual = kept * _CONTEXTUAL_OF_64 // 64
        dominant = dominant_tokens(received_T, kept - contextual - classes)
        rest = torch.ones(len(tokens_TC), dtype=torch.bool, device=tokens_TC.device)
        rest[dominant] = False
        targets = contextual_targets(int(rest.sum()), contextual).to(tokens_TC.device)
        return dominant, rest.nonzero()[targets, 0], contextual_tokens(tokens_TC[rest], keys_Td[rest], targets)

    def _merge_image(self, states: VisualStates, image: int, kept: int, read_T: Tensor) -> tuple[Tensor, Tensor]:
        assert states.received is not None
        assert states.keys is not None
        tokens_TC, keys_Td = states.tokens[image], states.keys[image]
        if not kept:
            return tokens_TC[:0], torch.zeros_like(read_T)
        if states.cls is None:
            received_T = states.received[image].masked_fill(read_T, torch.inf)
            own, newlines = patches_and_newlines(states, image, read_T)
            count = min(kept, len(own))
            dominant, places, merged_cC = self.choose(tokens_TC[own], received_T[own], keys_Td[own], count, 0)
            slots = torch.zeros_like(read_T)
            slots[own[dominant]] = slots[own[places]] = slots[newlines[: kept - count]] = True
            return tokens_TC.index_copy(0, own[places], merged_cC)[slots], slots
        slots = torch.arange(len(tokens_TC), device=tokens_TC.device) < kept
        if states.tiles is not None:
            given = (tokens_TC, states.received[image], keys_Td, states.cls[image])
            return zipped_tiles(*given, states.tiles[image], kept, self.choose), slots
        dominant, _, merged_cC = self.choose(tokens_TC, states.received[image], keys_Td, kept, 1)
        return torch.cat([states.cls[image][None], tokens_TC[dominant], merged_cC]), slots


def patches_and_newlines(states: VisualStates, image: int, read_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of an image's patches (and of a row that a token is read from), and of its newlines, int64."""
    newline_T = torch.zeros_like(read_T) if states.tiles is None else (states.tiles[image] < 0) & ~read_T
    return (~newline_T).nonzero()[:, 0], newline_T.nonzero()[:, 0]


def components(tokens_TC: Tensor, count: int) -> Tensor:
    """Return which of the first ``count`` principal components each token weighs most in, int64 [T].

    Those of the channels' sigmoids, each token less its mean over them; a component that holds nothing has no token.
    """
    states_CT = tokens_TC.float().sigmoid().nan_to_num().T
    _, held_P, axes_PT = torch.linalg.svd(states_CT - states_CT.mean(0), full_matrices=False)
    nothing = held_P[0] * max(states_CT.shape) * torch.finfo(torch.float32).eps
    return torch.where(held_P[:, None] > nothing, axes_PT, 0)[:count].abs().argmax(0)


def component_counts(size_P: Tensor, apart_P: Tensor, kept: int, classes: int) -> Tensor:
    """Share ``kept - classes`` tokens out over components of these sizes, [P]: by how many tokens are unlike others."""
    most_P, one_P = apart_P.clamp(max=5 * -(-kept // 64)), size_P.clamp(max=1)
    while int(most_P.sum()) < kept:
        most_P = torch.minimum(most_P + 1, size_P)
    left = max(0, kept - classes - int(one_P.sum()))
    upto_P = ((apart_P / apart_P.sum()).cumsum(0) * left).round().long()
    count_P = torch.minimum(upto_P.diff(prepend=upto_P.new_zeros(1)) + one_P, most_P)
    for best in apart_P.argsort(descending=True, stable=True).tolist():
        count_P[best] += min(int(most_P[best] - count_P[best]), kept - classes - int(count_P.sum()))
    return count_P


def principal_tokens(tokens_TC: Tensor, received_T: Tensor, kept: int, classes: int) -> Tensor:
    """Return the places of ``kept - classes`` tokens, component after component, of each the best first."""
    count, unit_TC = len(tokens_TC), unit_rows(tokens_TC)
    component_T = components(tokens_TC, max(1, kept // 4))
    like_TT = plain_product(unit_TC, unit_TC.T)
    most_alike = kept / 32 * like_TT.triu(1).sum() / max(1, count * (count - 1) // 2)
    repeats_TT = ((like_TT > most_alike) & (component_T == component_T[:, None])).fill_diagonal_(False)
    order_T, apart_T = top_indices(received_T, count), torch.ones_like(component_T, dtype=torch.bool)
    for place in order_T.tolist():
        apart_T &= ~(repeats_TT[place] & apart_T[place])
    size_P, apart_P = (torch.bincount(own, minlength=count).cpu() for own in (component_T, component_T[apart_T]))
    counts = component_counts(size_P, apart_P, kept, classes).tolist()
    own_T = ((2 * component_T + ~apart_T) * count + order_T.argsort()).argsort()
    return torch.cat([own[:n] for own, n in zip(own_T.split_with_sizes(size_P.tolist()), counts, strict=True)])


@dataclass(frozen=True, kw_only=True)
class PruneSID(VisionZip):
    """PruneSID (Fang et al., 2026, arXiv:2603.09480): keep each principal component's best unlike tokens.

    As released for LLaVA (ZhengyaoFang/PruneSID @4ef17d9). Of k tokens, the class token among them, each belongs to
    that of k / 4 principal components in which it weighs most. Within a component, from the most attention on, what is
    more alike (cosine) to one before than k / 32 times the mean of all pairs comes last. A component keeps one, and of
    the others in proportion to how many are unlike, up to 5 for each 64 of k where enough are left. Nothing is merged;
    emitted as ``visionzip`` does, component after component where the tower has a class token.

    The decomposition is exact; the release draws it at random, so that its choices differ from run to run. Its Qwen2-VL
    ranks by a token's weight in the component instead of attention; here every tower's attention does.
    """

    name: str = "prunesid"

    def choose(
        self, tokens_TC: Tensor, received_T: Tensor, keys_Td: Tensor, kept: int, classes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        places = principal_tokens(tokens_TC, received_T, kept, classes)
        return places, places[:0], tokens_TC[:0]


NEIGHBOURS = 32  # tokens that are added to each kept one


def outliers(received_T: Tensor) -> int:
    """Return the tokens whose attention is above Q3 + 1.5 (Q3 - Q1)."""
    values_T = received_T.double()
    low, high = values_T.quantile(0.25), values_T.quantile(0.75)
    return int((values_T > high + 1.5 * (high - low)).sum())


def spread_step(share: float) -> int:
    """Return the distance of the tokens that PruMerge+ takes for a share of outliers in (0, 1]."""
    return max(1, int(int(1 / share) / 3))


def chosen_tokens(received_T: Tensor, best: int, step: int | None) -> Tensor:
    """Return indices [k]: the ``best`` by attention, then every ``step``-th token that is not among them."""
    order_T = top_indices(received_T, len(received_T))
    if step is None:
        return order_T[:best]
    spread = torch.arange(0, len(received_T) - 1, step, device=received_T.device)
    return torch.cat([order_T[:best], spread[~torch.isin(spread, order_T[:best])]])


def chosen_count(received_T: Tensor, count: int) -> Tensor:
    """Cut PruMerge+ to exactly ``count`` tokens (0 to T), [count]: most outliers that leave room for spread ones."""
    tokens, order = len(received_T), top_indices(received_T, len(received_T)).tolist()
    rank = {place: i for i, place in enumerate(order)}
    ranks_of: dict[int, list[int]] = {}  # step -> ranks of the spread tokens, best first
    chosen: list[int] = []
    for best in range(count, 0, -1):
        step = spread_step(best / tokens)
        ranks = ranks_of.setdefault(step, sorted(rank[place] for place in range(0, tokens - 1, step)))
        if best + len(ranks) - bisect_left(ranks, best) <= count:
            chosen = order[:best] + [place for place in range(0, tokens - 1, step) if rank[place] >= best]
            break
    taken = set(chosen)
    missing = [place for place in order if place not in taken][: count - len(chosen)]
    return torch.tensor(chosen + missing, dtype=torch.long, device=received_T.device)


def merged_tokens(tokens_TC: Tensor, received_T: Tensor, keys_Td: Tensor, chosen_k: Tensor) -> Tensor:
    """Add to each chosen token its neighbours (by cosine of keys), and append the extra one, [k + 1, C]; in fp32."""
    states_TC, unit_Td = tokens_TC.float(), F.normalize(keys_Td.float(), dim=-1)
    weighted_TC = states_TC * received_T.float()[:, None]
    like_kT = plain_product(unit_Td[chosen_k], unit_Td.T)
    like_kT.scatter_(1, chosen_k[:, None], -torch.inf)
    near_kn = top_indices(like_kT, min(NEIGHBOURS, len(tokens_TC) - 1))
    dropped_T = torch.ones_like(received_T, dtype=torch.bool)
    dropped_T[chosen_k] = False
    kept_kC = states_TC[chosen_k] + weighted_TC[near_kn].sum(1)
    return torch.cat([kept_kC, weighted_TC[dropped_T].sum(0, keepdim=True)]).to(tokens_TC.dtype)


@dataclass(frozen=True, kw_only=True)
class PruMerge(TowerReducer):
    """LLaVA-PruMerge and PruMerge+ (Shang et al., 2024, arXiv:2403.15388): what the class token attends to, merged.

    As released (42Shawn/LLaVA-PruMerge, ``clip_encoder.py`` @097c041): in the tower's last layer, queries and keys
    being of one head as wide as the layer, the class token's attention ranks the tokens of an image. The best stay;
    each becomes itself plus the *sum* of the 32 tokens whose keys are most like its own (cosine), each times its
    attention. One extra token is the sum of all dropped ones times their attention. Emitted in the order of the
    ranking, the extra one last, at positions counted anew.

    By default ``keep_ratio`` fixes the count, the extra token included. ``adaptive``, as released, keeps the outliers,
    attention above Q3 + 1.5 (Q3 - Q1), of each image (the release: of the batch), and ``keep_ratio`` is a cap; its
    matched anchor is refused. ``plus`` adds every ``int(int(1 / share) / 3)``-th token from the first to the last but
    one; at a fixed count (our reading) the share is the largest that leaves room for them. A picture in tiles is one
    image; newlines go first. Towers without a class token are refused.

    Attributes:
        plus: PruMerge+, which also takes tokens spread over the image.
        adaptive: each image's outliers say how many stay, at most ``keep_ratio`` of its tokens.
    """

    name: str = "prumerge"
    plus: bool = False
    adaptive: bool = False

    statistics: ClassVar[TowerStatistics] = "unsplit"
    fixed_count = by_settings(lambda self: not self.adaptive)

    @property
    def acts(self) -> bool:
        return self.adaptive or super().acts

    @torch.no_grad()
    def merge(self, states: VisualStates, read: list[Tensor]) -> MergedStates:
        assert states.received is not None
        assert states.keys is not None
        tokens, slots = [], []
        for image, (kept, placeholders_TC) in enumerate(zip(self.image_counts(states), states.tokens, strict=True)):
            if not kept:
                tokens.append(placeholders_TC[:0])
                slots.append(torch.zeros(len(placeholders_TC), dtype=torch.bool, device=placeholders_TC.device))
                continue
            most = kept - 1
            tokens_TC, received_T, keys_Td = placeholders_TC, states.received[image], states.keys[image]
            if states.tiles is not None:
                patch_T = states.tiles[image] >= 0
                if most <= int(patch_T.sum()):  # newlines hold nothing to merge into; they stay where all patches do
                    tokens_TC, received_T, keys_Td = tokens_TC[patch_T], received_T[patch_T], keys_Td[patch_T]
            tokens.append(merged_tokens(tokens_TC, received_T, keys_Td, self._chosen(received_T, most)))
            slots.append(torch.arange(len(placeholders_TC), device=tokens_TC.device) < len(tokens[-1]))
        return MergedStates(tokens, slots)

    def _chosen(self, received_T: Tensor, most: int) -> Tensor:
        tokens = len(received_T)
        if not self.adaptive:
            return chosen_count(received_T, most) if self.plus else chosen_tokens(received_T, most, None)
        share = max(outliers(received_T), int(self.plus)) / tokens
        # the product's own rounding, as released: 100 * 0.29 is 28
        return chosen_tokens(received_T, int(tokens * share), spread_step(share) if self.plus else None)[:most]


@dataclass(frozen=True, kw_only=True)
class FasterVLM(TowerChoice):
    """FasterVLM (Zhang et al., 2024, arXiv:2412.01818): keep what the tower's class token attends to.

    Tokens are ranked by the class token's attention in the layer that made them, the mean over heads; the best r * T
    stay, in raster order. Nothing is merged and the question is not read. A tower without a class token is refused. A
    picture in tiles is ranked as one, each patch by the attention of its own tile's class token; newlines go first.
    There is no released output to compare with: tests hold it to the paper, section 3.3.
    """

    name: str = "fastervlm"

    statistics: ClassVar[TowerStatistics] = "class"

    def kept(self, states: VisualStates, image: int, kept: int, read_T: Tensor) -> Tensor:
        assert states.received is not None
        count = read_T.sum().clamp(min=kept)
        scores_1T = states.received[image].masked_fill(read_T, torch.inf)[None]
        return keep_best(scores_1T, torch.ones_like(read_T)[None], count[None])[0]


def important_and_distinct(tokens_TC: Tensor, received_T: Tensor, important: int, count: int) -> Tensor:
    """Choose ``count`` tokens of an image: so many by attention, the rest unlike each other."""
    order_T = top_indices(received_T, len(received_T))
    best, others = order_T[:important], order_T[important:]
    if count == important:
        return best
    return torch.cat([best, others[without_doubles(unit_rows(tokens_TC[others]), count - important)]])


@dataclass(frozen=True, kw_only=True)
class VisPruner(TowerChoice):
    """VisPruner (Zhang et al., 2025, arXiv:2412.01818v2): half by the tower's attention, half by removing duplicates.

    As released (Theia-4869/VisPruner @aefa01a). The tokens that receive the most attention stay, from the class token
    where there is one, else from all patches (mean over heads); of the others, in the order of their attention, every
    second is matched with the most similar of those between by cosine, the 8 most similar ones go, and so on until the
    count is met. Nothing is merged; what stays is in raster order. A picture in tiles is pruned as one; newlines go
    first. Where a tower's tokens leave it merged or projected (InternVL, Qwen, OneVision), likeness is that of these.

    Attributes:
        important: share of them that attention chooses, rounded down; 1 is FasterVLM.
    """

    name: str = "vispruner"
    important: float = setting(0.5, 0, 1)

    def kept(self, states: VisualStates, image: int, kept: int, read_T: Tensor) -> Tensor:
        assert states.received is not None
        reads = int(read_T.sum())
        kept = max(kept, reads)
        own, newlines = patches_and_newlines(states, image, read_T)
        count = min(kept, len(own))
        received_T = states.received[image].masked_fill(read_T, torch.inf)[own]
        important = max(int(count * self.important), reads)
        slots = torch.zeros_like(read_T)
        slots[own[important_and_distinct(states.tokens[image][own], received_T, important, count)]] = True
        slots[newlines[: kept - count]] = True
        return slots
