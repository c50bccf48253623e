"""MME in both forms; pairs."""

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import mme_own
from tests.support.benchmark_folders import mme_parquet as parquet
from tests.support.vqa_cases import picture, real_answers, real_lines, refused

ASKED = "<image>\nIs a python code shown in the picture?\nAnswer the question using a single word or phrase."
PAIR = [
    {"question": "Is a python code shown in the picture? Please answer yes or no.", "answer": "Yes"},
    {"question": "Is a c++ code shown in the picture? Please answer yes or no.", "answer": "No"},
]


def test_the_parquet_form(tmp_path):
    first, second = build_task("mme", parquet(tmp_path, PAIR)).samples()
    assert first.prompt == ASKED
    assert first.id == "code_reasoning/0020.png: Is a python code shown in the picture?"
    assert first.reference == {"answer": "yes", "category": "code_reasoning", "pair": "code_reasoning/0020.png"}
    assert (second.reference["answer"], second.kind) == ("no", "code_reasoning")


@pytest.mark.parametrize("split", [False, True], ids=["beside", "own folders"])
def test_the_benchmarks_own_form(tmp_path, split):
    folder = mme_own(tmp_path, "code_reasoning/0020.png", PAIR, picture(9), split)
    first, second = build_task("mme", folder).samples()
    assert first.prompt == ASKED
    assert second.reference["answer"] == "no"
    assert open_image(second.images[0]).getpixel((0, 0)) == (9, 0, 0)


def test_all_real_questions(shared, tmp_path):
    for row in real_answers(shared, "mme_llava15_7b"):
        path = tmp_path / row["question_id"]
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(f"{row['question']}\t{row['answer']}\n")
    task = build_task("mme", tmp_path)
    samples = task.samples()
    assert (len(samples), task.expected_rows) == (2350, 2374)
    lines = real_lines(shared, "mme_text", "llava_mme.jsonl")
    asked = {f"<image>\n{line['text'].partition(' Answer yes or no, and')[0]}" for line in lines}
    assert {sample.prompt for sample in samples} <= asked


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (PAIR[:1], r"parquet, row 1: image code_reasoning/0020\.png has 1 questions, but needs two different ones"),
        ([*PAIR, PAIR[0]], r"row 1; .*row 2; .*row 3: image code_reasoning/0020\.png has 3 questions"),
        ([PAIR[0], PAIR[0]], r"has 2 questions, but needs two different ones"),
        ([PAIR[0], {**PAIR[1], "answer": None}], r"row 2: no answers, so this is another split's file; use that of"),
        ([{**PAIR[0], "answer": "maybe"}], r"row 1: category 'code_reasoning' with answer 'maybe'; the categories are"),
        ([{**PAIR[0], "category": "reading"}], r"row 1: category 'reading' with answer 'yes'"),
    ],
)
def test_mistakes(tmp_path, rows, message):
    refused(message, "mme", parquet(tmp_path, rows))


def test_a_line_without_an_answer(tmp_path):
    (tmp_path / "OCR").mkdir()
    (tmp_path / "OCR" / "1.txt").write_text("Is it?\tYes\nIs it not?\n")
    refused(r"1\.txt, line 2: expected a question, a tab and an answer", "mme", tmp_path)
