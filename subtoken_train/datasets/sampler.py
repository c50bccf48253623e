"""An order of training records that can be resumed anywhere and shared out to any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils.data import DistributedSampler


class ResumableSampler(DistributedSampler[int]):
    """Shuffled passes over the records as one endless stream of global batches.

    Global batch ``b`` is a pure function of the seed: batch ``b % batches_per_pass`` of the permutation drawn for pass
    ``b // batches_per_pass``; process ``rank`` takes its own contiguous part of it. So the place in the data is one
    number, the batches that training has consumed, and nothing that workers have fetched ahead counts. Every ``iter()``
    asks for that number and yields one pass length of batches from there, into the next pass where it has to.
    It is a ``DistributedSampler`` so that Lightning never wraps it in one of its own; ``set_epoch`` changes nothing.

    Args:
        num_records: records to shuffle.
        batch_size: records per process and batch.
        seed: of the shuffling, not negative.
        rank: this process.
        world_size: processes that share each global batch.
        consumed: returns the batches that training has consumed so far.

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
        consumed: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(range(num_records), world_size, rank, seed=seed)
        self.num_records, self.batch_size, self.consumed = num_records, batch_size, consumed
        self.batches_per_pass = num_records // (batch_size * world_size)
        if self.batches_per_pass == 0:
            raise ValueError(
                f"{num_records} training records do not fill one batch of batch_size {batch_size} on {world_size} "
                f"process(es); lower batch_size or add records"
            )
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be 0 or more")

    def __len__(self) -> int:
        return self.batches_per_pass * self.batch_size

    def __iter__(self) -> Iterator[int]:
        first = self.consumed()
        current_pass, order = -1, torch.empty(0)
        for batch in range(first, first + self.batches_per_pass):
            pass_, index = divmod(batch, self.batches_per_pass)
            if pass_ != current_pass:
                current_pass, order = pass_, self._permutation(pass_)
            start = (index * self.num_replicas + self.rank) * self.batch_size
            yield from order[start : start + self.batch_size].tolist()

    def _permutation(self, pass_: int) -> torch.Tensor:
        """The order of one pass, int64 [num_records]."""
        # SeedSequence mixes the two numbers, so that (seed 0, pass 1) and (seed 1, pass 0) differ.
        mixed = int(np.random.SeedSequence([self.seed, pass_]).generate_state(1, np.uint64)[0])
        return torch.randperm(self.num_records, generator=torch.Generator().manual_seed(mixed))
