"""Lightning's side of the instruction data.

Legend: R records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.image_sources import (
    MAX_FRAMES,
    MAX_PIXELS,
    MOST_FRAMES,
    MOST_PIXELS,
    FolderImages,
    missing_images,
)
from subtoken_train.datasets.ordered import OrderedDataModule, SizedRecords, check_positive
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.unknown_tokens import SomeTexts
from subtoken_train.errors import check_range
from subtoken_train.families.family import Family, only_videos
from subtoken_train.reducers.base import Reducer


class InstructionDataModule(OrderedDataModule[Record]):
    """Instruction data in LLaVA's format for training and validation; see ``OrderedDataModule`` for the order.

    Args:
        train_file: JSON list or JSON lines of training records.
        image_folder: where image paths start; default: the training file's own folder.
        images_outside_folder: whether image paths may lead out of ``image_folder`` (absolute paths, ``..``, links).
        max_image_pixels: width times height of an image that is opened at most, of all frames of a video together.
        max_video_frames: frames of a video that are opened at most, evenly spaced.
        val_file: records of the validation loss; default: no validation.
        max_length: tokens per sample, visual ones included; longer samples are cut at the right.
        batch_size: training records per process and step of the data loader.
        val_batch_size: validation records per process and step; default: ``batch_size``.
        num_workers: processes that decode images and tokenise beside training; 0: in the training process.
        seed: of the shuffling.
        group_by_length: fill each training batch with records of like size (images, then text length). With or without
            it, a batch holds records with images only, or without (see ``ResumableSampler``).
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
        max_image_pixels: int = MAX_PIXELS,
        max_video_frames: int = MAX_FRAMES,
    ) -> None:
        super().__init__(batch_size, val_batch_size, num_workers, seed)
        check_positive(max_length=max_length)
        self.train_file, self.val_file, self.max_length = train_file, val_file, max_length
        self.image_folder = Path(train_file).parent if image_folder is None else Path(image_folder)
        self.group_by_length = group_by_length
        check_range("max_image_pixels", max_image_pixels, 1, MOST_PIXELS)
        check_range("max_video_frames", max_video_frames, 1, MOST_FRAMES)
        self.images_outside_folder, self.max_image_pixels = images_outside_folder, max_image_pixels
        self.max_video_frames = max_video_frames

    def read(self, training: bool = True) -> None:
        """Parse and check the data files (``InstructionRecords``), once."""
        if training and self._train is None:
            self._train = InstructionRecords(self.train_file, self.image_folder, self.images_outside_folder)
        if self.val_file is not None and self._val is None:
            self._val = InstructionRecords(self.val_file, self.image_folder, self.images_outside_folder)

    def check_images(self, family: type[Family], reducer: Reducer) -> list[FolderImages]:
        """Compare the images that the files name with their folders' listings; return those of the training file."""
        found: list[FolderImages] = []
        for records in (self._val, self._train):
            if isinstance(records, InstructionRecords):
                if not family.takes_videos and (record := records.first_video()) is not None:
                    raise ValueError(f"{records.path}, record {record!r}: {family.no_video()}")
                if reducer.reads_frames and (record := records.first_image()) is not None:
                    raise ValueError(f"{records.path}: {only_videos(record)}")
                found = records.compare_images()
                if missing := missing_images(found, records.path, records.image_folder):
                    raise missing
        return found

    @property
    def training_records(self) -> InstructionRecords:
        """Records that ``read`` found."""
        assert isinstance(self._train, InstructionRecords)
        return self._train

    def some_texts(self, tokenizer: Any) -> SomeTexts:
        return self.training_records.some_texts()

    def sizes(self, records: SizedRecords[Record]) -> NDArray[np.int64]:
        assert isinstance(records, InstructionRecords)
        return records.sizes()

    def collator(self) -> Collator:
        limits = self.max_image_pixels, self.max_video_frames
        return Collator(self.family, self.max_length, max_pixels=limits[0], max_frames=limits[1])
