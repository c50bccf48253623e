"""Tasks of one image and one question a row: what they ask, what all refuse, and ChartQA, DocVQA, VizWiz themselves."""

import json

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import gqa_parquet, mme_parquet, people, pope_parquet, scienceqa_parquet
from tests.support.vqa_cases import prompts_of, real_lines, reference_prompts, refused, write_rows

SHORT = "\nAnswer the question using a single word or phrase."
WORD = "\nAnswer the question with a single word."
UNANSWERABLE = "\nWhen the provided information is insufficient, respond with 'Unanswerable'."
FILES = {
    "ai2d": ("data/test", {"options": ["x", "y"], "answer": "1"}, None),
    "chartqa": ("data/test", {"type": "human_test", "answer": "14"}, None),
    "docvqa": ("DocVQA/validation", {"answers": ["x"], "question_types": ["form", "layout"]}, "questionId"),
    "infographicvqa": ("InfographicVQA/validation", {"answers": ["x"], "answer_type": ["form", "x"]}, "questionId"),
    "mmstar": ("data/val", {"answer": "A", "category": "math", "l2_category": "geometry"}, "index"),
    "ocrbench": ("data/test", {"answer": ["x"], "dataset": "IIIT5K", "question_type": "Doc-oriented VQA"}, None),
    "realworldqa": ("data/test", {"answer": "0"}, None),
    "seedbench": (
        "data/test",
        {"answer": "A", "data_type": "image", "question_type_id": 1, **{f"choice_{letter}": "x" for letter in "abcd"}},
        "question_id",
    ),
    "textvqa": ("data/validation", {"answers": ["x"] * 10, "ocr_tokens": ["a"]}, "question_id"),
    "vizwiz": ("data/val", {"answers": ["unsuitable"] * 6 + ["soda"] * 4, "category": "unanswerable"}, "question_id"),
    "vqav2": ("data/validation", {"answers": people(*["yes"] * 10), "answer_type": "other"}, "question_id"),
}
"""Task -> the beginning of its files' names, a row, and the column of its ids."""


def rows_of(name, documents):
    _, row, column = FILES[name]
    return [{**row, **({column: str(n)} if column else {}), **document} for n, document in enumerate(documents)]


def parquet(folder, name, documents, shard="00000-of-00001"):
    return write_rows(folder, f"{FILES[name][0]}-{shard}", rows_of(name, documents))


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
    terms = [metric.score("x", sample.reference) for sample in samples]
    assert scores[task.primary] == pytest.approx(sum(terms) / 4)
    assert task.name == name
    assert task.where.count("hf download " + task.hub_id) == 1


@pytest.mark.parametrize("name", FILES)
def test_what_no_file_may_be(tmp_path, name):
    """A row without image or question, an id twice; files that are absent, cut off or of another kind."""
    stem, row, column = FILES[name]
    refused(rf"task {name}: .* has no .*\.parquet\. .*hf download", name, tmp_path)
    asked = {"question": "What?"}
    refused("parquet, row 2: the row has no image", name, parquet(tmp_path, name, [asked, {**asked, "image": None}]))
    words = "parquet, row 2: question is None, but must be a text; fetch the file"
    refused(words, name, parquet(tmp_path, name, [asked, {"question": None}]))
    if column:
        parquet(tmp_path, name, [asked, asked, {**asked, column: "0"}])
        refused(r"parquet, row 3: id '0' appears twice, first in .*parquet, row 1", name, tmp_path)
    refused(f"has no column .*{next(iter(row))}", name, write_rows(tmp_path, f"{stem}-00000-of-00001", [asked]))
    path = tmp_path / f"{stem}-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    refused("is cut off or no Parquet file", name, tmp_path)


@pytest.mark.parametrize(
    ("name", "document", "words"),
    [
        *(
            ("docvqa", {"answers": answers}, rf"answers is {shown}.*, but must be a list of texts")
            for answers, shown in [
                (["x", None], r"\['x', None\]"),
                ("yes", "'yes'"),
                ({"answer": ["x"]}, r"\{'answer'"),
                ([{"text": "x"}], r"\[\{'text'"),
            ]
        ),
        ("chartqa", {"type": "val"}, "type 'val'; allowed: human_test, augmented_test"),
        ("chartqa", {"answer": None}, "no answers, so this is another split's file; use that of 'test'"),
        ("ocrbench", {"answer": []}, "no answers, so this is another split's file; use that of 'test'"),
        ("ai2d", {"answer": "2"}, "the answer is '2', which is none of the 2 options"),
        ("seedbench", {"question_type_id": 10}, "question_type_id '10'; allowed for images: 1 to 9"),
        ("vizwiz", {"answers": None}, "no answers, so this is another split's file; use that of 'val'"),
    ],
)
def test_rows_that_cannot_be_scored(tmp_path, name, document, words):
    rows = [{"question": "What?", **document}]
    refused(f"parquet, row 1: {words}", name, parquet(tmp_path, name, rows))


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("chartqa", None, {}),
        ("docvqa", None, {}),
        ("infographicvqa", None, {}),
        ("vizwiz", None, {}),
        ("vqav2", None, {}),
        ("textvqa", None, {"ocr": True}),
        ("textvqa", None, {"ocr": False}),
        ("gqa", gqa_parquet, {}),
        ("pope", pope_parquet, {}),
        ("scienceqa", scienceqa_parquet, {}),
        ("mme", mme_parquet, {}),
    ],
)
def test_prompts_are_the_reference_programs(shared, tmp_path, name, given, options):
    task = {"infographicvqa": "docvqa", "vizwiz": "vizwiz_vqa"}.get(name, name)
    documents, expected = reference_prompts(shared, task, **options)
    if name == "mme":  # two questions to an image
        documents = [{**row, "question_id": f"OCR/{n // 2}", "category": "OCR"} for n, row in enumerate(documents)]
    if name == "scienceqa":
        documents = [{**document, "answer": 0} for document in documents]
    folder = parquet(tmp_path, name, documents) if given is None else given(tmp_path, documents)
    assert prompts_of(build_task(name, folder, **options)) == expected


def test_charts(tmp_path):
    documents = [
        {"question": "How many food item is shown in the bar graph?"},
        {"question": "What was the share in 2019?", "type": "augmented_test", "answer": "37.3"},
    ]
    task = build_task("chartqa", parquet(tmp_path, "chartqa", documents))
    first, second = task.samples()
    assert first.prompt == f"<image>\nHow many food item is shown in the bar graph?{WORD}"
    assert (first.id, first.kind, first.reference) == ("0", "human", {"answer": "14", "kind": "human"})
    assert (second.id, second.kind) == ("1", "augmented")
    assert (second.max_new_tokens, task.expected_rows) == (16, 2500)
    metric = task.metric()
    metric.update(["14", "39"], [first.reference, second.reference])
    scores = metric.compute()
    assert scores == {"relaxed_accuracy": 1, "human": 1, "augmented": 1}


@pytest.mark.parametrize(("name", "labels"), [("docvqa", "question_types"), ("infographicvqa", "answer_type")])
def test_pages(tmp_path, name, labels):
    document = {"questionId": "49153", "question": "What is the real value?", "answers": ["0.28", ".28"]}
    task = build_task(name, parquet(tmp_path, name, [document, {"question": "Why?", labels: None}]))
    first, second = task.samples()
    assert first.prompt == f"<image>\nWhat is the real value?{SHORT}"
    assert (first.id, first.kind, first.reference) == ("49153", "form", {"answers": ["0.28", ".28"]})
    assert (second.kind, second.max_new_tokens) == ("question", 32)
    assert task.metric().score("0.28", first.reference) == 1
    assert task.expected_rows == {"docvqa": 5349, "infographicvqa": 2801}[name]


def test_the_other_set_of_the_repository_is_not_taken(tmp_path):
    words = r"infographicvqa: .* has no InfographicVQA/validation-\*\.parquet\. hf download"
    refused(words, "infographicvqa", parquet(tmp_path, "docvqa", [{"question": "Why?"}]))


def test_photographs(tmp_path):
    document = {"question": "what IS this?", "question_id": "VizWiz_val_00000000.jpg"}
    task = build_task("vizwiz", parquet(tmp_path, "vizwiz", [document]))
    (sample,) = task.samples()
    assert sample.prompt == f"<image>\nWhat is this?{UNANSWERABLE}{SHORT}"
    assert (sample.id, sample.kind) == ("VizWiz_val_00000000.jpg", "unanswerable")
    assert task.metric().score("Soda", sample.reference) == 1
    assert task.metric().score("Unanswerable", sample.reference) == 0
    assert task.expected_rows == 4319


def test_prompts_of_llava_for_vizwiz_but_for_case(shared, tmp_path):
    asked = [line["text"] for line in real_lines(shared, "vizwiz_text", "llava_test_head500.jsonl")]
    questions = [{"question": text.partition("\nWhen the provided")[0]} for text in asked]
    prompts = prompts_of(build_task("vizwiz", parquet(tmp_path, "vizwiz", questions)))
    assert [prompt.lower() for prompt in prompts] == [f"<image>\n{text}".lower() for text in asked]
    same = sum(prompt == f"<image>\n{text}" for prompt, text in zip(prompts, asked, strict=True))
    assert same > 0.8 * len(asked)


@pytest.mark.slow
def test_all_real_questions_of_chartqa(shared, tmp_path):
    lines = real_lines(shared, "chartqa_text", "test_all.jsonl")
    rows = [{"question": line["question"].removesuffix(SHORT), "answer": line["answer"]} for line in lines]
    task = build_task("chartqa", parquet(tmp_path, "chartqa", rows))
    samples = task.samples()
    assert len(samples) == task.expected_rows
    assert [sample.prompt for sample in samples] == [f"<image>\n{row['question']}{WORD}" for row in rows]
    assert all(task.metric().score(sample.reference["answer"], sample.reference) == 1 for sample in samples)


@pytest.mark.slow
def test_all_real_questions_of_docvqa(shared, tmp_path):
    lines = real_lines(shared, "docvqa_text", "val.jsonl")
    names = {"questionId": "question_id", "question": "question", "answers": "answer"}
    rows = [{ours: line[theirs] for ours, theirs in names.items()} for line in lines]
    rows = [
        {**row, "questionId": str(row["questionId"]), "question": row["question"].removesuffix(SHORT)} for row in rows
    ]
    task = build_task("docvqa", parquet(tmp_path, "docvqa", rows))
    samples = task.samples()
    assert len(samples) == task.expected_rows
    assert [sample.prompt for sample in samples] == [f"<image>\n{line['question']}" for line in lines]
    assert [sample.reference for sample in samples] == [{"answers": line["answer"]} for line in lines]
    metric = task.metric()
    metric.update([sample.reference["answers"][-1] for sample in samples], [sample.reference for sample in samples])
    assert metric.compute()["lmms_anls"] == 1
