"""DuoAttention's calibration: the heads' alphas, trained by distillation.

Source: section 2.2 of "DuoAttention" and ``duo_attn/train.py`` of its release: every head mixes full and streaming
attention, ``alpha`` starts at 1 and is clamped to [0, 1]; the loss is the squared difference of the last hidden states
from those of full attention, mean over channels and over the rows from which the answers are predicted, plus
``regularisation`` times the mean alpha; AdamW at 0.02, its rate rising over the first fifth of the steps and falling
over the last, a tenth of it at least. The release hides passkeys in a book, in sequences of up to 32k tokens over
several GPUs; here the prompts are key-value recall, with masks of N x N on one device. The backbone is never changed.

Legend: L layers, h key-value heads, B batch, N rows, D model width, R labelled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

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

    @torch.enable_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches, show: Progress | None = None) -> HeadAlphas:
        family, steps = backbone.family, -(-self.samples // self.batch_size)
        shape = family.shape.num_layers, family.shape.num_kv_heads
        alpha_Lh = torch.ones(shape, device=family.model.device, requires_grad=True)
        optimizer = torch.optim.AdamW([alpha_Lh], lr=self.learning_rate, weight_decay=0.0)
        course = LambdaLR(optimizer, lambda step: rate_at(step, steps))
        for batch in batches:
            optimizer.zero_grad()
            self.loss(family, batch, alpha_Lh).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            course.step()
            alpha_Lh.data.clamp_(0, 1)
        if not bool(are_finite(alpha_Lh)):
            raise no_numbers("while its heads were weighed", family.model.dtype)
        return HeadAlphas(rounded(alpha_Lh.tolist()), self.sinks, self.recent)

    def loss(self, family: Family, batch: Batch, alpha_Lh: Tensor) -> Tensor:
        """Distillation of the rows that predict the answers, plus the weighted mean alpha."""
        rows_BN, _ = predicting_rows(batch.labels_BN)
        target_RD, mixed_RD = (
            self._hidden(family, batch, each, rows_BN) for each in (torch.ones_like(alpha_Lh), alpha_Lh)
        )
        return (mixed_RD - target_RD).pow(2).mean(-1).mean() + self.regularisation * alpha_Lh.abs().mean()

    def _hidden(self, family: Family, batch: Batch, alpha_Lh: Tensor, rows_BN: Tensor) -> Tensor:
        """Last hidden states of some rows under some alphas, [R, D] in fp32."""
        mix = HeadMix(alpha_Lh, self.sinks, self.recent, batch.regions_BN != Region.PADDING)
        with torch.set_grad_enabled(alpha_Lh.requires_grad):
            hidden = mixed_hidden(family, family.embed(batch), family.positions(batch), mix)
        return hidden[rows_BN].float()


def rate_at(step: int, steps: int) -> float:
    """Factor of the learning rate: rises over the first fifth of the steps, falls over the last, a tenth at least."""
    fifth = max(1, steps // 5)
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))
