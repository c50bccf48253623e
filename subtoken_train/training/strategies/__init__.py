"""The strategies that a recipe may name in ``trainer.strategy``; each is Lightning's own with our settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import refuse
from subtoken_train.training.strategies.zero import PRECISIONS, ZeroStrategy, fitting_tensors


class Fsdp2Strategy(ModelParallelStrategy):
    """All processes form one data-parallel group; checkpoints are plain single files with whole tensors."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Size the group by the run: Lightning's own default is one process per node."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load as Lightning does, after a check; the trained tensors are in the result, as with any strategy."""
        tensors = fitting_tensors(self, Path(checkpoint_path))
        return {**super().load_checkpoint(checkpoint_path, weights_only), "state_dict": tensors}


_STAGES: dict[str, dict[str, Any]] = {f"zero{stage}": {"stage": stage} for stage in (1, 2, 3)}
PRESETS = {**_STAGES, "zero3_offload": {"stage": 3, "offload": True}}
"""Settings of a name; ``auto`` (one device, or DDP on several) and ``ddp`` are Lightning's as they come."""
_BARE = DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy


def shares_weights(strategy: Strategy) -> bool:
    """True if a strategy's processes hold parts of the weights, which none may load before the others."""
    return isinstance(strategy, Fsdp2Strategy) or (isinstance(strategy, ZeroStrategy) and strategy.zero_stage_3)


def check_fit(trainer: Trainer, module: Any) -> None:
    """Raise ``ValueError`` if the trainer's strategy contradicts the machine or the module's recipe."""
    strategy = trainer.strategy
    if isinstance(strategy, ZeroStrategy):
        strategy.check_accelerator()
    check_kind(type(strategy), str(strategy.precision_plugin.precision), module)


def check_kind(kind: type[Strategy], precision: str, module: Any) -> None:
    """Check the strategy's class alone, before there is a trainer, and without looking at the machine."""
    zero, fsdp2, routing = issubclass(kind, ZeroStrategy), issubclass(kind, Fsdp2Strategy), module.routing_config
    shares, optimizer = zero or fsdp2, module.optimizer_config.name
    own_loss = module.has_teacher and module.distillation_config is None
    who = f"model.loss {module.loss.name}" if own_loss else "model.distillation"
    refuse(
        (
            zero and precision not in PRECISIONS,
            f"trainer.precision {precision} would round LoRA and routers under ZeRO; use one of "
            f"{', '.join(PRECISIONS)}",
        ),
        (
            issubclass(kind, _BARE) and not shares,
            f"trainer.strategy {kind.__name__} knows nothing of frozen weights, routers and accumulation windows; use "
            "one of auto, ddp, zero1, zero2, zero3, zero3_offload, fsdp2",
        ),
        (  # seen: processes reduce in different orders as soon as one has a text-only batch and another images
            fsdp2 and module.gradient_checkpointing and routing is not None,
            "trainer.strategy fsdp2 cannot train routers with model.gradient_checkpointing; use ddp, zero2 or zero3, "
            "or set it to false",
        ),
        (
            shares and module.has_teacher,
            f"{who} runs every layer twice in a step, for its teacher too, which is not tried under ZeRO and FSDP2; "
            "use trainer.strategy ddp, or leave it out",
        ),
        (
            shares and routing is not None and "attention" in routing.features,
            "model.routing.features attention runs a layer's q and k projections twice, which is not tried under ZeRO "
            "and FSDP2; use trainer.strategy ddp, or leave attention out",
        ),
        (
            shares and optimizer != "adamw",
            f"model.optimizer.name {optimizer} keeps its own states, which {kind.__name__} would share out; use adamw, "
            "or trainer.strategy ddp",
        ),
    )


def check_parts(kind: type[Strategy], parts: CompressedBackbone) -> None:
    """Raise ``ValueError`` if a strategy's class cannot run a model (built or laid out)."""
    if issubclass(kind, Fsdp2Strategy) and parts.splits:  # it copies a layer's arguments, the split's notes among them
        raise ValueError(
            "trainer.strategy fsdp2 cannot train a language model whose context is compressed; use ddp, zero2 or zero3"
        )
