"""The strategies that a recipe may name in ``trainer.strategy``; each is Lightning's own with our settings.

What one cannot do with a recipe or a machine is found before anything is loaded or written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.training.strategies.zero import PRECISIONS, ZeroStrategy
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
        """Load as Lightning does, after a check; the trained tensors are in the result, as with any strategy."""
        module: Any = self.lightning_module
        tensors = trained_tensors(Path(checkpoint_path))
        check_same_shapes(shapes_of(module.trained()), shapes_of(tensors))
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return {**checkpoint, "state_dict": tensors}


PRESETS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3_offload": {"stage": 3, "offload": True},
}
"""Settings that a name stands for.

``auto``: one device, or DDP on several. ``ddp`` is Lightning's as it comes: NCCL on GPUs, gloo on CPUs, and every
trained tensor must get a gradient in every step (``find_unused_parameters=False``), from a text-only batch too.
"""
_BARE = DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy


def shares_weights(strategy: Strategy) -> bool:
    """Return whether a strategy's processes hold parts of the weights, which none may load before the others."""
    return isinstance(strategy, Fsdp2Strategy) or (isinstance(strategy, ZeroStrategy) and strategy.zero_stage_3)


def check_fit(trainer: Trainer, module: Any) -> None:
    """Raise ``ValueError`` if the trainer's strategy contradicts the machine or the module's recipe."""
    strategy = trainer.strategy
    if isinstance(strategy, ZeroStrategy):
        strategy.check_accelerator()
    check_kind(type(strategy), str(strategy.precision_plugin.precision), module)


def check_kind(kind: type[Strategy], precision: str, module: Any) -> None:
    """Check the strategy's class alone, before there is a trainer, and without looking at the machine."""
    if issubclass(kind, ZeroStrategy):
        if precision not in PRECISIONS:
            raise ValueError(
                f"trainer.precision {precision} would round LoRA and routers under ZeRO; use one of "
                f"{', '.join(PRECISIONS)}"
            )
    elif issubclass(kind, _BARE) and not issubclass(kind, Fsdp2Strategy):
        raise ValueError(
            f"trainer.strategy {kind.__name__} knows nothing of frozen weights, routers and accumulation "
            "windows; use one of auto, ddp, zero1, zero2, zero3, zero3_offload, fsdp2"
        )
    if issubclass(kind, Fsdp2Strategy) and module.gradient_checkpointing and module.routing_config is not None:
        # seen: processes reduce in different orders as soon as one has a text-only batch and another images
        raise ValueError(
            "trainer.strategy fsdp2 cannot train routers with model.gradient_checkpointing; use ddp, zero2 or zero3, "
            "or set it to false"
        )
    if not issubclass(kind, ZeroStrategy | Fsdp2Strategy):
        return
    if module.has_teacher:
        who = "model.distillation" if module.distillation_config is not None else f"model.loss {module.loss.name}"
        raise ValueError(
            f"{who} runs every layer twice in a step, for its teacher too, which is not tried under ZeRO and FSDP2; "
            "use trainer.strategy ddp, or leave it out"
        )
    if module.routing_config is not None and "attention" in module.routing_config.features:
        raise ValueError(
            "model.routing.features attention runs a layer's q and k projections twice, which is not tried under ZeRO "
            "and FSDP2; use trainer.strategy ddp, or leave attention out"
        )
    if (optimizer := module.optimizer_config.name) != "adamw":
        raise ValueError(
            f"model.optimizer.name {optimizer} keeps its own states, which {kind.__name__} would share out; "
            "use adamw, or trainer.strategy ddp"
        )


def check_parts(kind: type[Strategy], parts: CompressedBackbone) -> None:
    """Raise ``ValueError`` if a strategy's class cannot run a model (built or laid out).

    FSDP2 copies what it finds in a layer's arguments, so that a layer would note its routing in a copy of the split
    between context and query that no other layer sees.
    """
    if issubclass(kind, Fsdp2Strategy) and parts.splits:
        raise ValueError(
            "trainer.strategy fsdp2 cannot train a language model whose context is compressed; use ddp, zero2 or zero3"
        )
