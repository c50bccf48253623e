"""Weights that processes share out: how FSDP2 does it, how to see it, and how a tensor becomes whole again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone


def shard_layers(parts: CompressedBackbone, mesh: DeviceMesh) -> None:
    """Shard a built model in place: one group per decoder layer, and one for all else.

    The other group (embeddings, vision tower, head, routers) is gathered once per step, whether the batch holds images
    or not: no process waits for one that has none. Frozen and trained tensors share groups; gradients are averaged.

    Args:
        parts: the model; what is trained takes the first process's values.
        mesh: one-dimensional, the data-parallel processes.
    """
    _same_everywhere(parts, mesh)
    for layer in parts.family.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(parts, mesh=mesh)
    # ``run`` gathers the other group, which stays whole until the backward pass ends: ``logits`` has it too. That is no
    # forward method of its own: FSDP2 would end the group's backward pass where the gradients of its inputs are known
    register_fsdp_forward_method(parts, "run")


def is_sharded(module: nn.Module) -> bool:
    """Whether a process holds only a part of a model's weights (ZeRO-3, FSDP2)."""
    return any(isinstance(tensor, DTensor) or hasattr(tensor, "ds_id") for tensor in module.parameters())


def gathered(tensor: Tensor) -> Tensor:
    """A copy on the CPU, gathered where it is sharded."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().cpu().clone()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().cpu().clone()
    return tensor.detach().cpu().clone()


def _same_everywhere(parts: nn.Module, mesh: DeviceMesh) -> None:
    """What is trained starts with the first process's values, as under DDP and ZeRO; FSDP2 trusts its caller."""
    for parameter in parts.parameters():
        if parameter.requires_grad:
            values = parameter.detach().to(mesh.device_type)  # NCCL sends no CPU tensors
            torch.distributed.broadcast(values, src=0, group=mesh.get_group())
            parameter.data.copy_(values)
