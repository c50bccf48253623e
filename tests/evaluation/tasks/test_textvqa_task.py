"""TextVQA in LLaVA's form and in the Parquet form: prompts, answers, and files that do not belong together."""

import json

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import TEXTVQA_ANSWERS as ANSWERS
from tests.support.benchmark_folders import TEXTVQA_QUESTIONS as QUESTIONS
from tests.support.benchmark_folders import textvqa_llava
from tests.support.benchmark_folders import textvqa_parquet as parquet
from tests.support.vqa_cases import picture, prompts_of, refused

HOW = "Answer the question using a single word or phrase."
CAMERA = "what is the brand of this camera?"
LINES = [
    {
        "question_id": "003a8ae2ef43b901",
        "image": "003a8ae2ef43b901.jpg",
        "text": "What is the brand of this camera?\nReference OCR token: DAKOTA, DIGITAL, Single-Use, Camera, Pire, "
        f"digitat\n{HOW}",
        "category": "default",
    },
    {
        "question_id": "b9dc400eb20bad64",
        "image": "b9dc400eb20bad64.jpg",
        "text": f"What does the small white text spell?\nReference OCR token: \n{HOW}",
        "category": "default",
    },
    {
        "question_id": "003a8ae2ef43b901",
        "image": "003a8ae2ef43b901.jpg",
        "text": f"Is it digital?\nReference OCR token: DAKOTA\n{HOW}",
        "category": "default",
    },
]
DATA = [
    {"question_id": 34603, "image_id": "b9dc400eb20bad64", "question": "what does the small white text spell?"},
    {"question_id": 34602, "image_id": "003a8ae2ef43b901", "question": CAMERA},
    {"question_id": 34604, "image_id": "003a8ae2ef43b901", "question": "is it digital?"},
]
GIVEN = [["copenhagen"] * 10, ["dakota"] * 7 + ["dakota digital"] * 3, ["yes"] * 10]
NOTED = [{**row, "answers": answers, "set_name": "val"} for row, answers in zip(DATA, GIVEN, strict=True)]


def llava_folder(folder, lines=LINES, data=NOTED):
    return textvqa_llava(folder, lines, data, {"003a8ae2ef43b901": picture(7)})


def test_llava_form(tmp_path):
    task = build_task("textvqa", llava_folder(tmp_path))
    samples = task.samples()
    assert [sample.id for sample in samples] == ["34602", "34603", "34604"]
    assert samples[0].prompt == (
        "<image>\nWhat is the brand of this camera?\n"
        "Reference OCR token: DAKOTA, DIGITAL, Single-Use, Camera, Pire, digitat\n"
        "Answer the question using a single word or phrase."
    )
    assert samples[1].prompt.split("\n")[2] == "Reference OCR token: "
    assert samples[0].reference == {"answers": GIVEN[1]}
    assert open_image(samples[0].images[0]).getpixel((0, 0)) == (7, 0, 0)
    assert task.metric().score("Dakota", samples[0].reference) == 1
    assert task.metric().score("dakota digital", samples[0].reference) == pytest.approx(0.9)
    assert {sample.max_new_tokens for sample in samples} == {128}
    assert task.options == {"ocr": True}
    assert task.expected_rows == 5000


def test_without_ocr_tokens_only_their_line_is_gone(tmp_path):
    task = build_task("textvqa", llava_folder(tmp_path), ocr=False)
    assert task.options == {"ocr": False}
    assert prompts_of(task)[0] == (
        "<image>\nWhat is the brand of this camera?\nAnswer the question using a single word or phrase."
    )
    short = [{**line, "text": f"{line['text'].splitlines()[0]}\n{HOW}"} for line in LINES]
    (tmp_path / QUESTIONS).write_text("".join(json.dumps(line) + "\n" for line in short))
    assert len(prompts_of(task)) == 3
    refused(r"ocr\.jsonl, line 1: a text must have a line each", "textvqa", tmp_path)


def test_parquet_form(tmp_path):
    documents = [
        {"question": "what is the brand of this Camera?", "ocr_tokens": ["DAKOTA", "digital"]},
        {"question": "is it?", "ocr_tokens": []},
    ]
    folder = parquet(tmp_path, documents)
    assert prompts_of(build_task("textvqa", folder)) == [
        "<image>\nWhat is the brand of this camera?\nReference OCR token: DAKOTA, digital\n"
        "Answer the question using a single word or phrase.",
        "<image>\nIs it?\nReference OCR token: \nAnswer the question using a single word or phrase.",
    ]
    assert prompts_of(build_task("textvqa", folder, ocr=False)) == [
        "<image>\nWhat is the brand of this camera?\nAnswer the question using a single word or phrase.",
        "<image>\nIs it?\nAnswer the question using a single word or phrase.",
    ]


def test_a_question_put_twice_takes_its_answers_in_order(tmp_path):
    twice = {**NOTED[1], "question_id": 9, "answers": ["kodak"] * 10}
    folder = llava_folder(tmp_path, [*LINES, LINES[0]], [*NOTED, twice])
    samples = build_task("textvqa", folder).samples()
    assert [sample.id for sample in samples] == ["34602", "34603", "34604", "9"]
    assert samples[3].reference == {"answers": ["kodak"] * 10}


@pytest.mark.parametrize(
    ("lines", "data", "message"),
    [
        ([*LINES, LINES[0]], NOTED, r"ocr\.jsonl, line 4: .*no \(further\) answers for question 'What is the brand"),
        (LINES, NOTED[1:], r"line 2: .*val\.json has no .* of image 'b9dc400eb20bad64'; .* of the same split"),
        (LINES, [*NOTED, NOTED[0]], r"data\[3\]: id '34603' appears twice, first in .*data\[0\]"),
        (LINES, [*NOTED[1:], DATA[0]], r"data\[2\]: no answers, so this is another split's file; use .*'validation'"),
        ([{**LINES[0], "text": "What?"}], NOTED, r"line 1: a text must have a line each for the question"),
        ([{"question_id": "x", "text": "What?"}], NOTED, r"line 1: no column image"),
        (LINES, [{"image_id": "x"}], r"data\[0\]: no column question, question_id"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, lines, data, message):
    refused(message, "textvqa", llava_folder(tmp_path, lines, data))


def test_missing_and_truncated_files(tmp_path):
    folder = llava_folder(tmp_path)
    content = (folder / ANSWERS).read_text()
    (folder / ANSWERS).write_text(content[:-40])
    refused(r"val\.json: invalid JSON .*cut off", "textvqa", folder)
    (folder / ANSWERS).write_text("[]")
    refused(r"val\.json has no list 'data'", "textvqa", folder)
    (folder / ANSWERS).unlink()
    refused(r"task textvqa: .* has no TextVQA_0\.5\.1_val\.json\. Parquet: hf download", "textvqa", folder)
    (folder / ANSWERS).write_text(content)
    whole = (folder / QUESTIONS).read_text()
    (folder / QUESTIONS).write_text(whole[:-30])
    refused(r"ocr\.jsonl, line 3: invalid JSON .*cut off", "textvqa", folder)
    (folder / QUESTIONS).unlink()
    refused(r"has no llava_textvqa_val_v051_ocr\.jsonl", "textvqa", folder)
