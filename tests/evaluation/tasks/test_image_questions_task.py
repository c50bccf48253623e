"""Tasks of one image and one question a row: what they ask, what all refuse, and ChartQA, DocVQA, VizWiz themselves."""

import json

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import (
    gqa_parquet,
    mme_parquet,
    people,
    pope_parquet,
    prompts_of,
    reference_prompts,
    refused,
    scienceqa_parquet,
    write_rows,
)

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
    "vqav2": ("data/validation", {"answers": people(*["yes"] * 10), "answer_type": "other"}, "question_id"),
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
    *(("gqa", gqa_parquet, {}), ("pope", pope_parquet, {}), ("scienceqa", scienceqa_parquet, {})),
    ("mme", mme_parquet, {}),
]


@pytest.mark.parametrize(("name", "given", "options"), REFERENCES)
def test_prompts_are_the_reference_programs(shared, tmp_path, name, given, options):
    task = {"infographicvqa": "docvqa", "vizwiz": "vizwiz_vqa"}.get(name, name)
    documents, expected = reference_prompts(shared, task, **options)
    if name == "mme":  # two questions to an image
        documents = [{**row, "question_id": f"OCR/{n // 2}", "category": "OCR"} for n, row in enumerate(documents)]
    if name == "scienceqa":
        documents = [{**document, "answer": 0} for document in documents]
    folder = parquet(tmp_path, name, documents) if given is None else given(tmp_path, documents)
    assert prompts_of(build_task(name, folder, **options)) == expected


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
