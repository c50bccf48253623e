"""ChartQA: prompts, kinds, ids."""

import pytest

from subtoken_train.evaluation.tasks import build_task
from tests.support.vqa_cases import prompts_of, real_lines, reference_prompts, write_rows


def parquet(folder, documents):
    rows = [{"type": "human_test", "answer": "14", **document} for document in documents]
    return write_rows(folder, "data/test-00000-of-00001", rows)


def test_samples(tmp_path):
    documents = [
        {"question": "How many food item is shown in the bar graph?"},
        {"question": "What was the share in 2019?", "type": "augmented_test", "answer": "37.3"},
    ]
    task = build_task("chartqa", parquet(tmp_path, documents))
    first, second = task.samples()
    assert first.prompt == (
        "<image>\nHow many food item is shown in the bar graph?\nAnswer the question with a single word."
    )
    assert (first.id, first.kind, first.reference) == ("0", "human", {"answer": "14", "kind": "human"})
    assert (second.id, second.kind) == ("1", "augmented")
    assert (second.max_new_tokens, task.expected_rows) == (16, 2500)
    metric = task.metric()
    metric.update(["14", "39"], [first.reference, second.reference])
    scores = {name: value.item() for name, value in metric.compute().items()}
    assert scores == {"relaxed_accuracy": 1, "human": 1, "augmented": 1}


def test_reference_prompts(shared, tmp_path):
    documents, expected = reference_prompts(shared, "chartqa")
    assert prompts_of(build_task("chartqa", parquet(tmp_path, documents))) == expected


@pytest.mark.slow
def test_all_real_questions(shared, tmp_path):
    lines = real_lines(shared, "chartqa_text", "test_all.jsonl")
    other = "\nAnswer the question using a single word or phrase."
    rows = [{"question": line["question"].removesuffix(other), "answer": line["answer"]} for line in lines]
    task = build_task("chartqa", parquet(tmp_path, rows))
    samples = task.samples()
    assert len(samples) == task.expected_rows
    wanted = [f"<image>\n{row['question']}\nAnswer the question with a single word." for row in rows]
    assert [sample.prompt for sample in samples] == wanted
    assert all(task.metric().score(sample.reference["answer"], sample.reference) == 1 for sample in samples)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "val"}, r"parquet, row 2: type 'val'; allowed: human_test, augmented_test"),
        ({"answer": None}, r"parquet, row 2: no answers, so this is another split's file; use that of 'test'"),
    ],
)
def test_rows_that_are_no_test_questions(tmp_path, change, message):
    folder = parquet(tmp_path, [{"question": "How many?"}, {"question": "Why?", **change}])
    with pytest.raises(ValueError, match=message):
        build_task("chartqa", folder).samples()
