"""Questions of a data file, answered in memory: the runner's batches and records, without a grid and its folder."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from subtoken_train.datasets.collate import answer_tokens
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.scene_questions import DESCRIPTION_KINDS
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evaluation.metrics.metric import MeanScores
from subtoken_train.evaluation.metrics.scene_scores import SceneScore
from subtoken_train.evaluation.results.store import SampleRecord
from subtoken_train.evaluation.runner.batches import model_inputs
from subtoken_train.evaluation.runner.cell import answer_batch, record_of
from subtoken_train.evaluation.tasks.embedded_tasks import instruction_samples
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.families.literal_marks import escaped
from subtoken_train.inference.batched import TokenScore, in_batches
from subtoken_train.inference.compression import Compression
from subtoken_train.ledger.measure import emptied_words
from subtoken_train.types import Batch, Protocol, Turn


@dataclass(frozen=True)
class Answers:
    """All answers to some samples.

    Attributes:
        records: one per sample, in the samples' order.
        realised: share of the compressed region's keys and values that is stored, in the model's dtype and without the
            index; 1 where nothing could be compressed.
        seconds: what it took.
        compression: eviction and precision that were in use.
        measures: what is known of the answers beside their score, by name (``MEASURES``); one figure per sample, in
            the samples' order, None where the sample has none. What no sample has is left out.
    """

    records: list[SampleRecord]
    realised: float
    seconds: float
    compression: Compression
    measures: dict[str, list[float | None]]

    @property
    def scores(self) -> list[float]:
        """Of every sample."""
        return [record.score for record in self.records]

    def by_kind(self) -> dict[str, list[float]]:
        """Scores per question kind, in the order in which the kinds first appear."""
        return grouped([record.kind for record in self.records], self.scores)

    def total(self, name: str) -> int:
        """The sum of a measured figure over all prompts, for instance ``kv_bytes``."""
        return sum(getattr(record, name) for record in self.records)


def grouped(kinds: Sequence[str], scores: Sequence[float]) -> dict[str, list[float]]:
    """The scores of every kind, in the order in which the kinds first appear."""
    groups: dict[str, list[float]] = {}
    for kind, score in zip(kinds, scores, strict=True):
        groups.setdefault(kind, []).append(score)
    return groups


def answer_records(
    backbone: CompressedBackbone,
    records: InstructionRecords,
    *,
    max_length: int = 2048,
    batch_size: int = 64,
    max_new_tokens: int = 64,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    compression: Compression | None = None,
) -> Answers:
    """Answer the last turn of every record, earlier turns given, and score it as ``SceneScore`` does.

    Where a record has a reference answer, its tokens (end of turn included) are scored too, see ``answer_samples``.

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
    samples = instruction_samples(records, limit, max_new_tokens)
    order = sorted(range(len(samples)), key=lambda place: samples[place].kind in DESCRIPTION_KINDS)  # long answers last
    batches = list(in_batches(order, batch_size))

    def collate(samples: Sequence[Sample]) -> Batch:
        return model_inputs(samples, backbone.family, "image", max_length)[0]

    def reference(sample: Sample) -> list[int]:
        turns = [*sample.earlier, Turn(sample.prompt, escaped(sample.reference["answer"]))]
        return answer_tokens(Record(sample.id, [], turns), backbone.family)

    return answer_samples(backbone, samples, SceneScore(), batches, collate, progress, compression, reference=reference)


def answer_samples(
    backbone: CompressedBackbone,
    samples: Sequence[Sample],
    metric: MeanScores,
    batches: Sequence[Sequence[int]],
    collate: Callable[[Sequence[Sample]], Batch],
    progress: Callable[[int, int], None] | None = None,
    compression: Compression | None = None,
    protocol: Protocol = "query_aware",
    reference: Callable[[Sample], Sequence[int]] | None = None,
) -> Answers:
    """Greedy answers to samples without choices; what is not said here is as in ``answer_records``.

    Beside the score, ``measures`` holds the metric's other figures and, of samples with reference tokens, under teacher
    forcing: ``token_accuracy``, the share of the reference's tokens that are the greedy choice after those before it,
    and ``log_likelihood``, their mean log-probability in nats. Both are read from the very cache that the answer is
    decoded from, so that every reducer, router, eviction and precision shows in them; at the cost of one pass over the
    references for each batch (of one per token, where a step chooses its pages). An eviction that acts after the whole
    prompt cannot change a reference's first token. With ``eviction_every`` there is no such cache to go back to, and
    both are left out.

    Args:
        backbone: in evaluation mode.
        samples: what is asked.
        metric: what scores an answer.
        batches: places of ``samples`` that are answered together; all of them, each once.
        collate: makes the batch of some samples' prompts.
        progress: after every batch.
        compression: eviction and precision.
        protocol: what is seen when the cache is compressed.
        reference: the token ids of a sample's reference answer; none: it has none. None: no sample has.

    Raises:
        ValueError: a log-likelihood is not finite.
    """
    compression, clock = Compression() if compression is None else compression, time.perf_counter()
    found: dict[int, SampleRecord] = {}
    figures: list[dict[str, float]] = [{} for _ in samples]
    if compression.every is not None:
        reference = None
    kept = before = 0.0
    for places in batches:
        batch = [samples[place] for place in places]
        tokens = [reference(sample) for sample in batch] if reference is not None else None
        outcomes = answer_batch(backbone, batch, collate(batch), [], compression, protocol, tokens)
        kept += sum(outcome.keys_after + outcome.values_after for outcome in outcomes) / 2
        before += sum(outcome.entries_before for outcome in outcomes)
        for place, sample, outcome in zip(places, batch, outcomes, strict=True):
            found[place] = record_of(sample, outcome, metric)
            figures[place] = _forced(sample, outcome.reference) | metric.figures(
                found[place].prediction, sample.reference
            )
        if progress is not None:
            progress(len(found), len(samples))
    records = [found[place] for place in range(len(samples))]
    if words := emptied_words([record.emptied for record in records], compression.label):
        warnings.warn(words, SubTokenWarning, stacklevel=2)
    named = dict.fromkeys(name for each in figures for name in each if name != metric.names[0])
    measures = {name: [each.get(name) for each in figures] for name in named}
    return Answers(records, kept / before if before else 1.0, time.perf_counter() - clock, compression, measures)


def _forced(sample: Sample, score: TokenScore | None) -> dict[str, float]:
    """The figures of a reference's tokens; none where there is no reference."""
    if score is None:
        return {}
    if not math.isfinite(score.logprob):
        raise ValueError(
            f"sample {sample.id!r}: the model gave NaN or infinity; choose a wider dtype, or another adapter"
        )
    return {"token_accuracy": score.right / score.count, "log_likelihood": score.logprob / score.count}
