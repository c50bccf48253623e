"""MMBench, ScienceQA and what lmms-eval asks by letters: how they are asked and scored, and files that are refused."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, Image, List

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import TASKS, build_task
from subtoken_train.evaluation.tasks.files import check_samples
from tests.support import benchmark_folders
from tests.support.benchmark_folders import mmbench_parquet, picture, prompts_of, refused, scienceqa_parquet, write_rows
from tests.support.refusals import refuses

SPLITS = {"mmmu": "validation", "mmstar": "val"}
GIVEN = {
    "answer": "A", "category": "c", "l2_category": "l", "index": 1, "data_type": "image", "question_type_id": "9",
    "question_id": 1, "dataset": "x", "question_type": "q", "id": "validation_Art_Theory_1",
    **{f"image_{n}": {"bytes": picture(n), "path": None} for n in range(1, 8)},
}  # fmt: skip


def lines(name):
    """The recorded lines of a file, without those of other tasks."""
    path = Path(__file__).with_name(f"lmms_{name}.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def written(folder, task, document):
    """A set of one row."""
    if task == "mmbench_cn":
        return mmbench_parquet(folder, [document], "cn")
    row = {**GIVEN, **{"ai2d": {"answer": "0"}, "ocrbench": {"answer": ["x"]}}.get(task, {}), **document}
    return write_rows(folder, f"data/{SPLITS.get(task, 'test')}-00000-of-00001", [row])


@pytest.mark.parametrize(("task", "document", "expected"), lines("prompts"))
def test_prompts(tmp_path, task, document, expected):
    built = build_task(task, written(tmp_path, task, document), **{"prompt": "lmms"} if task == "mmbench_cn" else {})
    (sample,) = built.samples()
    assert sample.prompt == "<image>\n" * len(sample.images) + expected
    check_samples(built, [sample])
    if task == "mmmu":
        shades = [number for number in (1, 2, 3) if f"<image {number}>" in expected]
        assert [open_image(image).getpixel((0, 0))[0] for image in sample.images] == shades
        assert (sample.id, sample.kind) == ("validation_Art_Theory_1", "Art_Theory")


def test_answers():
    """Every answer, read as recorded."""
    seen = set()
    for task, prediction, reference, right in lines("answers"):
        metric, seen = TASKS[task].scored_by, seen | {task}
        if task == "mmstar":
            found = metric.score(prediction, {"answer": reference, "l2_category": "x"})
        else:
            read = {"task": task, "answer": reference} if isinstance(reference, str) else reference
            found = metric.figures(prediction, read)["accuracy"]
        assert found == (right[0] if task == "mmmu" else right), (task, prediction, reference)
    assert seen == {"ai2d", "mmmu", "mmstar", "ocrbench", "realworldqa", "seedbench"}


def test_mmstars_one_file(tmp_path):
    row = {"index": 7, "question": "What?", "answer": "B", "category": "math", "l2_category": "geometry"}
    (sample,) = build_task("mmstar", write_rows(tmp_path, "mmstar", [row])).samples()
    assert (sample.id, sample.kind, sample.max_new_tokens) == ("7", "math", 1024)


def test_seeds_images_are_lists_and_its_videos_are_left_out(tmp_path):
    document = {"question": "What?", **{f"choice_{letter}": letter for letter in "abcd"}}
    shown = {"bytes": picture(5), "path": None}
    rows = [
        {**GIVEN, **document, "question_id": n, "data_type": kind, "image": images}
        for n, (kind, images) in enumerate([("video", [shown] * 8), ("image", [shown]), ("image", [shown] * 2)])
    ]
    path = tmp_path / "data" / "test-00000-of-00001.parquet"
    path.parent.mkdir()
    Dataset.from_list(rows).cast_column("image", List(Image())).to_parquet(path)
    first, second = build_task("seedbench", tmp_path).samples()
    assert (first.id, first.kind) == ("1", "Text Understanding")
    assert open_image(first.images[0]).getpixel((0, 0)) == (5, 0, 0)
    refuses(r"parquet, row 3 cannot be read .*holds 2 images, where one belongs", open_image, second.images[0])


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"options": "['x'"}, r"options is \"\['x'\", but must be a list of texts"),
        ({"options": "[1]"}, r"options is '\[1\]', but must be a list of texts"),
        ({"options": "[" * 9999}, "but must be a list of texts"),
        ({"answer": "C"}, "the answer is 'C', which is none of the 2 options"),
        ({"answer": None}, "no answers, so this is another split's file; use that of 'validation'"),
        ({"id": "x"}, "id 'x' names no subject"),
        ({"question": "<image 8>"}, "the question names image_8; a row has image_1 to image_7"),
        ({"question": "<image 2>", "image_2": None}, "the row has no image"),
    ],
)
def test_mmmu_rows_that_cannot_be_asked(tmp_path, document, words):
    row = {"question": "<image 1>", "options": "['x', 'y']", "question_type": "multiple-choice"}
    refused(f"parquet, row 1: .*{words}", "mmmu", written(tmp_path, "mmmu", {**row, **document}))
    row = {"question": "How many?", "options": "[]", "question_type": "open", "answer": "['7', 'seven']"}
    (sample,) = build_task("mmmu", written(tmp_path, "mmmu", row)).samples()  # open answers may be several
    assert (sample.images, sample.reference) == ((), {"options": [], "answers": ["7", "seven"]})
    assert TASKS["mmmu"].scored_by.figures("There are seven.", sample.reference)["accuracy"] == 1


def test_mmbench_in_chinese(tmp_path):
    folder = mmbench_parquet(tmp_path, [{}], "cn")
    assert build_task("mmbench_cn", folder).expected_rows == 4329
    assert prompts_of(build_task("mmbench_cn", folder)) == [
        "<image>\nWhat is it?\nA. cat\nB. a\tdog\n\u8bf7\u76f4\u63a5\u56de\u7b54\u9009\u9879\u5b57\u6bcd\u3002"
    ]
    assert prompts_of(build_task("mmbench_cn", folder, prompt="lmms"))[0].startswith("<image>\nnan What is it?")
    reference = build_task("mmbench_cn", folder).samples()[0].reference
    for text in ("B", "B\u3002", "\uff08B\uff09", "B\u3001a dog"):
        assert TASKS["mmbench_cn"].scored_by.score(text, reference) == 1


LETTER = "\nAnswer with the option's letter from the given choices directly."
PROMPTS = {
    "llava": f"<image>\nA zoo.\nWhat is it?\nA. cat\nB. a\tdog{LETTER}",
    "lmms": f"<image>\nA zoo. What is it? There are several options:\nA. cat\nB. a\tdog\n{LETTER}",
    "vlmevalkit": (
        "<image>\nHint: A zoo.\nQuestion: What is it?\nOptions:\nA. cat\nB. a\tdog\n"
        "Please select the correct answer from the options above. \n"
    ),
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_how_mmbench_is_asked(tmp_path, prompt):
    folder = mmbench_parquet(tmp_path, [{"hint": "A zoo.", "index": 1_000_241}, {}])
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


def test_reference_prompts(shared, tmp_path):
    cases = [case for case in benchmark_folders.reference_cases(shared, "mmbench") if case["kind"] == "prompt"]
    assert cases
    rows = [{**case["doc"], "index": n} for n, case in enumerate(cases)]
    prompts = prompts_of(build_task("mmbench", mmbench_parquet(tmp_path, rows), prompt="lmms"))
    assert prompts == [f"<image>\n{case['lmms_prompt']}" for case in cases]


NORTH = f"<image>\nContext: Look at the map.\nWhich is farthest north?\nA. Ohio\nB. Utah{LETTER}"


def test_scienceqas_parquet_form(tmp_path):
    first, second = build_task("scienceqa", scienceqa_parquet(tmp_path, [{}, {"hint": ""}])).samples()
    assert (first.id, first.prompt, first.kind) == ("test-0", NORTH, "social science")
    assert first.reference == {"answer": 1, "choices": 2, "image": True}
    assert second.prompt == NORTH.replace("Context: Look at the map.\n", "")
    full = build_task("scienceqa", scienceqa_parquet(tmp_path, [{}, {"image": None}], "FULL"), subset="full")
    _, sample = full.samples()  # a question without an image is a text
    assert sample.prompt == NORTH.removeprefix("<image>\n")
    assert (sample.images, sample.reference["image"], full.expected_rows) == ((), False, 4241)
