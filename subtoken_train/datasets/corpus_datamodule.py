"""Lightning's side of packed text: blocks of context and query region, cached or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

import lightning as L
from torch.utils.data import DataLoader, IterableDataset

from subtoken_train.datasets.corpus import (
    CorpusSource,
    PackedBlock,
    iterate_documents,
    load_rows,
    packed_blocks,
    read_blocks,
)
from subtoken_train.datasets.ordered import AccumulationWindows, OrderedDataModule, check_positive
from subtoken_train.datasets.text_batches import TextSample, collate_text, padding_id
from subtoken_train.datasets.unknown_tokens import SomeTexts, first_texts
from subtoken_train.families.family import Family
from subtoken_train.types import Batch

if TYPE_CHECKING:
    from datasets import Dataset

Block = dict[str, Any]  # {"input_ids": ids of one block, "without_loss": places in it, "place": its number}


class CorpusDataModule(OrderedDataModule[Block]):
    """Packed text whose blocks are a context, a prefix that is read, and what is predicted.

    The first ``context_length`` tokens of a block are CONTEXT (a BOS included), the next ``prefix_tokens`` are QUERY,
    without loss, and the rest is ANSWER: predicted, and read by no reducer, ranking or query summary. With
    ``prefix_tokens`` 0 the whole query region is QUERY *and* predicted (the ``region`` reading): what is chosen from
    it has seen the tokens being predicted.

    ``streaming`` neither downloads nor caches: blocks come in the order of the corpus, unshuffled, in endless passes
    (give ``trainer.max_steps``), each ending where its last whole block does. Every process reads and tokenises all of
    it and takes its own share. The place is the count of batches as elsewhere, but a resumed run reads and tokenises
    everything before it again. The validation corpus is never streamed.

    Args:
        train: the training corpus.
        val: the corpus of the validation loss; default: no validation.
        block_length: tokens per sample.
        context_length: tokens of the context, less than ``block_length``.
        prefix_tokens: tokens of the query region that are read but not predicted.
        batch_size: training blocks per process and step of the data loader.
        val_batch_size: validation blocks per process and step; default: ``batch_size``.
        num_workers: processes that make batches beside training; 0 (needed by ``streaming``): in the training process.
        seed: of the shuffling.
        streaming: read the training corpus on the fly.

    Raises:
        ValueError: a size below 1, lengths that leave no token to read or none to predict, or workers of a stream.
    """

    def __init__(
        self,
        train: CorpusSource,
        *,
        val: CorpusSource | None = None,
        block_length: int = 2048,
        context_length: int = 1024,
        prefix_tokens: int = 64,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        streaming: bool = False,
    ) -> None:
        super().__init__(batch_size, val_batch_size, num_workers, seed)
        check_positive(block_length=block_length, context_length=context_length)
        _check_lengths(block_length, context_length, prefix_tokens)
        if streaming and num_workers:
            raise ValueError(f"num_workers is {num_workers}; a stream is read in the training process, set it to 0")
        self.train_source, self.val_source, self.streaming = train, val, streaming
        self.block_length, self.context_length, self.prefix_tokens = block_length, context_length, prefix_tokens
        self._raw_train: Any = None
        self._raw_val: Any = None

    def read(self, training: bool = True) -> None:
        """Open the corpora (``load_rows``), once; tokenising waits for ``setup``, which has the tokenizer."""
        if training and self._raw_train is None:
            self._raw_train = load_rows(self.train_source, self.streaming)
        if self.val_source is not None and self._raw_val is None:
            self._raw_val = load_rows(self.val_source)

    def rehearse(self, family: Family, trainer: L.Trainer) -> None:
        """Rehearse as every data module; a stream has no end of its own, see ``check_end``."""
        super().rehearse(family, trainer)
        self.check_end(trainer.max_steps, trainer.limit_train_batches)

    def check_end(self, max_steps: int, limit: int | float | None) -> None:
        """Raise a ``ValueError`` where a stream would not end, or epochs are shortened; arguments are the trainer's."""
        if self.streaming and (max_steps < 0 or limit not in (None, 1.0)):
            raise ValueError(
                f"a streamed corpus needs trainer.max_steps (it is {max_steps}) and no limit_train_batches "
                f"(it is {limit}): its passes have no length that an epoch could be a part of"
            )

    def records_to_show(self) -> Iterator[Block]:
        """Yield the first blocks of the corpus in its own order, so that nothing else has to be tokenised."""
        self.read()
        return (_block(block, place) for place, block in enumerate(self._pass()))

    def prepare_data(self) -> None:
        """Tokenise into the cache, in one process per machine while the others wait."""
        assert self.trainer is not None
        assert self.trainer.state.fn is not None
        self.setup(self.trainer.state.fn.value)

    def setup(self, stage: str) -> None:
        """Read and pack (``packed_blocks``) what ``stage`` (``fit`` | ``validate``) needs."""
        super().setup(stage)
        if stage == "fit" and not self.streaming and self._train is None:
            self._train = self._packed(self._raw_train, self.train_source)
        if self.val_source is not None and self._val is None:
            self._val = self._packed(self._raw_val, self.val_source)

    def train_dataloader(self) -> AccumulationWindows:
        """Return the shuffled, resumable loader, or the stream from where training stands."""
        if not self.streaming:
            return super().train_dataloader()
        assert self.trainer is not None
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        self.keep_order({"streaming": 1, "records per global batch": self.batch_size * world_size})
        stream = BlockStream(self._pass, self.batch_size, rank, world_size, self.batches_consumed)
        loader: DataLoader[Block] = DataLoader(stream, batch_size=self.batch_size, collate_fn=self.collator())
        return AccumulationWindows(loader, self.trainer.accumulate_grad_batches)

    def some_texts(self) -> SomeTexts:
        """Return the corpus's first documents."""
        self.read()
        rows = self._raw_train
        total = len(rows) if self.train_source.documents != "wikitext" and hasattr(rows, "__len__") else None
        return first_texts((document.text for document in iterate_documents(rows, self.train_source)), total)

    def collator(self) -> Callable[[list[Block]], Batch]:
        """Return the collator that gives blocks their regions and labels."""
        pad_id = padding_id(self.family.tokenizer)
        query_length = self.prefix_tokens or self.block_length - self.context_length

        def collate(rows: list[Block]) -> Batch:
            samples = [
                TextSample(
                    row["input_ids"], self.context_length, query_length, f"block {row['place']}", row["without_loss"]
                )
                for row in rows
            ]
            return collate_text(samples, pad_id)

        return collate

    def _packed(self, rows: Dataset, source: CorpusSource) -> PackedBlocks:
        return PackedBlocks(packed_blocks(rows, source, self.family.tokenizer, self.block_length))

    def _pass(self) -> Iterator[PackedBlock]:
        """Make one pass over the training corpus."""
        return read_blocks(self._raw_train, self.train_source, self.family.tokenizer, self.block_length)


class PackedBlocks:
    """Cached blocks (a data set with the columns ``input_ids`` and ``without_loss``) by their number."""

    def __init__(self, blocks: Dataset) -> None:
        self._blocks = blocks.with_format("numpy")

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> Block:
        row = self._blocks[index]
        return _block(PackedBlock(row["input_ids"], row["without_loss"]), index)


class BlockStream(IterableDataset[Block]):
    """One process's share of endless passes over a corpus, from the batch where training stands.

    Global batch ``b`` is the ``b``-th run of ``batch_size * world_size`` blocks of the passes one after another;
    process ``rank`` takes its own contiguous part of it. Every ``iter()`` reads from the first block again.

    Args:
        read_pass: starts one pass.
        batch_size: blocks per process and batch.
        rank: this process.
        world_size: processes that share each global batch.
        consumed: returns the batches that training has consumed so far.
    """

    def __init__(
        self,
        read_pass: Callable[[], Iterator[PackedBlock]],
        batch_size: int,
        rank: int,
        world_size: int,
        consumed: Callable[[], int],
    ) -> None:
        self.read_pass, self.batch_size, self.rank, self.world_size = read_pass, batch_size, rank, world_size
        self.consumed = consumed

    def __iter__(self) -> Iterator[Block]:
        endless = chain.from_iterable(self.read_pass() for _ in repeat(None))
        first = self.consumed() * self.batch_size * self.world_size
        for place, block in islice(enumerate(endless), first, None):
            if place // self.batch_size % self.world_size == self.rank:
                yield _block(block, place)


def _block(block: PackedBlock, place: int) -> Block:
    return {"input_ids": block.ids, "without_loss": block.without_loss, "place": place}


def _check_lengths(block_length: int, context_length: int, prefix_tokens: int) -> None:
    """Check that there is at least one token to read and one to predict."""
    if context_length >= block_length:
        raise ValueError(
            f"context_length {context_length} leaves a query region of zero tokens in blocks of {block_length}; "
            "lower it"
        )
    region = block_length - context_length
    if not 0 <= prefix_tokens < region:
        raise ValueError(
            f"prefix_tokens is {prefix_tokens}; 0 to {region - 1} are possible in a query region of {region} tokens "
            "(block_length - context_length)"
        )
