"""VizWiz-VQA: prompts and answers."""

import pytest

from subtoken_train.evaluation.tasks import build_task
from tests.support.vqa_cases import prompts_of, real_lines, reference_prompts, write_rows


def parquet(folder, documents):
    given = {"answers": ["unsuitable"] * 6 + ["soda"] * 4, "category": "unanswerable"}
    rows = [{"question_id": f"VizWiz_val_{n:08}.jpg", **given, **document} for n, document in enumerate(documents)]
    return write_rows(folder, "data/val-00000-of-00001-7775fd61bc6a3d98", rows)


def test_a_sample(tmp_path):
    task = build_task("vizwiz", parquet(tmp_path, [{"question": "what IS this?"}]))
    (sample,) = task.samples()
    assert sample.prompt == (
        "<image>\nWhat is this?\nWhen the provided information is insufficient, respond with 'Unanswerable'.\n"
        "Answer the question using a single word or phrase."
    )
    assert (sample.id, sample.kind) == ("VizWiz_val_00000000.jpg", "unanswerable")
    assert task.metric().score("Soda", sample.reference) == 1
    assert task.metric().score("Unanswerable", sample.reference) == 0
    assert task.expected_rows == 4319


def test_reference_prompts(shared, tmp_path):
    documents, expected = reference_prompts(shared, "vizwiz_vqa")
    assert prompts_of(build_task("vizwiz", parquet(tmp_path, documents))) == expected


def test_prompts_of_llava_but_for_case(shared, tmp_path):
    lines = real_lines(shared, "vizwiz_text", "llava_test_head500.jsonl")
    asked = [line["text"] for line in lines]
    questions = [{"question": text.partition("\nWhen the provided")[0]} for text in asked]
    prompts = prompts_of(build_task("vizwiz", parquet(tmp_path, questions)))
    assert [prompt.lower() for prompt in prompts] == [f"<image>\n{text}".lower() for text in asked]
    same = sum(prompt == f"<image>\n{text}" for prompt, text in zip(prompts, asked, strict=True))
    assert same > 0.8 * len(asked)


def test_the_test_set_has_no_answers(tmp_path):
    folder = parquet(tmp_path, [{"question": "What?"}, {"question": "Why?", "answers": None}])
    with pytest.raises(ValueError, match=r"parquet, row 2: no answers, so this is another split's file; use .*'val'"):
        build_task("vizwiz", folder).samples()
