"""POPE in both forms, MME, what is refused of them, and the conversations of LLaVA in which images are asked."""

from random import Random
from types import SimpleNamespace

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.families.chat import llava_chat
from subtoken_train.types import Turn
from tests.support.benchmark_folders import (
    expected_scores,
    mme_parquet,
    picture,
    pope_own,
    pope_parquet,
    real_answers,
    real_lines,
    reference_cases,
    refused,
    write_files,
)

HOW = "\nAnswer the question using a single word or phrase."
BOARD = f"<image>\nIs there a snowboard in the image?{HOW}"
CATEGORIES = ("adversarial", "popular", "random")


def test_popes_parquet_form(tmp_path):
    asked = {"question": "Is there a snowboard in the image? ", "answer": "Yes", "question_id": "1"}
    samples = build_task("pope", pope_parquet(tmp_path, [{**asked, "category": name} for name in CATEGORIES])).samples()
    assert [sample.id for sample in samples] == ["adversarial/1", "popular/1", "random/1"]
    assert {sample.prompt for sample in samples} == {BOARD}
    assert samples[1].reference == {"label": "yes", "category": "popular"}
    assert open_image(samples[2].images[0]).getpixel((0, 0)) == (2, 0, 0)
    (one,) = build_task("pope", tmp_path, category="popular").samples()
    assert (one.id, one.reference) == (samples[1].id, samples[1].reference)


def test_popes_own_form(tmp_path):
    pope_own(tmp_path, [{"text": "Is there a snowboard in the image?", "label": "yes"}, {"question_id": 2}])
    write_files(tmp_path, {"val2014/COCO_val2014_000000310196.jpg": picture(5)})
    first, second = build_task("pope", tmp_path, category="random").samples()
    assert (first.id, first.prompt) == ("random/1", BOARD)
    assert first.reference == {"label": "yes", "category": "random"}
    assert open_image(second.images[0]).getpixel((0, 0)) == (5, 0, 0)


def test_answers_of_llava_are_joined_by_id_whatever_their_order(shared):
    if not (folder := shared / "realdata" / "pope").is_dir():
        pytest.skip("reference material (pope) is absent")
    task = build_task("pope", folder, category="adversarial")
    references = {sample.id: sample.reference for sample in task.samples()}
    answers = [row for row in real_answers(shared, "pope_llava15_13b") if row["category"] == "adversarial"]
    assert len(answers) == len(references) == 3000
    Random(0).shuffle(answers)
    metric, ids = task.metric(), [f"adversarial/{row['question_id']}" for row in answers]
    metric.update([row["pred"] for row in answers], [references[name] for name in ids])
    expected = expected_scores(shared, "pope_llava15_13b")["adversarial"]
    assert metric.compute()["accuracy"] == pytest.approx(expected["Accuracy"], abs=1e-6)
    assert metric.compute()["f1"] == pytest.approx(expected["F1 score"], abs=1e-6)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{}, {"label": "maybe"}], "line 2: the answer is 'maybe'; POPE's are yes and no"),
        ([{}, {"question_id": 2, "label": None}], "line 2: no answers, so this is another split's file; use that"),
    ],
)
def test_popes_mistakes(tmp_path, rows, words):
    refused(r"has no coco_pope_adversarial\.json or coco/coco_pope_adversarial\.json\. Par", "pope", tmp_path)
    pope_own(tmp_path, rows)
    refused(rf"random\.json, {words}", "pope", tmp_path, category="random")


PYTHON = f"<image>\nIs a python code shown in the picture?{HOW}"
PAIR = [
    {"question": "Is a python code shown in the picture? Please answer yes or no.", "answer": "Yes"},
    {"question": "Is a c++ code shown in the picture? Please answer yes or no.", "answer": "No"},
]


def test_mmes_parquet_form(tmp_path):
    first, second = build_task("mme", mme_parquet(tmp_path, PAIR)).samples()
    assert first.prompt == PYTHON
    assert first.id == "code_reasoning/0020.png: Is a python code shown in the picture?"
    assert first.reference == {"answer": "yes", "category": "code_reasoning", "pair": "code_reasoning/0020.png"}
    assert (second.reference["answer"], second.kind) == ("no", "code_reasoning")


def test_all_real_questions_of_mme(shared, tmp_path):
    rows = real_answers(shared, "mme_llava15_7b")
    named = [
        {
            **{key: row[key] for key in ("question_id", "question", "answer")},
            "category": row["question_id"].split("/")[0],
        }
        for row in rows
    ]
    task = build_task("mme", mme_parquet(tmp_path, named))
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
def test_mmes_mistakes(tmp_path, rows, message):
    refused(message, "mme", mme_parquet(tmp_path, rows))


def rendered(family, turns):
    """The conversation without its BOS."""
    return family.render(turns).text.removeprefix(family.tokenizer.bos_token or "")


@pytest.mark.parametrize("mode", ["vicuna_v1", "llava_v1", "plain"])
def test_reference_conversations(shared, tiny_family, mode):
    cases = [case for case in reference_cases(shared, "prompts") if case["task"] == "llava_conversation"]
    cases = [case for case in cases if case["conv_mode"] == mode]
    assert cases
    for case in cases:
        said = case.get("turns") or [case["user_text"], None]
        turns = [Turn(prompt, answer) for prompt, answer in zip(said[::2], said[1::2], strict=True)]
        chat = llava_chat(mode, "vicuna_v1" if mode == "vicuna_v1" else "none")
        ends = SimpleNamespace(bos_token="", eos_token="</s>")
        assert chat.render(turns, "<image>", ends).text == case["prompt"]
        if mode == "vicuna_v1":
            system, _, rest = case["prompt"].partition("USER:")
            assert system
            assert rendered(tiny_family, turns) == f"USER:{rest}".replace("</s>", tiny_family.tokenizer.eos_token)


def test_space_around_a_question_is_kept(tiny_family):
    assert rendered(tiny_family, [Turn("<image>\n why? ")]) == "USER: <image>\n why?  ASSISTANT:"
    assert rendered(tiny_family, [Turn("\twhy?\n")]) == "USER: \twhy?\n ASSISTANT:"
    assert rendered(tiny_family, [Turn(" why? <image> ")]) == "USER: <image>\nwhy? ASSISTANT:"  # as LLaVA moves it
