"""The samples on which an arm falls furthest behind its anchor, with all that a reader needs to see why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from PIL import Image

from subtoken_train.evaluation.reporting.layout import anchor_of
from subtoken_train.evaluation.reporting.pictures import TaskFiles, kept_bits, kept_over, thumbnail
from subtoken_train.evaluation.reporting.reading import Arm, Run
from subtoken_train.evaluation.results.store import SampleRecord, read_samples

WORST = 8
"""Samples shown per arm, taken from its tasks in turn."""


@dataclass(frozen=True)
class Answer:
    """What one arm made of the sample.

    Attributes:
        arm: its name.
        text: the generated answer, or the log-likelihoods of the choices.
        score: of this sample.
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
    """One sample.

    Attributes:
        task: its task.
        sample_id: its id there.
        kind: its question kind.
        question: its prompt; None where the task's files cannot be read here.
        reference: what the metric read.
        ours: the arm's answer.
        anchor: the anchor's.
        remark: why no picture or question is shown; empty otherwise.
    """

    task: str
    sample_id: str
    kind: str
    question: str | None
    reference: dict[str, Any]
    ours: Answer
    anchor: Answer
    remark: str


def worst_regressions(arms: Sequence[Arm], files: TaskFiles) -> dict[str, list[Regression]]:
    """Arm -> its worst samples, for every arm whose anchor answered the same samples."""
    found = {}
    for arm in arms:
        anchor = anchor_of(arm, arms)
        if anchor is not None:
            found[arm.name] = _worst(arm, anchor, files)
    return found


def _worst(arm: Arm, anchor: Arm, files: TaskFiles) -> list[Regression]:
    """The worst of each task in turn, until there are enough."""
    pairs = {task: pair for task in arm.runs if (pair := _pair(arm, anchor, task)) is not None}
    queues = [[(task, name) for name in _behind(*pair)] for task, pair in pairs.items()]
    chosen = [place for turn in zip_longest(*queues) for place in turn if place is not None][:WORST]
    found = []
    for task in dict.fromkeys(task for task, _ in chosen):
        ours, others = (read_samples(run.folder) for run in pairs[task])
        for name in (name for other, name in chosen if other == task):
            found.append(_regression((arm.name, anchor.name), pairs[task], (ours[name], others[name]), files))
    return found


def _pair(arm: Arm, anchor: Arm, task: str) -> tuple[Run, Run] | None:
    """The first seed that both answered, else the first of each; None where they were not asked the same samples."""
    mine, others = arm.runs[task], anchor.runs.get(task, {})
    if not others:
        return None
    shared = [seed for seed in mine if seed in others]
    ours = mine[shared[0]] if shared else next(iter(mine.values()))
    its = others[shared[0]] if shared else next(iter(others.values()))
    return (ours, its) if ours.manifest.samples_sha256 == its.manifest.samples_sha256 else None


def _behind(ours: Run, anchor: Run) -> list[str]:
    """Ids of the samples where we are behind, worst first, at most ``WORST``."""
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
    metric = files.metric(runs[0].manifest)
    answers = [
        _answer(name, run, mine, metric.score(mine.prediction, mine.reference), image)
        for name, run, mine in zip(names, runs, records, strict=True)
    ]
    question = None if sample is None else sample.prompt
    return Regression(task, record.id, record.kind, question, record.reference, answers[0], answers[1], remark)


def _answer(name: str, run: Run, record: SampleRecord, score: float, image: Image.Image | None) -> Answer:
    """One side of the comparison."""
    prediction = record.prediction
    text = prediction if isinstance(prediction, str) else ", ".join(f"{value:.3f}" for value in prediction)
    bits = None if record.kept_visual is None else kept_bits(record.kept_visual, run.grid_bits)
    if bits is None:
        words = "" if record.kept_visual is None else "kept tokens are no square grid: not drawn"
        return Answer(name, text, score, None if image is None else thumbnail(image), words)
    words = f"{sum(bits)} of {len(bits)} visual tokens kept in the last layer"
    return Answer(name, text, score, None if image is None else kept_over(image, bits), words)
