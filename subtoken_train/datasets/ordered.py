"""What every data module shares: loaders whose order resumes anywhere and whose batches know their window."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from subtoken_train.datasets.image_sources import FolderImages
from subtoken_train.datasets.loaders import (
    AccumulationWindows,
    ResumableSampler,
    outlive_stop_signals,
    validation_order,
)
from subtoken_train.datasets.unknown_tokens import SomeTexts
from subtoken_train.errors import MAX_SEED, MAX_TOKENS, check_range
from subtoken_train.families.family import Family
from subtoken_train.types import Batch

MAX_WORKERS = 64
"""Of ``num_workers``: each is a process with the training process's memory, started anew for every epoch."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SizedRecords(Protocol[T_co]):
    """A data set of known length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class OrderedDataModule(L.LightningDataModule, ABC, Generic[T]):
    """Training and validation records in an order that depends on the seed, the records and the *global* batch alone.

    Records are shared out to the processes here, so recipes set ``trainer.use_distributed_sampler: false``. The place
    in the order is Lightning's own count of batches, which is in every checkpoint and is read whenever a loader starts.
    A subclass reads the records in ``read`` (and ``setup``) and turns them into batches in ``collator``. Where some
    records have images and some have none, ``sizes`` says so, and no step mixes them (see ``ResumableSampler``).

    Args:
        batch_size: training records per process and step of the data loader.
        val_batch_size: validation records per process and step; default: ``batch_size``.
        num_workers: processes that make batches beside training; 0: in the training process.
        seed: of the shuffling.

    Raises:
        ValueError: a size below 1, or a number out of range.
    """

    def __init__(
        self, batch_size: int = 8, val_batch_size: int | None = None, num_workers: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        check_positive(batch_size=batch_size, val_batch_size=val_batch_size)
        check_range("num_workers", num_workers, 0, MAX_WORKERS)
        check_range("seed", seed, 0, MAX_SEED)
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self._train: SizedRecords[T] | None = None
        self._val: SizedRecords[T] | None = None
        self._order: dict[str, int] = {}
        self._resumed_order: dict[str, int] = {}
        self._rehearsed_family: Family | None = None
        self.group_by_length = False

    @abstractmethod
    def read(self, training: bool = True) -> None:
        """Parse and check the data, once; a command calls it before it touches the run's folder.

        Raises:
            ValueError: the data are missing or wrong.
        """

    def check_images(self, family: type[Family]) -> list[FolderImages]:
        """Look for the images that the records of ``read`` name; a command calls it before it builds the model.

        Raises:
            ValueError: images are missing, or records have videos and ``family`` takes none.
        """
        return []

    @abstractmethod
    def some_texts(self) -> SomeTexts:
        """Texts of some training records that ``read`` found."""

    @abstractmethod
    def collator(self) -> Callable[[list[T]], Batch]:
        """What makes a batch of records."""

    def sizes(self, records: SizedRecords[T]) -> NDArray[np.int64] | None:
        """(images, characters) of every record, [R, 2]; None where all records are of one kind."""
        return None

    def training_order(
        self, rank: int = 0, world_size: int = 1, limit: int | float = 1.0, consumed: Callable[[], int] = lambda: 0
    ) -> ResumableSampler:
        """The order of the training records that ``setup`` found; arguments and errors as ``ResumableSampler``'s."""
        assert self._train is not None
        return ResumableSampler(
            len(self._train),
            self.batch_size,
            self.seed,
            rank=rank,
            world_size=world_size,
            limit=limit,
            consumed=consumed,
            sizes=self.sizes(self._train),
            by_length=self.group_by_length,
        )

    def samples(self, family: Family, count: int, size: int = 1) -> Iterator[Batch]:
        """The first ``count`` batches of ``size`` samples of a run on one device as the loss sees them; full ones."""
        self._rehearsed_family = family
        collate, records = self.collator(), iter(self.records_to_show())
        for _ in range(count):
            if len(some := list(islice(records, size))) < size:
                return
            yield collate(some)

    def records_to_show(self) -> Iterator[T]:
        """The training records as a run on one device takes them."""
        self.setup("fit")
        assert self._train is not None
        records = self._train
        return (records[index] for index in self.training_order())

    @property
    def family(self) -> Family:
        """The backbone family of the module that is being trained."""
        if self.trainer is None:
            assert self._rehearsed_family is not None
            return self._rehearsed_family
        return cast("Family", self.trainer.lightning_module.family)

    def rehearse(self, family: Family, trainer: L.Trainer) -> None:
        """Set up training before it starts: what a user can get wrong comes out now."""
        self._rehearsed_family = family
        self.setup("fit")
        if self._train is not None:
            self.training_order(world_size=trainer.world_size)

    def setup(self, stage: str) -> None:
        """Read and check the records that ``stage`` (``fit`` | ``validate``) needs, see ``read``."""
        self._resumed_order = {}  # a second fit of the same object may start afresh
        self.read(training=stage == "fit")

    def train_dataloader(self) -> AccumulationWindows:
        """Shuffled, full batches only, from where training stands, annotated with their accumulation window.

        Raises:
            ValueError: the records do not fill one batch, or a checkpoint counts another order of the data.
        """
        assert self.trainer is not None
        assert self._train is not None
        sampler = self.training_order(
            self.trainer.global_rank, self.trainer.world_size, self.trainer.limit_train_batches, self.batches_consumed
        )
        self.keep_order(sampler.identity)
        loader = self._loader(self._train, self.batch_size, sampler, drop_last=True)
        place = lambda: sampler.consumed() % sampler.batches_per_epoch  # noqa: E731
        return AccumulationWindows(loader, self.trainer.accumulate_grad_batches, place)

    def val_dataloader(self) -> DataLoader[T] | list[Any]:
        """In file order; no loader without validation records. Several processes: see ``validation_order``."""
        assert self.trainer is not None
        if self._val is None:
            return []
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        order = None if world_size == 1 else validation_order(self.sizes(self._val), len(self._val), rank, world_size)
        return self._loader(self._val, self.val_batch_size, order, drop_last=False)

    def state_dict(self) -> dict[str, Any]:
        """What the order of the data depends on; the place in it is in the state of Lightning's loops."""
        return {"order": self._order} if self._order else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the order that the checkpoint counts in; ``train_dataloader`` compares it with this run's."""
        self._resumed_order = state_dict["order"]
        # Lightning only looks for a state in the loader itself, and would call the data not resumable.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")

    def batches_consumed(self) -> int:
        """Batches that training has finished since the very first step, over all resumes; not those fetched ahead."""
        assert self.trainer is not None
        # Lightning types the tracker by its base class, which has no such count.
        total: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return int(total.processed)

    def keep_order(self, order: dict[str, int]) -> None:
        """Note what the order depends on for the next checkpoint.

        Raises:
            ValueError: the checkpoint that is resumed counts in another order.
        """
        for name, saved in self._resumed_order.items():
            if order.get(name) != saved:  # a count of batches would mean another place in the data
                raise ValueError(
                    f"the checkpoint counts in another order of the data ({name}: {saved}, here {order.get(name)}); "
                    "resume with the same data, seed, limit_train_batches and batch_size x processes, or start anew"
                )
        self._order = order

    def _loader(self, records: SizedRecords[T], batch_size: int, sampler: Any, drop_last: bool) -> DataLoader[T]:
        return DataLoader(
            cast("Dataset[T]", records),
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=self.num_workers,  # not persistent: left to the garbage collector, each stalls the end by 5 s
            generator=torch.Generator(),  # its own: starting a loader must not advance the run's random state
            collate_fn=self.collator(),
            worker_init_fn=outlive_stop_signals,
        )


def check_positive(**sizes: int | None) -> None:
    """Raise a ``ValueError`` that names the first size below 1, or past anything that is meant; None is no size."""
    for name, value in sizes.items():
        check_range(name, value, 1, MAX_TOKENS)
