"""One arm on one task, answered by one process or several: each record is kept at once.

The cell's manifest is written before the first answer: only answers of the same kind may join those of a folder.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from filelock import Timeout
from lightning.fabric.utilities import move_data_to_device

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import Record
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import MAX_TOKENS, at_place
from subtoken_train.evaluation import results
from subtoken_train.evaluation.metrics.metric import Prediction, TaskMetric
from subtoken_train.evaluation.runner.arms import Arm
from subtoken_train.evaluation.tasks.task import Modality, Sample, Task
from subtoken_train.families.family import Family
from subtoken_train.inference import text_prompts
from subtoken_train.inference.batched import generate_batch, in_batches, score_batch
from subtoken_train.inference.cache_report import Measured, Outcome
from subtoken_train.inference.compression import Compression
from subtoken_train.outputs import take_lock, unmake_folders
from subtoken_train.types import Batch, Protocol, Turn
from subtoken_train.version import __version__

Continuations = list[tuple[tuple[int, ...], ...]]
Progress = Callable[[int, int], None]


def plan_batches(samples: Sequence[Sample], batch_size: int) -> list[list[int]]:
    """Group samples that ask for the same, as indices, longest first, whatever was answered already."""

    def asks(place: int) -> tuple[bool, int, tuple[str, ...]]:
        sample = samples[place]
        return bool(sample.choices), 0 if sample.choices else sample.max_new_tokens, sample.stop

    def order(place: int) -> tuple[Any, ...]:
        return asks(place), -len(samples[place].images), -len(samples[place].prompt), place

    alike = groupby(sorted(range(len(samples)), key=order), key=asks)
    return [list(batch) for _, places in alike for batch in in_batches(list(places), batch_size)]


def model_inputs(
    samples: Sequence[Sample], family: Family, modality: Modality, max_length: int | None
) -> tuple[Batch, Continuations]:
    """Return the batch of some samples' prompts and, for samples with choices, the choices' token ids."""
    if modality == "image":
        assert not any(sample.choices for sample in samples)
        records = [Record(s.id, list(s.images), [*s.earlier, Turn(s.prompt)], s.kind) for s in samples]
        return Collator(family, max_length or MAX_TOKENS, padding_side="left", generation=True)(records), []
    encoded = [_encoded(sample, family, max_length) for sample in samples]
    return text_prompts.text_batch(family, encoded), [text.continuations for text in encoded]


def _encoded(sample: Sample, family: Family, max_length: int | None) -> text_prompts.EncodedText:
    prompt, context = sample.prompt, sample.context_characters
    with at_place(f"sample {sample.id!r}: "):
        if sample.chat:
            text_prompts.check_template(family.tokenizer)
        if sample.cut_middle:
            assert context is not None
            asked = sample.max_new_tokens, sample.chat
            prompt, context = text_prompts.without_middle(family, prompt, context, max_length, *asked)
            max_length = None  # it fits, and a token more than asked for may have come in where both ends meet
        if sample.messages:
            text = text_prompts.encode_messages(family, sample.messages, **sample.variables)
        elif sample.chat and sample.prefix_characters is not None:
            assert context is not None
            end = len(prompt) - sample.prefix_characters
            parts = prompt[:context], prompt[context:end], prompt[end:]
            text = text_prompts.encode_chat(family, *parts, max_length=max_length)
        else:
            prompt, context = text_prompts.in_chat(family, prompt, context) if sample.chat else (prompt, context)
            text = text_prompts.encode_text(family, prompt, sample.choices, context, max_length=max_length)
        return replace(text, record_id=sample.id)


@dataclass(frozen=True)
class Cell:
    """Holds what one arm is asked: ``inputs`` makes prompts and ids of choices, ``reference`` the ids to score."""

    samples: Sequence[Sample]
    metric: TaskMetric
    inputs: Callable[[Sequence[Sample]], tuple[Batch, Continuations]]
    compression: Compression
    protocol: Protocol = "query_aware"
    reference: Callable[[Sample], Sequence[int]] | None = None


def make_cell(arm: Arm, task: Task, samples: Sequence[Sample], family: Family, max_length: int | None = None) -> Cell:
    """Return the cell of an arm on a task; prompts have at most ``max_length`` tokens."""
    inputs = partial(model_inputs, family=family, modality=task.modality, max_length=max_length)
    return Cell(samples, task.metric(), inputs, arm.compression(), arm.spec.protocol)


def run_cell(
    cell: Cell,
    folder: Path,
    backbone: CompressedBackbone,
    batch_size: int,
    processes: "Processes",
    progress: Progress | None = None,
) -> None:
    """Answer what a folder lacks, in the batches of an uninterrupted run; nothing is answered again."""
    writer = results.SampleWriter(folder, processes.rank, processes.count)
    processes.meet()  # the first process has cut torn lines, and nobody writes yet
    done = finished(folder, cell.samples)
    processes.meet()
    mine = [batch for n, batch in enumerate(plan_batches(cell.samples, batch_size)) if processes.mine(n)]
    left = [[sample for i in batch if (sample := cell.samples[i]).id not in done] for batch in mine]
    total, count = sum(map(len, left)), 0
    for found in answered(cell, backbone, filter(None, left)):
        writer.append(record for record, _ in found)
        count += len(found)
        if progress is not None:
            progress(count, total)
    processes.meet()


def finished(folder: Path, samples: Sequence[Sample]) -> dict[str, results.SampleRecord]:
    """Read the samples that are answered already; answers to others than those that are asked are refused."""
    asked = {sample.id: results.prompt_digest(sample.prompt, sample.choices) for sample in samples}
    return results.read_samples(folder, asked)


def answered(
    cell: Cell, backbone: CompressedBackbone, batches: Iterable[Sequence[Sample]]
) -> Iterator[list[tuple[results.SampleRecord, Outcome]]]:
    """Ask batch after batch; the samples of one ask for the same (``plan_batches``)."""
    for batch in batches:
        prompts, continuations = cell.inputs(batch)
        prompts, first = move_data_to_device(prompts, backbone.family.device), batch[0]
        how: dict[str, Any] = {"compression": cell.compression, "protocol": cell.protocol}
        if first.choices:
            outcomes = score_batch(backbone, prompts, continuations, **how)
        else:
            how |= {"max_new_tokens": first.max_new_tokens, "stop": first.stop}
            how["references"] = None if cell.reference is None else list(map(cell.reference, batch))
            outcomes = generate_batch(backbone, prompts, **how)
        yield [(_record(*pair, cell.metric), pair[1]) for pair in zip(batch, outcomes, strict=True)]


def _record(sample: Sample, outcome: Outcome, metric: TaskMetric) -> results.SampleRecord:
    text = outcome.text if sample.keep_space else outcome.text.strip()
    said = map(float, outcome.greedy if sample.greedy else ())
    prediction: Prediction = [*outcome.logprobs, *said] if sample.choices else text
    reference = dict(sample.reference)
    return results.SampleRecord(
        id=sample.id,
        kind=sample.kind,
        prompt_sha256=results.prompt_digest(sample.prompt, sample.choices),
        reference=reference,
        prediction=prediction,
        score=metric.score(prediction, reference),
        **{field.name: getattr(outcome, field.name) for field in fields(Measured)},
    )


def write_manifest(
    arm: Arm,
    task: Task,
    samples: Sequence[Sample],
    folder: Path,
    family: Family,
    batch_size: int,
    max_length: int | None = None,
    processes: int = 1,
    paper: float | None = None,
) -> None:
    """Write the manifest of a cell's folder, or compare it with the one that is there."""
    manifest = results.Manifest(
        arm=arm.facts,
        task=task.name,
        options=_as_read(task.options),
        source=None if task.source is None else str(task.source),
        rows=len(samples),
        expected_rows=task.expected_rows,
        primary=task.primary,
        points=sorted(task.metric().points),
        samples_sha256=samples_digest(samples),
        settings={
            "batch_size": batch_size,
            "max_length": max_length,
            "dtype": str(family.model.dtype).removeprefix("torch."),
            "device": family.model.device.type,
            "processes": processes,
            "adapter_sha256": arm.adapter_sha256,
            "reducer": _as_read(asdict(arm.reducer)),
            "eviction_options": _as_read(dict(arm.spec.eviction_options)),
            "calibration_sha256": arm.calibration_sha256,
            "seed": arm.spec.seed,
            "versions": {"subtoken_train": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        },
        paper=paper,
    )
    there = manifest.joined(folder)
    if there is not None and there.samples_sha256 != samples_digest(samples[: there.rows]):
        words = "answers to other samples than the task's files have now; choose another results folder"
        raise ValueError(f"{folder} holds {words}")
    manifest.write(folder)


def samples_digest(samples: Sequence[Sample]) -> str:
    """Return the SHA-256 of what is asked and of the references, in hexadecimal; images are not in it."""
    asked = [
        [s.id, s.prompt, s.choices, dict(s.reference), s.context_characters, s.max_new_tokens, s.stop] for s in samples
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _as_read(settings: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(settings, default=str)))


_PATIENCE = timedelta(days=1)  # between two meetings lies what one process answers of a task


@dataclass(frozen=True)
class Processes:
    """This process among all, ``local_rank`` its GPU; a context manager that opens and closes their group."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Self:
        """Read what torchrun sets; one process without it."""
        defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        return cls(*(int(os.environ.get(name, default)) for name, default in defaults.items()))

    @property
    def first(self) -> bool:
        """True if this process speaks and writes for all."""
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Tell whether piece ``number`` of the work is this process's; every piece is exactly one's."""
        return number % self.count == self.rank

    def device(self, wanted: str | None) -> str:
        """Return ``wanted``, else this process's GPU or the CPU; ``auto`` stays for a process that is alone."""
        if wanted == "auto" and self.count == 1:
            return wanted
        if wanted is not None and wanted not in ("auto", "cuda"):
            if self.count > 1 and wanted.startswith("cuda"):
                raise ValueError(f"device {wanted} for {self.count} processes; leave it out, each takes its own GPU")
            return wanted
        return f"cuda:{self.local_rank}" if wanted == "cuda" or torch.cuda.is_available() else "cpu"

    def meet(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()

    def __enter__(self) -> Self:
        if self.count > 1:
            dist.init_process_group("gloo", timeout=_PATIENCE)
            if self.local_rank < torch.cuda.device_count():
                torch.cuda.set_device(self.local_rank)  # what names no device (bitsandbytes) must not meet on the first
        return self

    def __exit__(self, *_: object) -> None:
        if self.count > 1:
            dist.destroy_process_group()


ONE = Processes()


@contextmanager
def alone(folder: Path, processes: Processes) -> Iterator[None]:
    """Let this run alone write into a folder; one that it made goes where the block fails before an answer."""
    if not processes.first:
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = take_lock(folder / ".lock", 0)
    except Timeout:
        raise ValueError(f"another evaluation is writing to {folder}; wait for it, or write elsewhere") from None
    try:
        yield
    except BaseException:
        if made and not any(path.stat().st_size for path in folder.rglob(results.SAMPLES_GLOB)):
            shutil.rmtree(folder)  # the lock's file is in it, so nobody waits for it
            unmake_folders(made[1:])
        raise
    finally:
        lock.release()
