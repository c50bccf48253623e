"""What every task of this family refuses, and what each must say of itself."""

import json

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.vqa_cases import write_rows

PEOPLE = [{"answer": "yes", "answer_id": n} for n in range(10)]
FILES = {
    "chartqa": ("data/test", {"type": "human_test", "answer": "1"}, None),
    "docvqa": ("DocVQA/validation", {"answers": ["x"], "question_types": ["form"]}, "questionId"),
    "infographicvqa": ("InfographicVQA/validation", {"answers": ["x"], "answer_type": ["x"]}, "questionId"),
    "textvqa": ("data/validation", {"answers": ["x"] * 10, "ocr_tokens": ["a"]}, "question_id"),
    "vizwiz": ("data/val", {"answers": ["x"] * 10, "category": "other"}, "question_id"),
    "vqav2": ("data/validation", {"answers": PEOPLE, "answer_type": "other"}, "question_id"),
}
"""Task -> the beginning of its files' names, a row, and the column of its ids."""


def rows_of(name, count):
    _, row, column = FILES[name]
    return [{"question": f"What is {n}?", **row, **({column: str(n)} if column else {})} for n in range(count)]


@pytest.mark.parametrize("name", FILES)
def test_shards_in_order_with_closed_images(tmp_path, name):
    stem, *_ = FILES[name]
    rows = rows_of(name, 4)
    write_rows(tmp_path, f"{stem}-00001-of-00002", rows[3:])
    write_rows(tmp_path, f"{stem}-00000-of-00002", rows[:3])
    task = build_task(name, tmp_path)
    samples = task.samples()
    assert [sample.id for sample in samples] == ["0", "1", "2", "3"]
    assert all(sample.prompt.startswith("<image>\nWhat is ") for sample in samples)
    assert [open_image(sample.images[0]).getpixel((0, 0))[0] for sample in samples] == [0, 1, 2, 0]
    assert all(json.loads(json.dumps(sample.reference)) == sample.reference for sample in samples)
    metric = task.metric()
    metric.update(["x"] * 4, [sample.reference for sample in samples])
    scores = metric.compute()
    assert next(iter(scores)) == task.primary
    terms = [metric.score("x", sample.reference) for sample in samples]
    assert scores[task.primary].item() == pytest.approx(sum(terms) / 4)
    assert task.name == name
    assert task.where.count("hf download " + task.hub_id) == 1


@pytest.mark.parametrize("name", [name for name, (_, _, column) in FILES.items() if column])
def test_an_id_that_is_there_twice(tmp_path, name):
    stem, _, column = FILES[name]
    rows = rows_of(name, 3)
    rows[2][column] = "0"
    write_rows(tmp_path, f"{stem}-00000-of-00001", rows)
    with pytest.raises(ValueError, match=r"parquet, row 3: id '0' is there twice, first in .*parquet, row 1"):
        build_task(name, tmp_path).samples()


@pytest.mark.parametrize("name", FILES)
def test_a_row_without_image(tmp_path, name):
    stem, *_ = FILES[name]
    rows = rows_of(name, 2)
    rows[1]["image"] = None
    write_rows(tmp_path, f"{stem}-00000-of-00001", rows)
    with pytest.raises(ValueError, match="parquet, row 2: the row has no image"):
        build_task(name, tmp_path).samples()


@pytest.mark.parametrize("name", FILES)
def test_a_row_without_question(tmp_path, name):
    stem, *_ = FILES[name]
    rows = rows_of(name, 2)
    rows[1]["question"] = None
    write_rows(tmp_path, f"{stem}-00000-of-00001", rows)
    with pytest.raises(ValueError, match="parquet, row 2: question is None, and a text is wanted; fetch the file"):
        build_task(name, tmp_path).samples()


@pytest.mark.parametrize(
    ("answers", "shown"),
    [
        (["x", None], r"\['x', None\]"),
        ("yes", "'yes'"),
        ({"answer": ["x"]}, r"\{'answer'"),
        ([{"text": "x"}], r"\[\{'text'"),
    ],
)
def test_answers_that_are_no_list_of_texts(tmp_path, answers, shown):
    *_, row = rows_of("docvqa", 1)
    write_rows(tmp_path, "DocVQA/validation-00000-of-00001", [{**row, "answers": answers}])
    with pytest.raises(ValueError, match=rf"parquet, row 1: answers is {shown}.*, and a list of texts is wanted"):
        build_task("docvqa", tmp_path).samples()


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_absent_truncated_or_of_another_kind(tmp_path, name):
    stem, row, _ = FILES[name]
    with pytest.raises(ValueError, match=rf"task {name}: .* has no .*\.parquet\. .*hf download"):
        build_task(name, tmp_path).samples()
    write_rows(tmp_path, f"{stem}-00000-of-00001", [{"question": "What?"}])
    with pytest.raises(ValueError, match=f"has no column .*{next(iter(row))}"):
        build_task(name, tmp_path).samples()
    path = tmp_path / f"{stem}-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is cut off or no Parquet file"):
        build_task(name, tmp_path).samples()
