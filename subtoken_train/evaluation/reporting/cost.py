"""What the answered prompts' caches cost, measured: the sums that a table's budget columns are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from subtoken_train.evaluation.results.store import SampleRecord


@dataclass(frozen=True)
class Cost:
    """Sums over samples of what ``SampleRecord`` says of one; ``emptied`` counts those that lost a whole region."""

    kv_bytes: int = 0
    dense_kv_bytes: int = 0
    region_bytes: int = 0
    region_dense_bytes: int = 0
    index_bytes: int = 0
    entries_before: int = 0
    entries_after: int = 0
    values_after: float = 0.0
    emptied: int = 0

    @classmethod
    def of(cls, records: Iterable[SampleRecord]) -> Cost:
        """The records' sums."""
        total = cls()
        for record in records:
            total += cls(
                record.kv_bytes,
                record.dense_kv_bytes,
                record.region_bytes,
                record.region_dense_bytes,
                record.index_bytes,
                record.entries_before,
                record.entries_after,
                record.values_after,
                int(bool(record.emptied)),
            )
        return total

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    @property
    def prompt_share(self) -> float | None:
        """Whole prompts, text and index included, of their dense caches; None where there is nothing."""
        return self.kv_bytes / self.dense_kv_bytes if self.dense_kv_bytes else None

    @property
    def payload_share(self) -> float | None:
        """The compressed region without its index: what a nominal budget promises, measured."""
        return (self.region_bytes - self.index_bytes) / self.region_dense_bytes if self.region_dense_bytes else None

    @property
    def region_share(self) -> float | None:
        """The compressed region alone, index included; None where no prompt has one."""
        return self.region_bytes / self.region_dense_bytes if self.region_dense_bytes else None

    @property
    def entries_share(self) -> float | None:
        """(token, layer) entries that stayed."""
        return self.entries_after / self.entries_before if self.entries_before else None

    @property
    def acted(self) -> bool:
        """Whether an entry or a value part left the cache, or what stayed takes fewer bytes."""
        fewer = self.entries_after < self.entries_before or self.values_after < self.entries_after
        return fewer or self.region_bytes < self.region_dense_bytes
