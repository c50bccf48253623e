"""Dense layers, what of them is packed, and what attention on the packed layer must give.

Legend: B batch, H query heads, h key-value heads, N rows, q new tokens, d head width, S groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from subtoken_train.cache import pack
from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.kernels import formats
from subtoken_train.kernels.formats import FORMATS, Kivi
from subtoken_train.kernels.storage import Fill

FORMAT_OF = {each.bits: each for each in FORMATS.values() if not each.rotates and each.run == 1}
"""Formats of keys as they are, by their bits."""
SETS = ("all", "shared", "own")


@pytest.fixture(scope="module", autouse=True)
def short_runs() -> Iterator[None]:
    """KIVI's runs of 4 entries and 3 whole ones, as prompts of tests are short; import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kivi, "run", 4)
        patch.setattr(formats, "LATEST", 3)
        yield


@pytest.fixture(scope="module", autouse=True, params=[0.0, 1e9], ids=["bits", "places"])
def index_form(request) -> Iterator[None]:
    """Both forms of the index, whichever would be chosen; import it to run a module with each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "MAX_INDEX", request.param)
        yield


@dataclass
class Dense:
    """Keys and values [B, h, N, d], kept entries [B, h or 1, N], and which channels of an entry exist [B, h, N, d]."""

    key: Tensor
    value: Tensor
    keep: Tensor
    groups: Tensor | None
    channels: Tensor
    packing: Packing
    fill: Fill | None = None

    @property
    def read(self) -> Tensor:
        """Values as attention reads them: what is missing of a routed entry is the fill, or 0."""
        if self.fill is None:
            return self.value * self.channels
        return torch.where(self.channels, self.value, self.fill.vectors_Bhd.to(self.value.dtype)[:, :, None])

    def layer(self) -> PackedLayer:
        layer = PackedLayer()
        fill_BV = None if self.fill is None else self.fill.vectors_Bhd.to(self.value.dtype).flatten(1)
        plan = layer_plan(self.keep, self.groups)
        blocks = pack_layer(self.key, self.read, plan, self.packing, fill_BV=fill_BV)
        layer.store_prompt(blocks, self.key.shape[2], self.key, self.fill)
        return layer


def channel_mask(groups_BNS: Tensor, kv_heads: int, width: int, layout: str) -> Tensor:
    """Channel (head, c) of an entry exists iff its group is kept, bool [B, h, N, d]; written out channel by channel."""
    batch, length, num_groups = groups_BNS.shape
    mask = torch.zeros(batch, kv_heads, length, width, dtype=torch.bool)
    for head in range(kv_heads):
        for channel in range(width):
            group = (head * width + channel) * num_groups // (kv_heads * width)
            if layout == "per_head":
                group = channel * num_groups // width
            mask[:, head, :, channel] = groups_BNS[:, :, group]
    return mask


def dense(
    seed: int = 0,
    batch: int = 3,
    kv_heads: int = 2,
    length: int = 21,
    width: int = 8,
    num_groups: int | None = 4,
    share: float = 0.5,
    sets: str = "shared",
    layout: str = "contiguous",
    bits: int = 0,
    dtype: torch.dtype = torch.float32,
    fill: str = "none",
) -> Dense:
    """A random layer: ``share`` of the groups kept, a third of the entries whole; samples (and heads) of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(batch, kv_heads, length, width, generator=generator).to(dtype) for _ in range(2))
    heads = kv_heads if sets == "own" else 1
    if sets == "all":
        keep = torch.ones(batch, 1, length, dtype=torch.bool)
    else:
        limit = torch.rand(batch, heads, 1, generator=generator)
        keep = torch.rand(batch, heads, length, generator=generator) < limit
        keep[..., -1] = True  # every row keeps something
    groups, channels = None, torch.ones(batch, kv_heads, length, width, dtype=torch.bool)
    if num_groups is not None:
        groups = torch.rand(batch, length, num_groups, generator=generator) < share
        groups |= torch.rand(batch, length, 1, generator=generator) < (0.3 if 0 < share < 1 else 0)
        channels = channel_mask(groups, kv_heads, width, layout)
    return Dense(key, value, keep, groups, channels, Packing(layout, FORMAT_OF[bits]), drawn_fill(seed, fill, key))


def drawn_fill(seed: int, kind: str, like_BhNd: Tensor) -> Fill | None:
    """``mean``: of each sample, in its dtype; ``learned``: one of all samples, in fp32; ``none``."""
    if kind == "none":
        return None
    batch, heads, _, width = like_BhNd.shape
    vectors = torch.randn(batch if kind == "mean" else 1, heads, width, generator=torch.Generator().manual_seed(seed))
    return Fill(vectors.to(like_BhNd.dtype) if kind == "mean" else vectors.expand(batch, -1, -1), kind == "mean")


def masked_attention(
    state: Dense, query: Tensor, tail_key: Tensor, tail_value: Tensor, key: Tensor | None = None, value=None
) -> Tensor:
    """Softmax over kept entries and a causal tail, values with their missing channels filled, [B, H, q, d] in fp32.

    ``key`` and ``value`` stand for the dense ones where they were rounded.
    """
    key = state.key if key is None else key
    value = state.read if value is None else value
    shared, new, tail = query.shape[1] // key.shape[1], query.shape[2], tail_key.shape[2]
    keys = torch.cat([key, tail_key], 2).float().repeat_interleave(shared, 1)
    values = torch.cat([value, tail_value], 2).float().repeat_interleave(shared, 1)
    seen = state.keep.expand(-1, key.shape[1], -1).repeat_interleave(shared, 1)[:, :, None].expand(-1, -1, new, -1)
    causal = torch.ones(new, tail).tril(tail - new).bool().expand(*seen.shape[:2], -1, -1)
    scores = query.float() @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~torch.cat([seen, causal], -1), -torch.inf).softmax(-1) @ values


def states(seed: int, batch: int, heads: int, count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, heads, count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
