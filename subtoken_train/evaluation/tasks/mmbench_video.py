"""MMBench-Video (Fang et al., NeurIPS 2024): questions about frames, answered for a judge; no score without one.

Asked one by one, in VLMEvalKit's words (its first release put a line about an assistant before them). Its other way,
all questions of a video at once, is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.video import VideoTask
from subtoken_train.evaluation.tasks.parquet_sets import find_file, task_source, unique_ids
from subtoken_train.evaluation.tasks.text_files import read_table

FILE = "MMBench-Video.tsv"
COLUMNS = ("index", "video", "question", "answer", "dimensions")
_BEFORE = (
    "You will be provided with {} separate frames uniformly sampled from a video, the frames are provided in "
    "chronological order of the video.\n"
    "Please analyze these images and provide the answer to the question about the video content.\n"
    "Please directly reply with your response to the only question.\n"
)


@dataclass
class MMBenchVideo(VideoTask):
    """Open questions; the answers are for a judge, in ``judge.tsv``."""

    name = "mmbench_video"
    where = (
        "hf download opencompass/MMBench-Video --repo-type dataset --local-dir DIR (its videos are pickled archives, "
        "which VLMEvalKit unpacks), then extract frames of each into DIR/frames/VIDEO (ffmpeg -i VIDEO.mp4 -vf fps=1 "
        f"DIR/frames/VIDEO/%06d.jpg); DIR holds {FILE}"
    )

    def samples(self) -> list[Sample]:
        """The rows of the table; ids are their ``index``. Only the listings of the frames' folders are read."""
        rows = read_table(find_file(self, Path(task_source(self)), FILE), COLUMNS, delimiter="\t")
        unique_ids((row.values["index"], row.place) for row in rows)
        for row in rows:
            if not row.values["index"].isdecimal():
                raise ValueError(f"{row.place}: index {row.values['index']!r} is no number")
        chosen = self.frames_of(row.values["video"] for row in rows)
        return [
            Sample(
                id=row.values["index"],
                prompt=video_prompt(row.values["question"], len(chosen[row.values["video"]])),
                reference=dict(row.values),
                images=chosen[row.values["video"]],
                max_new_tokens=512,
                kind="question",
            )
            for row in rows
        ]


def video_prompt(question: str, frames: int) -> str:
    """The instruction, one placeholder per frame, and the question."""
    return _BEFORE.format(frames) + "<image>\n" * frames + f"Question: {question}\nAnswer: "
