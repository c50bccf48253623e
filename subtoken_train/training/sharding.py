"""Weights that processes share out: how FSDP2 does it, how to see it, and how a tensor becomes whole again."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.reducers.base import TowerReducer
from subtoken_train.types import Batch

BLANK_SIZE = (64, 64)


def shard_layers(parts: CompressedBackbone, mesh: DeviceMesh) -> None:
    """Shard a built model in place: one group per decoder layer, and one for all else, gathered once per step.

    What is trained takes the first process's values; gradients are averaged over ``mesh``, the data-parallel processes.
    """
    for parameter in parts.parameters():
        if parameter.requires_grad:  # as under DDP and ZeRO; FSDP2 trusts its caller
            values = parameter.detach().to(mesh.device_type)  # NCCL sends no CPU tensors
            torch.distributed.broadcast(values, src=0, group=mesh.get_group())
            parameter.data.copy_(values)
    for layer in parts.family.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(parts, mesh=mesh)
    # ``run`` gathers the other group, which stays whole until the backward pass ends: ``logits`` has it too. That is no
    # forward method of its own: FSDP2 would end the group's backward pass where the gradients of its inputs are known
    register_fsdp_forward_method(parts, "run")


def is_sharded(module: nn.Module) -> bool:
    """True if a process holds only a part of a model's weights (ZeRO-3, FSDP2)."""
    return any(isinstance(tensor, DTensor) or hasattr(tensor, "ds_id") for tensor in module.parameters())


def gathered(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, gathered if it is sharded."""
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().cpu().clone()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


@torch.no_grad()
def see_blank_image(parts: CompressedBackbone, batch: Batch) -> None:
    """Call the tower on a black image before a text-only batch: processes must call the same modules in one order."""
    family, reducer = parts.family, parts.reducer
    if batch.pixel_values is not None or family.image_token_id is None:
        return
    device = batch.input_ids_BN.device
    pixels, grid = family.process_images([Image.new("RGB", BLANK_SIZE)])
    nothing_BN = torch.zeros(1, 0, dtype=torch.long, device=device)
    blank = Batch(
        input_ids_BN=nothing_BN,
        labels_BN=nothing_BN,
        regions_BN=nothing_BN,
        rank_position_B=torch.tensor([-1], device=device),
        pixel_values=pixels.to(device),
        images_per_sample_B=torch.ones(1, dtype=torch.long, device=device),
        record_ids=["blank"],
        image_grid_I3=None if grid is None else grid.to(device),
    )
    statistics = reducer.statistics if isinstance(reducer, TowerReducer) and reducer.acts else None
    states = family.visual_states(blank, statistics)
    assert states is not None
    family.project(torch.cat(states.tokens))
