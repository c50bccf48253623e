"""What stored keys and values are read back as, and what a step reads that chooses pages, entry by entry.

Legend: h key-value heads, H query heads, N rows of a sample, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from subtoken_train.cache.key_basis import BalancedBasis
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.evictions.basic import QuestSteps
from subtoken_train.inference.compression import Compression
from subtoken_train.kernels import formats
from subtoken_train.kernels.formats import FORMATS, SHARES, Format, Kivi
from subtoken_train.types import Region

LEAST = 2.0**-24


class Rounding:
    """Rounds vectors, and notes how near ``edge`` any number was to the edge of two: of codes, or of fp16's scales.

    It is a share of the largest number of a vector or block, or of the scale.
    """

    def __init__(self) -> None:
        self.edge = math.inf

    def by_vector(self, vector: Tensor, bits: int, share: float = 1.0) -> Tensor:
        """One vector as symmetric whole numbers of one fp16 scale."""
        top, largest = 2 ** (bits - 1) - 1, vector.abs().max()
        scale = self._half((share * largest / top).clamp(min=LEAST))
        return self._codes(vector / scale, scale, largest).clamp(-top, top) * scale

    def by_block(self, numbers: Tensor, bits: int) -> Tensor:
        """Some numbers as whole ones above their least, of one fp16 scale."""
        top, zero = 2**bits - 1, self._half(numbers.min())
        extent = numbers.max() - zero
        scale = self._half((extent / top).clamp(min=LEAST))
        return self._codes((numbers - zero) / scale, scale, extent).clamp(0, top) * scale + zero

    def by_channel(self, key: Tensor, lower: Tensor, bits: int) -> Tensor:
        """One rotated key, of the share that loses least; every channel makes up for those before it."""
        top, lost, read = 2 ** (bits - 1) - 1, torch.zeros_like(key), torch.zeros_like(key)
        share = min(SHARES, key=lambda share: float((Rounding().by_vector(key, bits, share) - key).square().sum()))
        largest = key.abs().max()
        scale = self._half((share * largest / top).clamp(min=LEAST))
        for channel in range(len(key)):
            owed = (lower[channel, :channel] * lost[:channel]).sum()
            read[channel] = self._codes((key[channel] - owed) / scale, scale, largest).clamp(-top, top) * scale
            lost[channel] = read[channel] - key[channel]
        return read

    def _codes(self, numbers: Tensor, scale: Tensor, extent: Tensor) -> Tensor:
        apart = (numbers - numbers.floor() - 0.5).abs().min() * scale
        self.edge = min(self.edge, float(apart / extent.clamp(min=LEAST)))
        return numbers.round()

    def _half(self, number: Tensor) -> Tensor:
        rounded = number.float().half().float()
        if float(number) != 0:
            step = 2.0 ** max(math.floor(math.log2(abs(float(number)))) - 10, -24)
            apart = abs(abs(float(number - rounded)) - step / 2)
            self.edge = min(self.edge, apart / abs(float(number)))
        return rounded


@dataclass
class PlainStorage:
    """How a layer's entries are stored: ``form``, which are ``cut_N``, and in which coordinates its keys stand.

    What is stored of a key is (key - ``centre_h1d``) ``into_hdd``; it is read back by ``out_hdd`` and the centre.
    """

    form: Format
    cut_N: Tensor
    centre_h1d: Tensor | float = 0.0
    into_hdd: Tensor | None = None
    out_hdd: Tensor | None = None
    feedback_hdd: Tensor | None = None
    rounding: Rounding = field(default_factory=Rounding)

    def read(
        self, key_hNd: Tensor, value_hNd: Tensor, fill_hNd: Tensor, there_hNd: Tensor, entries_hN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values after they were stored.

        Args:
            key_hNd: as tokens read them, less cut channels.
            value_hNd: as tokens read them, dropped groups being the fill.
            fill_hNd: what dropped groups read as.
            there_hNd: channels that are stored of a value.
            entries_hN: entries that are stored.
        """
        whole_N = there_hNd.all(-1).all(0)
        under_hNd = fill_hNd * ~whole_N[:, None]
        keys, values = key_hNd - self.centre_h1d, value_hNd - under_hNd
        keys = keys if self.into_hdd is None else keys @ self.into_hdd
        for head in range(len(entries_hN)):
            for whole in (False, True):
                for cut in (False, True):
                    rows = (entries_hN[head] & (whole_N == whole) & (self.cut_N == cut)).nonzero()[:, 0].tolist()
                    self._round(keys[head], values[head], there_hNd[head], rows, head)
        keys = keys if self.out_hdd is None else keys @ self.out_hdd
        return keys + self.centre_h1d, values + under_hNd

    def _round(self, keys_Nd: Tensor, values_Nd: Tensor, there_Nd: Tensor, rows: list[int], head: int) -> None:
        """Round entries that are stored alike, in place."""
        bits, runs, rounding = self.form.bits, isinstance(self.form, Kivi), self.rounding
        by = rounding.by_block if runs else rounding.by_vector
        if runs:
            rows = rows[: max(len(rows) - formats.LATEST, 0) // self.form.run * self.form.run]
        for start in range(0, len(rows), self.form.run):
            run = rows[start : start + self.form.run]
            for channel in range(keys_Nd.shape[1]) if runs else ():
                keys_Nd[run, channel] = rounding.by_block(keys_Nd[run, channel], bits)
        for row in rows:
            own = there_Nd[row]
            if bool(own.any()):
                values_Nd[row, own] = by(values_Nd[row, own], bits)
            if self.feedback_hdd is not None:
                keys_Nd[row] = rounding.by_channel(keys_Nd[row], self.feedback_hdd[head], bits)
            elif not runs:
                keys_Nd[row] = rounding.by_vector(keys_Nd[row], bits)


def plain_storage(
    name: str, layer: PackedLayer, feedback_Bhdd: Tensor | None, sample: int, cut_N: Tensor, turn: tuple[Tensor, Tensor]
) -> PlainStorage:
    """How a layer's entries of a sample are stored; what a basis is, is taken from the prompt's pass.

    Args:
        name: of the format.
        layer: whose ``basis`` rotated keys have.
        feedback_Bhdd: of that basis.
        sample: which it is.
        cut_N: entries whose keys are cut.
        turn: centre and axes of cut keys that are turned, or two times None.
    """
    storage = PlainStorage(FORMATS[name], cut_N)
    if isinstance(layer.basis, BalancedBasis):
        size_hd, turn_dd = layer.basis.size_Bh1d[sample, :, 0].float(), layer.basis.turn_dd
        storage.centre_h1d = layer.basis.centre_Bh1d[sample].float()
        storage.into_hdd, storage.out_hdd = turn_dd / size_hd[..., None], turn_dd.T * size_hd[:, None]
        storage.feedback_hdd = feedback_Bhdd[sample]
    elif turn[0] is not None:
        storage.centre_h1d, storage.into_hdd = turn
        storage.out_hdd = turn[1].mT
    return storage


@contextmanager
def noting_feedback() -> Iterator[list[Tensor]]:
    """Note the feedback of rotated keys, layer after layer."""
    noted, feedback = [], BalancedBasis.feedback

    def noting(basis, moment_Bhdd):
        noted.append(feedback(basis, moment_Bhdd))
        return noted[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BalancedBasis, "feedback", noting)
        yield noted


@dataclass
class PageTruth:
    """One layer of one sample.

    ``columns``: its entries in order; ``chosen_of``: those that compete; ``budget`` of these may be read.
    """

    columns: list[int]
    chosen_of: set[int]
    budget: int
    size: int
    least: int

    def pages(self) -> tuple[list[list[int]], list[bool], int]:
        """Whole pages, whether each is always read, and how many are."""
        parts = [self.columns[i : i + self.size] for i in range(0, len(self.columns), self.size)]
        left_over = parts.pop() if parts and len(parts[-1]) < self.size else []
        always = [any(column not in self.chosen_of for column in part) for part in parts]
        if not left_over and always:
            always[-1] = True
        forced = [column for part, stays in zip(parts, always, strict=True) if stays for column in part]
        spare = self.budget - len([column for column in [*forced, *left_over] if column in self.chosen_of])
        count = max(sum(always) + max(0, spare) // self.size, self.least - bool(left_over))
        return parts, always, min(count, len(parts))

    def hide_unread(self, allowed_hNN: Tensor, query_HNd: Tensor, key_hNd: Tensor, alone: int) -> None:
        """Hide from every row from ``alone`` on, which came by itself, the pages that each head does not choose."""
        parts, always, count = self.pages()
        group = len(query_HNd) // len(key_hNd)
        for head, keys in enumerate(key_hNd.float()):
            for row in range(alone, allowed_hNN.shape[1]):
                bounds = []
                for part, stays in zip(parts, always, strict=True):
                    low, high = keys[part].amin(0), keys[part].amax(0)
                    queries = query_HNd[head * group : (head + 1) * group, row].float()
                    bound = sum(float(torch.maximum(query * low, query * high).sum()) for query in queries) / group
                    bounds.append(float("inf") if stays else bound)
                order = sorted(range(len(parts)), key=lambda page, own=bounds: (-own[page], page))
                for page in order[count:]:
                    allowed_hNN[head, row, parts[page]] = False


def note_pages(saved: list, tap, compression: Compression) -> None:
    """Write into the truth of every sample what the steps read under ``QuestSteps``, with a share as the budget."""
    method, result, followed = compression.eviction, tap.result[-1], tap.batch[-1].followed
    assert isinstance(method, QuestSteps)
    first = result.spans[0][2] if result.spans else result.rows
    for sample, truth in enumerate(saved):
        regions = first.regions_BM[sample, first.visible_BM[sample]].tolist()
        for layer in truth.layers[method.dense_layers :]:
            columns = layer.entries_hN[0].nonzero()[:, 0].tolist()
            inside = [i for i in columns if compression.scope == "all" or regions[i] in (Region.VISUAL, Region.CONTEXT)]
            chosen_of = set(inside) - (set() if followed else {columns[-1]})
            budget = int(len(inside) * compression.keep + 1e-9) - (len(inside) - len(chosen_of))
            budget = min(max(1, budget), len(chosen_of))
            layer.pages = PageTruth(columns, chosen_of, budget, method.page_size, method.least_pages)
