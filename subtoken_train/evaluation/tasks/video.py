"""Video tasks: questions about frames from folders of extracted images, answered for a judge; no score without one.

No video is decoded here. ``ffmpeg -i VIDEO.mp4 -vf fps=1 DIR/frames/VIDEO/%06d.jpg`` makes such a folder.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subtoken_train.datasets.image_sources import evenly_spaced
from subtoken_train.errors import MAX_COUNT
from subtoken_train.evaluation.metrics.short_answers import Answered
from subtoken_train.evaluation.results import SampleRecord, read_samples
from subtoken_train.evaluation.tasks.file_rows import find_file, task_folder, unique_ids
from subtoken_train.evaluation.tasks.table_files import read_split, read_table
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.outputs import write_whole

FRAMES = "frames"
JUDGE_FILE = "judge.tsv"
TABLE = "MMBench-Video.tsv"
_MMB_COLUMNS = ("index", "video", "question", "answer", "dimensions")
_MMB_BEFORE = (
    "You will be provided with {} separate frames uniformly sampled from a video, the frames are provided in "
    "chronological order of the video.\n"
    "Please analyze these images and provide the answer to the question about the video content.\n"
    "Please directly reply with your response to the only question.\n"
)
_TT_COLUMNS = ("video_id", "duration", "question", "question_prompt", "capability", "answer")
_TT_BEFORE = (
    "These are the frames of a video. Select the best answer to the following multiple-choice question based on the "
    "video. Respond with only the letter (A, B, C, or D) of the correct option.\n"
)


@dataclass
class VideoTask(Task):
    """Questions about frames, whose answers only a judge can score: a run leaves JUDGE_FILE beside its records.

    ``frames`` counts the images of each video, evenly spaced over its folder's. LLaVA-1.5's 4,096 tokens hold six.
    """

    frames: int = 8

    modality = "image"
    primary = "answered"
    scored_by = Answered
    ranges: ClassVar = {"frames": (1, MAX_COUNT)}

    def write_for_others(self, folder: Path) -> None:
        """Write the judge's file."""
        write_judge_file(read_samples(folder).values(), folder / JUDGE_FILE)

    def frames_of(self, videos: Iterable[str]) -> dict[str, tuple[Path, ...]]:
        """Return the images of each video, in order (``evenly_spaced``); each folder is listed once."""
        folder = task_folder(self) / FRAMES
        return {video: tuple(evenly_spaced(folder / video, self.frames)) for video in dict.fromkeys(videos)}


def write_judge_file(records: Iterable[SampleRecord], path: Path) -> None:
    """Write the answers in the form that VLMEvalKit's judges read: the set's columns and ``prediction``, as TSV.

    Rows come by their ``index``; the references hold the columns. Versions of VLMEvalKit that want ``.xlsx`` need it
    converted.
    """
    rows = []
    for record in records:
        if not isinstance(record.prediction, str) or "index" not in record.reference:
            raise ValueError(
                f"sample {record.id!r} is not an answer to a video question; only their tasks have a judge"
            )
        rows.append({**record.reference, "prediction": record.prediction})
    if not rows:
        raise ValueError(f"no answers to write to {path}; evaluate the task first")
    rows.sort(key=lambda row: int(row["index"]))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, file.getvalue())


@dataclass
class MMBenchVideo(VideoTask):
    """MMBench-Video (Fang et al., NeurIPS 2024): open questions; the answers are for a judge, in ``judge.tsv``.

    Asked one by one, in VLMEvalKit's words (its first release put a line about an assistant before them). Its other
    way, all questions of a video at once, is not here.
    """

    name = "mmbench_video"
    where = (
        "hf download opencompass/MMBench-Video --repo-type dataset --local-dir DIR (its videos are pickled archives, "
        "which VLMEvalKit unpacks), then extract frames of each into DIR/frames/VIDEO (ffmpeg -i VIDEO.mp4 -vf fps=1 "
        f"DIR/frames/VIDEO/%06d.jpg); DIR holds {TABLE}"
    )

    def samples(self) -> list[Sample]:
        """Return the rows of the table; ids are their ``index``. Only the listings of the frames' folders are read."""
        rows = read_table(find_file(self, task_folder(self), TABLE), _MMB_COLUMNS, delimiter="\t")
        unique_ids((row.values["index"], row.place) for row in rows)
        for row in rows:
            if not row.values["index"].isdecimal():
                raise ValueError(f"{row.place}: index {row.values['index']!r} is not a number")
        chosen = self.frames_of(row.values["video"] for row in rows)
        samples = []
        for row in rows:
            images = chosen[row.values["video"]]
            asked = "<image>\n" * len(images) + f"Question: {row.values['question']}\nAnswer: "
            prompt = _MMB_BEFORE.format(len(images)) + asked
            samples.append(Sample(row.values["index"], prompt, dict(row.values), images, max_new_tokens=512))
        return samples


@dataclass
class VideoTT(VideoTask):
    """Video-TT (Zhang et al., 2025): questions with options; the answers are for VLMEvalKit's judge, in ``judge.tsv``.

    VLMEvalKit's words. The set's open questions are not here.
    """

    name = "video_tt"
    where = (
        "hf download lmms-lab/video-tt --repo-type dataset --local-dir DIR, unpack its videos and extract frames of "
        "each into DIR/frames/VIDEO_ID (ffmpeg -i VIDEO_ID.mp4 -vf fps=1 DIR/frames/VIDEO_ID/%06d.jpg); DIR holds "
        "data/test-*.parquet"
    )

    def samples(self) -> list[Sample]:
        """Return the rows of split ``test``; ids are their numbers from 0, which VLMEvalKit calls ``index``."""
        rows = read_split(self, "test", _TT_COLUMNS)
        chosen = self.frames_of(str(row.values["video_id"]) for row in rows)
        samples = []
        for index, row in enumerate(rows):
            values = {name: row.values[name] for name in _TT_COLUMNS[1:]}
            video = str(row.values["video_id"])
            images = chosen[video]
            asked = f"Question: {values['question']}\n{values['question_prompt']}\nAnswer: "
            reference = {"index": index, "video": video, "video_path": f"./video/{video}.mp4", **values}
            prompt = "<image>\n" * len(images) + _TT_BEFORE + asked
            samples.append(Sample(str(index), prompt, reference, images, kind=str(values["capability"])))
        return samples
