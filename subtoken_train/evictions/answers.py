"""Methods made for long answers, which evict while tokens are decoded: TriAttention and R-KV.

Legend: B batch (while tokens are decoded: rows), N entries, H query heads, h key-value heads, G = H / h, d head width,
r its channels that are turned, L layers, W rows of a window, n rows of a block.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, check_table, table_words
from subtoken_train.evictions.base import Eviction, layer_count, protect_last
from subtoken_train.evictions.observers import (
    GroupReduction,
    kernel_setting,
    neighbours_pooled,
    over_groups,
    share_of,
    window_rows,
    window_setting,
)
from subtoken_train.functional.gather import take_rows
from subtoken_train.functional.rotary import Rotation
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Online, View

FURTHEST = 1 << 16  # positions ahead


@dataclass(frozen=True)
class QueryCentres(CalibratedNumbers):
    """Queries of every layer and query head before their rotary embedding, each [L, H, d].

    ``mean``: their mean. ``length``: mean length of the pair that a channel is turned in, at both of its channels.
    """

    mean: list[list[list[float]]]
    length: list[list[list[float]]]

    def __post_init__(self) -> None:
        for name, table_LHd, low in (("mean", self.mean, -1e6), ("length", self.length, 0)):
            for layer, table_Hd in enumerate(table_LHd):
                check_table(f"{name}[{layer}]", table_Hd, low, 1e6)
        shapes = {(len(table), len(table[0])) for table in (*self.mean, *self.length)}
        if len(shapes) != 1 or len(self.mean) != len(self.length):
            raise ValueError("mean and length must hold a table for every layer, all of one shape")

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        layers, heads, width = len(self.mean), len(self.mean[0]), len(self.mean[0][0])
        if (layers, heads % num_kv_heads, width) != (num_layers, 0, head_dim):
            found = f"mean has {layers} layers of {heads} query heads of width {width}"
            raise ValueError(f"{found}, and the backbone {num_layers} of a multiple of {num_kv_heads} of {head_dim}")

    def words(self) -> str:
        mean_LH, length_LH = (torch.tensor(each).norm(dim=-1) for each in (self.mean, self.length))
        share_LH = 2**0.5 * mean_LH / length_LH.clamp(min=1e-12)
        return table_words("concentration of every head's queries (1: all alike), a line per layer", share_LH.tolist())


def pair_lengths(vectors_BhNd: Tensor, rotation: Rotation) -> Tensor:
    """Length of the pair that each channel is turned in, [B, h, N, d]; of one that is not, itself twice."""
    quarter = replace(rotation, cos_BNr=torch.zeros_like(rotation.cos_BNr), sin_BNr=torch.ones_like(rotation.sin_BNr))
    return torch.hypot(vectors_BhNd.float(), quarter.turn(vectors_BhNd))


@dataclass(frozen=True)
class TriAttention(Eviction):
    """TriAttention (2026): the attention that a head's mean query is going to pay, at distances that double.

    Source: arXiv 2604.04921 and its code (WeianMao/triattention). Before their rotary embedding a head's queries lie
    around one centre, which ``subtoken-train calibrate triattention`` finds; the logit of an entry at a distance is
    then a sum of cosines, one per frequency. Its mean over the distances 1, 2, 4, ... after the next position, plus,
    per frequency, the key's length times what the queries' mean length is above their mean's, is the score. A query
    head's scores are standardised, a group's largest counts. The cached, turned key is scored as it is.

    Not offered: one set for all heads or layers. Positions whose frequencies depend on the length are refused.

    Attributes:
        calibration: file of the mean queries; needed.
        furthest: largest distance.
        window: last entries that always stay, inside the budget; a whole number, or a share of the budget.
        group: over the query heads of a key-value head.
    """

    name: ClassVar[str] = "triattention"
    online: ClassVar[Online] = Online(rows=0)
    calibrates: ClassVar[type[CalibratedNumbers]] = QueryCentres

    calibration: str | None = None
    furthest: int = setting(FURTHEST, 1, FURTHEST)
    window: int | float = window_setting(0.1)
    group: GroupReduction = "max"

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self.read_numbers()

    def score(self, view: View) -> Scores:
        numbers, key_BhNd, entries_B1N = self.read_numbers(), view.key_BhNd.float(), view.entries_BN[:, None]
        distance_D = 2 ** torch.arange(self.furthest.bit_length(), device=key_BhNd.device)
        rotation = view.rotate(view.next_position + distance_D).mean()
        samples = len(key_BhNd) // view.heads

        def of_rows(table_Hd: list[list[float]]) -> Tensor:
            own_hHd = torch.tensor(table_Hd, device=key_BhNd.device).view(view.heads, -1, key_BhNd.shape[-1])
            return own_hHd.repeat(samples, 1, 1)[:, :, None]  # while tokens are decoded, a sample's heads are rows

        mean_BH1d, length_BH1d = of_rows(numbers.mean[view.layer]), of_rows(numbers.length[view.layer])
        spread_BH1d = (length_BH1d - pair_lengths(mean_BH1d, rotation)).clamp(min=0)
        spread_BH1d[..., rotation.cos_BNr.shape[-1] :] = 0
        scores_BHN = grouped_products(rotation.turn(mean_BH1d), key_BhNd)
        scores_BHN += grouped_products(spread_BH1d, pair_lengths(key_BhNd, rotation)) / 2  # pairs stand there twice
        count_B11 = view.entries_BN.sum(-1).clamp(min=1)[:, None, None]
        centred_BHN = (scores_BHN - (scores_BHN * entries_B1N).sum(-1, keepdim=True) / count_B11) * entries_B1N
        deviation_BH1 = (centred_BHN.square().sum(-1, keepdim=True) / count_B11).sqrt().clamp(min=1e-6)
        scores_BhN = over_groups(centred_BHN / deviation_BH1, key_BhNd.shape[1], self.group)
        return Scores(scores_BhN, torch.zeros_like(view.entries_BN), notes={"entries": view.entries_BN})

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        count_B, window = layer_count(count_Bh), self.window
        last_B = torch.full_like(count_B, window) if isinstance(window, int) else share_of(count_B, window)
        scores = protect_last(scores, scores.notes["entries"], last_B)
        check_fits(self, window, scores, competes_BN, count_Bh)
        return scores


def grouped_products(query_BHnd: Tensor, key_BhNd: Tensor) -> Tensor:
    """Products of one query per head (n = 1) with its key-value head's keys, [B, H, N]."""
    batch, heads, _, width = query_BHnd.shape
    grouped = query_BHnd.view(batch, key_BhNd.shape[1], -1, width) @ key_BhNd.transpose(-1, -2)
    return grouped.reshape(batch, heads, -1)


def check_fits(method: Eviction, window: float, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> None:
    """Refuse a window of a fixed length whose competing entries are more than may stay."""
    least_B = count_Bh if count_Bh.dim() == 1 else count_Bh.amin(-1)
    if isinstance(window, int) and bool(((scores.protected_BN & competes_BN).sum(-1) > least_B).any()):
        least = int(least_B.min())
        raise ValueError(
            f"{method.name} window={window} is larger than the budget of {least} entries; use a smaller window, for "
            "instance 0.1 (a share of the budget), or a larger eviction_keep"
        )


BLOCK = 256  # rows of similarities at once


@dataclass(frozen=True)
class RKV(Eviction):
    """R-KV (Cai et al., 2025): attention of the last rows, less how much an entry's key repeats others.

    Source: "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models" (2505.24133) and its code
    (Zefan-Cai/R-KV). Importance: logits of the window's rows, the largest of a group, softmax over the entries before
    the window, mean over rows, maximum of neighbours. Redundancy: mean cosine similarity of an entry's key to all keys,
    softmax over the entries; of the entries that are more alike to a key than ``alike``, the latest does not count. The
    score is ``importance`` times the first less the rest of 1 times the second. Where no entry is that alike, the
    release leaves out the first one; here nothing is.

    Attributes:
        window: last entries, which observe and stay, inside the budget; a whole number, or a share of the budget.
        kernel: neighbours whose largest importance counts, odd.
        importance: the paper's lambda.
        alike: similarity from which an entry repeats another.
    """

    name: ClassVar[str] = "rkv"

    window: int | float = window_setting(8)
    kernel: int = kernel_setting(7)
    importance: float = setting(0.1, 0, 1)
    alike: float = setting(0.5, -1, 1)

    online = by_settings(lambda self: Online(rows=self.window if isinstance(self.window, int) else None))
    observing_rows = by_settings(lambda self: self.window if isinstance(self.window, int) else None)

    def score(self, view: View) -> Scores:
        window_BN, index_BW = window_rows(view, self.window)
        before_BN = view.entries_BN & ~window_BN
        important_BhN = neighbours_pooled(window_attention(view, index_BW, before_BN), before_BN, self.kernel, "max")
        repeated_BhN = redundancy(view.key_BhNd, view.entries_BN, self.alike)
        return Scores(self.importance * important_BhN - (1 - self.importance) * repeated_BhN, window_BN)

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        check_fits(self, self.window, scores, competes_BN, count_Bh)
        return scores


def window_attention(view: View, index_BW: Tensor, before_BN: Tensor) -> Tensor:
    """Attention of rows over what is before them, of each group's largest logits, mean over the rows, [B, h, N]."""
    batch, kv_heads, length, width = view.key_BhNd.shape
    place_BW = index_BW - (length - view.query_BHNd.shape[2])
    seen_BW = (index_BW >= 0) & (place_BW >= 0)
    query_BHWd = take_rows(view.query_BHNd.transpose(1, 2), place_BW.clamp(min=0)).transpose(1, 2).float()
    grouped = query_BHWd.reshape(batch, kv_heads, -1, width)  # the rows of a group's query heads, head after head
    logits = grouped @ view.key_BhNd.float().transpose(-1, -2) * view.scale
    logits = logits.view(batch, kv_heads, -1, index_BW.shape[1], length)
    least = torch.finfo(torch.float32).min
    paid_BhWN = logits.amax(2).masked_fill(~before_BN[:, None, None], least).softmax(-1) * seen_BW[:, None, :, None]
    mean_BhN = paid_BhWN.sum(2) / seen_BW.sum(-1).clamp(min=1)[:, None, None]
    return mean_BhN.masked_fill(~before_BN[:, None], 0.0)


def redundancy(key_BhNd: Tensor, entries_BN: Tensor, alike: float) -> Tensor:
    """Softmax over the entries of each key's mean similarity to all keys, its own left out, [B, h, N] in fp32."""
    key_BhNd = key_BhNd.float() * entries_BN[:, None, :, None]
    key_BhNd = key_BhNd / (key_BhNd.norm(dim=-1, keepdim=True) + 1e-8)
    total_BhN, place_N = torch.zeros_like(key_BhNd[..., 0]), torch.arange(key_BhNd.shape[2], device=key_BhNd.device)
    for rows_n in torch.split(place_N, BLOCK):
        similar_BhnN = key_BhNd[:, :, rows_n] @ key_BhNd.transpose(-1, -2)
        similar_BhnN.masked_fill_(rows_n[:, None] == place_N, 0.0)
        latest_Bhn1 = torch.where(similar_BhnN > alike, place_N, -1).amax(-1, keepdim=True)
        total_BhN += similar_BhnN.masked_fill_(place_N == latest_Bhn1, 0.0).sum(2)
    mean_BhN = total_BhN / entries_BN.sum(-1).clamp(min=1)[:, None, None]
    return mean_BhN.masked_fill(~entries_BN[:, None], torch.finfo(torch.float32).min).softmax(-1)
