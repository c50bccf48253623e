"""Questions about pictures and frames: how they are asked, files that are refused, and the file for a judge."""

import csv
import json
from random import Random
from types import SimpleNamespace

import pytest
from datasets import Dataset
from PIL import Image

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.results import SampleRecord, SampleWriter
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.families.chat import llava_chat
from subtoken_train.types import Turn
from tests.support import benchmark_folders as folders
from tests.support.benchmark_folders import mme_parquet, real_answers, refused, scienceqa_parquet, write_rows
from tests.support.eval_runs import MEASURED

SHORT = "\nAnswer the question using a single word or phrase."
WORD = "\nAnswer the question with a single word."
UNANSWERABLE = "\nWhen the provided information is insufficient, respond with 'Unanswerable'."
SEED = {"answer": "A", "data_type": "image", "question_type_id": 1, **{f"choice_{letter}": "x" for letter in "abcd"}}
SODA = ["unsuitable"] * 6 + ["soda"] * 4
FILES = {
    "ai2d": ("data/test", {"options": ["x", "y"], "answer": "1"}, None),
    "chartqa": ("data/test", {"type": "human_test", "answer": "14"}, None),
    "docvqa": ("DocVQA/validation", {"answers": ["x"], "question_types": ["form", "layout"]}, "questionId"),
    "infographicvqa": ("InfographicVQA/validation", {"answers": ["x"], "answer_type": ["form", "x"]}, "questionId"),
    "mmstar": ("data/val", {"answer": "A", "category": "math", "l2_category": "geometry"}, "index"),
    "ocrbench": ("data/test", {"answer": ["x"], "dataset": "IIIT5K", "question_type": "Doc-oriented VQA"}, None),
    "realworldqa": ("data/test", {"answer": "0"}, None),
    "seedbench": ("data/test", SEED, "question_id"),
    "textvqa": ("data/validation", {"answers": ["x"] * 10, "ocr_tokens": ["a"]}, "question_id"),
    "vizwiz": ("data/val", {"answers": SODA, "category": "unanswerable"}, "question_id"),
    "vqav2": ("data/validation", {"answers": folders.people(*["yes"] * 10), "answer_type": "other"}, "question_id"),
}
"""Task -> the beginning of its files' names, a row, and the column of its ids."""


def rows_of(name, documents):
    _, row, column = FILES[name]
    return [{**row, **({column: str(n)} if column else {}), **document} for n, document in enumerate(documents)]


def parquet(folder, name, documents):
    return write_rows(folder, f"{FILES[name][0]}-00000-of-00001", rows_of(name, documents))


@pytest.mark.parametrize("name", FILES)
def test_shards_in_order_with_closed_images(tmp_path, name):
    rows = rows_of(name, [{"question": f"What is {n}?"} for n in range(4)])
    write_rows(tmp_path, f"{FILES[name][0]}-00001-of-00002", rows[3:])
    write_rows(tmp_path, f"{FILES[name][0]}-00000-of-00002", rows[:3])
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
    assert scores[task.primary] == pytest.approx(sum(metric.score("x", each.reference) for each in samples) / 4)
    assert (task.name, task.where.count("hf download " + task.hub_id)) == (name, 1)


@pytest.mark.parametrize("name", FILES)
def test_what_no_file_may_be(tmp_path, name):
    """A row without image or question; files that are absent, cut off or of another kind."""
    stem, row, _ = FILES[name]
    refused(rf"task {name}: .* has no .*\.parquet\. .*hf download", name, tmp_path)
    asked = {"question": "What?"}
    refused("parquet, row 2: the row has no image", name, parquet(tmp_path, name, [asked, {**asked, "image": None}]))
    words = "parquet, row 2: question is None, but must be a text; fetch the file"
    refused(words, name, parquet(tmp_path, name, [asked, {"question": None}]))
    refused(f"has no column .*{next(iter(row))}", name, write_rows(tmp_path, f"{stem}-00000-of-00001", [asked]))
    path = tmp_path / f"{stem}-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    refused("is cut off or no Parquet file", name, tmp_path)


REFUSED = [
    ("docvqa", {"answers": ["x", None]}, r"answers is \['x', None\], but must be a list of texts"),
    ("docvqa", {"answers": "yes"}, "answers is 'yes', but must be a list of texts"),
    ("docvqa", {"answers": [{"text": "x"}]}, r"answers is \[\{'text.*, but must be a list of texts"),
    ("chartqa", {"type": "val"}, "type 'val'; allowed: human_test, augmented_test"),
    ("chartqa", {"answer": None}, "no answers, so this is another split's file; use that of 'test'"),
    ("ocrbench", {"answer": []}, "no answers, so this is another split's file; use that of 'test'"),
    ("ai2d", {"answer": "2"}, "the answer is '2', which is none of the 2 options"),
    ("seedbench", {"question_type_id": 10}, "question_type_id '10'; allowed for images: 1 to 9"),
]


@pytest.mark.parametrize(("name", "document", "words"), REFUSED)
def test_rows_that_cannot_be_scored(tmp_path, name, document, words):
    refused(f"parquet, row 1: {words}", name, parquet(tmp_path, name, [{"question": "What?", **document}]))


REFERENCES = [
    *((name, None, {}) for name in ("chartqa", "docvqa", "infographicvqa", "vizwiz", "vqav2")),
    *(("textvqa", None, {"ocr": ocr}) for ocr in (True, False)),
    *(("gqa", folders.gqa_parquet, {}), ("pope", folders.pope_parquet, {}), ("scienceqa", scienceqa_parquet, {})),
    ("mme", mme_parquet, {}),
]


@pytest.mark.parametrize(("name", "given", "options"), REFERENCES)
def test_prompts_are_the_reference_programs(shared, tmp_path, name, given, options):
    task = {"infographicvqa": "docvqa", "vizwiz": "vizwiz_vqa"}.get(name, name)
    documents, expected = folders.reference_prompts(shared, task, **options)
    if name == "mme":  # two questions to an image
        documents = [{**row, "question_id": f"OCR/{n // 2}", "category": "OCR"} for n, row in enumerate(documents)]
    if name == "scienceqa":
        documents = [{**document, "answer": 0} for document in documents]
    folder = parquet(tmp_path, name, documents) if given is None else given(tmp_path, documents)
    assert folders.prompts_of(build_task(name, folder, **options)) == expected


NUMBERS = ["0.28", ".28"]
SAMPLES = [
    ("chartqa", {}, f"How MANY?{WORD}", ("0", "human", 16), {"answer": "14", "kind": "human"}, ("14", "13")),
    (
        *("chartqa", {"type": "augmented_test", "answer": "37.3"}, f"How MANY?{WORD}", ("0", "augmented", 16)),
        *({"answer": "37.3", "kind": "augmented"}, ("39", "40")),
    ),
    ("docvqa", {"answers": NUMBERS}, f"How MANY?{SHORT}", ("0", "form", 32), {"answers": NUMBERS}, ("0.28", "7")),
    ("docvqa", {"question_types": None}, f"How MANY?{SHORT}", ("0", "question", 32), {"answers": ["x"]}, ("x", "y")),
    ("infographicvqa", {}, f"How MANY?{SHORT}", ("0", "form", 32), {"answers": ["x"]}, ("x", "y")),
    ("vizwiz", {}, f"How many?{UNANSWERABLE}{SHORT}", ("0", "unanswerable", 128), {"answers": SODA}, ("Soda", "No")),
]


@pytest.mark.parametrize(("name", "document", "prompt", "said", "reference", "answers"), SAMPLES)
def test_samples_and_their_scores(tmp_path, name, document, prompt, said, reference, answers):
    task = build_task(name, parquet(tmp_path, name, [{"question": "How MANY?", **document}]))
    (sample,) = task.samples()
    assert (sample.prompt, sample.reference) == (f"<image>\n{prompt}", reference)
    assert (sample.id, sample.kind, sample.max_new_tokens) == said
    assert [task.metric().score(answer, sample.reference) for answer in answers] == [1, 0]


def test_the_other_set_of_the_repository_is_not_taken(tmp_path):
    words = r"infographicvqa: .* has no InfographicVQA/validation-\*\.parquet\. hf download"
    refused(words, "infographicvqa", parquet(tmp_path, "docvqa", [{"question": "Why?"}]))


BOARD = f"<image>\nIs there a snowboard in the image?{SHORT}"
CATEGORIES = ("adversarial", "popular", "random")


def test_popes_parquet_form(tmp_path):
    asked = {"question": "Is there a snowboard in the image? ", "answer": "Yes", "question_id": "1"}
    samples = build_task(
        "pope", folders.pope_parquet(tmp_path, [{**asked, "category": name} for name in CATEGORIES])
    ).samples()
    assert [sample.id for sample in samples] == ["adversarial/1", "popular/1", "random/1"]
    assert {sample.prompt for sample in samples} == {BOARD}
    assert samples[1].reference == {"label": "yes", "category": "popular"}
    assert open_image(samples[2].images[0]).getpixel((0, 0)) == (2, 0, 0)
    (one,) = build_task("pope", tmp_path, category="popular").samples()
    assert (one.id, one.reference) == (samples[1].id, samples[1].reference)


def test_popes_own_form(tmp_path):
    folders.pope_own(tmp_path, [{"text": "Is there a snowboard in the image?", "label": "yes"}, {"question_id": 2}])
    folders.write_files(tmp_path, {"val2014/COCO_val2014_000000310196.jpg": folders.picture(5)})
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
    expected = folders.expected_scores(shared, "pope_llava15_13b")["adversarial"]
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
    folders.pope_own(tmp_path, rows)
    refused(rf"random\.json, {words}", "pope", tmp_path, category="random")


PAIR = [
    {"question": "Is a python code shown in the picture? Please answer yes or no.", "answer": "Yes"},
    {"question": "Is a c++ code shown in the picture? Please answer yes or no.", "answer": "No"},
]


def test_mmes_parquet_form(tmp_path):
    first, second = build_task("mme", mme_parquet(tmp_path, PAIR)).samples()
    assert first.prompt == f"<image>\nIs a python code shown in the picture?{SHORT}"
    assert first.id == "code_reasoning/0020.png: Is a python code shown in the picture?"
    assert first.reference == {"answer": "yes", "category": "code_reasoning", "pair": "code_reasoning/0020.png"}
    assert (second.reference["answer"], second.kind) == ("no", "code_reasoning")


def test_all_real_questions_of_mme(shared, tmp_path):
    rows = real_answers(shared, "mme_llava15_7b")
    kept = ("question_id", "question", "answer")
    named = [{**{key: row[key] for key in kept}, "category": row["question_id"].split("/")[0]} for row in rows]
    task = build_task("mme", mme_parquet(tmp_path, named))
    samples = task.samples()
    assert (len(samples), task.expected_rows) == (2350, 2374)
    lines = folders.real_lines(shared, "mme_text", "llava_mme.jsonl")
    asked = {f"<image>\n{line['text'].partition(' Answer yes or no, and')[0]}" for line in lines}
    assert {sample.prompt for sample in samples} <= asked


LAYOUTS = {
    "gqa": folders.gqa_parquet,
    "mmbench": folders.mmbench_parquet,
    "mme": mme_parquet,
    "scienceqa": scienceqa_parquet,
}
OTHERS = "row 2: no answers, so this is another split's file; use that of"
MISTAKES = [
    ("gqa", [{"question": "Why?", "imageId": "n7"}], "parquet, row 1: image n7 is not in testdev_balanced_images"),
    ("gqa", [{"question": "Why?"}, {"question": "Who?", "answer": None}], f"{OTHERS} 'testdev'"),
    ("mmbench", [{}, {"answer": "C"}], "the answer is 'C', and the options are A, B"),
    ("mmbench", [{}, {"answer": "nan"}], f"{OTHERS} 'dev'"),
    ("scienceqa", [{}, {"answer": 2}], "row 2: the answer is 2, which is none of the 2 choices"),
    ("mme", PAIR[:1], r"parquet, row 1: image code_reasoning/0020\.png has 1 questions, but needs two different ones"),
    ("mme", [*PAIR, PAIR[0]], r"row 1; .*row 2; .*row 3: image code_reasoning/0020\.png has 3 questions"),
    ("mme", [PAIR[0], PAIR[0]], "has 2 questions, but needs two different ones"),
    ("mme", [PAIR[0], {**PAIR[1], "answer": None}], OTHERS),
    ("mme", [{**one, "answer": "maybe"} for one in PAIR], "row 1: category 'code_reasoning' with answer 'maybe'; the"),
    ("mme", [{**one, "category": "reading"} for one in PAIR], "row 1: category 'reading' with answer 'yes'"),
]


@pytest.mark.parametrize(("name", "rows", "words"), MISTAKES)
def test_rows_of_layouts_of_their_own_that_cannot_be_scored(tmp_path, name, rows, words):
    refused(words, name, LAYOUTS[name](tmp_path, rows))


def rendered(family, turns):
    """The conversation without its BOS."""
    return family.render(turns).text.removeprefix(family.tokenizer.bos_token or "")


@pytest.mark.parametrize("mode", ["vicuna_v1", "llava_v1", "plain"])
def test_reference_conversations(shared, tiny_family, mode):
    cases = [case for case in folders.reference_cases(shared, "prompts") if case["task"] == "llava_conversation"]
    cases = [case for case in cases if case["conv_mode"] == mode]
    assert cases
    for case in cases:
        said = case.get("turns") or [case["user_text"], None]
        turns = [Turn(prompt, answer) for prompt, answer in zip(said[::2], said[1::2], strict=True)]
        chat = llava_chat(mode, "vicuna_v1" if mode == "vicuna_v1" else "none")
        assert chat.render(turns, "<image>", SimpleNamespace(bos_token="", eos_token="</s>")).text == case["prompt"]
        if mode == "vicuna_v1":
            system, _, rest = case["prompt"].partition("USER:")
            assert system
            assert rendered(tiny_family, turns) == f"USER:{rest}".replace("</s>", tiny_family.tokenizer.eos_token)


def test_space_around_a_question_is_kept(tiny_family):
    assert rendered(tiny_family, [Turn("<image>\n why? ")]) == "USER: <image>\n why?  ASSISTANT:"
    assert rendered(tiny_family, [Turn("\twhy?\n")]) == "USER: \twhy?\n ASSISTANT:"
    assert rendered(tiny_family, [Turn(" why? <image> ")]) == "USER: <image>\nwhy? ASSISTANT:"  # as LLaVA moves it


MMBENCH = (
    "You will be provided with 2 separate frames uniformly sampled from a video, the frames are provided in "
    "chronological order of the video.\nPlease analyze these images and provide the answer to the question about the "
    "video content.\nPlease directly reply with your response to the only question.\n"
    '<image>\n<image>\nQuestion: Who, and "where"?\nAnswer: '
)
VIDEO_TT = (
    "<image>\n<image>\nThese are the frames of a video. Select the best answer to the following multiple-choice "
    "question based on the video. Respond with only the letter (A, B, C, or D) of the correct option.\n"
    "Question: How many?\nA. 1\nB. 2\nAnswer: "
)


def frames(folder, count):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (2, 2)).save(folder / f"{number:06}.jpg")


@pytest.fixture
def mmbench(tmp_path):
    frames(tmp_path / "frames" / "v1", 10)
    rows = [
        ["index", "video", "video_type", "question", "answer", "dimensions"],
        ["11", "v1", "news", 'Who, and "where"?', "a man", "['OCR']"],
        ["2", "v1", "news", "When?", "line one\nline two", "['OCR']"],
    ]
    with (tmp_path / "MMBench-Video.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows(rows)
    return tmp_path


def record(sample, prediction):
    told = {"id": sample.id, "kind": sample.kind, "prompt_sha256": "", "reference": dict(sample.reference)}
    return SampleRecord(**told, prediction=prediction, score=1.0, **MEASURED)


def test_mmbench_video(mmbench):
    task = build_task("mmbench_video", mmbench, frames=2)
    first, second = task.samples()
    assert (first.id, first.prompt) == ("11", MMBENCH)
    assert [path.name for path in first.images] == ["000002.jpg", "000007.jpg"]
    SampleWriter(mmbench).append([record(first, "a woman\t!"), record(second, "today")])
    task.write_for_others(mmbench)
    with (mmbench / "judge.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["index"] for row in rows] == ["2", "11"]
    assert rows[1] == {**first.reference, "prediction": "a woman\t!"}
    metric = task.metric()
    metric.update(["a woman", ""], [first.reference, second.reference])
    assert set(metric.compute()) == {task.primary} == {"answered"}


def test_video_tt(tmp_path):
    frames(tmp_path / "frames" / "abc", 2)
    row = {"qid": "0001", "video_id": "abc", "duration": 9, "question": "How many?", "question_prompt": "A. 1\nB. 2"}
    row |= {"capability": "Element Counting", "answer": "B"}
    (tmp_path / "data").mkdir()
    Dataset.from_list([row]).to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    (sample,) = build_task("video_tt", tmp_path).samples()
    assert sample.prompt == VIDEO_TT
    assert list(sample.reference) == [
        "index", "video", "video_path", "duration", "question", "question_prompt", "capability", "answer",
    ]  # fmt: skip
    assert (sample.kind, sample.reference["video_path"]) == ("Element Counting", "./video/abc.mp4")


def test_what_is_refused(mmbench):
    (mmbench / "frames" / "v1").rename(mmbench / "frames" / "v2")
    refused(r"v1 has no frames; extract some: ffmpeg -i VIDEO -vf fps=1 .*v1/%06d.jpg", "mmbench_video", mmbench)
    table = mmbench / "MMBench-Video.tsv"
    table.write_text(table.read_text().replace("11\tv1", "11a\tv1"))
    refused(r"Video\.tsv, line 2: index '11a' is not a number", "mmbench_video", mmbench)
