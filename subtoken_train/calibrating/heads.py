"""Calibrations of heads: HeadKV's and SparseMM's scores, DuoAttention's alphas, LKV's budgets.

Legend: B batch, N positions or rows, A tokens of an answer, W rows that are looked at, K largest weights, H query
heads, h key-value heads, L layers, D model width, R labelled rows, or those after a context, C context entries.
"""

import io
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR

from subtoken_train.calibrating.base import Batches, Calibrator, PromptSource, named_method, rounded, scored_prompts
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.image_sources import EncodedImage
from subtoken_train.datasets.record_format import IMAGE_PLACEHOLDER
from subtoken_train.datasets.records import Record
from subtoken_train.datasets.scenes import GRID, PLACES, SPLITS, ask, draw_scene
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.mixed_heads import FadingEntries, HeadMix, mixed_hidden
from subtoken_train.engine.prompt_pass import Rows, are_finite
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS, no_numbers, refuse
from subtoken_train.evaluation.picture import check_drawable, visual_grid
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import protected_first
from subtoken_train.evictions.duo_attention import HeadAlphas
from subtoken_train.evictions.kvzip import FIRST
from subtoken_train.evictions.snapkv import HeadScores
from subtoken_train.evictions.wrappers import check_sets_of_heads
from subtoken_train.families.family import Family
from subtoken_train.families.load import check_on_one_device
from subtoken_train.families.positions import position_bound
from subtoken_train.functional.causal_attention import attention_rows
from subtoken_train.functional.objective import IGNORE_INDEX, distillation_loss, predicting_rows
from subtoken_train.inference.batched import in_batches
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import contexts_of
from subtoken_train.inference.text_prompts import EncodedText, text_batch
from subtoken_train.routing.shares import head_shares
from subtoken_train.types import Batch, Region, Turn
from subtoken_train.view.method import setting

SHORTEST = 2  # tokens of a run: one alone may stand anywhere


class HeadCalibrator(Calibrator):
    """Attention of the rows that say the answers to what they say; see ``Calibrator`` for the settings."""

    answers: ClassVar[bool] = True
    whole_caches: ClassVar[bool] = True

    @abstractmethod
    def needle(self, family: Family, batch: Batch, sample: int, label_A: Tensor) -> Tensor:
        """Mark what each labelled token of a sample tells, bool [A, N]; nothing where it tells of no needle."""

    def needles(self, family: Family, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the rows that predict tokens which a needle tells, int64 [B, W], -1 pads, and it, bool [B, W, N]."""
        rows, marks = [], []
        for sample, labels_N in enumerate(batch.labels_BN):
            label_A = (labels_N != IGNORE_INDEX).nonzero()[:, 0]
            needle_AN = self.needle(family, batch, sample, label_A)
            has_A = needle_AN.any(-1)
            rows.append(label_A[has_A] - 1)
            marks.append(needle_AN[has_A])
        return pad_sequence(rows, True, -1), pad_sequence(marks, True, False)

    @abstractmethod
    def weight(self, looked_BHWN: Tensor, needle_BWN: Tensor) -> Tensor:
        """Return how much rows look at their needles, [B, H, W], 0 without one; ``looked_BHWN`` is their attention."""

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> HeadScores:
        family, sums = backbone.family, dict[int, Tensor]()
        use_packed_attention(family.decoder.config)

        def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
            index_BW, needle_BWN = (each.to(query.device) for each in needles)
            own = index_BW, rows.visible_BM.to(query.device)
            looked_BHWN = attention_rows(query, key, *own, scale, window=family.window(layer, rows.position))
            found_h = self.weight(looked_BHWN, needle_BWN).sum((0, 2)).view(key.shape[1], -1).sum(-1).double().cpu()
            sums[layer] = sums.get(layer, 0) + found_h

        for batch in batches:
            if (needles := self.needles(family, batch))[0].shape[1]:
                backbone.run(batch, observer=observe)
        if not any(bool(each.any()) for each in sums.values()):
            raise ValueError(f"no head attends to the answers in {self.samples} samples; choose more")
        score_Lh = torch.stack([sums[layer] for layer in sorted(sums)])
        return HeadScores(rounded((score_Lh / score_Lh.mean()).tolist()))


@dataclass(frozen=True)
class NeedleCalibrator(HeadCalibrator):
    """HeadKV's: runs of the context that answers say again; see ``Calibrator`` for the settings.

    Source: section 3.1 of "HeadKV" and ``Important_Head/retrieval_head_detection_r2.py`` of its release. While an
    answer is said, a head's score is what the largest weights of its row put on the needle, as many weights as the
    needle has tokens, over that number; mean over the answer's tokens, sum over the query heads of a key-value head.
    The release hides one needle in essays and counts the prompts that the model gets right; here the prompts are
    key-value recall whose answers are given, and a token's needle is the longest run that the answer says again.
    """

    name: ClassVar[str] = "headkv"
    for_images: ClassVar[str] = "sparsemm"

    def needle(self, family: Family, batch: Batch, sample: int, label_A: Tensor) -> Tensor:
        ids_N = batch.input_ids_BN[sample]
        return repeated_runs(ids_N[label_A], ids_N, batch.regions_BN[sample] == Region.CONTEXT)

    def weight(self, looked_BHWN: Tensor, needle_BWN: Tensor) -> Tensor:
        tokens_B1W = needle_BWN.sum(-1)[:, None]
        weight_BHWK, place_BHWK = looked_BHWN.topk(max(1, int(tokens_B1W.max())))
        hit_BHWK = needle_BWN[:, None].expand(looked_BHWN.shape).gather(-1, place_BHWK)
        largest_K = torch.arange(place_BHWK.shape[-1], device=place_BHWK.device)
        hit_BHWK = hit_BHWK & (largest_K < tokens_B1W[..., None])
        return (weight_BHWK * hit_BHWK).sum(-1) / tokens_B1W.clamp(min=1)


def repeated_runs(answer_A: Tensor, ids_N: Tensor, context_N: Tensor) -> Tensor:
    """Mark the longest run of the context, ``SHORTEST`` or more, that an answer says around a token, [A, N]."""
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
    return (place_N >= first_A1) & (place_N < first_A1 + tokens_A[:, None]) & (tokens_A >= SHORTEST)[:, None]


SCENES = "scenes"
_TOLD = re.compile(r"([A-D][1-4])\s+\w+\s+\d")


@dataclass(frozen=True)
class VisualCalibrator(HeadCalibrator):
    """SparseMM's: cells of digit scenes that answers tell of; see ``Calibrator`` for the settings.

    Source: section 3.1 of "SparseMM" and ``visual_head/qwen_visual_head.py`` of its release: while a page's words are
    said, a head whose largest weight of a row lies on a visual token of the word's box gets 1 over the box's tokens;
    mean over pages, sum over the query heads of a key-value head. The release reads 1,000 synthetic pages; here digit
    scenes are described ("B3 red 7 C1 blue 2"), and a box is a cell. Pictures in tiles are refused.
    """

    name: ClassVar[str] = "sparsemm"

    samples: int = setting(50, 1, MAX_COUNT)

    def check(self, backbone: CompressedBackbone) -> None:
        if backbone.family.image_token_id is None:
            raise ValueError("sparsemm is calibrated on pictures, and the backbone sees none; use headkv")
        check_drawable(backbone.family)
        super().check(backbone)

    def prompts(self, family: Family, data: str | None) -> PromptSource:
        refuse((data not in (None, SCENES), f"data {data!r}: sparsemm draws its own scenes; leave --data out"))
        collate = Collator(family, position_bound(family.decoder.config) or MAX_TOKENS)
        groups = in_batches(range(self.samples), self.batch_size)
        drawn = ([scene_record(np.random.default_rng([self.seed, each]), each) for each in some] for some in groups)
        return PromptSource(SCENES, (move_data_to_device(collate(records), family.device) for records in drawn))

    def needle(self, family: Family, batch: Batch, sample: int, label_A: Tensor) -> Tensor:
        grid, regions_N = visual_grid(family, batch), batch.regions_BN[sample]
        none_T = torch.zeros(grid[0] * grid[1], dtype=torch.bool)
        of_cells = torch.stack([*(cell_tokens(cell, *grid) for cell in range(len(PLACES))), none_T])  # -1: no cell
        needle_AN = torch.zeros(len(label_A), len(regions_N), dtype=torch.bool, device=label_A.device)
        cells = told_cells(family.tokenizer, batch.labels_BN[sample][label_A].tolist())
        needle_AN[:, regions_N == Region.VISUAL] = of_cells[cells].to(label_A.device)
        return needle_AN

    def weight(self, looked_BHWN: Tensor, needle_BWN: Tensor) -> Tensor:
        hit_BHW = needle_BWN[:, None].expand(looked_BHWN.shape).gather(-1, looked_BHWN.argmax(-1, keepdim=True))[..., 0]
        return hit_BHW / needle_BWN.sum(-1).clamp(min=1)[:, None]


def scene_record(rng: np.random.Generator, number: int) -> Record:
    """Draw a scene of the training split with its description."""
    scene = draw_scene(rng, SPLITS[0])
    question, answer = ask(rng, scene.objects, "describe")
    written = io.BytesIO()
    Image.fromarray(scene.pixels).save(written, "PNG")
    picture = EncodedImage(written.getvalue, f"scene {number}")
    return Record(f"scene-{number}", [picture], [Turn(f"{IMAGE_PLACEHOLDER}\n{question}", answer)])


def cell_tokens(cell: int, rows: int, columns: int) -> Tensor:
    """Mark the visual tokens of a grid that a scene's cell reaches into, bool [rows * columns]."""
    marks = []
    for place, tokens in ((cell // GRID, rows), (cell % GRID, columns)):
        token = torch.arange(tokens)
        marks.append((token * GRID < (place + 1) * tokens) & ((token + 1) * GRID > place * tokens))
    return (marks[0][:, None] & marks[1]).flatten()


def told_cells(tokenizer: Any, answer: list[int]) -> list[int]:
    """Return the cell that every token of a description tells of; -1 where it ends in none's words."""
    told = list(_TOLD.finditer(tokenizer.decode(answer)))
    ends = (len(tokenizer.decode(answer[: i + 1])) for i in range(len(answer)))
    return [next((PLACES.index(each[1]) for each in told if each.start() < end <= each.end()), -1) for end in ends]


@dataclass(frozen=True)
class DuoCalibrator(Calibrator):
    """DuoAttention's calibration: the heads' alphas, trained by distillation.

    Source: section 2.2 of "DuoAttention" and ``duo_attn/train.py`` of its release: every head mixes full and streaming
    attention, ``alpha`` starts at 1 and is clamped to [0, 1]; the loss is the squared difference of the last hidden
    states from those of full attention, mean over channels and over the rows from which the answers are predicted, plus
    ``regularisation`` times the mean alpha; AdamW at 0.02. The release hides passkeys in a book, in sequences of up to
    32k tokens; here the prompts are key-value recall, with masks of N x N on one device.

    Attributes:
        sinks: first entries that a streaming head sees.
        recent: entries up to a row that it sees.
        regularisation: weight of the mean alpha.
    """

    name: ClassVar[str] = "duo_attention"
    answers: ClassVar[bool] = True
    whole_caches: ClassVar[bool] = True
    for_images: ClassVar[str] = "prefixkv"

    samples: int = setting(200, 1, MAX_COUNT)
    sinks: int = setting(4)
    recent: int = setting(28, 1)
    learning_rate: float = setting(0.02, 0, 100)
    regularisation: float = setting(0.05, 0, 100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks + self.recent >= self.context_length:
            raise ValueError(f"duo_attention sinks and recent hold a whole context of {self.context_length} tokens")

    def check(self, backbone: CompressedBackbone) -> None:
        super().check(backbone)
        check_on_one_device(backbone.model, "duo_attention's calibration")

    @torch.enable_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> HeadAlphas:
        family, steps = backbone.family, -(-self.samples // self.batch_size)
        shape = family.shape.num_layers, family.shape.num_kv_heads
        alpha_Lh = torch.ones(shape, device=family.model.device, requires_grad=True)
        optimizer = torch.optim.AdamW([alpha_Lh], lr=self.learning_rate, weight_decay=0.0)
        course = LambdaLR(optimizer, lambda step: rate_at(step, steps))
        for batch in batches:
            optimizer.zero_grad()
            self.loss(family, batch, alpha_Lh).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            course.step()
            alpha_Lh.data.clamp_(0, 1)
        if not bool(are_finite(alpha_Lh)):
            raise no_numbers("while its heads were weighed", family.model.dtype)
        return HeadAlphas(rounded(alpha_Lh.tolist()), self.sinks, self.recent)

    def loss(self, family: Family, batch: Batch, alpha_Lh: Tensor) -> Tensor:
        """Return the distillation of the rows that predict the answers, plus the weighted mean alpha."""
        rows_BN, _ = predicting_rows(batch.labels_BN)
        states = []  # last hidden ones, [R, D] in fp32
        for each in (torch.ones_like(alpha_Lh), alpha_Lh):  # full attention first
            mix = HeadMix(each, self.sinks, self.recent, batch.regions_BN != Region.PADDING)
            with torch.set_grad_enabled(each.requires_grad):
                states.append(mixed_hidden(family, family.embed(batch), family.positions(batch), mix)[rows_BN].float())
        return (states[1] - states[0]).pow(2).mean(-1).mean() + self.regularisation * alpha_Lh.abs().mean()


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate's factor: up over the first fifth of the steps, down over the last, 0.1 at least."""
    fifth = max(1, steps // 5)
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))


SOFTEST, HARDEST = 0.5, 0.05  # width of the edge between what stays and goes, of the mean budget: first step, last step


@dataclass(frozen=True)
class BudgetCalibrator(Calibrator):
    """LKV's budgets; see ``Calibrator`` for the other settings, and ``LearnedBudgets`` for what reads them.

    Source: "LKV" (arXiv 2605.06676), of which no code was found: budgets are the softmax of a logit for every layer
    and head times the total. An entry of place r stays by sigmoid((budget - r) / width), whose log joins the attention
    logits of what follows; the edge gets sharper step by step. The loss is KL(full cache || this) on the last tokens of
    a context, which stay whole, and on the context said again.

    Attributes:
        eviction: the method whose scores order the entries of a head.
        eviction_options: its settings, ``KEY=VALUE`` with commas between them.
        keep: share of the entries that stays while budgets are learned.
        following: last tokens of a context that are read after it.
        learning_rate: of Adam, at the first step; it falls to 0.
    """

    name: ClassVar[str] = "lkv"
    any_text: ClassVar[bool] = True
    whole_caches: ClassVar[bool] = True
    for_images: ClassVar[str] = "prefixkv"

    samples: int = setting(100, 1, MAX_COUNT)
    batch_size: int = setting(1, 1, MAX_COUNT)
    context_length: int = setting(256, 2)
    eviction: str = "kvzip"
    eviction_options: str = ""
    keep: float = setting(0.125, 0, 1)
    following: int = setting(64, 1)
    learning_rate: float = setting(0.1, 0, 100)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sets_of_heads("lkv", named_method(self.eviction, self.eviction_options))
        tokens = self.context_length - self.following
        if not 1 <= self.keep * tokens < tokens:
            what = f"one at least of the {tokens} tokens before following={self.following}, and not all"
            raise ValueError(f"lkv keep={self.keep:g} must leave a head {what}; choose another share")

    def check(self, backbone: CompressedBackbone) -> None:
        super().check(backbone)
        check_on_one_device(backbone.model, "lkv's calibration")
        Compression(named_method(self.eviction, self.eviction_options), self.keep).check(backbone.family)

    @torch.enable_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> HeadScores:
        family, prompts = backbone.family, self._prompts(backbone.family, batches)
        use_packed_attention(family.decoder.config)
        shape = family.shape.num_layers, family.shape.num_kv_heads
        logit_Lh = torch.zeros(shape, device=family.model.device, requires_grad=True)
        optimizer, step = torch.optim.Adam([logit_Lh]), 0
        for step, prompt in enumerate(prompts, 1):
            left = max(0.0, 1 - (step - 1) / self.samples)
            optimizer.param_groups[0]["lr"] = self.learning_rate * left
            loss = self.loss(backbone, prompt, head_shares(logit_Lh), HARDEST * (SOFTEST / HARDEST) ** left)
            (logit_Lh.grad,) = torch.autograd.grad(loss, logit_Lh)
            optimizer.step()
        refuse((not step, "none of the prompts has a context to score; choose other data"))
        if not bool(are_finite(logit_Lh)):
            raise no_numbers("while its heads were weighed", family.model.dtype)
        return HeadScores(rounded(head_shares(logit_Lh).tolist()))

    def _prompts(self, family: Family, batches: Batches) -> Iterator[Batch]:
        """Yield one at a time a context but for its last tokens, these, and the context said again."""
        said = family.tokenizer(f"{FIRST}\n", add_special_tokens=False)["input_ids"]
        for contexts in map(contexts_of, batches):
            for ids_N, regions_N in zip(contexts.input_ids_BN, contexts.regions_BN, strict=True):
                ids = ids_N[regions_N != Region.PADDING].tolist()
                if (length := len(ids) - self.following) > 0:
                    yield text_batch(family, [EncodedText((*ids, *said, *ids[:length]), length)])

    def loss(self, backbone: CompressedBackbone, prompt: Batch, share_Lh: Tensor, width: float) -> Tensor:
        """Return the divergence from the full cache, mean over the rows after the context."""
        family, context_N = backbone.family, prompt.regions_BN[0] == Region.CONTEXT
        place_LhC = places(backbone, prompt, named_method(self.eviction, self.eviction_options))
        budget = self.keep * place_LhC.shape[-1]
        stays_LhC = F.logsigmoid((share_Lh[..., None] * budget - place_LhC - 0.5) / (width * budget))
        stays_LBhN = stays_LhC.new_zeros(*share_Lh.shape, len(context_N)).masked_scatter(context_N, stays_LhC)[:, None]
        states = []
        for each in (torch.zeros_like(stays_LBhN), stays_LBhN):  # the full cache first
            fading = FadingEntries(context_N[None], each, prompt.regions_BN != Region.PADDING)
            with torch.set_grad_enabled(each.requires_grad):
                hidden_BND = mixed_hidden(family, family.embed(prompt), family.positions(prompt), fading)
                states.append(family.logits(hidden_BND[fading.later_BN]))
        return distillation_loss(states[1], states[0], 1.0) / len(states[0])


@torch.no_grad()
def places(backbone: CompressedBackbone, prompt: Batch, method: Eviction) -> Tensor:
    """Return each context entry's place in its head's order, best first, [L, h, C]; what is protected leads."""
    found = scored_prompts(backbone, Compression(method, 0.5), contexts_of(prompt)).scores
    score_LhC = torch.stack([protected_first(found[layer])[0] for layer in sorted(found)])
    return score_LhC.sort(dim=-1, descending=True, stable=True).indices.argsort(-1).float()
