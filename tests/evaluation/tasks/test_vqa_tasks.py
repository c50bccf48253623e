"""GQA, TextVQA, VQAv2: prompts, answers, files; COCO Captions and TextCaps: CIDEr beside pycocoevalcap and Java."""

import json
import shutil

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.captions import CaptionCider, cider, ptb_tokens, word_overlap
from tests.support import benchmark_folders as folders
from tests.support.benchmark_folders import picture, prompts_of, reference_cases, refused, write_rows
from tests.support.refusals import refuses

HOW = "\nAnswer the question using a single word or phrase."


def shade(sample):
    return open_image(sample.images[0]).getpixel((0, 0))[0]


def test_gqas_questions_and_images_are_joined(tmp_path):
    documents = [{"question": "Is it overcast?"}, {"question": "Who?", "answer": "man", "imageId": "n1"}]
    first, second = build_task("gqa", folders.gqa_parquet(tmp_path, documents)).samples()
    asked = f"<image>\nIs it overcast?{HOW}"
    assert (first.id, first.prompt, first.reference, first.kind) == ("0", asked, {"answer": "no"}, "binary")
    assert second.kind == "open"
    assert [shade(sample) for sample in (first, second)] == [1, 0]


def line(image, *lines):
    return {"question_id": image, "image": f"{image}.jpg", "text": "\n".join(lines) + HOW, "category": "default"}


CAMERA = "003a8ae2ef43b901"
SPELL = "b9dc400eb20bad64"
TOKENS = "Reference OCR token: DAKOTA, DIGITAL, Single-Use, Camera, Pire, digitat"
LINES = [
    line(CAMERA, "What is the brand of this camera?", TOKENS),
    line(SPELL, "What does the small white text spell?", "Reference OCR token: "),
    line(CAMERA, "Is it digital?", "Reference OCR token: DAKOTA"),
]
GIVEN = [["copenhagen"] * 10, ["dakota"] * 7 + ["dakota digital"] * 3, ["yes"] * 10]
NOTED = [
    {"question_id": name, "image_id": image, "question": question, "answers": answers, "set_name": "val"}
    for name, image, question, answers in (
        (34603, SPELL, "what does the small white text spell?", GIVEN[0]),
        (34602, CAMERA, "what is the brand of this camera?", GIVEN[1]),
        (34604, CAMERA, "is it digital?", GIVEN[2]),
    )
]


def llava_folder(folder, lines=LINES, data=NOTED):
    return folders.textvqa_llava(folder, lines, data, {CAMERA: picture(7)})


def test_textvqas_llava_form(tmp_path):
    task = build_task("textvqa", llava_folder(tmp_path))
    samples = task.samples()
    assert [sample.id for sample in samples] == ["34602", "34603", "34604"]
    assert samples[0].prompt == f"<image>\nWhat is the brand of this camera?\n{TOKENS}{HOW}"
    assert samples[1].prompt.split("\n")[2] == "Reference OCR token: "
    assert samples[0].reference == {"answers": GIVEN[1]}
    assert shade(samples[0]) == 7
    assert task.metric().score("Dakota", samples[0].reference) == 1
    assert task.metric().score("dakota digital", samples[0].reference) == pytest.approx(0.9)
    assert {sample.max_new_tokens for sample in samples} == {128}
    assert task.options == {"ocr": True}
    twice = {**NOTED[1], "question_id": 9, "answers": ["kodak"] * 10}  # the same question takes its answers in order
    samples = build_task("textvqa", llava_folder(tmp_path, [*LINES, LINES[0]], [*NOTED, twice])).samples()
    assert [sample.id for sample in samples] == ["34602", "34603", "34604", "9"]
    assert samples[3].reference == {"answers": ["kodak"] * 10}


def test_without_ocr_tokens_only_their_line_is_gone(tmp_path):
    task = build_task("textvqa", llava_folder(tmp_path), ocr=False)
    assert prompts_of(task)[0] == f"<image>\nWhat is the brand of this camera?{HOW}"
    short = [{**line, "text": f"{line['text'].splitlines()[0]}{HOW}"} for line in LINES]
    (tmp_path / folders.TEXTVQA_QUESTIONS).write_text("".join(json.dumps(line) + "\n" for line in short))
    assert len(prompts_of(task)) == 3
    refused(r"ocr\.jsonl, line 1: a text must have a line each", "textvqa", tmp_path)


@pytest.mark.parametrize("ocr", [True, False])
def test_textvqas_parquet_form(tmp_path, ocr):
    given = [("what is the brand of this Camera?", ["DAKOTA", "digital"]), ("is it?", [])]
    folder = folders.textvqa_parquet(tmp_path, [{"question": one, "ocr_tokens": tokens} for one, tokens in given])
    lines = ["\nReference OCR token: DAKOTA, digital", "\nReference OCR token: "] if ocr else ["", ""]
    asked = ["What is the brand of this camera?", "Is it?"]
    expected = [f"<image>\n{question}{line}{HOW}" for question, line in zip(asked, lines, strict=True)]
    assert prompts_of(build_task("textvqa", folder, ocr=ocr)) == expected


UNANSWERED = {name: NOTED[0][name] for name in ("question_id", "image_id", "question")}


@pytest.mark.parametrize(
    ("lines", "data", "message"),
    [
        ([*LINES, LINES[0]], NOTED, r"ocr\.jsonl, line 4: .*no \(further\) answers for question 'What is the brand"),
        (LINES, NOTED[1:], r"line 2: .*val\.json has no .* of image 'b9dc400eb20bad64'; .* of the same split"),
        (LINES, [*NOTED, NOTED[0]], r"data\[3\]: id '34603' appears twice, first in .*data\[0\]"),
        (LINES, [*NOTED[1:], UNANSWERED], r"data\[2\]: no answers, so this is another split's file; use .*'validatio"),
        ([{**LINES[0], "text": "What?"}], NOTED, r"line 1: a text must have a line each for the question"),
    ],
)
def test_textvqas_files_that_do_not_belong_together(tmp_path, lines, data, message):
    refused(message, "textvqa", llava_folder(tmp_path, lines, data))


def test_vqav2s_parquet_form(tmp_path):
    task = build_task("vqav2", folders.vqav2_parquet(tmp_path, [{"question": "Is it raining?"}]))
    (sample,) = task.samples()
    assert (sample.id, sample.kind, sample.prompt) == ("0", "yes/no", f"<image>\nIs it raining?{HOW}")
    assert sample.reference == {"answers": ["yes"] * 9 + ["no"]}
    assert task.options == {"split": "validation"}


def test_missing_and_truncated_files(tmp_path):
    path = llava_folder(tmp_path) / folders.TEXTVQA_ANSWERS
    path.write_text(path.read_text()[:-40])
    refused(r"json.*: invalid JSON .*cut off", "textvqa", tmp_path)
    path.write_text("[]")
    refused("has no list data; is it", "textvqa", tmp_path)
    path.unlink()
    refused(rf"task textvqa: .* has no {path.name}\. Parquet: hf download", "textvqa", tmp_path)


needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="the PTB tokenizer is a Java program")
COLUMNS = {"coco_caption": ("question_id", "answer"), "textcaps": ("image_id", "caption_str")}


def parquet(folder, name, *captions):
    rows = [dict(zip(COLUMNS[name], pair, strict=True)) for pair in captions]
    return write_rows(folder, "data/val-00000-of-00001", rows)


@pytest.mark.parametrize("name", COLUMNS)
def test_samples(tmp_path, name):
    folder = parquet(tmp_path, name, ("one.jpg", ["A dog.", "dogs"]), ("two.jpg", ["A cat."]))
    first, second = build_task(name, folder).samples()
    prompt = "<image>\nProvide a one-sentence caption for the provided image."
    assert (first.id, first.prompt, first.reference) == ("one.jpg", prompt, {"captions": ["A dog.", "dogs"]})
    assert (second.id, second.max_new_tokens, second.choices) == ("two.jpg", 64, ())
    assert open_image(first.images[0]).size == (2, 2)
    later = build_task("coco_caption", year=2017)
    assert (later.source, later.expected_rows) == ("lmms-lab/COCO-Caption2017", 5_000)


def test_captions_that_cannot_be_scored(tmp_path):
    """None at all, and one that is no list, which would be taken letter by letter."""
    words = "no answers, so this is another split's file; use that of 'val'"
    refused(words, "textcaps", parquet(tmp_path / "a", "textcaps", ("one", [])))
    words = r"row 1: caption_str is 'A dog\.', but must be a list of texts"
    refused(words, "textcaps", parquet(tmp_path / "b", "textcaps", ("one", "A dog.")))


def test_cider_of_golden_tokens(shared):
    for case in reference_cases(shared, "caption_cider"):
        names = list(case["ptb_gts"])
        mean, terms = cider([case["ptb_res"][n] for n in names], [case["ptb_gts"][n] for n in names])
        assert mean == pytest.approx(case["CIDEr"], abs=1e-6)
        assert terms == pytest.approx(case["CIDEr_per_image"], abs=1e-6)


@pytest.mark.slow
@needs_java
def test_tokens_and_metric_of_golden_texts(shared):
    for case in reference_cases(shared, "caption_cider"):
        names = list(case["gts"])
        assert ptb_tokens([case["gts"][n] for n in names]) == [case["ptb_gts"][n] for n in names]
        metric = CaptionCider()
        for n in names:
            metric.update([case["res"][n]], [{"captions": case["gts"][n]}])
        assert metric.compute()["cider"] == pytest.approx(case["CIDEr"], abs=1e-6)


@needs_java
def test_line_breaks_inside_captions_shift_nothing():
    texts = [["one\rtwo\nthree\u2028four"], ["five\x0bsix\x85seven", ""], ["A man's hat, red."]]
    assert ptb_tokens(texts) == [["one two three four"], ["five six seven", ""], ["a man 's hat red"]]


def test_what_is_missing_stops_before_a_model_runs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    refuses("no 'java' on the PATH; install a Java runtime", build_task("textcaps").check_requirements)
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    refuses(r"pycocoevalcap, which is not installed: .*\[eval\]", build_task("textcaps").check_requirements)


def test_words_shared():
    assert word_overlap("A dog, a cat", "a DOG") == pytest.approx(2 * 2 / 6)
    assert word_overlap("", "a dog") == word_overlap("", "") == 0
    assert CaptionCider.score("the dog", {"captions": ["a dog runs fast", "The dog."]}) == 1
