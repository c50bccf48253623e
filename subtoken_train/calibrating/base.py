"""What makes a calibration: a method's numbers, from prompts that run through a backbone.

Legend: B batch, N positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import ClassVar

from subtoken_train.calibrating.prompts import calibration_prompts
from subtoken_train.calibrations import CalibratedNumbers, Calibration, CalibrationData
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS, check_range
from subtoken_train.types import Batch, Identity, Region

Progress = Callable[[int, int], None]
"""Called with (done, of how many)."""


@dataclass(frozen=True)
class Calibrator(ABC):
    """How one method is calibrated; a frozen dataclass whose fields are the settings.

    Attributes:
        samples: prompts that are read.
        batch_size: of them, at a time.
        context_length: tokens of a drawn prompt's context.
        seed: of what is drawn.
    """

    name: ClassVar[str]
    answers: ClassVar[bool] = False
    """Whether the prompts' answers are read too."""

    samples: int = 10
    batch_size: int = 2
    context_length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for setting, most in (("samples", MAX_COUNT), ("batch_size", MAX_COUNT), ("context_length", MAX_TOKENS)):
            check_range(f"{self.name} {setting}", getattr(self, setting), 1, most)
        check_range(f"{self.name} seed", self.seed, 0, 2**32 - 1)

    @abstractmethod
    def numbers(self, backbone: CompressedBackbone, batches: Iterable[Batch]) -> CalibratedNumbers:
        """What the method reads, from prompts of ``samples``; ``check`` passed."""

    def check(self, backbone: CompressedBackbone) -> None:
        """Raise a worded ``ValueError`` where the backbone cannot be calibrated so."""
        return

    def run(
        self, backbone: CompressedBackbone, identity: Identity, data: str | None = None, show: Progress | None = None
    ) -> Calibration[CalibratedNumbers]:
        """A calibration of a backbone in evaluation mode.

        Args:
            backbone: with or without an adapter.
            identity: of the backbone, as adapters record it.
            data: a data set's name or a file, see ``calibration_prompts``.
            show: told after every batch.

        Raises:
            ValueError: data that does not fit the backbone, or has nothing to calibrate with.
        """
        self.check(backbone)
        source = calibration_prompts(
            backbone.family, data, self.samples, self.batch_size, self.context_length, self.seed, self.answers
        )
        read = [0, 0]

        def counted() -> Iterable[Batch]:
            for batch in source.batches:
                yield batch
                read[0] += len(batch.record_ids)
                read[1] += int((batch.regions_BN != Region.PADDING).sum())
                if show is not None:
                    show(read[0], self.samples)

        numbers = self.numbers(backbone, counted())
        made_of = CalibrationData(source.name, read[0], read[1], source.sha256)
        return Calibration(self.name, identity, asdict(self), numbers, made_of)
