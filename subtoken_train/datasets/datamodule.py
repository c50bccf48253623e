"""Lightning's side of data: instructions, key-value recall, whose samples are drawn as they are needed, and text.

Text is packed blocks of context and query region, or chats. Legend: R records.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from subtoken_train.datasets import corpus
from subtoken_train.datasets import image_sources as media
from subtoken_train.datasets.chats import ChatLimits, asked_words, cached_chats, iterate_chats, reads_chats, wholly_read
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.corpus import CorpusSource
from subtoken_train.datasets.english import documents
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.recall import RecallRecords, RecallSample, RecallTask, check_num_facts
from subtoken_train.datasets.record_format import said_turns
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.text_batches import TextSample, collate_text, padding_id
from subtoken_train.datasets.unknown_tokens import SomeTexts, first_texts
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS, SubTokenWarning, check_range
from subtoken_train.families.family import Family, only_videos
from subtoken_train.reducers.base import Reducer
from subtoken_train.types import Batch

if TYPE_CHECKING:
    from datasets import Dataset

Row = Mapping[str, Any]  # A packed block (``input_ids``), or a chat by the fields of ``TextSample``


class InstructionDataModule(OrderedDataModule[Record]):
    """Instruction data in LLaVA's format for training and validation.

    Args:
        train_file: training records, in any form and kind of file.
        image_folder: where image paths start; default: the training file's own folder.
        images_outside_folder: whether image paths may lead out of ``image_folder`` (absolute paths, ``..``, links).
        max_image_pixels: width times height of an image that is opened at most, of all frames of a video together.
        max_video_frames: frames of a video that are opened at most, evenly spaced.
        val_file: records of the validation loss; default: no validation.
        max_length: tokens per sample, visual ones included; longer samples are cut at the right.
        group_by_length: fill each training batch with records of like size (images, then text length). With or without
            it, a batch holds records with images only, or without.
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
        images_outside_folder: bool = False,
        max_image_pixels: int = media.MAX_PIXELS,
        max_video_frames: int = media.MAX_FRAMES,
    ) -> None:
        super().__init__(batch_size, val_batch_size, num_workers, seed)
        check_range("max_length", max_length, 1, MAX_TOKENS)
        self.train_file, self.val_file, self.max_length = train_file, val_file, max_length
        self.image_folder = Path(train_file).parent if image_folder is None else Path(image_folder)
        check_range("max_image_pixels", max_image_pixels, 1, media.MOST_PIXELS)
        check_range("max_video_frames", max_video_frames, 1, media.MOST_FRAMES)
        self.group_by_length, self.images_outside_folder = group_by_length, images_outside_folder
        self.max_image_pixels, self.max_video_frames = max_image_pixels, max_video_frames

    def read(self, training: bool = True) -> None:
        images = self.image_folder, self.images_outside_folder
        if training and self._train is None:
            self._train = InstructionRecords(self.train_file, *images)
        if self.val_file is not None and self._val is None:
            self._val = InstructionRecords(self.val_file, *images)

    def check_images(self, family: type[Family], reducer: Reducer) -> list[media.FolderImages]:
        """Compare the images that the files name with their folders' listings; return those of the training file."""
        found: list[media.FolderImages] = []
        for records in (self._val, self._train):
            if not isinstance(records, InstructionRecords):
                continue
            if not family.takes_videos and (record := records.first_with(videos=True)) is not None:
                raise ValueError(f"{records.path}, record {record!r}: {family.no_video()}")
            if reducer.reads_frames and (record := records.first_with(videos=False)) is not None:
                raise ValueError(f"{records.path}: {only_videos(record)}")
            found = records.compare_images()
            if missing := media.missing_images(found, records.path, records.image_folder):
                raise missing
        return found

    @property
    def training_records(self) -> InstructionRecords:
        """Records that ``read`` found."""
        assert isinstance(self._train, InstructionRecords)
        return self._train

    def some_texts(self, tokenizer: Any) -> SomeTexts:
        return self.training_records.some_texts()

    def sizes(self, records: InstructionRecords) -> NDArray[np.int64]:
        return records.sizes()

    def collator(self) -> Collator:
        limits = self.max_image_pixels, self.max_video_frames
        return Collator(self.family, self.max_length, max_pixels=limits[0], max_frames=limits[1])


class RecallDataModule(OrderedDataModule[RecallSample]):
    """Key-value recall over English (``datasets/recall.py``): CONTEXT, the question QUERY, the answer ANSWER.

    Args:
        context_length: tokens of the context, a BOS included.
        num_facts: facts stated in it.
        num_questions: facts asked, at most ``num_facts``.
        train_samples: training samples; each is a pure function of the seed and its number.
        val_samples: samples of the validation loss; 0: no validation.
    """

    def __init__(
        self,
        *,
        context_length: int = 512,
        num_facts: int = 24,
        num_questions: int = 8,
        train_samples: int = 12800,
        val_samples: int = 0,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, val_batch_size, num_workers, seed)
        check_range("context_length", context_length, 1, MAX_TOKENS)
        check_range("train_samples", train_samples, 1, MAX_COUNT)
        check_range("val_samples", val_samples, 0, MAX_COUNT)
        check_num_facts(num_facts, num_questions)
        self.context_length, self.num_facts, self.num_questions = context_length, num_facts, num_questions
        self.train_samples, self.val_samples = train_samples, val_samples

    def read(self, training: bool = True) -> None:
        """Do nothing: samples are drawn once the tokenizer is there."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        task = RecallTask(self.family.tokenizer, self.context_length, self.num_facts, self.num_questions)
        if stage == "fit":
            self._train = RecallRecords(task, "train", self.train_samples, self.seed)
        if self.val_samples:
            self._val = RecallRecords(task, "dev", self.val_samples, self.seed)

    def some_texts(self, tokenizer: Any) -> SomeTexts:
        english = documents("train")
        return first_texts(english, len(english))

    def collator(self) -> Callable[[list[RecallSample]], Batch]:
        pad_id = padding_id(self.family.tokenizer)
        return lambda samples: collate_text([sample.text for sample in samples], pad_id)


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
        repeat_context: let every second training block go on with parts of its context: stretches of it or, in one of
            eight, what follows ten quoted tokens. Running text seldom needs what stands far before.
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
        repeat_context: bool = False,
    ) -> None:
        super().__init__(batch_size, val_batch_size, num_workers, seed)
        check_range("block_length", block_length, 2, MAX_TOKENS)
        region = block_length - context_length
        check_range(f"context_length, of block_length {block_length},", context_length, 1, block_length - 1)
        check_range(f"prefix_tokens, of the {region} behind the context,", prefix_tokens, 0, region - 1)
        self.train_source, self.val_source = train, val
        self.block_length, self.context_length, self.prefix_tokens = block_length, context_length, prefix_tokens
        self.as_asked, self.chat_template_kwargs = as_asked, chat_template_kwargs or {}
        check_range("context_length, under repeat_context,", context_length, 64 if repeat_context else 1)
        self.repeat_context = repeat_context
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
        return self._raw_train

    def records_to_show(self) -> Iterator[TextSample]:
        self.read()  # in its own order, so that nothing else has to be tokenised
        self._check_form()
        rows, source, family = self._raw_train, self.train_source, self.family
        made: Iterator[Row]
        if reads_chats(source, family.tokenizer):
            made = map(vars, iterate_chats(rows, family, self.chat_limits))
        else:
            made = ({"input_ids": ids} for ids in corpus.read_blocks(rows, source, family.tokenizer, self.block_length))
        return map(self._training_sample, made, count())

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
        return partial(collate_text, pad_id=padding_id(self.family.tokenizer))

    def sizes(self, records: TokenisedRows) -> NDArray[np.int64] | None:
        return records.sizes() if self.group_by_length else None

    def _tokenised(self, rows: Dataset, source: CorpusSource) -> TokenisedRows:
        if not reads_chats(source, self.family.tokenizer):
            blocks = corpus.packed_blocks(rows, source, self.family.tokenizer, self.block_length)
            return TokenisedRows(blocks, self._training_sample if rows is self._raw_train else self._sample)
        chats = cached_chats(rows, source, self.family, self.chat_limits)
        if words := wholly_read(chats["context_length"], self.chat_limits):
            warnings.warn(f"{source.name}: {words}", SubTokenWarning, stacklevel=2)
        return TokenisedRows(chats, self._sample)

    def _check_form(self) -> None:
        """Warn where chats are written otherwise than prompts; refuse settings of chats without any."""
        if reads_chats(self.train_source, self.family.tokenizer):
            if words := asked_words(self.family.tokenizer, self.chat_limits):
                warnings.warn(words, SubTokenWarning, stacklevel=3)
            if self.repeat_context:
                raise ValueError("data.repeat_context is for text that is no chat; leave it out")
        elif self.as_asked or self.chat_template_kwargs:
            raise ValueError("data.as_asked and data.chat_template_kwargs are for chats in a template; leave them out")

    def _training_sample(self, row: Row, place: int) -> TextSample:
        if self.repeat_context:
            ids = [*map(int, row["input_ids"])]
            row = {"input_ids": corpus.repeat_context(ids, self.context_length, place, self.family.tokenizer)}
        return self._sample(row, place)

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
