"""DocVQA and InfographicVQA: prompts, references, kinds."""

import pytest

from subtoken_train.evaluation.tasks import build_task
from tests.support.vqa_cases import prompts_of, real_lines, reference_prompts, write_rows

HOW = "\nAnswer the question using a single word or phrase."
CONFIGS = {"docvqa": "DocVQA", "infographicvqa": "InfographicVQA"}
LABELS = {"docvqa": "question_types", "infographicvqa": "answer_type"}


def parquet(folder, task, documents):
    given = {"answers": ["x"], LABELS[task]: ["form", "layout"]}
    rows = [{"questionId": str(n), **given, **document} for n, document in enumerate(documents)]
    return write_rows(folder, f"{CONFIGS[task]}/validation-00000-of-00001", rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sample(tmp_path, name):
    document = {"questionId": "49153", "question": "What is the real value?", "answers": ["0.28", ".28"]}
    task = build_task(name, parquet(tmp_path, name, [document, {"question": "Why?", LABELS[name]: None}]))
    first, second = task.samples()
    assert first.prompt == ("<image>\nWhat is the real value?\nAnswer the question using a single word or phrase.")
    assert (first.id, first.kind, first.reference) == ("49153", "form", {"answers": ["0.28", ".28"]})
    assert (second.kind, second.max_new_tokens) == ("question", 32)
    assert task.metric().score("0.28", first.reference) == 1
    assert task.expected_rows == {"docvqa": 5349, "infographicvqa": 2801}[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_reference_prompts(shared, tmp_path, name):
    documents, expected = reference_prompts(shared, "docvqa")
    assert prompts_of(build_task(name, parquet(tmp_path, name, documents))) == expected


@pytest.mark.slow
def test_all_real_questions(shared, tmp_path):
    lines = real_lines(shared, "docvqa_text", "val.jsonl")
    rows = [
        {
            "questionId": str(line["question_id"]),
            "question": line["question"].removesuffix(HOW),
            "answers": line["answer"],
        }
        for line in lines
    ]
    task = build_task("docvqa", parquet(tmp_path, "docvqa", rows))
    samples = task.samples()
    assert len(samples) == task.expected_rows
    assert [sample.prompt for sample in samples] == [f"<image>\n{line['question']}" for line in lines]
    assert [sample.reference for sample in samples] == [{"answers": line["answer"]} for line in lines]
    metric = task.metric()
    metric.update([sample.reference["answers"][-1] for sample in samples], [sample.reference for sample in samples])
    assert metric.compute()["lmms_anls"].item() == 1


def test_the_other_set_of_the_repository_is_not_taken(tmp_path):
    folder = parquet(tmp_path, "docvqa", [{"question": "Why?"}])
    with pytest.raises(
        ValueError, match=r"infographicvqa: .* has no InfographicVQA/validation-\*\.parquet\. hf download"
    ):
        build_task("infographicvqa", folder).samples()
