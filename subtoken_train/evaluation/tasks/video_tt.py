"""Video-TT (Zhang et al., 2025), multiple choice: questions about frames, answered for VLMEvalKit's judge; no score.

VLMEvalKit's words. The set's open questions are not here.
"""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.video import VideoTask
from subtoken_train.evaluation.tasks.parquet_sets import read_split

COLUMNS = ("video_id", "duration", "question", "question_prompt", "capability", "answer")
_BEFORE = (
    "These are the frames of a video. Select the best answer to the following multiple-choice question based on the "
    "video. Respond with only the letter (A, B, C, or D) of the correct option.\n"
)


@dataclass
class VideoTT(VideoTask):
    """Questions with options; the answers are for a judge, in ``judge.tsv``."""

    name = "video_tt"
    where = (
        "hf download lmms-lab/video-tt --repo-type dataset --local-dir DIR, unpack its videos and extract frames of "
        "each into DIR/frames/VIDEO_ID (ffmpeg -i VIDEO_ID.mp4 -vf fps=1 DIR/frames/VIDEO_ID/%06d.jpg); DIR holds "
        "data/test-*.parquet"
    )

    def samples(self) -> list[Sample]:
        """The rows of split ``test``; ids are their numbers from 0, which VLMEvalKit calls ``index``."""
        rows = read_split(self, "test", COLUMNS)
        chosen = self.frames_of(str(row.values["video_id"]) for row in rows)
        samples = []
        for index, row in enumerate(rows):
            values = {name: row.values[name] for name in COLUMNS[1:]}
            video = str(row.values["video_id"])
            images = chosen[video]
            samples.append(
                Sample(
                    id=str(index),
                    prompt=video_prompt(values["question"], values["question_prompt"], len(images)),
                    reference={"index": index, "video": video, "video_path": f"./video/{video}.mp4", **values},
                    images=images,
                    kind=str(values["capability"]),
                )
            )
        return samples


def video_prompt(question: str, form: str, frames: int) -> str:
    """One placeholder per frame, the instruction, and the question with the form of its answer."""
    return "<image>\n" * frames + _BEFORE + f"Question: {question}\n{form}\nAnswer: "
