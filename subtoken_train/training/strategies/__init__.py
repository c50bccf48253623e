"""The strategies that a recipe may name in ``trainer.strategy``; each is Lightning's own with our settings.

ZeRO is DeepSpeed's: optimiser states (1), gradients (2) and weights (3) over processes. Only what is trained has the
first two, so 1 and 2 save little and 3 is for backbones that do not fit on one device.
"""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.deepspeed import _validate_device_index_selection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import check_package, refuse
from subtoken_train.training.trained_tensors import check_same_shapes, shapes_of, trained_shapes, trained_tensors

BUCKET = 50_000_000
"""Elements that are communicated at once; Lightning's 200 million would reserve 800 MB for adapters of a tenth."""

PRECISIONS = ("32-true", "bf16-mixed")  # others would round what is trained


def _module(strategy: Strategy) -> Any:
    assert strategy.lightning_module is not None
    return strategy.lightning_module


class _Checked(Strategy):
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load as Lightning does, after a check; the trained tensors are in the result, as with any strategy."""
        tensors = trained_tensors(Path(checkpoint_path))
        check_same_shapes(trained_shapes(_module(self)), shapes_of(tensors))
        return {**super().load_checkpoint(checkpoint_path, weights_only), "state_dict": tensors}


class ZeroStrategy(_Checked, DeepSpeedStrategy):
    """ZeRO with torch's own AdamW, whose steps are those of DDP: the same loss, the same accumulation windows.

    * Accumulation is Lightning's: DeepSpeed is told where a window ends, and divides by nothing.
    * LoRA and routers stay fp32 under ``bf16-mixed`` (torch's autocast), and are reduced in fp32; frozen weights keep
      the recipe's dtype. DeepSpeed's own bf16 mode would round them all.
    * Checkpoints hold what is trained only. Stage 3 splits the backbone's weights as they are read.

    Args:
        offload: keep optimiser states (and in stage 3 the weights) in the host's memory.
        config: more settings of DeepSpeed's JSON, which go on top of ours.
    """

    def __init__(self, stage: int = 2, offload: bool = False, config: dict[str, Any] | None = None) -> None:
        check_package("deepspeed", "deepspeed", "trainer.strategy", "use trainer.strategy ddp")
        extra = config or {}
        zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True}
        zero |= {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu"}
            zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
        settings = {
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # offloaded states are updated by torch's AdamW too
            **extra,
            "zero_optimization": {**zero, **extra.get("zero_optimization", {})},
        }
        super().__init__(config=settings, exclude_frozen_parameters=True)
        self._hf_config: Any = None

    def check_accelerator(self) -> None:
        """Refuse what is no CUDA device; the one thing in which the strategy of the CPU tests differs."""
        if not isinstance(self.accelerator, CUDAAccelerator):
            raise ValueError("trainer.strategy: ZeRO runs on CUDA GPUs; use trainer.strategy ddp or fsdp2 on a CPU")
        assert self.parallel_devices is not None
        try:
            _validate_device_index_selection(self.parallel_devices)
        except RuntimeError as error:
            raise ValueError(f"trainer.devices: {error}") from None

    def setup_environment(self) -> None:
        """Start the process group; from then on stage 3 shards what transformers loads, by the configuration."""
        self.check_accelerator()
        DDPStrategy.setup_environment(self)
        self._init_config_if_needed()
        if self.zero_stage_3:
            from transformers.integrations.deepspeed import HfDeepSpeedConfig

            assert isinstance(self.config, dict)
            dtype = _module(self).backbone_config.dtype  # DeepSpeed would load it in the dtype of what is trained
            load = {"bf16": {"enabled": dtype == "bfloat16"}, "fp16": {"enabled": dtype == "float16"}}
            self._hf_config = HfDeepSpeedConfig({**self.config, **load})

    def setup_distributed(self) -> None:
        """Set up as Lightning does, whose check of the device indices is in ``check_accelerator``."""
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @contextmanager
    def model_sharded_context(self) -> Generator[None]:
        """Do nothing: ``setup`` splits LoRA and routers, which inside ``deepspeed.zero.Init`` would start empty."""
        yield

    def setup(self, trainer: Trainer) -> None:
        """Hand the model to DeepSpeed; stage 3 gathers every layer as it is called, so all processes call the same."""
        _module(self).in_step = self.zero_stage_3
        super().setup(trainer)

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        import deepspeed

        index = self.root_device.index
        args = argparse.Namespace(device_rank=self.local_rank if index is None else index)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given = {"model_parameters": trained, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        started = deepspeed.initialize(args=args, config=self.config, model=model, dist_init_required=False, **given)
        return started[0], started[1]

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning calls for a step at a window's end."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Do nothing: Lightning would call DeepSpeed's ``no_sync``, which stages 2 and 3 refuse."""
        yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Tell DeepSpeed whether this micro-batch is its window's last: stage 1 reduces then; 2 and 3 always do."""
        last = not _module(self).trainer.fit_loop._should_accumulate()
        self.deepspeed_engine.set_gradient_accumulation_boundary(last)

    def teardown(self) -> None:
        """Forget the configuration for loading: a model that is loaded after the run is loaded whole."""
        self._hf_config = None
        super().teardown()

    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert isinstance(self.config, dict)
        trainer = _module(self).trainer
        self.config["gradient_accumulation_steps"] = 1  # Lightning divides already
        self.config["train_micro_batch_size_per_gpu"] = getattr(trainer.datamodule, "batch_size", 1)
        self.config["gradient_clipping"] = trainer.gradient_clip_val or 0.0

    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        self.config["bf16"] = {"enabled": False}
        if self.precision_plugin.precision == "bf16-mixed":
            # an empty list: nothing that is trained is communicated in bf16
            self.config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        super()._format_config()


class Fsdp2Strategy(_Checked, ModelParallelStrategy):
    """All processes form one data-parallel group; checkpoints are plain single files with whole tensors."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Size the group by the run: Lightning's own default is one process per node."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


PRESETS: dict[str, dict[str, Any]] = {f"zero{stage}": {"stage": stage} for stage in (1, 2, 3)}
PRESETS["zero3_offload"] = {"stage": 3, "offload": True}
"""Settings of a name; ``auto`` (one device, or DDP on several) and ``ddp`` are Lightning's as they come."""
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
    zero, fsdp2, routing = issubclass(kind, ZeroStrategy), issubclass(kind, Fsdp2Strategy), module.routing_config
    shares, optimizer = zero or fsdp2, module.optimizer_config.name
    own_loss = module.has_teacher and module.distillation_config is None
    untried = {
        f"model.loss {module.loss.name}, whose teacher" if own_loss else "model.distillation": module.has_teacher,
        "model.routing.features attention": routing is not None and "attention" in routing.features,
        "model.routing.byte_pool learned": routing is not None and routing.byte_pool == "learned",
        f"model.optimizer.name {optimizer}": optimizer != "adamw",
    }
    rounds = f"trainer.precision {precision} would round LoRA and routers under ZeRO"
    bare = f"trainer.strategy {kind.__name__} knows nothing of frozen weights, routers and accumulation windows"
    # seen: processes reduce in different orders as soon as one has a text-only batch and another images
    unordered = fsdp2 and module.gradient_checkpointing and routing is not None
    why = "trainer.strategy fsdp2 cannot train routers with model.gradient_checkpointing"
    refuse(
        (zero and precision not in PRECISIONS, f"{rounds}; use one of {', '.join(PRECISIONS)}"),
        (issubclass(kind, _BARE) and not shares, f"{bare}; use one of auto, ddp, fsdp2, {', '.join(PRESETS)}"),
        (unordered, f"{why}; use ddp, zero2 or zero3, or set it to false"),
        *(
            (shares and there, f"{what} is not tried under ZeRO and FSDP2; use trainer.strategy ddp, or leave it out")
            for what, there in untried.items()
        ),
    )


def check_parts(kind: type[Strategy], parts: CompressedBackbone) -> None:
    """Raise ``ValueError`` if a strategy's class cannot run a model (built or laid out)."""
    if issubclass(kind, Fsdp2Strategy) and parts.splits:  # it copies a layer's arguments, the split's notes among them
        raise ValueError("trainer.strategy fsdp2 cannot train a language model's compressed context; use ddp")
