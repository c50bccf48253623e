"""Lightning's side of the data: loaders over instruction records, in an order that resumes anywhere."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from subtoken_train.backbones.base import Family
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.sampler import ResumableSampler
from subtoken_train.datasets.window import AccumulationWindows


class InstructionDataModule(L.LightningDataModule):
    """Instruction data in LLaVA's format for training and validation.

    Records are shared out to the processes here, so recipes set ``trainer.use_distributed_sampler: false``. The order
    depends on the seed, the records and the *global* batch (``batch_size`` x processes) alone; the place in it is
    Lightning's own count of batches, which is in every checkpoint and is read whenever a loader starts.

    Args:
        train_file: JSON list or JSON lines of training records.
        image_folder: where image paths start; default: the training file's own folder.
        val_file: records of the validation loss; default: no validation.
        max_length: tokens per sample, visual ones included; longer samples are cut at the right.
        batch_size: training records per process and step of the data loader.
        val_batch_size: validation records per process and step; default: ``batch_size``.
        num_workers: processes that decode images and tokenise beside training; 0: in the training process.
        seed: of the shuffling.
        group_by_length: fill each training batch with records of like size (images, then text length).
    """

    def __init__(
        self,
        train_file: str,
        *,
        image_folder: str | None = None,
        val_file: str | None = None,
        max_length: int = 2048,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        group_by_length: bool = False,
    ) -> None:
        super().__init__()
        for name, value in {
            "max_length": max_length,
            "batch_size": batch_size,
            "val_batch_size": val_batch_size,
        }.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        self.train_file, self.val_file = train_file, val_file
        self.image_folder = Path(train_file).parent if image_folder is None else Path(image_folder)
        self.max_length, self.batch_size, self.num_workers, self.seed = max_length, batch_size, num_workers, seed
        self.group_by_length = group_by_length
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self._train: InstructionRecords | None = None
        self._val: InstructionRecords | None = None
        self._sampler: ResumableSampler | None = None
        self._resumed_order: dict[str, int] = {}

    @property
    def family(self) -> Family:
        """The backbone family of the module that is being trained."""
        assert self.trainer is not None
        return cast("Family", self.trainer.lightning_module.family)

    def setup(self, stage: str) -> None:
        """Read and check the records that ``stage`` (``fit`` | ``validate``) needs.

        Raises:
            ValueError: see ``InstructionRecords``.
        """
        self._resumed_order = {}  # a second fit of the same object may start afresh
        self.read(training=stage == "fit")

    def read(self, training: bool = True) -> None:
        """Parse and check the data files, once; a command calls it before it touches the run's folder.

        Raises:
            ValueError: see ``InstructionRecords``.
        """
        if training and self._train is None:
            self._train = InstructionRecords(self.train_file, self.image_folder)
        if self.val_file is not None and self._val is None:
            self._val = InstructionRecords(self.val_file, self.image_folder)

    def train_dataloader(self) -> AccumulationWindows:
        """Shuffled, full batches only, from where training stands, annotated with their accumulation window.

        Raises:
            ValueError: the records do not fill one batch, or a checkpoint counts another order of the data.
        """
        assert self.trainer is not None
        assert self._train is not None
        self._sampler = ResumableSampler(
            len(self._train),
            self.batch_size,
            self.seed,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            limit=self.trainer.limit_train_batches,
            consumed=self._batches_consumed,
            sizes=self._train.sizes() if self.group_by_length else None,
        )
        self._check_resumed_order(self._sampler.identity)
        loader = self._loader(self._train, self.batch_size, self._sampler, drop_last=True)
        return AccumulationWindows(loader, self.trainer.accumulate_grad_batches)

    def val_dataloader(self) -> DataLoader[Record] | list[Any]:
        """In file order; no loader without a validation file.

        Several processes take equal steps: up to one record per process is repeated, as in torch's own sampler.
        """
        assert self.trainer is not None
        if self._val is None:
            return []
        sampler: DistributedSampler[Record] | None = None
        if self.trainer.world_size > 1:
            sampler = DistributedSampler(self._val, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return self._loader(self._val, self.val_batch_size, sampler, drop_last=False)

    def state_dict(self) -> dict[str, Any]:
        """What the order of the data depends on; the place in it is in the state of Lightning's loops."""
        return {} if self._sampler is None else {"order": self._sampler.identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the order that the checkpoint counts in; ``train_dataloader`` compares it with this run's."""
        self._resumed_order = state_dict["order"]
        # Lightning only looks for a state in the loader itself, and would call the data not resumable.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")

    def _batches_consumed(self) -> int:
        """Batches that training has finished since the very first step, over all resumes; not those fetched ahead."""
        assert self.trainer is not None
        # Lightning types the tracker by its base class, which has no such count.
        total: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return int(total.processed)

    def _check_resumed_order(self, order: dict[str, int]) -> None:
        """A count of batches means another place in the data when the order differs."""
        for name, saved in self._resumed_order.items():
            if order[name] != saved:
                raise ValueError(
                    f"the checkpoint counts in another order of the data ({name}: {saved}, here {order[name]}); resume "
                    "with the same data, seed, limit_train_batches and batch_size x processes, or start a new run"
                )

    def _loader(
        self, records: InstructionRecords, batch_size: int, sampler: Any, drop_last: bool
    ) -> DataLoader[Record]:
        return DataLoader(
            records,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=self.num_workers,  # not persistent: left to the garbage collector, each stalls the end by 5 s
            generator=torch.Generator(),  # its own: starting a loader must not advance the run's random state
            collate_fn=Collator(self.family, self.max_length),
        )
