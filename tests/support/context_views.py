"""Random layers as context reducers see them."""

import torch

from subtoken_train.types import Region
from subtoken_train.view.view import View
from tests.support.prompt_views import HEADS, KV_HEADS, WIDTH, rope

PADDING, SYSTEM, CONTEXT, QUERY = Region.PADDING, Region.SYSTEM, Region.CONTEXT, Region.QUERY


def context_view(prompts, pad="right", seed=0, layer=0, dtype=torch.float32, kv_heads=KV_HEADS):
    """A view of prompts (lists of regions); a row's tensors depend on its place, the prompt's length and the seed."""
    width = max(map(len, prompts))
    regions = torch.full((len(prompts), width), int(PADDING))
    tensors = [torch.zeros(len(prompts), heads, width, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]
    for sample, codes in enumerate(prompts):
        span = slice(width - len(codes), width) if pad == "left" else slice(0, len(codes))
        regions[sample, span] = torch.tensor(codes, dtype=torch.long)
        generator = torch.Generator().manual_seed(1000 * seed + 10 * layer + len(codes))
        for tensor in tensors:
            tensor[sample, :, span] = torch.randn(tensor.shape[1], len(codes), WIDTH, generator=generator)
    query, key, value = (tensor.to(dtype) for tensor in tensors)
    context, asks = regions == CONTEXT, regions == QUERY
    return View(
        layer,
        query,
        key,
        value,
        regions,
        WIDTH**-0.5,
        frozenset({"asks", "values"}),
        context,
        position=((regions != PADDING).cumsum(-1) - 1).clamp(min=0),
        rotate=rope,
        asks_BN=asks,
        scope_counts=context.sum(-1).tolist(),
        asks_counts=asks.sum(-1).tolist(),
    )
