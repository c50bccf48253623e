"""ScienceQA in both forms."""

import json
import shutil

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import SCIENCEQA_PROBLEM as PROBLEM
from tests.support.benchmark_folders import scienceqa_own as own_form
from tests.support.benchmark_folders import scienceqa_parquet as parquet
from tests.support.benchmark_folders import write_files
from tests.support.vqa_cases import picture, refused

HOW = "\nAnswer with the option's letter from the given choices directly."
ASKED = f"<image>\nContext: Look at the map.\nWhich is farthest north?\nA. Ohio\nB. Utah{HOW}"


def test_the_parquet_form(tmp_path):
    task = build_task("scienceqa", parquet(tmp_path, [{}, {"hint": ""}]))
    first, second = task.samples()
    assert (first.id, first.prompt, first.kind) == ("test-0", ASKED, "social science")
    assert first.reference == {"answer": 1, "choices": 2, "image": True}
    assert second.prompt == f"<image>\nWhich is farthest north?\nA. Ohio\nB. Utah{HOW}"
    assert task.expected_rows == 2017


def test_questions_without_an_image_are_text(tmp_path):
    task = build_task("scienceqa", parquet(tmp_path, [{}, {"image": None}], "FULL"), subset="full")
    _, sample = task.samples()
    assert sample.prompt == ASKED.removeprefix("<image>\n")
    assert (sample.images, sample.reference["image"]) == ((), False)
    assert task.expected_rows == 4241


def test_the_benchmarks_own_form(tmp_path):
    problems = {"5": {**PROBLEM, "image": None}, "8": {**PROBLEM, "image": "image.png"}, "9": PROBLEM}
    folder = own_form(tmp_path, {**problems, "9": {**PROBLEM, "image": None}}, ["8", "5"])
    write_files(folder, {"images/test/8/image.png": picture(4)})
    (sample,) = build_task("scienceqa", folder).samples()
    assert (sample.id, sample.prompt) == ("8", ASKED)
    assert open_image(sample.images[0]).getpixel((0, 0)) == (4, 0, 0)
    assert [sample.id for sample in build_task("scienceqa", folder, subset="full").samples()] == ["8", "5"]


def test_real_problems(shared, tmp_path):
    folder = shared / "realdata" / "scienceqa"
    if not folder.is_dir():
        pytest.skip("reference material (scienceqa) is absent")
    shutil.copy(folder / "problems_first_part.json", tmp_path / "problems.json")
    shutil.copy(folder / "pid_splits.json", tmp_path)
    refused(r"pid_splits\.json: 3,880 ids of 'test' are not in .*problems\.json, first '", "scienceqa", tmp_path)
    there = json.loads((tmp_path / "problems.json").read_text())
    ids = [name for name in json.loads((tmp_path / "pid_splits.json").read_text())["test"] if name in there]
    (tmp_path / "pid_splits.json").write_text(json.dumps({"test": ids}))
    assert len(build_task("scienceqa", tmp_path).samples()) == 167
    assert len(build_task("scienceqa", tmp_path, subset="full").samples()) == 361


def test_mistakes(tmp_path):
    refused(
        r"row 2: the answer is 2, which is none of the 2 choices", "scienceqa", parquet(tmp_path, [{}, {"answer": 2}])
    )
    own_form(tmp_path, {"8": {**PROBLEM, "image": None, "answer": "1"}}, ["8"])
    refused(
        r"problems\.json, '8': the answer is '1', which is none of the 2 choices", "scienceqa", tmp_path, subset="full"
    )
    own_form(tmp_path, {"8": {**PROBLEM, "image": None}}, ["8", "8"])
    refused(r"splits\.json, test\[1\]: id '8' appears twice, first in .*test\[0\]; keep one", "scienceqa", tmp_path)
    (tmp_path / "pid_splits.json").write_text('{"val": []}')
    refused(r"pid_splits\.json has no list 'test'", "scienceqa", tmp_path)
    (tmp_path / "problems.json").unlink()
    refused(r"has no problems\.json\. Parquet: hf download", "scienceqa", tmp_path)
