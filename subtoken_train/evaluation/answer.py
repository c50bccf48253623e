"""Ask every question of a data file, greedily, with reducer and routers active."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from lightning.fabric.utilities import move_data_to_device

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evaluation.scoring import score
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.decoding import generate_greedy
from subtoken_train.ledger.ledger import KVShape, Ledger
from subtoken_train.ledger.measure import emptied_regions, emptied_words, measured_ledger


@dataclass(frozen=True)
class Answer:
    """One question's outcome."""

    record_id: str
    kind: str
    prediction: str
    answer: str
    score: float


@dataclass(frozen=True)
class Answers:
    """All outcomes in file order.

    Attributes:
        rows: one per question.
        ledger: what all prompts together keep, from their plans, in the model's dtype.
        kv_bytes: the prompts' caches, measured on their tensors: keys, values and index.
        seconds: what it took.
        compression: eviction and precision that were in use.
        emptied: prompts of which a whole region was lost in some layer.
    """

    rows: list[Answer]
    ledger: Ledger
    kv_bytes: int
    seconds: float
    compression: Compression
    emptied: int = 0

    def by_kind(self) -> dict[str, list[float]]:
        """Scores per question kind, in the order in which the kinds first appear."""
        groups: dict[str, list[float]] = {}
        for row in self.rows:
            groups.setdefault(row.kind, []).append(row.score)
        return groups


def answer_all(
    backbone: CompressedBackbone,
    records: InstructionRecords,
    max_length: int = 2048,
    batch_size: int = 64,
    max_new_tokens: int = 64,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    compression: Compression | None = None,
) -> Answers:
    """Answer the last turn of every record, earlier turns given; batches never mix long and short answers.

    Args:
        backbone: in evaluation mode.
        records: questions with reference answers.
        max_length: prompt tokens, visual ones included.
        batch_size: prompts decoded together.
        max_new_tokens: cap on a generated answer.
        limit: only the first records.
        progress: called with (done, total) after every batch.
        compression: eviction and precision; None: none, the model's dtype.
    """
    compression = Compression() if compression is None else compression
    clock = time.perf_counter()
    total = len(records) if limit is None else min(limit, len(records))
    questions = [records[i] for i in range(total)]
    order = sorted(range(total), key=lambda i: questions[i].kind in DESCRIPTION_KINDS)
    collate = Collator(backbone.family, max_length, padding_side="left", generation=True)
    rows: dict[int, Answer] = {}
    ledgers, kv_bytes = [], 0
    emptied: list[dict[str, int]] = []
    for start in range(0, total, batch_size):
        chosen = order[start : start + batch_size]
        batch_records = [questions[i] for i in chosen]
        prompts = move_data_to_device(collate(batch_records), backbone.family.model.device)
        result = generate_greedy(backbone, prompts, max_new_tokens, compression)
        texts = backbone.family.tokenizer.batch_decode(result.token_ids_BT, skip_special_tokens=True)
        for i, record, text in zip(chosen, batch_records, texts, strict=True):
            rows[i] = _graded(record, text)
        ledgers.append(measured_ledger(result.plan, prompts.regions_BN, backbone.family.shape))
        emptied += emptied_regions(result.plan, prompts.regions_BN)
        kv_bytes += result.cache.prompt_bytes
        if progress is not None:
            progress(len(rows), total)
    ordered = [rows[i] for i in range(total)]
    merged = merged_ledger(backbone.family.shape, ledgers)
    if words := emptied_words(emptied, compression.label):
        warnings.warn(words, SubTokenWarning, stacklevel=2)
    lost = sum(map(bool, emptied))
    return Answers(ordered, merged, kv_bytes, time.perf_counter() - clock, compression, lost)


def _graded(record: Record, text: str) -> Answer:
    """Score one prediction against the record's last answer."""
    reference = record.turns[-1].answer or ""
    kind = record.kind or "question"
    return Answer(record.id, kind, text.strip(), reference, score(record.kind, text, reference))


def merged_ledger(shape: KVShape, ledgers: list[Ledger]) -> Ledger:
    """All batches' rows in one ledger."""
    return Ledger(shape, tuple(entry for ledger in ledgers for entry in ledger.entries))
