"""Lightning's side of instruction data, and of key-value recall, whose samples are drawn as they are needed.

Legend: R records.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subtoken_train.datasets import image_sources as media
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.english import documents
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.recall import RecallRecords, RecallSample, RecallTask, check_num_facts
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.datasets.unknown_tokens import SomeTexts, first_texts
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS, check_range
from subtoken_train.families.family import Family, only_videos
from subtoken_train.reducers.base import Reducer
from subtoken_train.types import Batch


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
        self.group_by_length = group_by_length
        check_range("max_image_pixels", max_image_pixels, 1, media.MOST_PIXELS)
        check_range("max_video_frames", max_video_frames, 1, media.MOST_FRAMES)
        self.images_outside_folder, self.max_image_pixels = images_outside_folder, max_image_pixels
        self.max_video_frames = max_video_frames

    def read(self, training: bool = True) -> None:
        """Parse and check the data files, once."""
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
