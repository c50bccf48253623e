"""MMBench and ScienceQA in both forms: how they are asked, and every file that is refused."""

import json
import shutil

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import SCIENCEQA_PROBLEM as PROBLEM
from tests.support.benchmark_folders import (
    mmbench_parquet,
    mmbench_table,
    scienceqa_own,
    scienceqa_parquet,
    write_files,
)
from tests.support.vqa_cases import picture, prompts_of, reference_cases, refused

LETTER = "\nAnswer with the option's letter from the given choices directly."
PROMPTS = {
    "llava": f"<image>\nA zoo.\nWhat is it?\nA. cat\nB. a\tdog{LETTER}",
    "lmms": f"<image>\nA zoo. What is it? There are several options:\nA. cat\nB. a\tdog\n{LETTER}",
    "vlmevalkit": (
        "<image>\nHint: A zoo.\nQuestion: What is it?\nOptions:\nA. cat\nB. a\tdog\n"
        "Please select the correct answer from the options above. \n"
    ),
}
FORMS = pytest.mark.parametrize("write", [mmbench_parquet, mmbench_table])


@FORMS
@pytest.mark.parametrize("prompt", PROMPTS)
def test_how_mmbench_is_asked(tmp_path, write, prompt):
    folder = write(tmp_path, [{"hint": "A zoo.", "index": 1_000_241}, {}])
    first, second = build_task("mmbench", folder, prompt=prompt).samples()
    assert first.prompt == PROMPTS[prompt]
    assert "zoo" not in second.prompt
    assert (first.id, first.kind) == ("1000241", "object")
    options = {"A": "cat", "B": "a\tdog"}
    assert first.reference == {"index": 1_000_241, "answer": "B", "options": options, "nan_options": "CD"}
    assert open_image(second.images[0]).getpixel((0, 0)) == (1, 0, 0)


def test_cells_without_an_option(tmp_path):
    rows = [{"C": None, "D": "nan"}, {"C": "bird", "D": "fish"}, {"C": None, "D": None}]
    samples = build_task("mmbench", mmbench_parquet(tmp_path, rows)).samples()
    assert [sample.reference.get("nan_options") for sample in samples] == ["D", None, None]
    samples = build_task("mmbench", mmbench_table(tmp_path, [{"C": "", "D": "nan"}])).samples()
    assert [sample.reference["nan_options"] for sample in samples] == ["CD"]  # as the Hub's file has these cells


def test_images_of_other_rows_and_releases(tmp_path):
    assert build_task("mmbench").expected_rows == build_task("mmbench", tmp_path).expected_rows == 4329
    assert build_task("mmbench", mmbench_table(tmp_path / "july", [{}])).expected_rows == 4377
    documents = [{}, {}, {"index": 1_000_001, "image": "1"}]
    folder = mmbench_table(tmp_path, documents, "MMBench_DEV_EN.tsv")
    *_, sample = build_task("mmbench", folder).samples()
    assert open_image(sample.images[0]).getpixel((0, 0)) == (1, 0, 0)
    mmbench_table(tmp_path, [{}, {"image": "7"}], "MMBench_DEV_EN.tsv")
    refused(r"EN\.tsv, line 3: image is '7', neither base64 nor the index of a row", "mmbench", folder)


def test_reference_prompts(shared, tmp_path):
    cases = [case for case in reference_cases(shared, "mmbench") if case["kind"] == "prompt"]
    assert cases
    rows = [{**case["doc"], "index": n} for n, case in enumerate(cases)]
    prompts = prompts_of(build_task("mmbench", mmbench_parquet(tmp_path, rows), prompt="lmms"))
    assert prompts == [f"<image>\n{case['lmms_prompt']}" for case in cases]


@FORMS
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{}, {"index": 0}], r"id '0' appears twice, first in"),
        ([{}, {"answer": "C"}], r"the answer is 'C', and the options are A, B"),
        ([{}, {"answer": "nan"}], r"(row 2|line 3): no answers, so this is another split's file; use that of 'dev'"),
    ],
)
def test_mmbenchs_mistakes(tmp_path, write, rows, message):
    refused(message, "mmbench", write(tmp_path, rows))


def test_mistakes_of_tables(tmp_path):
    refused(r"has no en/dev-\*\.parquet", "mmbench", tmp_path)
    mmbench_table(tmp_path, [{"index": "x"}])
    refused(r"20230712\.tsv, line 2: index 'x' is not a number", "mmbench", tmp_path)


NORTH = f"<image>\nContext: Look at the map.\nWhich is farthest north?\nA. Ohio\nB. Utah{LETTER}"


def test_scienceqas_parquet_form(tmp_path):
    task = build_task("scienceqa", scienceqa_parquet(tmp_path, [{}, {"hint": ""}]))
    first, second = task.samples()
    assert (first.id, first.prompt, first.kind) == ("test-0", NORTH, "social science")
    assert first.reference == {"answer": 1, "choices": 2, "image": True}
    assert second.prompt == NORTH.replace("Context: Look at the map.\n", "")
    full = build_task("scienceqa", scienceqa_parquet(tmp_path, [{}, {"image": None}], "FULL"), subset="full")
    _, sample = full.samples()  # a question without an image is a text
    assert sample.prompt == NORTH.removeprefix("<image>\n")
    assert (sample.images, sample.reference["image"], full.expected_rows) == ((), False, 4241)


def test_scienceqas_own_form(tmp_path):
    problems = {"5": {**PROBLEM, "image": None}, "8": {**PROBLEM, "image": "image.png"}, "9": PROBLEM}
    folder = scienceqa_own(tmp_path, {**problems, "9": {**PROBLEM, "image": None}}, ["8", "5"])
    write_files(folder, {"images/test/8/image.png": picture(4)})
    (sample,) = build_task("scienceqa", folder).samples()
    assert (sample.id, sample.prompt) == ("8", NORTH)
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
    counts = [len(build_task("scienceqa", tmp_path, subset=subset).samples()) for subset in ("img", "full")]
    assert counts == [167, 361]


def test_scienceqas_mistakes(tmp_path):
    none = {**PROBLEM, "image": None}
    words = r"row 2: the answer is 2, which is none of the 2 choices"
    refused(words, "scienceqa", scienceqa_parquet(tmp_path, [{}, {"answer": 2}]))
    words = r"problems\.json, '8': the answer is '1', which is none of the 2 choices"
    refused(words, "scienceqa", scienceqa_own(tmp_path, {"8": {**none, "answer": "1"}}, ["8"]), subset="full")
    words = r"splits\.json, test\[1\]: id '8' appears twice, first in .*test\[0\]; keep one"
    refused(words, "scienceqa", scienceqa_own(tmp_path, {"8": none}, ["8", "8"]))
    (tmp_path / "pid_splits.json").write_text('{"val": []}')
    refused(r"pid_splits\.json has no list 'test'", "scienceqa", tmp_path)
    (tmp_path / "problems.json").unlink()
    refused(r"has no problems\.json\. Parquet: hf download", "scienceqa", tmp_path)
