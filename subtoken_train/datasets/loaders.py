"""What goes around a data loader: the order of records, accumulation windows, workers that outlive a stop signal.

There are two orders, shared out to processes: for training, one that can be resumed anywhere; one for validation.

Legend: R records.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from subtoken_train.types import Batch

_GROUPED_BATCHES = 50  # batches that are filled together when records are grouped by length, as in transformers


class AccumulationWindows:
    """Yields each micro-batch with the labelled tokens and the number of micro-batches of its window.

    Averaging micro-batch means would weigh a short answer's tokens more than a long one's. The sum over the window is
    known only by looking ahead: ``size`` batches are held at a time.

    Args:
        loader: yields ``Batch``.
        size: micro-batches per optimiser step (``trainer.accumulate_grad_batches``).
        first: the micro-batch of the epoch that the loader starts with; Lightning's windows count from the epoch's
            first.
    """

    def __init__(self, loader: DataLoader[Any], size: int, first: Callable[[], int] = lambda: 0) -> None:
        self.loader = loader
        self.size = size
        self.first = first

    def __len__(self) -> int:
        """Micro-batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Batch, int, int]]:
        """(micro-batch, labelled tokens of its window, micro-batches of its window).

        Raises:
            ValueError: the loader starts inside a window: the gradients of its first part are in no checkpoint.
        """
        if self.first() % self.size:
            raise ValueError(
                f"training would start with micro-batch {self.first()} of the epoch, inside an accumulation window of "
                f"{self.size}; resume from a checkpoint taken after an optimiser step, with the same "
                "accumulate_grad_batches"
            )
        batches: Iterator[Batch] = iter(self.loader)
        while window := list(islice(batches, self.size)):
            # the first label of a sequence is never a target
            tokens = sum(int((batch.labels_BN[:, 1:] != -100).sum()) for batch in window)
            for batch in window:
                yield batch, tokens, len(window)


def outlive_stop_signals(worker: int) -> None:
    """Let a worker go on where a signal was meant for the whole run, for ``DataLoader(worker_init_fn=...)``.

    Ctrl-C and SLURM signal every process of a run. The training process then finishes its step, for which it needs its
    workers, and ends them itself. A second SIGTERM does end a worker: multiprocessing's last resort at exit.

    Args:
        worker: its number, not used.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _next_time)


def _next_time(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


class ResumableSampler(DistributedSampler[int]):
    """Shuffled passes over the records as one endless stream of global batches.

    Global batch ``b`` is a pure function of the seed: batch ``b % batches_per_pass`` of the permutation drawn for pass
    ``b // batches_per_pass``; process ``rank`` takes its own contiguous part of it. So the place in the data is one
    number, the batches that training has consumed, and nothing that workers have fetched ahead counts. Every ``iter()``
    asks for that number and yields from there to the end of the trainer's epoch: one pass, or less where
    ``limit_train_batches`` cuts epochs short (the next epoch then goes on with the pass). It is a
    ``DistributedSampler`` so that Lightning never wraps it in one of its own; ``set_epoch`` changes nothing.

    With ``sizes`` all records of a global batch have images, or none has: the processes of a sharded model must run the
    same parts of it, and in a text-only step none runs the vision tower. What is left of both kinds at the end of a
    pass makes one mixed batch if every process's part of it can have an image; else it is left out. With
    ``by_length``, too, a batch holds records of like size: 50 batches at a time are filled in the order (images, text
    length to within a factor of two). Short answers are then neither padded to the longest description of their batch
    nor drowned by its tokens in the loss. Grouped batches are shuffled.

    Args:
        num_records: records to shuffle.
        batch_size: records per process and batch.
        seed: of the shuffling, not negative.
        rank: this process.
        world_size: processes that share each global batch.
        limit: the trainer's ``limit_train_batches``: batches (int) or share of a pass (float) that make an epoch.
        consumed: returns the batches that training has consumed so far.
        sizes: (images, characters of text) of every record, [R, 2]; None: all records are of one kind.
        by_length: group by size as well; needs ``sizes``.

    Raises:
        ValueError: there are fewer records than one global batch holds, or the seed is negative.
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
        self.batches_per_pass = self._count_batches()
        share = limit if isinstance(limit, int) else int(self.batches_per_pass * limit)
        self.batches_per_epoch = min(self.batches_per_pass, share)
        if self.batches_per_pass == 0:
            raise ValueError(
                f"{num_records} training records do not fill one batch of batch_size {batch_size} on {world_size} "
                f"process(es); lower batch_size or add records"
            )
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be 0 or more")

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
        first = self.consumed()
        current_pass, order = -1, torch.empty(0)
        for batch in range(first, first + self.batches_per_epoch - first % self.batches_per_epoch):
            pass_, index = divmod(batch, self.batches_per_pass)
            if pass_ != current_pass:
                current_pass, order = pass_, self._permutation(pass_)
            start = (index * self.num_replicas + self.rank) * self.batch_size
            yield from order[start : start + self.batch_size].tolist()

    def _permutation(self, pass_: int) -> torch.Tensor:
        """The order of one pass, int64 [num_records]."""
        # SeedSequence mixes the two numbers, so that (seed 0, pass 1) and (seed 1, pass 0) differ.
        mixed = int(np.random.SeedSequence([self.seed, pass_]).generate_state(1, np.uint64)[0])
        generator = torch.Generator().manual_seed(mixed)
        order = torch.randperm(self.num_records, generator=generator)
        with_images = int(self._images.sum())
        if self._key is None and with_images in (0, self.num_records):
            return order  # nothing to group
        batches = self._batches(order.numpy())
        shuffled = torch.randperm(len(batches), generator=generator)
        return torch.from_numpy(batches)[shuffled].flatten()

    def _batches(self, order: NDArray[Any]) -> NDArray[Any]:
        """The same records as global batches of one kind each, [batches, records per global batch]."""
        size, images = self.batch_size * self.num_replicas, self._images[order]
        whole, rest = [], []
        for kind in (order[~images], order[images]):
            full = len(kind) // size * size
            whole.append(self._alike(kind[:full]))
            rest.append(kind[full:])
        if self._mixed_batch(len(rest[0]), len(rest[1])):
            # evenly: each of up to as many processes as there are images finds one in its part
            mixed, places = np.empty(size, order.dtype), np.arange(len(rest[1])) * size // len(rest[1])
            is_image = np.isin(np.arange(size), places)
            mixed[is_image], mixed[~is_image] = rest[1], rest[0][: size - len(places)]
            whole.append(mixed)
        return np.concatenate(whole).reshape(-1, size)

    def _alike(self, order: NDArray[Any]) -> NDArray[Any]:
        """Records of full batches, each next to those of like size with ``by_length``."""
        if self._key is None:
            return order
        step = self.batch_size * self.num_replicas * _GROUPED_BATCHES
        chunks = [order[start : start + step] for start in range(0, len(order), step)]
        return np.concatenate([order[:0], *(chunk[np.argsort(self._key[chunk], kind="stable")] for chunk in chunks)])

    def _count_batches(self) -> int:
        size, images = self.batch_size * self.num_replicas, int(self._images.sum())
        texts = self.num_records - images
        return texts // size + images // size + self._mixed_batch(texts % size, images % size)

    def _mixed_batch(self, texts: int, images: int) -> bool:
        """Whether what is left of both kinds fills a batch in which every process has an image."""
        return texts + images >= self.batch_size * self.num_replicas and images >= self.num_replicas


def validation_order(sizes: NDArray[np.int64] | None, num_records: int, rank: int, world_size: int) -> list[int]:
    """One process's share of the validation records, in file order (records with images first where not all have some).

    Processes take equal steps, and at every step all of them have images or none has: up to ``world_size - 1`` records
    of each kind are repeated. Arguments as ``ResumableSampler``'s.
    """
    images = np.zeros(num_records, bool) if sizes is None else sizes[:, 0] > 0
    share: list[int] = []
    for kind in (np.flatnonzero(images), np.flatnonzero(~images)):
        if len(kind):
            padded = np.resize(kind, -(-len(kind) // world_size) * world_size)  # begins again
            share += padded[rank::world_size].tolist()
    return share
