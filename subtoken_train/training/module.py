"""The LightningModule: trains q/v LoRA and value-group routers of a frozen backbone under its token reducer.

Legend: B batch, N positions before the reducer, M positions after it.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftModel, set_peft_model_state_dict
from PIL import Image
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from subtoken_train.artifact.config import AdapterConfig
from subtoken_train.artifact.folder import FirstStage, identify, put_lora, read_first_stage
from subtoken_train.engine.build import Stage2Config, assemble, build
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.engine.prompt_pass import PromptPass, Rows
from subtoken_train.errors import in_a_recipe
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family
from subtoken_train.families.load import layout_family
from subtoken_train.families.lora import LoraSettings
from subtoken_train.functional.objective import answer_loss, distillation_loss, predicting_rows
from subtoken_train.reducers.base import Reducer, TowerReducer
from subtoken_train.routing import RoutingConfig, with_defaults
from subtoken_train.routing.bank import RoutingState
from subtoken_train.training import trained_tensors as stored
from subtoken_train.training.checkpoints import read_marker, state_path
from subtoken_train.training.loss import CrossEntropy, DistillationConfig, LossInput, Teacher, build_loss, checked_loss
from subtoken_train.training.optimizer import OptimizerConfig, build_optimizer, check_optimizer
from subtoken_train.types import Batch, in_compressed_region


@dataclass(frozen=True)
class StepRecord:
    """The rows of a pass (of the last layer, and by ``PromptPass.spans``) and what its routers did; no activations."""

    regions_BN: Tensor  # codes of the unreduced batch
    rows: Rows
    spans: list[tuple[int, int, Rows]]
    state: RoutingState | None
    kept: dict[int, Tensor]  # under a context reducer, per layer the rows that later rows see, bool [B, M]

    def compressed(self) -> tuple[Tensor, Tensor]:
        """Count the compressed region's entries before and after the reducer, over all layers: int64 scalars."""
        num_layers = self.spans[-1][1]
        before = in_compressed_region(self.regions_BN).sum() * num_layers
        return before, torch.stack([self.routed(layer).sum() for layer in range(num_layers)]).sum()

    def routed(self, layer: int) -> Tensor:
        """Return which tokens a layer's routers chose groups for, bool [B, M] of the layer's rows."""
        rows = next(rows for start, stop, rows in self.spans if start <= layer < stop)
        routed_BM = in_compressed_region(rows.regions_BM)
        return routed_BM & self.kept[layer] if layer in self.kept else routed_BM


FIRST_STAGE_KEY = "first_stage_sha256"
BLANK_SIZE = (64, 64)


class SubTokenModule(L.LightningModule):
    """Adapters of a frozen backbone, trained with a token-normalised loss + lambda * balance (+ distillation).

    The backbone is loaded at the first use of ``family``, never at construction. Checkpoints hold only what is trained.

    Args:
        backbone: the frozen model.
        lora: q/v LoRA of the language model; None takes the defaults or, in stage 2, what stage 1 had.
        reducer: token reducer, the same at training and inference.
        routing: value-group routing; None trains a token-only arm (LoRA-only where the reducer is ``none``).
        stage2: two-stage training: freeze the LoRA of a token-only adapter and train the routers on top of it.
        optimizer: AdamW and schedule.
        gradient_checkpointing: recompute decoder layers in the backward pass (non-reentrant).
        distillation: learn the answers' distributions of the uncompressed backbone, too; None: labels alone.
        loss: what learns the labels: ``cross_entropy``, or the name of another package's loss (``training.loss``).
        loss_options: settings of that loss.
    """

    def __init__(
        self,
        *,
        backbone: BackboneConfig,
        lora: LoraSettings | None = None,
        reducer: Reducer,
        routing: RoutingConfig | None = None,
        stage2: Stage2Config | None = None,
        optimizer: OptimizerConfig | None = None,
        gradient_checkpointing: bool = False,
        distillation: DistillationConfig | None = None,
        loss: str = "cross_entropy",
        loss_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.backbone_config, self.lora_written = backbone, lora
        self.reducer_config, self.routing_config = reducer, None if routing is None else with_defaults(routing)
        self.stage2_config = stage2
        self.lora_settings = lora or LoraSettings()  # in stage 2 stage 1's, once its folder is read
        self.first_stage: FirstStage | None = None
        self.first_stage_digest: str | None = None
        self.optimizer_config = optimizer or OptimizerConfig()
        self.gradient_checkpointing = gradient_checkpointing
        self.distillation_config = distillation
        self.loss = build_loss(loss, loss_options or {})
        self._teacher: Teacher | None = None
        self.strict_loading = False  # the frozen weights are not in the checkpoint; on_load_checkpoint is strict
        self.compressed: CompressedBackbone | None = None
        self.in_step = False  # set by a strategy under which all processes must call the same modules
        self.last_step: StepRecord | None = None
        self.peft_model: PeftModel | None = None
        self.gathered: dict[str, Tensor] | None = None  # the adapter after training, where processes hold parts of it

    @property
    def family(self) -> Family:
        """The backbone's family; loads the model on first use."""
        return self.parts.family

    @property
    def parts(self) -> CompressedBackbone:
        """Backbone, reducer and routers; built on first use."""
        if self.compressed is None:
            self.configure_model()
        assert self.compressed is not None
        return self.compressed

    @property
    def has_teacher(self) -> bool:
        """True if every step runs the uncompressed backbone, too."""
        return self.distillation_config is not None or self.loss.reads_full_logits

    def configure_model(self) -> None:
        """Load and attach everything, once; then share the weights out, once, where the strategy is FSDP2."""
        if self.compressed is None:
            self._build()
        if self.device_mesh is not None and not isinstance(self.compressed, FSDPModule):
            shard_layers(self.parts, self.device_mesh["data_parallel"])

    @in_a_recipe
    def _build(self) -> None:
        check_optimizer(self.optimizer_config)
        source, first = self.backbone_config, self.read_first_stage()
        recipe = self.lora_settings, self.reducer_config, self.routing_config, self.stage2_config
        compressed, peft_model = build(source, *recipe)
        if first is not None:
            set_peft_model_state_dict(peft_model, first.tensors(compressed.family, source, peft_model))
            self.first_stage_digest = first.digest()
        if self.gradient_checkpointing:
            enable_checkpointing(compressed.family, compressed.bank)
        self.compressed = compressed
        object.__setattr__(self, "peft_model", peft_model)  # not a submodule: its modules are compressed's own

    def lay_out(self, family: Family) -> tuple[CompressedBackbone, PeftModel]:
        """Build the recipe's parts around a family that is laid out; adapters are drawn anew."""
        return assemble(family, self.lora_settings, self.reducer_config, self.routing_config, self.stage2_config)

    def read_first_stage(self) -> FirstStage | None:
        """Read and check stage 2's start once; ``lora_settings`` are then stage 1's. None without stage 2."""
        if self.stage2_config is not None and self.first_stage is None:
            folder = Path(self.stage2_config.adapter)
            self.first_stage = read_first_stage(folder, self.reducer_config, self.routing_config, self.lora_written)
            self.lora_settings = self.first_stage.config.lora
        return self.first_stage

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def training_step(self, batch: tuple[Batch, int, int], batch_idx: int) -> Tensor:
        """Return one micro-batch's share of the window's token-normalised losses, plus the weighted balance loss."""
        micro, window_tokens, window_size = batch
        if self.in_step:
            see_blank_image(self.parts, micro)
        # before the student, so that what its pass holds is let go when the student's begins
        if self.has_teacher and self._teacher is None:
            self._teacher = Teacher(self.family)
        teacher = self._teacher.logits(micro) if self._teacher is not None else None
        result, rows, targets, logits = self.answered(micro)
        # Lightning divides by accumulate_grad_batches; an epoch's last window may be shorter
        accumulation = self.trainer.accumulate_grad_batches
        share = accumulation / max(self._global_tokens(window_tokens), 1)  # 0: nothing of the window is learnt
        answer = checked_loss(self.loss, LossInput(logits, targets, rows, result.state, teacher)) * share
        weight, balance = 0.0, torch.zeros((), device=self.device)
        if result.state is not None and self.routing_config is not None:
            weight, balance = self.routing_config.balance_weight, self._balance(result.state, self.routing_config)
        self.log("train/loss", answer.detach() * window_size / accumulation, prog_bar=True, sync_dist=True)
        self.log("train/balance", balance.detach(), sync_dist=True)
        self.last_step = StepRecord(micro.regions_BN, result.rows, result.spans, result.state, result.kept)
        loss = answer + weight * balance * accumulation / window_size
        if teacher is None or self.distillation_config is None:
            return loss
        divergence = distillation_loss(logits, teacher, self.distillation_config.temperature) * share
        self.log("train/distillation", divergence.detach() * window_size / accumulation, sync_dist=True)
        return loss + self.distillation_config.weight * divergence

    def _balance(self, state: RoutingState, routing: RoutingConfig) -> Tensor:
        """Return the balance loss; of gates, how far too few of them are closed."""
        if not state.closed:
            return state.mean_balance()
        closed = torch.stack(list(state.closed.values())).mean()
        self.log("train/closed", closed.detach(), sync_dist=True)
        steps = int(self.trainer.estimated_stepping_batches)
        return (routing.closed_target((self.trainer.global_step + 1) / steps) - closed).clamp(min=0)

    def answered(self, batch: Batch) -> tuple[PromptPass, Tensor, Tensor, Tensor]:
        """Run a batch; return the pass, the rows that predict a label, these labels, and the rows' logits."""
        result = self.parts.run(batch)
        rows, targets = predicting_rows(result.labels(batch.labels_BN))
        return result, rows, targets, self.parts.logits(result, rows)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log held-out records' token-normalised answer loss and token accuracy (teacher-forced)."""
        if self.in_step:
            see_blank_image(self.parts, batch)
        _, _, targets, logits = self.answered(batch)
        tokens, most = len(targets), max(len(targets), 1)  # a block of a conversation may hold nothing that is learnt
        loss, right = answer_loss(logits, targets) / most, (logits.argmax(-1) == targets).sum() / most
        self.log("val/loss", loss, batch_size=tokens, sync_dist=True, prog_bar=True)
        self.log("val/token_accuracy", right, batch_size=tokens, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW over LoRA and routers; the schedule steps with the optimiser."""
        trained = self.trained()
        routers = [parameter for name, parameter in trained.items() if ".bank." in name]
        lora = [parameter for name, parameter in trained.items() if ".bank." not in name]
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer, schedule = build_optimizer(lora, routers, self.optimizer_config, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self) -> None:
        """Gather the adapter while the processes still talk to each other; every one takes part."""
        self.gathered = stored.adapter_tensors(self.parts) if is_sharded(self.parts) else None

    def state_dict(  # type: ignore[override]  # torch types it by two overloads
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return only what is trained."""
        whole = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return {name: whole[prefix + name] for name in self.trained()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which stage-1 tensors a stage-2 checkpoint stands on."""
        if self.first_stage_digest is not None:
            checkpoint[FIRST_STAGE_KEY] = self.first_stage_digest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another set of trained tensors, or one that stands on another stage 1."""
        self.configure_model()
        stored.check_same_shapes(stored.trained_shapes(self), stored.shapes_of(checkpoint["state_dict"]))
        self.check_first_stage(checkpoint.get(FIRST_STAGE_KEY))

    def check_first_stage(self, digest: str | None) -> None:
        """Raise ``ValueError`` unless a checkpoint stands on the stage 1 whose SHA-256 is ``digest``."""
        if digest != self.first_stage_digest:
            raise ValueError("model.stage2.adapter is not the one that the checkpoint was trained on; give that one")

    def _global_tokens(self, window_tokens: int) -> float:
        """Count the window's labelled tokens, averaged over processes, as their gradients are."""
        if self.trainer.world_size == 1:
            return float(window_tokens)
        counts = torch.tensor(float(window_tokens), device=self.device)
        return float(self.trainer.strategy.reduce(counts, reduce_op="mean"))


def lay_out_checkpoint(module: SubTokenModule, checkpoint: Path) -> None:
    """Build ``module``'s parts around the tensors of a checkpoint folder; its backbone stays on the meta device."""
    state = state_path(checkpoint)
    tensors, digest = stored.trained_tensors(state), _noted(state, FIRST_STAGE_KEY)
    stored.check_same_shapes(read_marker(checkpoint).trained, stored.shapes_of(tensors), checkpoint)
    first = module.read_first_stage()
    family = layout_family(module.backbone_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of routers below a reducer's cut, which no checkpoint has
        compressed, peft_model = module.lay_out(family)
    if first is not None:
        put_lora(peft_model, first.tensors(family, module.backbone_config, peft_model))
        module.first_stage_digest = first.digest()
    module.check_first_stage(digest)
    module.compressed = compressed
    object.__setattr__(module, "peft_model", peft_model)  # as configure_model does
    stored.check_same_shapes(stored.trained_shapes(module), stored.shapes_of(tensors), checkpoint)
    own = {name.removeprefix("compressed."): tensor for name, tensor in tensors.items()}
    assert not compressed.load_state_dict(own, strict=False, assign=True).unexpected_keys
    compressed.eval()


def adapter_config(module: SubTokenModule, family: Family, training: dict[str, Any]) -> AdapterConfig:
    """Return a built module's ``subtoken_config.json``; stage 1, loss and distillation join ``training``."""
    if (first := module.first_stage) is not None:
        stage1 = {**first.config.training, "reading": first.reading, "sha256": module.first_stage_digest}
        training = {**training, "stage1": stage1}
    if module.distillation_config is not None:
        training = {**training, "distillation": asdict(module.distillation_config)}
    if module.loss.name != CrossEntropy.name:
        training = {**training, "loss": {"name": module.loss.name, **asdict(module.loss)}}
    return AdapterConfig(
        backbone=module.backbone_config,
        lora=module.lora_settings,
        reducer=module.reducer_config,
        routing=module.routing_config,
        identity=identify(family, module.backbone_config),
        stage2=module.stage2_config,
        training=training,
    )


def _noted(state: Path, key: str) -> Any:
    if not state.is_dir():
        return stored.read_state(state).get(key)
    file = min(state.rglob("*_model_states.pt"), default=None)
    if file is None:
        raise ValueError(f"{state} is not a complete DeepSpeed checkpoint: it holds no *_model_states.pt")
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True).get(key)


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
    """Return whether a process holds only a part of a model's weights (ZeRO-3, FSDP2)."""
    return any(isinstance(tensor, DTensor) or hasattr(tensor, "ds_id") for tensor in module.parameters())


@torch.no_grad()
def see_blank_image(parts: CompressedBackbone, batch: Batch) -> None:
    """Call the tower on a black image before a text-only batch: processes must call the same modules in one order."""
    family, reducer = parts.family, parts.reducer
    if batch.pixel_values is not None or family.image_token_id is None:
        return
    device = batch.input_ids_BN.device
    pixels, grid = family.process_images([Image.new("RGB", BLANK_SIZE)])
    one_B = torch.ones(1, dtype=torch.long, device=device)
    nothing_BN = one_B[:, None][:, :0]
    blank = Batch(nothing_BN, nothing_BN, nothing_BN, -one_B, pixels.to(device), one_B, ["blank"])
    blank.image_grid_I3 = None if grid is None else grid.to(device)
    statistics = reducer.statistics if isinstance(reducer, TowerReducer) and reducer.acts else None
    family.project(torch.cat(family.visual_states(blank, statistics).tokens))
