"""An order of training records that can be resumed anywhere and shared out to any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

_GROUPED_BATCHES = 50  # batches that are filled together when records are grouped by length, as in transformers


class ResumableSampler(DistributedSampler[int]):
    """Shuffled passes over the records as one endless stream of global batches.

    Global batch ``b`` is a pure function of the seed: batch ``b % batches_per_pass`` of the permutation drawn for pass
    ``b // batches_per_pass``; process ``rank`` takes its own contiguous part of it. So the place in the data is one
    number, the batches that training has consumed, and nothing that workers have fetched ahead counts. Every ``iter()``
    asks for that number and yields from there to the end of the trainer's epoch: one pass, or less where
    ``limit_train_batches`` cuts epochs short (the next epoch then goes on with the pass). It is a
    ``DistributedSampler`` so that Lightning never wraps it in one of its own; ``set_epoch`` changes nothing.

    With ``sizes`` a batch holds records of like size: 50 batches at a time are filled in the order (images, text length
    to within a factor of two), then all batches of the pass are shuffled. Short answers are then neither padded to the
    longest description of their batch nor drowned by its tokens in the loss.

    Args:
        num_records: records to shuffle.
        batch_size: records per process and batch.
        seed: of the shuffling, not negative.
        rank: this process.
        world_size: processes that share each global batch.
        limit: the trainer's ``limit_train_batches``: batches (int) or share of a pass (float) that make an epoch.
        consumed: returns the batches that training has consumed so far.
        sizes: (images, characters of text) of every record, to group them by; None: batches are drawn at random.

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
        sizes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        # torch reads nothing but the length
        super().__init__(cast("Dataset[int]", range(num_records)), world_size, rank, seed=seed)
        self.num_records, self.batch_size, self.consumed = num_records, batch_size, consumed
        self._sizes = None if sizes is None else [(images, math.frexp(text)[1]) for images, text in sizes]
        self.batches_per_pass = num_records // (batch_size * world_size)
        share = int(self.batches_per_pass * limit)
        self.batches_per_epoch = min(self.batches_per_pass, limit) if isinstance(limit, int) else share
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
            "group_by_length": int(self._sizes is not None),
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
        return order if self._sizes is None else self._grouped(order, self._sizes, generator)

    def _grouped(self, order: torch.Tensor, sizes: list[tuple[int, int]], generator: torch.Generator) -> torch.Tensor:
        """The same records (but the last incomplete batch), so that each global batch holds records of like size."""
        batch = self.batch_size * self.num_replicas
        chunks = torch.split(order[: self.batches_per_pass * batch], batch * _GROUPED_BATCHES)
        alike = [index for chunk in chunks for index in sorted(chunk.tolist(), key=sizes.__getitem__)]
        shuffled = torch.randperm(self.batches_per_pass, generator=generator)
        return torch.tensor(alike).view(self.batches_per_pass, batch)[shuffled].flatten()
