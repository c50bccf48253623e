"""What video tasks share: frames from folders of extracted images, and the file that a judge reads.

No video is decoded here. ``ffmpeg -i VIDEO.mp4 -vf fps=1 DIR/frames/VIDEO/%06d.jpg`` makes such a folder.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from subtoken_train.datasets.images import SUFFIXES
from subtoken_train.evaluation.metrics.short_answers import Answered
from subtoken_train.evaluation.results.record import SampleRecord
from subtoken_train.evaluation.results.store import read_samples
from subtoken_train.evaluation.tasks.base import Task
from subtoken_train.evaluation.tasks.reading import task_source

FRAMES = "frames"
JUDGE_FILE = "judge.tsv"


@dataclass
class VideoTask(Task):
    """Questions about frames, whose answers only a judge can score.

    Nothing is scored here: a run leaves JUDGE_FILE beside its records.

    Attributes:
        frames: images of each video, evenly spaced over its folder's. LLaVA-1.5's 4,096 tokens hold six.
    """

    frames: int = 8

    modality = "image"
    hub_id = None
    rows = None
    primary = "answered"

    def metric(self) -> Answered:
        """How much was answered: no score."""
        return Answered()

    def write_for_others(self, folder: Path) -> None:
        """The judge's file."""
        write_judge_file(read_samples(folder).values(), folder / JUDGE_FILE)

    def frames_of(self, videos: Iterable[str]) -> dict[str, tuple[Path, ...]]:
        """The images of each video, in order; each folder is listed once.

        Raises:
            ValueError: a video has none.
        """
        folder = Path(task_source(self)) / FRAMES
        return {video: tuple(evenly_spaced(folder / video, self.frames)) for video in dict.fromkeys(videos)}


def evenly_spaced(folder: Path, count: int) -> list[Path]:
    """``count`` images of a folder, at the middles of as many equal parts of its listing by name; all where fewer.

    Raises:
        ValueError: there is no image.
    """
    names = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)
    if not names:
        raise ValueError(f"{folder} has no frames; extract some: ffmpeg -i VIDEO -vf fps=1 {folder}/%06d.jpg")
    taken = min(count, len(names))
    return [names[(2 * part + 1) * len(names) // (2 * taken)] for part in range(taken)]


def write_judge_file(records: Iterable[SampleRecord], path: Path) -> None:
    """The answers in the form that VLMEvalKit's judges read: the benchmark's own columns and ``prediction``, as TSV.

    Rows come by their ``index``. Versions of VLMEvalKit that want ``.xlsx`` need it converted.

    Args:
        records: of one video task: their references hold the columns.
        path: of the file.

    Raises:
        ValueError: there is no record, or a prediction is no text.
    """
    rows: list[Mapping[str, object]] = []
    for record in records:
        if not isinstance(record.prediction, str) or "index" not in record.reference:
            raise ValueError(f"sample {record.id!r} is no answer to a video question; only their tasks have a judge")
        rows.append({**record.reference, "prediction": record.prediction})
    if not rows:
        raise ValueError(f"no answers to write to {path}; evaluate the task first")
    rows.sort(key=lambda row: int(str(row["index"])))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
