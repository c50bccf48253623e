"""HeadKV's calibration: how much every head looks at the needles that answers say again.

Source: section 3.1 of "HeadKV" and ``Important_Head/retrieval_head_detection_r2.py`` of its release. While an answer is
said, a head's score is what the largest weights of its row put on the needle, as many weights as the needle has tokens,
over that number; mean over the answer's tokens, and the sum over the query heads of a key-value head.
The release hides one needle, sentences that must be put together, in essays, lets the model answer, and counts the
prompts that it gets right. Here the prompts are key-value recall (``datasets/recall.py``) whose answers are given, so
all of them count; the needle of an answer's token is the longest run of the context that the answer says there again.

Legend: B batch, N positions, A tokens of an answer, W rows that are looked at, K largest weights, H query heads, h
key-value heads, L layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from subtoken_train.calibrating.base import Calibrator, Progress, rounded
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.evictions.headkv import HeadScores
from subtoken_train.families.family import Family
from subtoken_train.functional.attention_statistics import attention_rows
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.types import Batch, Region

SHORTEST = 2  # tokens of a run: one alone may stand anywhere


class HeadCalibrator(Calibrator):
    """Attention of the rows that say the answers to what they say; see ``Calibrator`` for the settings."""

    answers: ClassVar[bool] = True
    whole_caches: ClassVar[bool] = True

    @abstractmethod
    def needles(self, family: Family, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the rows that predict tokens which a needle tells, int64 [B, W], -1 pads, and it, bool [B, W, N]."""

    @abstractmethod
    def weight(self, looked_BHWN: Tensor, needle_BWN: Tensor) -> Tensor:
        """Return how much rows look at their needles, [B, H, W], 0 without one; ``looked_BHWN`` is their attention."""

    @torch.no_grad()
    def numbers(
        self, backbone: CompressedBackbone, batches: Iterable[Batch], show: Progress | None = None
    ) -> HeadScores:
        use_packed_attention(backbone.family.decoder.config)
        looks = Looks(backbone.family, self.weight)
        for batch in batches:
            looks.index_BW, looks.needle_BWN = self.needles(backbone.family, batch)
            if looks.index_BW.shape[1]:
                backbone.run(batch, observer=looks.observe)
        if not any(bool(each.any()) for each in looks.sums.values()):
            raise ValueError(f"no head looks at what an answer tells in {self.samples} samples; choose more")
        score_Lh = torch.stack([looks.sums[layer] for layer in sorted(looks.sums)])
        return HeadScores(rounded((score_Lh / score_Lh.mean()).tolist()))


@dataclass(frozen=True)
class NeedleCalibrator(HeadCalibrator):
    """Runs of the context that answers say again; see ``Calibrator`` for the settings."""

    name: ClassVar[str] = "headkv"
    for_images: ClassVar[str] = "sparsemm"

    def needles(self, family: Family, batch: Batch) -> tuple[Tensor, Tensor]:
        rows, marks = [], []
        for ids_N, labels_N, regions_N in zip(batch.input_ids_BN, batch.labels_BN, batch.regions_BN, strict=True):
            label_A = (labels_N != IGNORE_INDEX).nonzero()[:, 0]
            needle_AN = repeated_runs(ids_N[label_A], ids_N, regions_N == Region.CONTEXT)
            has_A = needle_AN.any(-1)
            rows.append(label_A[has_A] - 1)
            marks.append(needle_AN[has_A])
        return pad_sequence(rows, True, -1), pad_sequence(marks, True, False)

    def weight(self, looked_BHWN: Tensor, needle_BWN: Tensor) -> Tensor:
        tokens_B1W = needle_BWN.sum(-1)[:, None]
        weight_BHWK, place_BHWK = looked_BHWN.topk(max(1, int(tokens_B1W.max())))
        hit_BHWK = needle_BWN[:, None].expand(looked_BHWN.shape).gather(-1, place_BHWK)
        largest_K = torch.arange(place_BHWK.shape[-1], device=place_BHWK.device)
        hit_BHWK = hit_BHWK & (largest_K < tokens_B1W[..., None])
        return (weight_BHWK * hit_BHWK).sum(-1) / tokens_B1W.clamp(min=1)


class Looks:
    """Sums of what heads put on needles, by layer [h]; observes ``CompressedBackbone.run`` once it knows the needles.

    ``index_BW`` and ``needle_BWN`` are those of the batch that runs, see ``HeadCalibrator``.
    """

    index_BW: Tensor
    needle_BWN: Tensor

    def __init__(self, family: Family, weight: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.family, self.weight = family, weight
        self.sums: dict[int, Tensor] = {}

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
        """Add what a layer's rows of a batch put on their needles."""
        here, reach = query.device, self.family.window(layer, rows.position)
        own = self.index_BW.to(here), rows.visible_BM.to(here)
        found_BHW = self.weight(attention_rows(query, key, *own, scale, window=reach), self.needle_BWN.to(here))
        found_h = found_BHW.sum((0, 2)).view(key.shape[1], -1).sum(-1).double().cpu()
        self.sums[layer] = self.sums.get(layer, 0) + found_h


def repeated_runs(answer_A: Tensor, ids_N: Tensor, context_N: Tensor) -> Tensor:
    """Mark the longest run of the context that an answer says again around each of its tokens, bool [A, N].

    Nothing where it has less than ``SHORTEST`` tokens; of two as long the earlier. ``context_N`` marks the context.
    """
    same_AN = (answer_A[:, None] == ids_N) & context_N
    before_AN, whole_AN = same_AN.long(), torch.zeros_like(same_AN, dtype=torch.long)
    for i in range(1, len(same_AN)):  # tokens of the run up to here
        before_AN[i, 1:] += before_AN[i - 1, :-1] * same_AN[i, 1:]
    for i in reversed(range(len(same_AN))):  # and of all of it
        whole_AN[i] = before_AN[i]
        if i + 1 < len(same_AN):
            whole_AN[i, :-1] = torch.where(same_AN[i + 1, 1:] & same_AN[i, :-1], whole_AN[i + 1, 1:], whole_AN[i, :-1])
    tokens_A, place_A = whole_AN.max(-1)
    first_A1 = (place_A - before_AN.gather(1, place_A[:, None])[:, 0] + 1)[:, None]
    place_N = torch.arange(len(ids_N), device=ids_N.device)
    run_AN = (place_N >= first_A1) & (place_N < first_A1 + tokens_A[:, None])
    return run_AN & (tokens_A >= SHORTEST)[:, None]
