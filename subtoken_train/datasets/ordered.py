"""Loaders of all data modules: the training order resumes anywhere, batches know their window. Legend: R records."""

import signal
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar, cast

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from subtoken_train.datasets.image_sources import FolderImages
from subtoken_train.datasets.unknown_tokens import SomeTexts
from subtoken_train.errors import MAX_SEED, MAX_TOKENS, check_range
from subtoken_train.families.family import Family
from subtoken_train.reducers.base import Reducer
from subtoken_train.types import Batch

_GROUPED_BATCHES = 50  # batches that are filled together when records are grouped by length, as in transformers


class AccumulationWindows:
    """Yields (micro-batch, labelled tokens of its window, micro-batches of its window), ``size`` held at a time.

    ``first``: the micro-batch of the epoch that the loader starts with.
    """

    def __init__(self, loader: DataLoader[Any], size: int, first: Callable[[], int] = lambda: 0) -> None:
        self.loader, self.size, self.first = loader, size, first

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Batch, int, int]]:
        if self.first() % self.size:
            place = f"micro-batch {self.first()} of the epoch, inside an accumulation window of {self.size}"
            raise ValueError(f"training would start at {place}; resume with the same accumulate_grad_batches")
        batches: Iterator[Batch] = iter(self.loader)
        while window := list(islice(batches, self.size)):
            # the first label of a sequence is never a target
            tokens = sum(int((batch.labels_BN[:, 1:] != -100).sum()) for batch in window)
            for batch in window:
                yield batch, tokens, len(window)


def outlive_stop_signals(worker: int) -> None:
    """Let a worker go on where Ctrl-C or SLURM signals the whole run, which ends it; a second SIGTERM does end one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, signal.SIG_DFL))


class ResumableSampler(DistributedSampler[int]):
    """Shuffled passes over the records as one endless stream of global batches.

    Global batch ``b`` is batch ``b % batches_per_pass`` of the permutation that the seed draws for pass ``b //
    batches_per_pass``; process ``rank`` takes its own contiguous part. So the place in the data is one number, the
    batches that training has ``consumed``, from which every ``iter()`` goes on to the end of the trainer's epoch: one
    pass, or the batches (int) or share of a pass (float) of ``limit``. Lightning never wraps a ``DistributedSampler``.

    With ``sizes`` ((images, characters of text) of every record, [R, 2]) a global batch has images in all records or in
    none: processes of a sharded model run the same parts. What is left of both at the end of a pass makes one mixed
    batch if every process's part can have an image. ``by_length``: 50 batches at a time are filled in the order
    (images, text length to within a factor of two), and shuffled.
    """

    def __init__(
        self,
        num_records: int,
        batch_size: int,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        limit: int | float = 1.0,
        consumed: Callable[[], int] = lambda: 0,
        sizes: NDArray[np.int64] | None = None,
        by_length: bool = False,
    ) -> None:
        # torch reads nothing but the length
        super().__init__(cast("Dataset[int]", range(num_records)), world_size, rank, seed=seed)
        self.num_records, self.batch_size, self.consumed = num_records, batch_size, consumed
        self._images = np.zeros(num_records, bool) if sizes is None else sizes[:, 0] > 0
        self._key = None  # by which records are alike: images, then the text's binary magnitude
        if by_length:
            assert sizes is not None
            self._key = sizes[:, 0] * 64 + np.frexp(sizes[:, 1])[1]
        size, images = batch_size * world_size, int(self._images.sum())
        texts = num_records - images
        self.batches_per_pass = texts // size + images // size + self._mixed_batch(texts % size, images % size)
        share = limit if isinstance(limit, int) else int(self.batches_per_pass * limit)
        self.batches_per_epoch = min(self.batches_per_pass, share)
        if self.batches_per_pass == 0:
            batch = f"batch of batch_size {batch_size} on {world_size} process(es)"
            raise ValueError(f"{num_records} training records do not fill one {batch}; lower batch_size or add records")
        check_range("seed", seed, 0)

    @property
    def identity(self) -> dict[str, int]:
        """All that the order and the ends of epochs depend on; a count of batches is a place only under the same."""
        return {
            "records": self.num_records,
            "records per global batch": self.batch_size * self.num_replicas,
            "seed": self.seed,
            "batches per epoch": self.batches_per_epoch,
            "group_by_length": int(self._key is not None),
            "records with images": int(self._images.sum()),
        }

    def __len__(self) -> int:
        return self.batches_per_pass * self.batch_size  # Lightning applies its limit to this

    def __iter__(self) -> Iterator[int]:
        first, current_pass, order = self.consumed(), -1, torch.empty(0)
        for batch in range(first, first + self.batches_per_epoch - first % self.batches_per_epoch):
            pass_, index = divmod(batch, self.batches_per_pass)
            if pass_ != current_pass:
                current_pass, order = pass_, self._permutation(pass_)
            start = (index * self.num_replicas + self.rank) * self.batch_size
            yield from order[start : start + self.batch_size].tolist()

    def _permutation(self, pass_: int) -> torch.Tensor:
        """Return the order of one pass, int64 [num_records]."""
        # SeedSequence mixes the two numbers, so that (seed 0, pass 1) and (seed 1, pass 0) differ.
        mixed = int(np.random.SeedSequence([self.seed, pass_]).generate_state(1, np.uint64)[0])
        generator = torch.Generator().manual_seed(mixed)
        order = torch.randperm(self.num_records, generator=generator)
        if self._key is None and int(self._images.sum()) in (0, self.num_records):
            return order  # nothing to group
        batches = self._batches(order.numpy())
        return torch.from_numpy(batches)[torch.randperm(len(batches), generator=generator)].flatten()

    def _batches(self, order: NDArray[Any]) -> NDArray[Any]:
        """Return the same records as global batches of one kind each, [batches, records per global batch]."""
        size, images = self.batch_size * self.num_replicas, self._images[order]
        whole, rest = [], []
        for kind in (order[~images], order[images]):
            full, step = len(kind) // size * size, size * _GROUPED_BATCHES
            for start in range(0, full, step):
                chunk = kind[start : min(start + step, full)]
                whole.append(chunk if self._key is None else chunk[np.argsort(self._key[chunk], kind="stable")])
            rest.append(kind[full:])
        if self._mixed_batch(len(rest[0]), len(rest[1])):
            # evenly: each of up to as many processes as there are images finds one in its part
            mixed, places = np.empty(size, order.dtype), np.arange(len(rest[1])) * size // len(rest[1])
            is_image = np.isin(np.arange(size), places)
            mixed[is_image], mixed[~is_image] = rest[1], rest[0][: size - len(places)]
            whole.append(mixed)
        return np.concatenate(whole).reshape(-1, size)

    def _mixed_batch(self, texts: int, images: int) -> bool:
        """Tell whether what is left of both kinds fills a batch in which every process has an image."""
        return texts + images >= self.batch_size * self.num_replicas and images >= self.num_replicas


def validation_order(sizes: NDArray[np.int64] | None, num_records: int, rank: int, world_size: int) -> list[int]:
    """Return one process's share of validation records, in file order (those with images first if not all have some).

    At every step all processes have images or none has: up to ``world_size - 1`` records of each kind are repeated.
    """
    images = np.zeros(num_records, bool) if sizes is None else sizes[:, 0] > 0
    share: list[int] = []
    for kind in (np.flatnonzero(images), np.flatnonzero(~images)):
        if len(kind):
            padded = np.resize(kind, -(-len(kind) // world_size) * world_size)  # begins again
            share += padded[rank::world_size].tolist()
    return share


MAX_WORKERS = 64  # each a process with the training process's memory, started anew for every epoch
T = TypeVar("T")


class OrderedDataModule(L.LightningDataModule, ABC, Generic[T]):
    """Training and validation records in an order that depends on the seed, the records and the *global* batch alone.

    Records are shared out to the processes here, so recipes set ``trainer.use_distributed_sampler: false``.

    Args:
        batch_size: training samples per process and step of the data loader.
        val_batch_size: validation samples per process and step; default: ``batch_size``.
        num_workers: processes that make batches (decode images, tokenise) beside training; 0: in the training process.
        seed: of the samples' order, and of samples that are drawn.
    """

    def __init__(
        self, batch_size: int = 8, val_batch_size: int | None = None, num_workers: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        check_range("batch_size", batch_size, 1, MAX_TOKENS)
        check_range("val_batch_size", val_batch_size, 1, MAX_TOKENS)
        check_range("num_workers", num_workers, 0, MAX_WORKERS)
        check_range("seed", seed, 0, MAX_SEED)
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self._train: Any = None  # records with a length and places, of T
        self._val: Any = None
        self._order, self._resumed_order = dict[str, int](), dict[str, int]()
        self._rehearsed_family: Family | None = None
        self.group_by_length = False

    @abstractmethod
    def read(self, training: bool = True) -> None:
        """Parse and check the data, once; a command calls it before it touches the run's folder."""

    def check_images(self, family: type[Family], reducer: Reducer) -> list[FolderImages]:
        """Look for the images that the records of ``read`` name; a command calls it before it builds the model."""
        return []

    @abstractmethod
    def some_texts(self, tokenizer: Any) -> SomeTexts:
        """Return texts of some training records that ``read`` found, as a model with ``tokenizer`` learns them."""

    @abstractmethod
    def collator(self) -> Callable[[list[T]], Batch]:
        """Return what makes a batch of records."""

    def sizes(self, records: Any) -> NDArray[np.int64] | None:
        """Return (images, characters) of every record, [R, 2]; None where all records are of one kind."""
        return None

    def training_order(
        self, rank: int = 0, world_size: int = 1, limit: int | float = 1.0, consumed: Callable[[], int] = lambda: 0
    ) -> ResumableSampler:
        """Return the order of the training records of ``setup``."""
        assert self._train is not None
        grouped: dict[str, Any] = {"sizes": self.sizes(self._train), "by_length": self.group_by_length}
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "limit": limit, "consumed": consumed}
        return ResumableSampler(len(self._train), self.batch_size, self.seed, **place, **grouped)

    def samples(self, family: Family, count: int, size: int = 1) -> Iterator[Batch]:
        """Yield the first ``count`` full batches of ``size`` samples of a run on one device, as the loss sees them."""
        self._rehearsed_family = family
        collate, records = self.collator(), iter(self.records_to_show())
        for _ in range(count):
            if len(some := list(islice(records, size))) < size:
                return
            yield collate(some)

    def records_to_show(self) -> Iterator[T]:
        """Yield the training records as a run on one device takes them."""
        self.setup("fit")
        assert self._train is not None
        return map(self._train.__getitem__, self.training_order())

    @property
    def family(self) -> Family:
        """The backbone family of the module that is being trained."""
        return cast("Family", self._rehearsed_family if self.trainer is None else self.trainer.lightning_module.family)

    def rehearse(self, family: Family, trainer: L.Trainer) -> None:
        """Set up training before it starts: what a user can get wrong comes out now."""
        self._rehearsed_family = family
        self.setup("fit")
        if self._train is not None:
            self.training_order(world_size=trainer.world_size)

    def setup(self, stage: str) -> None:
        """Read and check the records that ``stage`` (``fit`` | ``validate``) needs."""
        self._resumed_order = {}  # a second fit of the same object may start afresh
        self.read(training=stage == "fit")

    def train_dataloader(self) -> AccumulationWindows:
        """Load shuffled, full batches only, from where training stands."""
        assert self.trainer is not None
        assert self._train is not None
        sampler = self.training_order(
            self.trainer.global_rank, self.trainer.world_size, self.trainer.limit_train_batches, self.batches_consumed
        )
        order = sampler.identity
        for name, saved in self._resumed_order.items():
            if order.get(name) != saved:  # a count of batches would mean another place in the data
                found = f"another order of the data ({name}: {saved}, here {order.get(name)})"
                raise ValueError(f"the checkpoint counts in {found}; resume with its data and sizes, or start over")
        self._order = order  # for the next checkpoint
        loader = self._loader(self._train, self.batch_size, sampler, drop_last=True)
        place = lambda: sampler.consumed() % sampler.batches_per_epoch  # noqa: E731
        return AccumulationWindows(loader, self.trainer.accumulate_grad_batches, place)

    def val_dataloader(self) -> DataLoader[T] | list[Any]:
        """Load in file order; no loader without validation records."""
        assert self.trainer is not None
        if self._val is None:
            return []
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        order = None if world_size == 1 else validation_order(self.sizes(self._val), len(self._val), rank, world_size)
        return self._loader(self._val, self.val_batch_size, order, drop_last=False)

    def state_dict(self) -> dict[str, Any]:
        # what the order depends on; the place in it is in the state of Lightning's loops
        return {"order": self._order} if self._order else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the order that the checkpoint counts in."""
        self._resumed_order = state_dict["order"]
        # Lightning only looks for a state in the loader itself, and would call the data not resumable.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")

    def batches_consumed(self) -> int:
        """Count the batches that training has finished since step 0, over all resumes; not those fetched ahead."""
        assert self.trainer is not None
        # Lightning types the tracker by its base class, which has no such count.
        total: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return int(total.processed)

    def _loader(self, records: Any, batch_size: int, sampler: Any, drop_last: bool) -> DataLoader[T]:
        return DataLoader(
            records,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=self.num_workers,  # not persistent: left to the garbage collector, each stalls the end by 5 s
            generator=torch.Generator(),  # its own: starting a loader must not advance the run's random state
            collate_fn=self.collator(),
            worker_init_fn=outlive_stop_signals,
        )
