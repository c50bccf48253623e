"""Base of calibrators, which find a method's numbers from prompts in a backbone. Legend: B batch, N positions."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.utilities import move_data_to_device

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrations import CalibratedNumbers, Calibration, CalibrationData
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.corpus import CorpusSource, load_rows, read_blocks
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import check_states
from subtoken_train.errors import MAX_COUNT, MAX_SEED, MAX_TOKENS, refuse
from subtoken_train.evaluation.runner.cell import model_inputs
from subtoken_train.evaluation.runner.prompt_file import PromptFile
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.base import Eviction
from subtoken_train.families.family import Family
from subtoken_train.families.positions import position_bound
from subtoken_train.inference.batched import in_batches
from subtoken_train.inference.compression import Compression, parse_settings
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.layer_packer import LayerPacker
from subtoken_train.inference.prefill import run_whole
from subtoken_train.inference.text_prompts import EncodedText, text_batch
from subtoken_train.types import Batch, Identity, Region
from subtoken_train.view.method import Method, setting

RECALL = "recall"  # the data set of language models: facts among English, questions and answers; the training split


@dataclass(frozen=True)
class PromptSource:
    """Batches of prompts on the backbone's device, the name of their data set or file, and its digest; None: drawn."""

    name: str
    batches: Iterator[Batch]
    sha256: str | None = None


def calibration_prompts(
    family: Family,
    data: str | None,
    samples: int,
    batch_size: int,
    context_length: int,
    seed: int,
    answers: bool,
    any_text: bool = False,
) -> PromptSource:
    """Return prompts for a backbone, as many as ``samples`` or a file has, with or without the answers.

    A language model reads ``recall`` (the default), or, without answers, a ``.jsonl`` file of prompts, or where
    ``any_text`` serves stretches of ``context_length`` tokens of another text; one that sees images a file of records.
    """
    sees = family.image_token_id is not None
    file = None if data == RECALL and not sees else data
    batches: Iterable[Batch]
    if file is None and sees:
        raise ValueError(f"{family.name} is calibrated on a file of records with images, as data/scenes/dev.json")
    if file is None:
        batches = recall_prompts(family, samples, batch_size, context_length, "train", seed, answers)
    elif sees:
        batches = record_prompts(family, InstructionRecords(file), samples, batch_size, answers)
    elif file.endswith(".jsonl") and not answers:
        task = PromptFile(source=file, chat=bool(family.tokenizer.chat_template))
        parts = in_batches(task.samples()[:samples], batch_size)
        batches = (model_inputs(part, family, "text", None)[0] for part in parts)
    elif any_text:
        refuse((not Path(file).is_file(), f"data {file!r} is neither {RECALL!r} nor a file; check the path"))
        source = CorpusSource(file)
        blocks = islice(read_blocks(load_rows(source), source, family.tokenizer, context_length), samples)
        texts = [EncodedText((*ids, ids[-1]), context_length) for ids in blocks]  # its last token once more
        batches = (text_batch(family, part) for part in in_batches(texts, batch_size))
    else:
        others = "leave it out" if answers else "leave it out, or name a .jsonl file of prompts"
        raise ValueError(f"data {file!r}: {family.name} is calibrated on {RECALL!r}; {others}")
    moved = (move_data_to_device(batch, family.device) for batch in batches)
    if file is None:
        return PromptSource(RECALL, moved)
    return PromptSource(Path(file).name, moved, hashlib.sha256(Path(file).read_bytes()).hexdigest())


def record_prompts(
    family: Family, records: InstructionRecords, limit: int, batch_size: int = 16, answers: bool = False
) -> Iterator[Batch]:
    """Yield the first ``limit`` records in order, the last turn of each with or without its answer."""
    collate = Collator(family, position_bound(family.decoder.config) or MAX_TOKENS, generation=not answers)
    for places in in_batches(range(min(limit, len(records))), batch_size):
        yield collate([records[i] for i in places])


def recall_prompts(
    family: Family,
    limit: int,
    batch_size: int = 16,
    context_length: int = 512,
    split: str = "dev",
    seed: int = 0,
    answers: bool = False,
) -> Iterator[Batch]:
    """Yield ``limit`` contexts of ``context_length`` tokens, each with a question, of key-value recall; and answers."""
    records = RecallRecords(RecallTask(family.tokenizer, context_length), split, limit, seed)
    for places in in_batches(range(limit), batch_size):
        samples = [records[i].text for i in places]
        if not answers:
            samples = [replace(sample, input_ids=sample.input_ids[: sample.prompt_length]) for sample in samples]
        yield collate_text(samples, padding_id(family.tokenizer))


def rounded(numbers: Any) -> Any:
    """Round all numbers of nested lists to the six digits that files of calibrations have."""
    return round(numbers, 6) if isinstance(numbers, float) else [rounded(row) for row in numbers]


Batches = Iterable[Batch]


def named_method(eviction: str, options: str) -> Eviction:
    """Build an eviction with its settings, ``KEY=VALUE`` with commas between them."""
    each = [option.strip() for option in options.split(",") if option.strip()]
    return build_eviction(eviction, **parse_settings(eviction, each))


def scored_prompts(backbone: CompressedBackbone, compression: Compression, prompts: Batch) -> EvictionPass:
    """Run prompts and the eviction's second pass; what it scored stands in ``scores``."""
    compression.check_prompts(prompts)
    layers = backbone.family.shape.num_layers
    eviction = EvictionPass(compression, backbone.family, prompts, backbone.reducer, backbone.group_budget)
    packer = LayerPacker(backbone, compression, PackedCache(layers), prompts.input_ids_BN.shape[1])
    result = run_whole(backbone, prompts, eviction, packer)
    check_states(result.hidden_BMD, result.rows.visible_BM, prompts.record_ids)
    return eviction


@dataclass(frozen=True)
class Calibrator(Method, ABC):
    """Calibration of one method; a frozen dataclass whose fields are the settings.

    ``context_length`` counts tokens of a drawn prompt's context; ``seed`` is of what is drawn.
    """

    name: ClassVar[str]
    answers: ClassVar[bool] = False  # True where the prompts' answers are read too
    any_text: ClassVar[bool] = False  # True where a language model can be calibrated on any text, not on recall alone
    whole_caches: ClassVar[bool] = False  # True where neither a reducer nor routers may act meanwhile
    for_images: ClassVar[str] = ""
    """The method to calibrate in the place of this one, which reads text alone, where the backbone sees images."""

    samples: int = setting(10, 1, MAX_COUNT)
    batch_size: int = setting(2, 1, MAX_COUNT)
    context_length: int = setting(512, 1)
    seed: int = setting(0, 0, MAX_SEED)

    @abstractmethod
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> CalibratedNumbers:
        """Measure the numbers that the method reads."""

    def check(self, backbone: CompressedBackbone) -> None:
        """Raise a worded ``ValueError`` where the backbone cannot be calibrated so."""
        made_on = f"{self.name} is calibrated on"
        if self.for_images and backbone.family.image_token_id is not None:
            raise ValueError(f"{made_on} recall of text, and the backbone sees images; use {self.for_images}")
        gated = backbone.bank is not None and backbone.bank.gated
        if self.whole_caches and (gated or backbone.active_routing is not None or backbone.reducer.acts):
            raise ValueError(f"{made_on} whole caches; use the backbone, or a LoRA-only adapter")

    def prompts(self, family: Family, data: str | None) -> PromptSource:
        """Return the prompts to read, see ``calibration_prompts``."""
        drawn = self.samples, self.batch_size, self.context_length, self.seed, self.answers, self.any_text
        return calibration_prompts(family, data, *drawn)

    def run(
        self,
        backbone: CompressedBackbone,
        identity: Identity,
        data: str | None = None,
        show: Callable[[int, int], None] | None = None,
    ) -> Calibration[CalibratedNumbers]:
        """Calibrate a backbone in evaluation mode, ``identity`` its name; ``show`` sees (done, of how many)."""
        self.check(backbone)
        source = self.prompts(backbone.family, data)
        read = [0, 0]

        def counted() -> Iterable[Batch]:
            for batch in source.batches:
                yield batch
                read[0] += len(batch.record_ids)
                read[1] += int((batch.regions_BN != Region.PADDING).sum())
                if show is not None:
                    show(read[0], self.samples)

        numbers = self.numbers(backbone, counted())
        made_of = CalibrationData(source.name, read[0], read[1], source.sha256)
        return Calibration(self.name, identity, asdict(self), numbers, made_of)
