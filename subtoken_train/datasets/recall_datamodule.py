"""Lightning's side of key-value recall, whose samples are drawn as they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subtoken_train.datasets.english import documents
from subtoken_train.datasets.ordered import OrderedDataModule, check_positive
from subtoken_train.datasets.recall import RecallRecords, RecallSample, RecallTask, check_num_facts
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.datasets.unknown_tokens import SomeTexts, first_texts
from subtoken_train.errors import MAX_COUNT, check_range
from subtoken_train.types import Batch


class RecallDataModule(OrderedDataModule[RecallSample]):
    """Key-value recall over English (``datasets/recall.py``); see ``OrderedDataModule`` for the order.

    The context is CONTEXT, the question QUERY, the answer ANSWER: nothing that is chosen by the question has seen an
    answer. Training samples use the training split's English, validation samples the dev split's.

    Args:
        context_length: tokens of the context, a BOS included.
        num_facts: facts stated in it.
        num_questions: facts asked, at most ``num_facts``.
        train_samples: training samples; each is a pure function of the seed and its number.
        val_samples: samples of the validation loss; 0: no validation.
        batch_size: training samples per process and step of the data loader.
        val_batch_size: validation samples per process and step; default: ``batch_size``.
        num_workers: processes that make batches beside training; 0: in the training process.
        seed: of the samples and their order.
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
        check_positive(context_length=context_length)
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
