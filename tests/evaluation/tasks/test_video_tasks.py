"""Questions about frames, and the file for their judge."""

import csv

import pytest
from datasets import Dataset
from PIL import Image

from subtoken_train.evaluation.results import SampleRecord, SampleWriter
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import refused
from tests.support.eval_runs import MEASURED

MMBENCH = (
    "You will be provided with 2 separate frames uniformly sampled from a video, the frames are provided in "
    "chronological order of the video.\nPlease analyze these images and provide the answer to the question about the "
    "video content.\nPlease directly reply with your response to the only question.\n"
    '<image>\n<image>\nQuestion: Who, and "where"?\nAnswer: '
)
VIDEO_TT = (
    "<image>\n<image>\nThese are the frames of a video. Select the best answer to the following multiple-choice "
    "question based on the video. Respond with only the letter (A, B, C, or D) of the correct option.\n"
    "Question: How many?\nA. 1\nB. 2\nAnswer: "
)


def frames(folder, count):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (2, 2)).save(folder / f"{number:06}.jpg")


@pytest.fixture
def mmbench(tmp_path):
    frames(tmp_path / "frames" / "v1", 10)
    rows = [
        ["index", "video", "video_type", "question", "answer", "dimensions"],
        ["11", "v1", "news", 'Who, and "where"?', "a man", "['OCR']"],
        ["2", "v1", "news", "When?", "line one\nline two", "['OCR']"],
    ]
    with (tmp_path / "MMBench-Video.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows(rows)
    return tmp_path


def record(sample, prediction):
    told = {"id": sample.id, "kind": sample.kind, "prompt_sha256": "", "reference": dict(sample.reference)}
    return SampleRecord(**told, prediction=prediction, score=1.0, **MEASURED)


def test_mmbench_video(mmbench):
    task = build_task("mmbench_video", mmbench, frames=2)
    first, second = task.samples()
    assert (first.id, first.prompt) == ("11", MMBENCH)
    assert [path.name for path in first.images] == ["000002.jpg", "000007.jpg"]
    SampleWriter(mmbench).append([record(first, "a woman\t!"), record(second, "today")])
    task.write_for_others(mmbench)
    with (mmbench / "judge.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["index"] for row in rows] == ["2", "11"]
    assert rows[1] == {**first.reference, "prediction": "a woman\t!"}
    metric = task.metric()
    metric.update(["a woman", ""], [first.reference, second.reference])
    assert set(metric.compute()) == {task.primary} == {"answered"}


def test_video_tt(tmp_path):
    frames(tmp_path / "frames" / "abc", 2)
    row = {"qid": "0001", "video_id": "abc", "duration": 9, "question": "How many?", "question_prompt": "A. 1\nB. 2"}
    row |= {"capability": "Element Counting", "answer": "B"}
    (tmp_path / "data").mkdir()
    Dataset.from_list([row]).to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    (sample,) = build_task("video_tt", tmp_path).samples()
    assert sample.prompt == VIDEO_TT
    assert list(sample.reference) == [
        "index", "video", "video_path", "duration", "question", "question_prompt", "capability", "answer",
    ]  # fmt: skip
    assert (sample.kind, sample.reference["video_path"]) == ("Element Counting", "./video/abc.mp4")


def test_what_is_refused(mmbench):
    (mmbench / "frames" / "v1").rename(mmbench / "frames" / "v2")
    refused(r"v1 has no frames; extract some: ffmpeg -i VIDEO -vf fps=1 .*v1/%06d.jpg", "mmbench_video", mmbench)
    table = mmbench / "MMBench-Video.tsv"
    table.write_text(table.read_text().replace("11\tv1", "11a\tv1"))
    refused(r"Video\.tsv, line 2: index '11a' is not a number", "mmbench_video", mmbench)
