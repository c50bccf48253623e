"""PyTorch's FSDP2 through Lightning's strategy: weights, gradients and optimiser states over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

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
