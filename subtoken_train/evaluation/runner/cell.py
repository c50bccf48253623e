"""One arm on one task: what is missing is answered, batch after batch, and kept as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from lightning.fabric.utilities import move_data_to_device

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.metrics.metric import Prediction, TaskMetric
from subtoken_train.evaluation.results.store import SampleRecord, SampleWriter, prompt_digest, read_samples
from subtoken_train.evaluation.runner.arms import Arm
from subtoken_train.evaluation.runner.batches import Continuations, model_inputs, plan_batches
from subtoken_train.evaluation.runner.processes import Processes
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.inference.batched import Outcome, generate_batch, score_batch
from subtoken_train.inference.cache_report import Measured
from subtoken_train.inference.compression import Compression
from subtoken_train.types import Batch, Protocol

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Cell:
    """One arm on one task, and how it is asked.

    Attributes:
        arm: who answers.
        task: what is asked.
        samples: all that are asked, in the task's order.
        folder: the cell's own, with its manifest in it.
        batch_size: prompts that share a pass.
        max_length: longest prompt in tokens; None: any.
    """

    arm: Arm
    task: Task
    samples: Sequence[Sample]
    folder: Path
    batch_size: int
    max_length: int | None = None

    def finished(self) -> dict[str, SampleRecord]:
        """What is answered already.

        Raises:
            ValueError: a record is broken, of a sample that is not asked, or of one that asked something else.
        """
        asked = {sample.id: sample for sample in self.samples}
        found = read_samples(self.folder)
        for record in found.values():
            sample = asked.get(record.id)
            if sample is None:
                raise ValueError(
                    f"{self.folder} holds sample {record.id!r}, which is not asked here; raise limit, or choose "
                    "another folder"
                )
            if record.prompt_sha256 != prompt_digest(sample.prompt, sample.choices):
                raise ValueError(f"{self.folder} holds sample {record.id!r} with another prompt; choose another folder")
        return found

    def answer(self, backbone: CompressedBackbone, processes: Processes, progress: Progress | None = None) -> None:
        """Answer what is missing; finished samples are never answered again.

        The batches are those of an uninterrupted run: a batch that was cut by a kill goes on with its missing samples.

        Raises:
            ValueError: see ``finished`` and ``model_inputs``; what was answered before stays on disk.
        """
        writer = SampleWriter(self.folder, processes.rank, processes.count)
        processes.meet()  # the first process has cut torn lines, and nobody writes yet
        done = self.finished()
        processes.meet()
        plan = plan_batches(self.samples, self.batch_size)
        mine = [batch for number, batch in enumerate(plan) if processes.mine(number)]
        left = [[self.samples[i] for i in batch if self.samples[i].id not in done] for batch in mine]
        total = count = sum(map(len, left))
        metric, compression = self.task.metric(), self.arm.compression()
        for batch in filter(None, left):
            inputs = model_inputs(batch, backbone.family, self.task.modality, self.max_length)
            outcomes = answer_batch(backbone, batch, *inputs, compression, self.arm.spec.protocol)
            writer.append(record_of(*pair, metric) for pair in zip(batch, outcomes, strict=True))
            count -= len(batch)
            if progress is not None:
                progress(total - count, total)
        processes.meet()


def answer_batch(
    backbone: CompressedBackbone,
    samples: Sequence[Sample],
    prompts: Batch,
    continuations: Continuations,
    compression: Compression,
    protocol: Protocol = "query_aware",
    references: Sequence[Sequence[int]] | None = None,
) -> list[Outcome]:
    """Ask samples that ask for the same (``plan_batches``); ``prompts`` and ``continuations`` are theirs.

    ``references`` are token ids of samples without choices, see ``generate_batch``.
    """
    prompts = move_data_to_device(prompts, backbone.family.device)
    if samples[0].choices:
        return score_batch(backbone, prompts, continuations, compression=compression, protocol=protocol)
    return generate_batch(
        backbone,
        prompts,
        max_new_tokens=samples[0].max_new_tokens,
        stop=samples[0].stop,
        compression=compression,
        protocol=protocol,
        references=references,
    )


def record_of(sample: Sample, outcome: Outcome, metric: TaskMetric) -> SampleRecord:
    """What is kept of one answer."""
    text = outcome.text if sample.keep_space else outcome.text.strip()
    prediction: Prediction = list(outcome.logprobs) if sample.choices else text
    reference = dict(sample.reference)
    return SampleRecord(
        id=sample.id,
        kind=sample.kind,
        prompt_sha256=prompt_digest(sample.prompt, sample.choices),
        reference=reference,
        prediction=prediction,
        score=metric.score(prediction, reference),
        **{field.name: getattr(outcome, field.name) for field in fields(Measured)},
    )
