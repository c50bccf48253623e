"""Video tasks: questions about frames from folders of extracted images, answered for a judge; no score without one.

No video is decoded here: ``ffmpeg -i VIDEO.mp4 -vf fps=1 DIR/frames/VIDEO/%06d.jpg`` makes such a folder. Words are
VLMEvalKit's.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from subtoken_train.datasets.image_sources import frames_in, spaced
from subtoken_train.errors import MAX_COUNT, refuse
from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.tasks.files import FileRow, find_file, read_split, read_table, task_folder
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.outputs import write_whole


@dataclass
class VideoTask(Task):
    """Questions about ``frames`` spaced over a folder's, which a judge alone scores, by the run's ``judge.tsv``."""

    frames: int = 8

    kinds: ClassVar[str | None] = None  # column of what scores are also shown by
    ranges: ClassVar = {"frames": (1, MAX_COUNT)}
    form: ClassVar[str]  # of a prompt: {images}, their {count}, and a row's columns

    def write_for_others(self, folder: Path) -> None:
        """Write the answers as VLMEvalKit's judges read them: the set's columns and ``prediction``, by ``index``."""
        found = read_samples(folder).values()
        rows = pd.DataFrame([{**each.reference, "prediction": each.prediction} for each in found], dtype=object)
        rows = rows.sort_values("index", key=lambda index: index.astype(int), kind="stable")
        write_whole(folder / "judge.tsv", rows.to_csv(sep="\t", index=False, lineterminator="\r\n"))

    def samples(self) -> list[Sample]:
        rows = self.video_rows()
        folder = task_folder(self) / "frames"  # each video's is listed once
        videos = dict.fromkeys(str(row.values["video"]) for row in rows)
        chosen = {video: tuple(spaced(frames_in(folder / video), self.frames)) for video in videos}
        return [self.sample(row.values, chosen[str(row.values["video"])]) for row in rows]

    @abstractmethod
    def video_rows(self) -> list[FileRow]:
        """Return rows with the columns that the judge reads, ``index`` and ``video`` among them."""

    def sample(self, row: Mapping[str, Any], images: tuple[Path, ...]) -> Sample:
        """Return a row's sample; its reference is the row."""
        prompt = self.form.format_map({**row, "images": "<image>\n" * len(images), "count": len(images)})
        kind = "question" if self.kinds is None else str(row[self.kinds])
        return Sample(str(row["index"]), prompt, dict(row), images, max_new_tokens=self.tokens, kind=kind)


class MMBenchVideo(VideoTask):
    """MMBench-Video (Fang et al., NeurIPS 2024): open questions one by one, not VLMEvalKit's all at once."""

    table: ClassVar = "MMBench-Video.tsv"
    form = (
        "You will be provided with {count} separate frames uniformly sampled from a video, the frames are provided in "
        "chronological order of the video.\n"
        "Please analyze these images and provide the answer to the question about the video content.\n"
        "Please directly reply with your response to the only question.\n"
        "{images}Question: {question}\nAnswer: "
    )

    def video_rows(self) -> list[FileRow]:
        rows = read_table(find_file(self, task_folder(self), self.table), self.columns, delimiter="\t")
        for row in rows:
            refuse((not row.values["index"].isdecimal(), f"{row.place}: index {row.values['index']!r} is not a number"))
        return rows


class VideoTT(VideoTask):
    """Video-TT (Zhang et al., 2025): its questions with options; ids are the rows' numbers, VLMEvalKit's ``index``."""

    form = (
        "{images}These are the frames of a video. Select the best answer to the following multiple-choice question "
        "based on the video. Respond with only the letter (A, B, C, or D) of the correct option.\n"
        "Question: {question}\n{question_prompt}\nAnswer: "
    )

    def video_rows(self) -> list[FileRow]:
        found = []
        for index, row in enumerate(read_split(self, self.answered, self.columns)):
            video, *more = row.values.items()
            values = {"index": index, "video": str(video[1]), "video_path": f"./video/{video[1]}.mp4", **dict(more)}
            found.append(FileRow(values, row.place))
        return found
