"""Lightning's side of text: packed blocks of context and query region, or chats."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from subtoken_train.datasets import corpus
from subtoken_train.datasets.chats import ChatLimits, asked_words, cached_chats, iterate_chats, reads_chats, wholly_read
from subtoken_train.datasets.corpus import CorpusSource
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.record_format import said_turns
from subtoken_train.datasets.text_batches import TextSample, collate_text, padding_id
from subtoken_train.datasets.unknown_tokens import SomeTexts, first_texts
from subtoken_train.errors import MAX_TOKENS, SubTokenWarning, check_range
from subtoken_train.types import Batch

if TYPE_CHECKING:
    from datasets import Dataset

Row = Mapping[str, Any]  # A packed block (``input_ids``), or a chat by the fields of ``TextSample``


class CorpusDataModule(OrderedDataModule[TextSample]):
    """Packed text whose blocks are a context, a prefix that is read, and what is predicted.

    The first ``context_length`` tokens of a block are CONTEXT (a BOS included), the next ``prefix_tokens`` are QUERY,
    without loss, and the rest is ANSWER: predicted, and read by no reducer, ranking or query summary. With
    ``prefix_tokens`` 0 the whole query region is QUERY *and* predicted: what is chosen from it has seen the tokens
    being predicted. Conversations, where the tokenizer has a chat template, are chats instead (``chats``).

    Args:
        val: the corpus of the validation loss; default: no validation.
        block_length: tokens per sample; of a chat at most.
        context_length: tokens of the context, less than ``block_length``; of a chat at most.
        prefix_tokens: tokens of the query region that are read but not predicted; of a chat the longest question that
            asks as a whole, and how much of a longer one asks.
        as_asked: learn of each chat the last answer alone, right behind the prompt with which a model is asked for it.
        chat_template_kwargs: variables for the chat template, as ``enable_thinking``; ask with the same ones.
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
        as_asked: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(batch_size, val_batch_size, num_workers, seed)
        check_range("block_length", block_length, 2, MAX_TOKENS)
        region = block_length - context_length
        check_range(f"context_length, of block_length {block_length},", context_length, 1, block_length - 1)
        check_range(f"prefix_tokens, of the {region} behind the context,", prefix_tokens, 0, region - 1)
        self.train_source, self.val_source = train, val
        self.block_length, self.context_length, self.prefix_tokens = block_length, context_length, prefix_tokens
        self.as_asked, self.chat_template_kwargs = as_asked, chat_template_kwargs or {}
        self._raw_train: Any = None
        self._raw_val: Any = None

    def read(self, training: bool = True) -> None:
        """Open the corpora, once; tokenising waits for ``setup``, which has the tokenizer."""
        if training and self._raw_train is None:
            self._raw_train = corpus.load_rows(self.train_source)
        if self.val_source is not None and self._raw_val is None:
            self._raw_val = corpus.load_rows(self.val_source)

    def conversations(self) -> Dataset:
        """Return the training corpus where it is one of conversations, a row each."""
        self.read()
        rows: Dataset = self._raw_train
        return rows

    def records_to_show(self) -> Iterator[TextSample]:
        self.read()  # in its own order, so that nothing else has to be tokenised
        self._check_form()
        rows, source, family = self._raw_train, self.train_source, self.family
        made: Iterator[Row]
        if reads_chats(source, family.tokenizer):
            made = map(vars, iterate_chats(rows, family, self.chat_limits))
        else:
            made = ({"input_ids": ids} for ids in corpus.read_blocks(rows, source, family.tokenizer, self.block_length))
        return (self._sample(row, place) for place, row in enumerate(made))

    def prepare_data(self) -> None:
        """Tokenise into the cache, in one process per machine while the others wait."""
        assert self.trainer is not None
        assert self.trainer.state.fn is not None
        self.setup(self.trainer.state.fn.value)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._check_form()
        if stage == "fit" and self._train is None:
            self._train = self._tokenised(self._raw_train, self.train_source)
            self.group_by_length = reads_chats(self.train_source, self.family.tokenizer)
        if self.val_source is not None and self._val is None:
            self._val = self._tokenised(self._raw_val, self.val_source)

    def some_texts(self, tokenizer: Any) -> SomeTexts:
        self.read()
        rows = self._raw_train
        if reads_chats(self.train_source, tokenizer):
            chats = (said_turns(json.loads(row["conversation"])) for row in rows)
            return first_texts(("\n".join(turn["value"] for turn in chat) for chat in chats), len(rows))
        total = len(rows) if self.train_source.documents != "wikitext" else None
        return first_texts(corpus.iterate_documents(rows, self.train_source), total)

    @property
    def chat_limits(self) -> ChatLimits:
        """The sizes of a chat, and how it is written."""
        sizes = self.block_length, self.context_length, self.prefix_tokens
        return ChatLimits(*sizes, self.as_asked, self.chat_template_kwargs)

    def collator(self) -> Callable[[list[TextSample]], Batch]:
        pad_id = padding_id(self.family.tokenizer)
        return lambda samples: collate_text(samples, pad_id)

    def sizes(self, records: TokenisedRows) -> NDArray[np.int64] | None:
        return records.sizes() if self.group_by_length else None

    def _tokenised(self, rows: Dataset, source: CorpusSource) -> TokenisedRows:
        if not reads_chats(source, self.family.tokenizer):
            blocks = corpus.packed_blocks(rows, source, self.family.tokenizer, self.block_length)
            return TokenisedRows(blocks, self._sample)
        chats = cached_chats(rows, source, self.family, self.chat_limits)
        if words := wholly_read(chats["context_length"], self.chat_limits):
            warnings.warn(f"{source.name}: {words}", SubTokenWarning, stacklevel=2)
        return TokenisedRows(chats, self._sample)

    def _check_form(self) -> None:
        """Warn where chats are written otherwise than prompts; refuse settings of chats without any."""
        if reads_chats(self.train_source, self.family.tokenizer):
            if words := asked_words(self.family.tokenizer, self.chat_limits):
                warnings.warn(words, SubTokenWarning, stacklevel=3)
        elif self.as_asked or self.chat_template_kwargs:
            raise ValueError("data.as_asked and data.chat_template_kwargs are for chats in a template; leave them out")

    def _sample(self, row: Row, place: int) -> TextSample:
        if "record_id" in row:
            return TextSample(**row)
        query_length = self.prefix_tokens or self.block_length - self.context_length
        return TextSample(row["input_ids"], self.context_length, query_length, f"block {place}")


class TokenisedRows:
    """Cached rows as samples, by their number."""

    def __init__(self, rows: Dataset, sample: Callable[[Row, int], TextSample]) -> None:
        self._rows, self._as_sample = rows.with_format("numpy"), sample

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TextSample:
        return self._as_sample(self._rows[index], index)

    def sizes(self) -> NDArray[np.int64]:
        """Return (0, tokens to the fourth power) of every row, [R, 2]: what differs by a fifth is then unlike."""
        offsets = [chunk.offsets.to_numpy() for chunk in self._rows.data.column("input_ids").chunks]
        lengths = np.minimum(np.concatenate(list(map(np.diff, offsets))), 2**15).astype(np.int64)  # the power must fit
        return np.stack([np.zeros_like(lengths), lengths**4], axis=1)
