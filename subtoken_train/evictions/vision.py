"""Methods for models that see images: AirCache, VL-Cache, TGV-KV.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, L layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction, layer_count, protect_last
from subtoken_train.evictions.budgets import claims, competing_counts, divided, pyramid_weights
from subtoken_train.evictions.observers import over_groups, share_of, task_rows
from subtoken_train.functional.gather import last_marked
from subtoken_train.types import Region
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, Rule, View

AirBudgets = Literal["both", "strength", "skewness", "uniform", "pyramid"]


@dataclass(frozen=True)
class AirCache(Eviction):
    """AirCache: visual entries stay by the attention of a few key text tokens; layers with more of it keep more.

    Source: "AirCache: Activating Inter-modal Relevancy KV Cache Compression for Efficient LVLM Inference", equations
    4-11 and Table 5. One shot, after the prompt; only visual entries are compressed, and text that competes (scope
    ``all``) is protected. A reconstruction, since our copy of the paper has lost its equations: instruction text is
    what follows the last visual token; heads are averaged, and all heads of a layer share a set; skewness uses the
    sample deviation, and a negative one counts as 0; strength and skewness are divided by their mean over the layers.
    Merging (Table 11) is the option ``merge`` of any eviction.

    Attributes:
        alpha: a text token is elite if the last one attends to it by this share of its largest attention (equation 5):
            0 takes all text, 1 the best alone.
        window: who observes the visual tokens: ``elite`` text, all ``text``, or the last ``window_size`` tokens of the
            text (``last``) or of the image (``visual``).
        window_size: tokens of a ``last`` or ``visual`` window (the paper: 16 or 32).
        budgets: how layers share: by ``both`` strength and skewness or one of them, ``uniform``, or as a ``pyramid``.
    """

    name: ClassVar[str] = "aircache"
    needs: ClassVar[frozenset[Need]] = frozenset({"rows", "blocks"})
    heads_share: ClassVar[bool] = True
    needs_image: ClassVar[bool] = True

    alpha: float = setting(0.9, 0, 1)
    window: Literal["elite", "last", "text", "visual"] = "elite"
    window_size: int = setting(32, 1)
    budgets: AirBudgets = "both"

    def score(self, view: View) -> Scores:
        visual_BN = view.regions_BN == Region.VISUAL
        observers_BN = self.observers(view)
        importance_BN = importance(view, observers_BN, visual_BN, None if self.window == "visual" else task_rows)
        notes = {"strength": importance_BN.sum(-1), "skewness": skewness(importance_BN, visual_BN)}
        return Scores(importance_BN[:, None], view.entries_BN & ~visual_BN, notes=notes)

    def observers(self, view: View) -> Tensor:
        """Mark the rows of the observation window, bool [B, N]; none in a layer without visual entries."""
        text_BN = task_rows(view.regions_BN)
        if self.window == "text":
            return text_BN
        if self.window == "last":
            return last_marked(text_BN, self.window_size)
        if self.window == "visual":
            visual_BN = view.regions_BN == Region.VISUAL
            return last_marked(torch.where(visual_BN.any(-1, keepdim=True), visual_BN, text_BN), self.window_size)
        attention_BN = view.rows(view.last_rows(1), text_BN)[:, :, 0].mean(1).masked_fill(~text_BN, 0.0)
        return text_BN & (attention_BN >= self.alpha * attention_BN.amax(-1, keepdim=True))

    across_layers = by_settings(lambda self: self.budgets != "uniform")

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        strength, skewness = (torch.stack([each.notes[note] for each in scores]) for note in ("strength", "skewness"))
        return divided(layer_weights(strength, skewness, self.budgets) * candidates.budget_LB, candidates)


def importance(view: View, observers_BN: Tensor, visual_BN: Tensor, among: Rule | None = None) -> Tensor:
    """Return the observers' mean attention to each visual entry (equations 7, 8), over heads too, [B, N]; else 0."""
    received_BN = view.received(observers_BN, visual_BN | observers_BN, among=among).mean(1)
    return (received_BN / observers_BN.sum(-1, keepdim=True).clamp(min=1)).masked_fill(~visual_BN, 0.0)


def skewness(importance_BN: Tensor, visual_BN: Tensor) -> Tensor:
    """Return visual importance's adjusted Fisher-Pearson skewness (equation 10), [B]; 0 of fewer than 3, or equals."""
    count_B = visual_BN.sum(-1)
    mean_B1 = importance_BN.sum(-1, keepdim=True) / count_B[:, None].clamp(min=1)
    away_BN = (importance_BN - mean_B1).masked_fill(~visual_BN, 0.0)
    deviation_B = (away_BN.square().sum(-1) / (count_B - 1).clamp(min=1)).sqrt()
    varies_B = (count_B >= 3) & (deviation_B > 1e-6 * mean_B1[:, 0])  # less is rounding of equal numbers
    cubes_B = (away_BN / deviation_B.masked_fill(~varies_B, 1.0)[:, None]).pow(3).sum(-1)
    return torch.where(varies_B, (count_B / ((count_B - 1) * (count_B - 2)).clamp(min=1)) * cubes_B, 0.0)


def layer_weights(strength_LB: Tensor, skewness_LB: Tensor, budgets: AirBudgets) -> Tensor:
    """Return the factor of each layer's budget (equation 11 over r), [L, B]; the mean over the layers is 1."""
    if budgets == "uniform":
        return torch.ones_like(strength_LB)
    if budgets == "pyramid":
        return pyramid_weights(strength_LB)
    strength_LB, skewness_LB = _over_mean(strength_LB), _over_mean(skewness_LB.clamp(min=0))
    if budgets == "both":
        return (strength_LB + skewness_LB) / 2
    return strength_LB if budgets == "strength" else skewness_LB


def _over_mean(value_LB: Tensor) -> Tensor:
    mean_1B = value_LB.mean(0, keepdim=True)
    return torch.where(mean_1B > 0, value_LB / mean_1B.masked_fill(mean_1B <= 0, 1.0), 1.0)


@dataclass(frozen=True)
class VLCache(Eviction):
    """VL-Cache: entries stay by the attention of the text after the image; layers with denser attention keep more.

    Source: "VL-Cache: Sparsity and Modality-Aware KV Cache Compression for Vision-Language Model Inference
    Acceleration", equations 1 and 2, Algorithm 1 and section 4.2; in the paper visual and text entries compete together
    (scope ``all``). A reconstruction, since our copy has lost its equations: a layer's budget is scaled by 1 - sparsity
    over its mean, 1 % to 100 % of its entries stay, and what these bounds take or leave moves between layers; sparsity
    is counted over what the rows can see, and averaged over heads; scores are per key-value head. Without an image the
    rows are those after the context. What the paper compares with is a setting: last rows, equal budgets, a pyramid.

    Attributes:
        threshold: p of equation 1: attention below this share of its row's largest counts as zero.
        least: share of its entries that every layer keeps, where the budget has that; not with ``uniform`` budgets.
        recent: as many of the prompt's last entries as this share of what a layer keeps stay, whatever they score.
        window: whose attention counts: the ``post_vision`` rows, or the ``last`` ``window_size`` rows of the prompt.
        window_size: rows of a ``last`` window.
        budgets: how layers share: by ``sparsity``, ``uniform`` (each its own budget), or ``pyramid`` (falling).
    """

    name: ClassVar[str] = "vl_cache"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})

    threshold: float = setting(0.01, 1e-9, 1)
    least: float = setting(0.01, 0, 1)
    recent: float = setting(0.1, 0, 1)
    window: Literal["post_vision", "last"] = "post_vision"
    window_size: int = setting(50, 1)
    budgets: Literal["sparsity", "uniform", "pyramid"] = "sparsity"

    def score(self, view: View) -> Scores:
        last = self.window == "last"
        rows_BN = last_marked(view.entries_BN, self.window_size) if last else task_rows(view.regions_BN)
        blocks = view.blocks(rows_BN, among=self.window_size if last else task_rows)
        sums_BHN, density_BH = post_vision_statistics(blocks, view.entries_BN, self.threshold)
        scores_BhN = over_groups(sums_BHN, view.key_BhNd.shape[1])
        nothing_BN = torch.zeros_like(view.entries_BN)
        notes = {"entries": view.entries_BN, "in_scope": view.in_scope_BN & view.entries_BN}
        return Scores(scores_BhN, nothing_BN, density_BH.mean(1), notes)

    across_layers = by_settings(lambda self: self.budgets != "uniform")

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        if self.budgets == "uniform":
            return candidates.budget_LB
        weight_LB = pyramid_weights(claims(scores)) if self.budgets == "pyramid" else claims(scores)
        return divided(weight_LB * candidates.budget_LB, candidates, self.least)

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        kept_B = layer_count(count_Bh) + (scores.notes["in_scope"] & ~competes_BN).sum(-1)
        return protect_last(scores, scores.notes["entries"], share_of(kept_B, self.recent))


def post_vision_statistics(blocks: Iterable[Any], entries_BN: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Sum the rows' attention by column, [B, H, N] in fp32, and return its density (1 - eq. 2), [B, H]."""
    visible_BN = entries_BN.cumsum(-1)
    sums_BHN = passed_BH = seen_B = torch.zeros((), device=entries_BN.device)
    for index_BW, probability_BHWN in blocks:
        passes_BHWN = (probability_BHWN >= threshold * probability_BHWN.amax(-1, keepdim=True)) & (probability_BHWN > 0)
        sums_BHN = sums_BHN + probability_BHWN.sum(2)
        passed_BH = passed_BH + passes_BHWN.sum((2, 3))
        seen_B = seen_B + (visible_BN.gather(1, index_BW.clamp(min=0)) * (index_BW >= 0)).sum(-1)
    return sums_BHN, passed_BH / seen_B[:, None].clamp(min=1)


Importance = Literal["TV+TT", "VV+TT", "window", "self"]
First = Literal["text", "vision", "score"]
TEXT_BONUS, FIRST, LAST = 100.0, 4, 1  # of the released code: for text, and entries that it always keeps


@dataclass(frozen=True)
class TGVKV(Eviction):
    """TGV-KV: text says which visual entries matter and which layers need them; text itself is evicted last.

    Source: arXiv 2606.03075, of which a summary was at hand, and its code (Danielement321/TGV-KV). Text-vision
    budgeting (TVB) divides the total between layers by the attention that text pays to vision; text-weighted ranking
    (TWR) weighs that attention by how much later text attends to each text token; text-prioritised retention (TPR)
    keeps all text before any visual entry. A reconstruction: heads are averaged and share a set, attention is that of
    the full row (both as released); a layer's budget counts text under scope ``all`` (the paper's), otherwise text
    stays beside it. Nothing is evicted while decoding.

    Attributes:
        released: as the code has it: weights only from text after the images; all between the first and the last visual
            entry is one block; the first four entries and the last stay; removals are rounded layer by layer.
        budgets: what a layer's share is measured by: the attention of text to vision (``TV``), vision to vision
            (``VV``) or text to text (``TT``); or ``uniform``.
        importance: ``TV+TT``: vision by the text that looks at it, weighted (TWR), and text by text; ``VV+TT``: each by
            its own kind; all by the last ``window_size`` rows (``window``) or by all rows (``self``).
        window_size: rows of a ``window``.
        first: ``text`` before any visual entry (TPR), ``vision`` before any text, or both by ``score`` alone.
    """

    name: ClassVar[str] = "tgv_kv"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    heads_share: ClassVar[bool] = True
    needs_image: ClassVar[bool] = True

    released: bool = False
    budgets: Literal["TV", "VV", "TT", "uniform"] = "TV"
    importance: Importance = "TV+TT"
    window_size: int = setting(32, 1)
    first: First = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.released and (self.budgets, self.importance, self.first) != ("TV", "TV+TT", "text"):
            raise ValueError("tgv_kv released=true has its own budgets, importance and first; leave them out")

    def score(self, view: View) -> Scores:
        if self.released:
            return released_scores(view)
        visual_BN = view.regions_BN == Region.VISUAL
        text_BN = text_rows(view.regions_BN)
        from_text_BN, from_vision_BN = view.received(text_BN, among=text_rows).mean(1), None
        if "VV" in (self.budgets, self.importance[:2]):
            from_vision_BN = view.received(visual_BN).mean(1)
        measured = {"TV": (from_text_BN, visual_BN), "VV": (from_vision_BN, visual_BN), "TT": (from_text_BN, text_BN)}
        summed_BN, columns_BN = measured.get(self.budgets, (view.entries_BN.float(), view.entries_BN))
        assert summed_BN is not None
        if self.importance == "TV+TT":
            weight_BN = text_weights(from_text_BN, text_BN)
            weight_BN = weight_BN / weight_BN.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            text_score_BN = from_text_BN
            visual_score_BN = view.received(text_BN, weight_BN=weight_BN, among=text_rows).mean(1)
        elif self.importance == "VV+TT":
            assert from_vision_BN is not None
            text_score_BN, visual_score_BN = from_text_BN, from_vision_BN
        else:
            rows_BN = last_marked(view.entries_BN, self.window_size) if self.importance == "window" else view.entries_BN
            text_score_BN = visual_score_BN = view.received(rows_BN).mean(1)
        notes = {"text": text_score_BN.masked_fill(~text_BN, 0), "visual": visual_score_BN.masked_fill(~visual_BN, 0)}
        order_BN = retention_order(notes["text"], notes["visual"], text_BN, visual_BN, self.first)
        layer_B = summed_BN.masked_fill(~columns_BN, 0.0).sum(-1)
        return Scores(order_BN[:, None], torch.zeros_like(text_BN), layer_B, notes)

    across_layers = by_settings(lambda self: self.budgets != "uniform")

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        if self.budgets == "uniform":
            return candidates.budget_LB
        if not self.released:
            return divided(claims(scores), candidates)
        most_LB = competing_counts(candidates)
        return released_counts(claims(scores), candidates.budget_LB.sum(0), most_LB).clamp(min=1).minimum(most_LB)


def text_rows(regions_BN: Tensor) -> Tensor:
    """Mark the entries that are no visual tokens, bool [B, N]."""
    return (regions_BN != Region.PADDING) & (regions_BN != Region.VISUAL)


def released_scores(view: View) -> Scores:
    """Score as the released code does, see ``TGVKV``."""
    visual_BN = view.regions_BN == Region.VISUAL
    started_BN, going_on_BN = visual_BN.cumsum(-1) > 0, visual_BN.flip(-1).cumsum(-1).flip(-1) > 0
    before_BN, visual_BN = (view.entries_BN & part_BN & going_on_BN for part_BN in (~started_BN, started_BN))
    rows_BN = task_rows(view.regions_BN)
    from_text_BN = view.received(rows_BN, among=task_rows).mean(1)
    visual_score_BN = view.received(rows_BN, weight_BN=text_weights(from_text_BN, rows_BN), among=task_rows).mean(1)
    text_score_BN = torch.where(before_BN, view.received(view.entries_BN).mean(1), from_text_BN) + TEXT_BONUS
    scores_BN = torch.where(view.entries_BN & ~visual_BN, text_score_BN, visual_score_BN.masked_fill(~visual_BN, 0.0))
    vision_B = from_text_BN.masked_fill(~visual_BN, 0.0).sum(-1)
    first_BN = view.entries_BN & (view.entries_BN.cumsum(-1) <= FIRST)
    return Scores(scores_BN[:, None], first_BN | last_marked(view.entries_BN, LAST), vision_B)


def text_weights(received_BN: Tensor, rows_BN: Tensor) -> Tensor:
    """Return each text token's mean attention from itself and later text (TWR), [B, N]; 0 elsewhere."""
    later_BN = rows_BN.flip(-1).cumsum(-1).flip(-1)  # N_t - j + 1 for the j-th text token
    return (received_BN / later_BN.clamp(min=1)).masked_fill(~rows_BN, 0.0)


def retention_order(
    text_score_BN: Tensor, visual_score_BN: Tensor, text_BN: Tensor, visual_BN: Tensor, first: First = "text"
) -> Tensor:
    """Return each entry's negative rank, [B, N]: one kind by score, then the other (TPR); ties to the lower index."""
    order_BN = torch.where(text_BN, text_score_BN, visual_score_BN).sort(dim=-1, descending=True, stable=True).indices
    text, vision = {"text": (2, 1), "vision": (1, 2), "score": (1, 1)}[first]
    class_BN = (text * text_BN.int() + vision * visual_BN.int()).gather(-1, order_BN)  # padding last
    order_BN = order_BN.gather(-1, class_BN.sort(dim=-1, descending=True, stable=True).indices)
    return -order_BN.argsort(dim=-1).float()


def released_counts(vision_LB: Tensor, total_B: Tensor, length_LB: Tensor) -> Tensor:
    """Return the released code's counts, int64 [L, B]: shares by attention (equal if all 0), removals rounded."""
    vision_LB = vision_LB.cpu().double()
    vision_LB = torch.where(vision_LB.sum(0) > 0, vision_LB, 1.0)
    kept_LB = vision_LB / vision_LB.sum(0) * total_B.cpu()
    removed_LB = (length_LB.cpu() - kept_LB).round().clamp(min=0).long()
    return length_LB - removed_LB.to(length_LB.device)
