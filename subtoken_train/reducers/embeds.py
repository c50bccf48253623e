"""Reducers that choose before layer 0, by places, likeness or frames.

Controls (none, random, uniform); tokens unlike each other (DivPrune, CDPruner, DART); of videos (EVS, VidCom2).

Legend: B batch, N positions, F frames of one video, T visual tokens of a frame, D model width, P pivots.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.errors import MAX_SEED, refuse
from subtoken_train.functional.diversity import SAME, farthest_places, unit_rows, unlike_places, volume_places
from subtoken_train.functional.gather import masked_mean, plain_product, rank_candidates
from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.reducers.base import RankingReducer, Reducer, Stage, shared_out
from subtoken_train.reducers.staged import RankedCuts
from subtoken_train.view.method import setting
from subtoken_train.view.view import View


@dataclass(frozen=True, kw_only=True)
class NoReducer(Reducer):
    """No reduction: every token stays; ``keep_ratio`` must be 1."""

    name: str = "none"

    stage: ClassVar[Stage] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse((self.acts, f"reducer 'none' keeps every token, but keep_ratio={self.keep_ratio}; set it to 1"))


@dataclass(frozen=True, kw_only=True)
class RandomReducer(RankingReducer):
    """Control: visual tokens at random, by a hash of (``seed``, sample, position).

    Attributes:
        seed: another one, other tokens.
    """

    name: str = "random"
    seed: int = setting(0, 0, MAX_SEED)

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        positions_N = torch.arange(view.regions_BN.shape[1], device=view.regions_BN.device)
        first_B1 = (view.regions_BN != 0).long().argmax(-1, keepdim=True)
        return uniform_hash(view.sample_seed_B[:, None], positions_N - first_B1, self.seed)


GOLDEN = 2654435769  # 2^32 over the golden ratio, rounded


@dataclass(frozen=True, kw_only=True)
class UniformReducer(RankingReducer):
    """Control: visual tokens evenly spread over the images.

    Ranked by the fractional part of their place times the golden ratio, smallest first: gaps between kept places have
    three sizes at most at any budget (Steinhaus), and a smaller budget keeps a part of a larger one.
    """

    name: str = "uniform"

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        return -(((view.visual.long().cumsum(-1) - 1) * GOLDEN) % 2**32).float() / 2**32


@dataclass(frozen=True, kw_only=True)
class DivPrune(RankingReducer):
    """DivPrune (Alvar et al., 2025, arXiv:2503.02175): keep the visual tokens farthest from each other.

    As released (vbdi/divprune @799e2d9): among the projected visual features, distance being 1 - cosine, the first is
    the one whose nearest other is farthest away; then, again and again, the one whose nearest chosen one is (greedy
    max-min). That order is the ranking. Neither attention nor the question is read. All images of a sample are pruned
    together; newlines are all alike, so that one stays at most while any other token is left.
    """

    name: str = "divprune"

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        visual_BN = view.visual
        return -farthest_places(unit_rows(view.hidden_BND), visual_BN, max(self.kept_counts(visual_BN)))


def relevance(unit_BND: Tensor, visual_BN: Tensor, question_BN: Tensor) -> Tensor:
    """Return each visual row's scaled negative mean cosine to the question's rows, [B, N]; 1 where all are alike."""
    alike_BN = plain_product(unit_BND, masked_mean(unit_BND, question_BN)[..., None])[..., 0]
    low_B1 = alike_BN.masked_fill(~visual_BN, torch.inf).amin(-1, keepdim=True)
    high_B1 = alike_BN.masked_fill(~visual_BN, -torch.inf).amax(-1, keepdim=True)
    range_B1 = high_B1 - low_B1
    return torch.where(range_B1 < SAME, 1.0, (high_B1 - alike_BN + 1e-6) / range_B1)


@dataclass(frozen=True, kw_only=True)
class CDPruner(RankingReducer):
    """CDPruner (Zhang et al., 2025, arXiv:2506.10967): keep diverse visual tokens, given the instruction.

    As released (Theia-4869/CDPruner @9541616): a determinantal point process over the visual tokens has the kernel r_i
    cos_ij r_j of their projected features; its greedy MAP set stays, in whose order tokens rank. The relevance r is the
    *negative* mean cosine to the text's embeddings, min-max scaled to [0, 1] with 1e-6 added to the numerator.

    A reconstruction in one point: the release takes r from CLIP's own text tower, which no LLaVA checkpoint holds.
    Here, in every family, it is of the projected features and the question's input embeddings, as in OpenVINO's port
    (openvino_contrib @98c5fe8). Without a question r = 1. All images of a sample are pruned together; once the chosen
    tokens span all others the lowest index is next.
    """

    name: str = "cdpruner"

    ranks: ClassVar[bool] = True
    reads_question: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        unit_BND, visual_BN = unit_rows(view.hidden_BND), view.visual
        weight_BN = relevance(unit_BND, visual_BN, view.question).clamp(min=0)
        return -volume_places(unit_BND, weight_BN, visual_BN, max(self.kept_counts(visual_BN)))


PIVOTS = 4
"""Pivots of the image, and of the text."""
_LAYER = 2


def dart_places(states_BND: Tensor, norm_BN: Tensor, visual_BN: Tensor, question_BN: Tensor, count_B: Tensor) -> Tensor:
    """Return the order in which visual tokens are taken, int64 [B, N]; N if never; pivots by ``norm_BN``."""
    rank_BN, text_rank_BN = rank_candidates(norm_BN, visual_BN), rank_candidates(norm_BN, question_BN)
    pivots_BP = torch.cat([ranks.argsort(-1)[:, :PIVOTS] for ranks in (rank_BN, text_rank_BN)], 1)
    limits_B2 = torch.stack([count_B.clamp(max=PIVOTS), question_BN.sum(-1).clamp(max=PIVOTS)], 1)
    number_p = torch.arange(pivots_BP.shape[1] // 2, device=count_B.device)  # of either kind
    there_BP = (number_p < limits_B2[..., None]).flatten(1)
    left_B1, pivots_B1 = (count_B - limits_B2[:, 0])[:, None], there_BP.sum(-1, keepdim=True).clamp(min=1)
    quota_BP = (left_B1 // pivots_B1 + (there_BP.cumsum(-1) <= left_B1 % pivots_B1)) * there_BP
    pivot_BN = visual_BN & (rank_BN < limits_B2[:, :1])
    how = visual_BN & ~pivot_BN, quota_BP, limits_B2[:, :1], visual_BN.shape[1]
    return torch.where(pivot_BN, rank_BN, unlike_places(unit_rows(states_BND), pivots_BP, *how))


@dataclass(frozen=True, kw_only=True)
class DART(RankingReducer, RankedCuts):
    """DART (Wen et al., 2025, arXiv:2502.11494): keep a few pivots and the visual tokens that repeat them least.

    As released (ZichenWen1/DART, read in the copy xqy1111111/DART @d6a5af6): the four visual tokens and the four tokens
    of the text whose keys have the largest L1 norm are pivots; one after another, each takes an equal number of the
    visual tokens that are left, those least like it by cosine. No attention is read. The count is exact (there 4 and as
    many times 8 as the share holds), and remainders go to the first pivots; the text is the question up to the token
    that asks; a sample's images are pruned together.

    Attributes:
        stage: where it cuts. ``decoder``, as published: rows leave at layer ``layer``, by the keys of the layer below
            and its output after the model's last norm. ``embeds``, a reconstruction: before layer 0, by the input
            embeddings, so that every layer's cache is short.
        layer: at which rows leave, in the stage ``decoder``.
    """

    name: str = "dart"
    stage: Literal["embeds", "decoder"] = "embeds"
    layer: int = setting(_LAYER, 1, 10_000)

    reads_question: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = f"reducer.layer {self.layer} is for DART's stage decoder, and stage {self.stage!r} reads no layer"
        unread = self.stage == "embeds" and self.layer != _LAYER
        refuse((unread, f"{idle}; set reducer.stage: decoder, or leave layer out"))

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        return (self.layer,) if self.stage == "decoder" else ()

    @property
    def words(self) -> str:
        return f"stage {self.stage}, layer {self.layer}" if self.stage == "decoder" else f"stage {self.stage}"

    def scores(self, view: View) -> Tensor:
        if self.stage == "decoder":
            norm_BN = view.key_BhNd.float().abs().sum((1, 3)).to(view.regions_BN.device)
            return -dart_places(view.normed_states(), norm_BN, view.visual, view.question, view.count_B)
        norm_BN = view.hidden_BND.float().abs().sum(-1)
        count_B = torch.tensor(self.kept_counts(view.visual), device=norm_BN.device)
        return -dart_places(view.hidden_BND, norm_BN, view.visual, view.question, count_B)


class VideoReducer(RankingReducer, ABC):
    """Chooses in each video by itself; a sample's videos share its count by their tokens, exactly.

    For families that tell their frames (``Family.tells_frames``): an image is refused. What stands behind the last
    frame (LLaVA-OneVision's newline) stays.
    """

    reads_frames: ClassVar[bool] = True

    @abstractmethod
    def order(self, states_FTD: Tensor) -> Tensor:
        """Return a video's tokens in the order in which they stay, indices [F * T] of frame after frame."""

    def scores(self, view: View) -> Tensor:
        """Score what stays above 0, [B, N]: the first of each video's ``order``."""
        score_BN = torch.zeros(view.visual.shape, dtype=torch.int64, device=view.hidden_BND.device)
        for sample, videos in enumerate(view.videos()):
            if not videos:
                continue
            rows = view.visual[sample].nonzero()[:, 0]
            sizes = [video.total for video in videos]
            counts = shared_out(sizes, self.kept_tokens(len(rows)))
            for video, own, count in zip(videos, torch.split(rows, sizes), counts, strict=True):
                shown, after = own[: video.total - video.after], own[video.total - video.after :]
                states_FTD = view.hidden_BND[sample, shown].float().reshape(video.number, video.tokens, -1)
                order = shown[self.order(states_FTD)]
                first = max(min(count, 1), count - video.after)
                order = torch.cat([order[:first], after, order[first:]])
                score_BN[sample, order] = count - torch.arange(len(order), device=order.device)
        return score_BN


@dataclass(frozen=True, kw_only=True)
class EVS(VideoReducer):
    """EVS, efficient video sampling (Bagrov et al., 2025, arXiv:2510.14624): keep what is new in each frame.

    As vLLM ships it (vllm-project/vllm #22980, read in 0.33.0): a token's dissimilarity is 1 - cosine of its projected
    feature to that in the same place of the frame before; the first frame comes first, and in the whole video the most
    dissimilar tokens stay, at their own positions. For Qwen a frame is a layer of two. The count is exact, so that a
    small share cuts the first frame's last tokens; images are refused; Qwen3-VL's input embeddings are compared.
    """

    name: str = "evs"

    def order(self, states_FTD: Tensor) -> Tensor:
        unit_FTD = unit_rows(states_FTD)
        unlike_FT = 1 - (unit_FTD[1:] * unit_FTD[:-1]).sum(-1)
        unlike_FT = torch.cat([torch.full_like(unit_FTD[:1, :, 0], torch.inf), unlike_FT])
        return unlike_FT.masked_fill(unlike_FT < SAME, 0).flatten().argsort(descending=True, stable=True)


_TEMPERATURE = 0.01
_VARIANCES = (0.125, 0.25, 0.5, 1.0, 2.0)


def likeness(unit_FTD: Tensor, centre_D: Tensor) -> Tensor:
    """Return the sum of Gaussians of each row's distance to a centre, [F, T]."""
    square_FT = (unit_FTD - centre_D).square().sum(-1)
    return torch.stack([(-square_FT / (2 * variance)).exp() for variance in _VARIANCES]).sum(0)


@dataclass(frozen=True, kw_only=True)
class VidCom2(VideoReducer):
    """VidCom2, video compression commander (Liu et al., 2025, arXiv:2505.14454): keep more of frames that stand out.

    As released (xuyang-liu16/VidCom2 @944a17d), on projected features, of which the half of the channels that vary
    least over the video is read, scaled to length 1: a token's likeness to the mean of the video, and to that of its
    frame, is a sum of five Gaussians of the squared distance. A frame's share is r * (1 + p - mean p), p the softmax of
    minus its mean likeness to the video, at a temperature of 0.01; in each frame the tokens with the least sum of both
    stay. For Qwen a frame is a layer of two. The count is exact, as in vLLM (#47750, read in 0.33.0): of what is too
    much the most alike tokens leave, what is missing is filled with the least alike. A prompt with images is refused.
    """

    name: str = "vidcom2"

    def order(self, states_FTD: Tensor) -> Tensor:
        _, tokens, width = states_FTD.shape
        steady = states_FTD.flatten(0, 1).var(0, unbiased=False).argsort(stable=True)[: max(1, width // 2)]
        unit_FTD = unit_rows(states_FTD[..., steady])
        to_video_FT = likeness(unit_FTD, unit_FTD.mean((0, 1)))
        alike_FT = to_video_FT + likeness(unit_FTD, unit_FTD.mean(1, keepdim=True))
        unique_F = (-to_video_FT.mean(-1) / _TEMPERATURE).softmax(0)
        share_F = (self.keep_ratio * (1 + unique_F - unique_F.mean())).clamp(max=1)
        count_F = (share_F * tokens).round().clamp(1, tokens)
        place_FT = alike_FT.argsort(dim=-1, stable=True).argsort(-1)
        order = alike_FT.flatten().argsort(stable=True)
        beyond = (place_FT >= count_F[:, None]).flatten()
        return order[beyond[order].int().argsort(stable=True)]
