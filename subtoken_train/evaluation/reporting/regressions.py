"""The samples on which an arm falls furthest behind its anchor, with all that a reader needs to see why.

Questions and pictures come from a task's own files, looked for on disk only: nothing is downloaded for a report. Of a
picture's kept visual tokens the last layer's are drawn, without value groups, and only where they are a square grid.

Legend: t visual tokens.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from PIL import Image

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.datasets.video_sources import VideoSource
from subtoken_train.evaluation.picture import dimmed
from subtoken_train.evaluation.reporting.runs import ArmResults, Run
from subtoken_train.evaluation.reporting.score_tables import anchor_of
from subtoken_train.evaluation.results import Manifest, SampleRecord, prompt_digest, read_samples
from subtoken_train.evaluation.tasks import TASKS, build_task
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.families.images import check_square, pad_to_square

WORST = 8
"""Samples shown per arm, taken from its tasks in turn."""
NOT_AVAILABLE = "question and picture are not available"
SIDE = 224
"""Longer side of a thumbnail, in pixels."""

DIMMED, FOG, BARS = 0.82, (128, 128, 128), (122, 116, 104)
"""Share and colour that a dropped token is mixed with, and the colour of a padded picture's bars (CLIP's mean)."""


class TaskFiles:
    """The samples of tasks, read when one is asked for and held until the report is done.

    ``data_root`` is a folder with a folder per task; None: where the manifests say that the files were.
    """

    def __init__(self, data_root: Path | None = None) -> None:
        self.data_root = data_root
        self._samples: dict[str, dict[str, Sample] | str] = {}

    def sample(self, manifest: Manifest, record: SampleRecord) -> tuple[Sample | None, str]:
        """Return the sample of a record, or why it is not there."""
        samples = self._of_task(manifest)
        if isinstance(samples, str):
            return None, samples
        sample = samples.get(record.id)
        if sample is None or prompt_digest(sample.prompt, sample.choices) != record.prompt_sha256:
            return None, f"{NOT_AVAILABLE}: the files of {manifest.task} here hold another sample"
        return sample, ""

    def image(self, sample: Sample) -> tuple[Image.Image | None, str]:
        """Return the sample's picture, or why there is none."""
        if len(sample.images) > 1:
            return None, f"the sample has {len(sample.images)} pictures: not drawn"
        source = sample.images[0]
        if isinstance(source, VideoSource):
            return None, "the sample has a video: not drawn"
        try:
            image = open_image(source)
            check_square(image.height, image.width)
            return image, ""
        except ValueError as error:
            return None, f"the picture is not available: {error}"

    def _of_task(self, manifest: Manifest) -> dict[str, Sample] | str:
        """Return all samples by id, or why they are not there."""
        source = manifest.source if self.data_root is None else str(self.data_root / manifest.task)
        if manifest.source is None and TASKS[manifest.task].hub_id is None:
            source = None  # drawn by the task itself
        elif source is None or not Path(source).exists():
            place = "they were read from the Hub" if source is None else f"no {source}"
            return f"{NOT_AVAILABLE} ({place}); --data-root names the folder that holds {manifest.task}/"
        key = repr((manifest.task, source, manifest.options))
        if key not in self._samples:
            try:
                task = build_task(manifest.task, source, **manifest.options)
                self._samples[key] = {sample.id: sample for sample in task.samples()}
            except (OSError, ValueError) as error:
                self._samples[key] = f"{NOT_AVAILABLE}: {error}"
        return self._samples[key]


def kept_bits(kept_visual: str, grid_bits: int | None) -> list[bool] | None:
    """Return the tokens of a square grid, row by row, True where one is kept; None where they are no square.

    Args:
        kept_visual: as in ``SampleRecord``; up to three bits more than tokens, which fill the last digit.
        grid_bits: how many bits every sample of the run has; None where the numbers differ, as they do for a model
            that reads pictures in their own shape: then a square number is chance.
    """
    if grid_bits is None:
        return None
    side = math.isqrt(grid_bits)
    if grid_bits - side * side > 3:
        return None
    bits = bin(int(kept_visual, 16))[2:].zfill(grid_bits)
    return [bit == "1" for bit in bits[: side * side]]


def kept_over(image: Image.Image, kept_t: list[bool]) -> Image.Image:
    """Return a thumbnail of the padded square that the model saw, dropped tokens dimmed."""
    side = math.isqrt(len(kept_t))
    seen = pad_to_square(image, BARS).resize((max(1, SIDE // side) * side,) * 2)
    return dimmed(seen, [DIMMED * (not kept) for kept in kept_t], (side, side), FOG)


def data_uri(image: Image.Image) -> str:
    """Return the picture as text that an HTML page may hold."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class ShownAnswer:
    """One arm's answer to the sample.

    Attributes:
        text: the generated answer, or the log-likelihoods of the choices.
        picture: the sample's, dropped tokens dimmed; None where there is none to draw on.
        kept: what of the visual tokens is kept, in words; empty for text.
    """

    arm: str
    text: str
    score: float
    picture: Image.Image | None
    kept: str


@dataclass(frozen=True)
class Regression:
    """One sample, with both answers.

    Attributes:
        question: its prompt; None where the task's files cannot be read here.
        remark: why no picture or question is shown; empty otherwise.
    """

    task: str
    sample_id: str
    kind: str
    question: str | None
    reference: dict[str, Any]
    ours: ShownAnswer
    anchor: ShownAnswer
    remark: str


def worst_regressions(arms: Sequence[ArmResults], files: TaskFiles) -> dict[str, list[Regression]]:
    """Map each arm to its worst samples, for every arm whose anchor answered the same samples."""
    found = {}
    for arm in arms:
        anchor = anchor_of(arm, arms)
        if anchor is not None:
            found[arm.name] = _worst(arm, anchor, files)
    return found


def _worst(arm: ArmResults, anchor: ArmResults, files: TaskFiles) -> list[Regression]:
    """Return the worst of each task in turn, until there are enough."""
    pairs = {task: pair for task in arm.runs if (pair := _pair(arm, anchor, task)) is not None}
    queues = [[(task, name) for name in _behind(*pair)] for task, pair in pairs.items()]
    chosen = [place for turn in zip_longest(*queues) for place in turn if place is not None][:WORST]
    found = []
    for task in dict.fromkeys(task for task, _ in chosen):
        ours, others = (read_samples(run.folder) for run in pairs[task])
        for name in (name for other, name in chosen if other == task):
            found.append(_regression((arm.name, anchor.name), pairs[task], (ours[name], others[name]), files))
    return found


def _pair(arm: ArmResults, anchor: ArmResults, task: str) -> tuple[Run, Run] | None:
    """Pair the first seed that both answered, else the first of each; None where they were asked other samples."""
    mine, others = arm.runs[task], anchor.runs.get(task, {})
    if not others:
        return None
    shared = [seed for seed in mine if seed in others]
    ours = mine[shared[0]] if shared else next(iter(mine.values()))
    its = others[shared[0]] if shared else next(iter(others.values()))
    return (ours, its) if ours.manifest.samples_sha256 == its.manifest.samples_sha256 else None


def _behind(ours: Run, anchor: Run) -> list[str]:
    """Return the ids of the samples where we are behind, worst first, at most ``WORST``."""
    anchor_scores = dict(zip(anchor.ids, anchor.scores_n.tolist(), strict=True))
    sign = 1 if ours.higher_is_better else -1
    drops = [
        (sign * (anchor_scores[name] - score), name)
        for name, score in zip(ours.ids, ours.scores_n.tolist(), strict=True)
        if name in anchor_scores
    ]
    return [name for drop, name in sorted(drops, key=lambda drop: -drop[0])[:WORST] if drop > 0]


def _regression(
    names: tuple[str, str], runs: tuple[Run, Run], records: tuple[SampleRecord, SampleRecord], files: TaskFiles
) -> Regression:
    task, record = runs[0].manifest.task, records[0]
    sample, remark = files.sample(runs[0].manifest, record)
    image = None
    if sample is not None and sample.images:
        image, remark = files.image(sample)
    ours, its = (_answer(*side, image) for side in zip(names, runs, records, strict=True))
    question = None if sample is None else sample.prompt
    return Regression(task, record.id, record.kind, question, record.reference, ours, its, remark)


def _answer(name: str, run: Run, record: SampleRecord, image: Image.Image | None) -> ShownAnswer:
    """Return one side of the comparison."""
    said = record.prediction
    text = said if isinstance(said, str) else ", ".join(f"{value:.3f}" for value in said)
    score = float(run.scores_n[run.ids.index(record.id)])
    bits = None if record.kept_visual is None else kept_bits(record.kept_visual, run.grid_bits)
    if bits is None:
        words = "" if record.kept_visual is None else "kept tokens do not form a square grid: not drawn"
        small = None if image is None else image.copy()
        if small is not None:
            small.thumbnail((SIDE, SIDE))
        return ShownAnswer(name, text, score, small, words)
    words = f"{sum(bits)} of {len(bits)} visual tokens kept in the last layer"
    return ShownAnswer(name, text, score, None if image is None else kept_over(image, bits), words)
