"""PyTorch's FSDP2 through Lightning's strategy: weights, gradients and optimiser states over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.training.trained_tensors import check_same_shapes, shapes_of, trained_tensors


class Fsdp2Strategy(ModelParallelStrategy):
    """All processes form one data-parallel group; checkpoints are plain single files with whole tensors.

    The module shards itself by ``shard_layers`` once it is built.
    """

    def __init__(self) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Size the group by the run: Lightning's own default is one process per node."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning's, after a check; the trained tensors are in the result, as under any other strategy.

        Raises:
            ValueError: the file cannot be read, or it does not hold what the recipe trains.
        """
        module: Any = self.lightning_module
        tensors = trained_tensors(Path(checkpoint_path))
        check_same_shapes(shapes_of(module.trained()), shapes_of(tensors))
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return {**checkpoint, "state_dict": tensors}


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


def _same_everywhere(parts: nn.Module, mesh: DeviceMesh) -> None:
    """What is trained starts with the first process's values, as under DDP and ZeRO; FSDP2 trusts its caller."""
    for parameter in parts.parameters():
        if parameter.requires_grad:
            values = parameter.detach().to(mesh.device_type)  # NCCL sends no CPU tensors
            torch.distributed.broadcast(values, src=0, group=mesh.get_group())
            parameter.data.copy_(values)
