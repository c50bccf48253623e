"""A backbone over several GPUs, for prompts: accelerate puts whole layers on each, and what is made there stays there.

transformers loads every layer onto its GPU (``device_map="auto"`` with the memory that is given here), and accelerate's
hooks bring a layer's inputs to it. Dense and packed caches, routers and an eviction's view of a layer lie where the
layer does; prompts, positions, the plan, scores that are compared between layers, and hidden states between two
stretches of layers lie with the token embeddings (``DecoderStack.device``).

What it does not do: training (the strategies shard weights for that), and weights on the CPU or on disk, which are
absent between two calls while evictions and routers read some of them. Tests run it on pretended devices; it has not
been run on several real GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family

WEIGHTS = 0.7
"""Share of a GPU's free memory that weights may take; the rest is for caches and activations."""
BYTES = {"nf4": 0.53, "int8": 1.01}
"""Bytes of a quantised weight, its scales included."""


def spread_memory(layout: Family, config: BackboneConfig, free: Sequence[int]) -> dict[int, int] | None:
    """Bytes of weights that each GPU may take; None where the first one holds all of them.

    Args:
        layout: the backbone without weights.
        config: how it will be loaded.
        free: free bytes of each GPU.

    Raises:
        ValueError: the GPUs together do not hold it.
    """
    needed, room = _weight_bytes(layout, config), [int(WEIGHTS * each) for each in free]
    if len(room) < 2 or needed <= room[0]:
        return None
    if needed > sum(room):
        held, gib = sum(room), 2**30
        raise ValueError(
            f"the weights of backbone {config.path!r} take {needed / gib:.1f} GiB, and {len(room)} GPUs have room for "
            f"{held / gib:.1f} ({WEIGHTS:.0%} of their free memory); weights on the CPU or on disk are not served: "
            "quantise the backbone (quantization: nf4), or free more memory"
        )
    return dict(enumerate(room))


def free_memory() -> list[int]:
    """Free bytes of every GPU of this machine."""
    return [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]


def is_spread(model: Any) -> bool:
    """Whether a model's parts lie on several devices."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def check_whole(model: Any, path: str) -> None:
    """Raise a worded ``ValueError`` where accelerate left weights on the CPU or on disk."""
    left = sorted(name for name, place in getattr(model, "hf_device_map", {}).items() if place in ("cpu", "disk"))
    if left:
        raise ValueError(
            f"backbone {path!r}: {len(left)} parts do not fit on the GPUs (first {left[0]}), and weights on the CPU or "
            "on disk are not served; quantise the backbone (quantization: nf4), or free more memory"
        )


def check_on_one_device(model: Any, what: str) -> None:
    """Raise a worded ``ValueError`` where a model is spread and ``what`` needs it on one device."""
    if is_spread(model):
        raise ValueError(
            f"{what} needs a backbone on one device, and this one is spread over several (device_map auto), which "
            "serves prompts only; name a device (cuda:0), quantise the backbone, or train with a strategy that shards "
            "weights (fsdp2, deepspeed)"
        )


def _weight_bytes(layout: Family, config: BackboneConfig) -> int:
    inside = {id(part.weight) for part in layout.decoder.modules() if isinstance(part, torch.nn.Linear)}
    quantised = BYTES.get(config.quantization)
    each = (
        part.numel() * (part.element_size() if quantised is None or id(part) not in inside else quantised)
        for part in layout.model.parameters()
    )
    return int(sum(each))
