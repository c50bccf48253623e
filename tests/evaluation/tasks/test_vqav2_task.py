"""VQAv2 in the Parquet form and in the challenge's two files."""

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import VQAV2_QUESTIONS as QUESTIONS
from tests.support.benchmark_folders import people, vqav2_own
from tests.support.benchmark_folders import vqav2_parquet as parquet
from tests.support.vqa_cases import picture, refused

ASKED = [
    {"question_id": 262148000, "image_id": 262148, "question": "Where is he looking?"},
    {"question_id": 393225000, "image_id": 393225, "question": "What website copyrighted the picture?"},
]
NOTED = [
    {"question_id": 393225000, "image_id": 393225, "answers": people(*["foodiebakercom"] * 10), "answer_type": "other"},
    {"question_id": 262148000, "image_id": 262148, "answers": people(*["down"] * 10), "answer_type": "other"},
]
HOW = "\nAnswer the question using a single word or phrase."


def official_folder(folder, asked=ASKED, noted=NOTED):
    return vqav2_own(folder, asked, noted, {262148: picture(5)})


def test_official_form(tmp_path):
    task = build_task("vqav2", official_folder(tmp_path))
    first, second = task.samples()
    assert first.prompt == "<image>\nWhere is he looking?\nAnswer the question using a single word or phrase."
    assert second.prompt == f"<image>\nWhat website copyrighted the picture?{HOW}"
    assert (first.id, first.kind, first.reference) == ("262148000", "other", {"answers": ["down"] * 10})
    assert open_image(first.images[0]).getpixel((0, 0)) == (5, 0, 0)
    assert second.images[0] == tmp_path / "val2014" / "COCO_val2014_000000393225.jpg"
    assert task.metric().score("Down", first.reference) == 1
    assert task.expected_rows == 214_354


def test_parquet_form(tmp_path):
    task = build_task("vqav2", parquet(tmp_path, [{"question": "Is it raining?"}]))
    (sample,) = task.samples()
    assert sample.prompt == f"<image>\nIs it raining?{HOW}"
    assert (sample.id, sample.kind) == ("0", "yes/no")
    assert sample.reference == {"answers": ["yes"] * 9 + ["no"]}
    assert task.options == {"split": "validation"}


@pytest.mark.parametrize("split", ["testdev", "test"])
def test_splits_of_the_server(split):
    with pytest.raises(
        ValueError, match=f"split '{split}' has no answers and cannot be scored; use split 'validation'"
    ):
        build_task("vqav2", split=split)


@pytest.mark.parametrize(
    ("asked", "noted", "message"),
    [
        (ASKED, NOTED[:1], r"questions\[0\]: question 262148000 is not in .*annotations\.json; .* of the same split"),
        (ASKED[:1], NOTED, r"annotations\[0\]: question 393225000 is not in .*questions\.json; .* of the same split"),
        ([*ASKED, ASKED[0]], NOTED, r"questions\[2\]: id '262148000' appears twice, first in .*questions\[0\]"),
        (ASKED, [*NOTED, NOTED[0]], r"annotations\[2\]: id '393225000' appears twice"),
        (ASKED, [NOTED[0], {**NOTED[1], "answers": []}], r"annotations\[1\]: no answers, so this is another split's"),
        (ASKED, [{"question_id": 1}], r"annotations\[0\]: no column answers, answer_type"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, asked, noted, message):
    refused(message, "vqav2", official_folder(tmp_path, asked, noted))


def test_missing_and_truncated_files(tmp_path):
    folder = official_folder(tmp_path)
    (folder / QUESTIONS).write_text((folder / QUESTIONS).read_text()[:-9])
    refused(r"questions\.json: invalid JSON .*cut off", "vqav2", folder)
    (folder / QUESTIONS).unlink()
    refused(r"task vqav2: .* has no v2_OpenEnded_mscoco_val2014_questions\.json\. Parquet:", "vqav2", folder)
