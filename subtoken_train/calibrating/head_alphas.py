"""DuoAttention's calibration: the heads' alphas, trained with Lightning.

Source: section 2.2 of "DuoAttention" and ``duo_attn/train.py`` of its release: every head mixes full and streaming
attention, ``alpha`` starts at 1 and is clamped to [0, 1]; the loss is the squared difference of the last hidden states
from those of full attention, mean over channels and over the rows from which the answers are predicted, plus
``regularisation`` times the mean alpha; AdamW at 0.02, its rate rising over the first fifth of the steps and falling
over the last, a tenth of it at least. The release hides passkeys in a book, in sequences of up to 32k tokens over
several GPUs; here the prompts are key-value recall, with masks of N x N on one device. The backbone is never changed.

Legend: L layers, h key-value heads, B batch, N rows, D model width, R labelled rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from subtoken_train.calibrating.base import Batches, Calibrator, Progress, rounded
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.mixed_heads import HeadMix, mixed_hidden
from subtoken_train.engine.prompt_pass import are_finite
from subtoken_train.errors import MAX_COUNT, no_numbers
from subtoken_train.evictions.duo_attention import HeadAlphas
from subtoken_train.families.family import Family
from subtoken_train.families.load import check_on_one_device
from subtoken_train.functional.objective import predicting_rows
from subtoken_train.types import Batch, Region
from subtoken_train.view.method import setting


@dataclass(frozen=True)
class DuoCalibrator(Calibrator):
    """Training of the alphas, one step per batch; see ``Calibrator`` for the other settings.

    Attributes:
        sinks: first entries that a streaming head sees.
        recent: entries up to a row that it sees.
        regularisation: weight of the mean alpha.
    """

    name: ClassVar[str] = "duo_attention"
    answers: ClassVar[bool] = True
    whole_caches: ClassVar[bool] = True
    for_images: ClassVar[str] = "prefixkv"

    samples: int = setting(200, 1, MAX_COUNT)
    sinks: int = setting(4)
    recent: int = setting(28, 1)
    learning_rate: float = setting(0.02, 0, 100)
    regularisation: float = setting(0.05, 0, 100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks + self.recent >= self.context_length:
            raise ValueError(
                f"duo_attention sinks={self.sinks} and recent={self.recent} hold a whole context of "
                f"{self.context_length} tokens, so that no head needs more; raise context_length"
            )

    def check(self, backbone: CompressedBackbone) -> None:
        super().check(backbone)
        check_on_one_device(backbone.model, "duo_attention's calibration")

    def numbers(self, backbone: CompressedBackbone, batches: Batches, show: Progress | None = None) -> HeadAlphas:
        family = backbone.family
        module = AlphaModule(family, self, steps=-(-self.samples // self.batch_size))
        device = family.model.device
        with _hushed():
            trainer = L.Trainer(
                accelerator="cpu" if device.type == "cpu" else "gpu",
                devices=1 if device.type == "cpu" else [device.index or 0],
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, DataLoader(_Batches(batches), batch_size=None))
        alpha_Lh = module.alpha_Lh.detach().clamp(0, 1).cpu()
        if not bool(are_finite(alpha_Lh)):
            raise no_numbers("while its heads were weighed", family.model.dtype)
        return HeadAlphas(rounded(alpha_Lh.tolist()), self.sinks, self.recent)


class AlphaModule(L.LightningModule):
    """One number per layer and key-value head; the frozen backbone is no part of what is trained or saved."""

    def __init__(self, family: Family, settings: DuoCalibrator, steps: int) -> None:
        super().__init__()
        object.__setattr__(self, "family", family)  # no submodule
        self.settings, self.steps = settings, steps
        self.alpha_Lh = nn.Parameter(torch.ones(family.shape.num_layers, family.shape.num_kv_heads))

    family: Family

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Distillation of the rows that predict the answers, plus the weighted mean alpha."""
        rows_BN, _ = predicting_rows(batch.labels_BN)
        target_RD = self._hidden(batch, torch.ones_like(self.alpha_Lh), rows_BN)
        mixed_RD = self._hidden(batch, self.alpha_Lh, rows_BN)
        distance = (mixed_RD - target_RD).pow(2).mean(-1).mean()
        self.log("train/distillation", distance.detach())
        return distance + self.settings.regularisation * self.alpha_Lh.abs().mean()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        with torch.no_grad():
            self.alpha_Lh.clamp_(0, 1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW([self.alpha_Lh], lr=self.settings.learning_rate, weight_decay=0.0)
        fifth = max(1, self.steps // 5)

        def scale(step: int) -> float:
            return min(1.0, max((step + 1) / fifth, 0.1), max((self.steps - step) / fifth, 0.1))

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, scale), "interval": "step"}}

    def _hidden(self, batch: Batch, alpha_Lh: Tensor, rows_BN: Tensor) -> Tensor:
        """Last hidden states of some rows under some alphas, [R, D] in fp32."""
        visible_BN = batch.regions_BN != Region.PADDING
        mix = HeadMix(alpha_Lh, self.settings.sinks, self.settings.recent, visible_BN)
        with torch.set_grad_enabled(alpha_Lh.requires_grad):
            hidden = mixed_hidden(self.family, self.family.embed(batch), self.family.positions(batch), mix)
        return hidden[rows_BN].float()


@contextmanager
def _hushed() -> Iterator[None]:
    """Inside the block Lightning does not say which devices there are and that training ends."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Batches(IterableDataset[Batch]):
    """One pass over batches that are made elsewhere."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)
