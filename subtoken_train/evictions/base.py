"""Base classes of KV evictions: after the prompt's pass they say which cached entries stay, per layer and head.

A method sees one layer at a time (``View``), leaves its scores, and plans when all layers have been seen. What it reads
of the attention is declared in ``needs``; nothing else is computed. It acts after prefill, so it cannot change the
first generated token; one that says how (``online``) evicts again while tokens are decoded. One that wants to know what
a reader would look for has rows run after the prompt: it declares ``second_pass`` in ``needs``, says for which samples
(``second_pass``) and which rows (``tasks``), and scores their entries anew (``score_task``). Wrappers change how much
stays or what counts, and stand in each other: ``ada(critical(expected_attention))``.

Legend: B batch, N cached rows of the prompt, h key-value heads, L layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from subtoken_train.errors import refuse
from subtoken_train.functional.gather import last_marked
from subtoken_train.functional.merging import Merge
from subtoken_train.types import Region
from subtoken_train.view.method import Method, by_settings
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, Online, TaskPlan, View

LayerScores = Scores
"""Name of ``Scores`` up to version 0.2."""


class Eviction(Method, ABC):
    """One method, a frozen dataclass of its settings; a fact that these decide is a property, see ``by_settings``."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    heads_share: ClassVar[bool] = False
    """One set for all heads of a layer: scores, at their budget at the latest, are [B, 1, N]."""
    heads_differ: ClassVar[bool] = False
    """Heads of a layer keep different numbers of entries."""
    second_pass_advice: ClassVar[str] = ""
    """Advice where a second pass needs more positions than the model has."""
    merges: ClassVar[Merge] = "none"
    """Treatment of evicted entries unless a compression says otherwise, see ``functional/merging.py``."""
    needs_image: ClassVar[bool] = False
    """A method for models that see images: refused on a text model, and for prompts without an image."""
    needs_question: ClassVar[bool] = False
    """A method with nothing to score by but a question: refused for prompts that end with their context."""
    evenly: ClassVar[Mapping[str, Any]] = {}
    """Settings under which every layer and head keeps as much; a context reducer of its scores has them."""
    reads: ClassVar[bool] = False
    """All entries stay, and nothing is freed: the budget is what a step of decoding reads of them, by ``pages``."""

    needs_file: ClassVar[bool] = False
    """It has no numbers of its own, and is refused without a ``calibration``."""
    reads_question: ClassVar[bool] = by_settings(lambda self: self.needs_image or self.needs_question)
    """It needs the question to be there; such a method is refused under ``context_first``."""
    online: ClassVar[Online | None] = None
    """It evicts while decoding, by ``score`` and ``keep`` on its entries; None: it cannot."""
    absolute: ClassVar[Scale | None] = None
    """Scale of its scores where they mean the same in every prompt, layer and head, as a threshold asks; else None."""
    across_layers: ClassVar[bool] = False
    """A layer keeps what depends on others, so that none is packed before all have run; refused in chunks."""
    observing_rows: ClassVar[int | None] = 0
    """Rows of an observation window at a prompt's end, which a chunk must hold; None: it depends on the budget."""
    decides: ClassVar[bool] = False
    """Its threshold was trained, and what reaches it stays: that this is all or nothing is no mistake of a setting."""
    may_empty: ClassVar[bool] = False
    """A layer or head may keep nothing of what competes; otherwise at least one entry stays."""
    inside: ClassVar[tuple[Any, ...]] = ()
    """All that a wrapper is around; the last one is no wrapper."""

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a worded ``ValueError`` where the settings do not fit a backbone's cache; most fit any."""
        if self.needs_file:
            self.check_named()

    @abstractmethod
    def score(self, view: View) -> Scores:
        """Look at one layer."""

    def second_pass(self, regions_BN: Tensor) -> Tensor:
        """Mark samples whose entries a second pass over the prompt scores, bool [B]; none unless a method needs it."""
        return torch.zeros_like(regions_BN[:, 0], dtype=torch.bool)

    def tasks(self, regions_BN: Tensor) -> list[TaskPlan]:
        """Return the rows of each task of the second pass; one task, the prompt once more, unless overridden."""
        return [TaskPlan()]

    def score_task(self, view: View) -> Tensor:
        """Look at one layer of a task: scores that replace those of what it is about, [B, h, N] or [B, 1, N]."""
        raise AssertionError(f"{self.name} needs no second pass")

    def pages(self, layer: int) -> tuple[int, int] | None:
        """Return (entries of a page, fewest pages a step reads) in a layer of a method that ``reads``; None: all."""
        return None

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        """Return how many entries stay, int64 [L, B], or [L, B, h] where heads differ; here the budget itself."""
        return candidates.budget_LB

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        """Return a layer's scores once its ``counts``, [B] or [B, h], are known; unchanged unless overridden."""
        return scores

    def keep(self, scores: list[Scores], candidates: Candidates) -> list[Tensor]:
        """Choose what stays, per layer bool [B, h, N] (h = 1: one set for all heads), what does not compete included.

        Protected entries come first, then the best scores; ties go to the lower index. Every sample keeps at least one
        entry of those that compete (unless ``may_empty``), and never more than its count.
        """
        count_LB, competes_LBN = self.counts(scores, candidates), candidates.competes_LBN
        least = int(not self.may_empty)
        # a layer that is kept alone comes with the counts of all
        best_L = [self.at_budget(*layer) for layer in zip(scores, competes_LBN, count_LB, strict=False)]
        check_fitting(self, best_L)
        facts = [best_facts(best.scores_BhN, count, least) for best, count in zip(best_L, count_LB, strict=False)]
        known = torch.stack(facts).tolist()  # of all layers, read at once
        kept = []
        for layer, (best, competes_BN) in enumerate(zip(best_L, competes_LBN, strict=True)):
            own = best.scores_BhN, competes_BN, best.protected_BN, count_LB[layer], least
            best_BhN = keep_best_entries(*own, known[layer])
            kept.append(best_BhN | ((candidates.regions_LBN[layer] != Region.PADDING) & ~competes_BN)[:, None])
        return kept


def _of_base(name: str) -> Any:
    return by_settings(lambda self: getattr(self.base, name))


@dataclass(frozen=True)
class Wrapper(Eviction):
    """A method around another; its own settings are the fields of its subclass, all that it does not say the base's.

    A class has the ``name`` that it is registered by; an object's shows the whole chain, and its ``needs`` are all.
    """

    absolute: ClassVar[None] = None
    online: ClassVar[None] = None
    score = _of_base("score")

    base: Eviction

    def __post_init__(self) -> None:
        super().__post_init__()
        base, kind = self.base, type(self)
        refuse((base.reads, f"{base.name} keeps every entry and reads some, so {kind.name} has nothing to choose"))
        if type(base).keep is not Eviction.keep:
            raise ValueError(f"{base.name} decides itself what stays, so {kind.name} cannot go around it")
        own = {"name": f"{kind.name}({base.name})", "needs": kind.needs | base.needs}
        own |= {name: getattr(base, name) for name in ("needs_image", "needs_question", "merges", "second_pass_advice")}
        own |= {name: getattr(kind, name) or getattr(base, name) for name in ("heads_share", "heads_differ")}
        for key, value in own.items():
            object.__setattr__(self, key, value)

    inside = by_settings(lambda self: (self.base, *self.base.inside))


for _name in (
    *("reads_question", "calibrated", "may_empty", "across_layers", "observing_rows", "check_shape", "second_pass"),
    *("tasks", "score_task", "counts", "at_budget"),
):
    setattr(Wrapper, _name, _of_base(_name))


def protect_last(scores: Scores, entries_BN: Tensor, count_B: Tensor) -> Scores:
    """Return the scores with the last ``count_B`` entries of each prompt protected, and no others."""
    return replace(scores, protected_BN=last_marked(entries_BN, count_B[:, None]))


def layer_count(count_Bh: Tensor) -> Tensor:
    """Average a layer's counts over heads, [B, h] to int64 [B], rounded down; counts [B] return as they are."""
    return count_Bh if count_Bh.dim() == 1 else count_Bh.sum(-1) // count_Bh.shape[-1]


def keep_best_entries(
    scores_BhN: Tensor,
    competes_BN: Tensor,
    protected_BN: Tensor,
    count: Tensor,
    least: int = 1,
    known: Sequence[int] | None = None,
) -> Tensor:
    """Mark each head's best competing entries, ``count`` of them ([B], or [B, h]), bool [B, h, N].

    Protected entries come before all others, the latest first; a count below ``least`` is that. Ties go to the lower
    index. NaN is a fault of the method. ``known``: what ``best_facts`` say; None: it is read from the device.
    """
    wrong, fewest, most = best_facts(scores_BhN, count, least).tolist() if known is None else known
    assert not wrong
    count_Bh = _entries_of_heads(count, least, scores_BhN.shape[-1])
    if not most:
        return torch.zeros_like(scores_BhN, dtype=torch.bool)
    rank_BhN = _ranked(scores_BhN, competes_BN, protected_BN)
    even = fewest == most
    best_BhK = rank_BhN.topk(most, dim=-1, sorted=not even).values
    if even:
        last_Bh1 = best_BhK.amin(-1, keepdim=True)
    else:
        heads = max(best_BhK.shape[1], count_Bh.shape[1])  # one set of scores may have a count for each head
        last_Bh1 = best_BhK.expand(-1, heads, -1).gather(-1, (count_Bh - 1).clamp(min=0).expand(-1, heads)[..., None])
    return (rank_BhN >= last_Bh1) & competes_BN[:, None] & (count_Bh > 0)[..., None]


def best_facts(scores_BhN: Tensor, count: Tensor, least: int) -> Tensor:
    """Return the host facts of ``keep_best_entries``, int64 [3]: whether a score is NaN, the fewest, the most."""
    fewest, most = _entries_of_heads(count, least, scores_BhN.shape[-1]).aminmax()
    return torch.stack([scores_BhN.isnan().any().long(), fewest, most])


def _entries_of_heads(count: Tensor, least: int, length: int) -> Tensor:
    return (count if count.dim() == 2 else count[:, None]).clamp(min=least, max=length)


def _ranked(scores_BhN: Tensor, competes_BN: Tensor, protected_BN: Tensor) -> Tensor:
    """A whole number for every entry, larger for what stays sooner and no two alike in a head, [B, h, N].

    Its digits: protected, competing or neither; a protected entry's place, or the score; the place from the end. One
    selection among these takes a third of the time of stable sorts by each.
    """
    length = scores_BhN.shape[-1]
    places_N = torch.arange(length, device=scores_BhN.device)
    bits_BhN = (scores_BhN.float() + 0.0).view(torch.int32)  # as whole numbers floats rise, below 0 they fall
    rising_BhN = (bits_BhN ^ ((bits_BhN >> 31) & 0x7FFFFFFF)).long() + (1 << 31)
    class_BN = torch.where(competes_BN, torch.where(protected_BN, 2, 1), 0)
    within_BhN = torch.where(protected_BN[:, None], places_N, rising_BhN)
    return ((class_BN << 32)[:, None] + within_BhN) * length + (length - 1 - places_N)


def fitting(window: float, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
    """Return the scores; of a window of a fixed length they note what ``check_fitting`` reads of all layers at once."""
    if not isinstance(window, int):
        return scores
    least_B = count_Bh if count_Bh.dim() == 1 else count_Bh.amin(-1)
    beyond = ((scores.protected_BN & competes_BN).sum(-1) > least_B).any()
    return replace(scores, notes={**scores.notes, "beyond": torch.stack([beyond.long(), least_B.min()])})


def check_fitting(method: Any, scores: Sequence[Scores]) -> None:
    """Refuse a window of a fixed length whose competing entries are more than may stay in a layer."""
    noted, own = [layer.notes["beyond"] for layer in scores if "beyond" in layer.notes], (method, *method.inside)[-1]
    for beyond, least in torch.stack(noted).tolist() if noted else ():
        words = f"{own.name} window={own.window} is larger than the budget of {least} entries" if beyond else ""
        refuse((words, f"{words}; use a smaller window (0.1: a share of the budget) or a larger eviction_keep"))
