"""GQA in both forms."""

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import gqa_own
from tests.support.benchmark_folders import gqa_parquet as parquet
from tests.support.vqa_cases import picture, refused

ASKED = "<image>\nIs it overcast?\nAnswer the question using a single word or phrase."


def test_questions_and_images_are_joined(tmp_path):
    documents = [{"question": "Is it overcast?"}, {"question": "Who?", "answer": "man", "imageId": "n1"}]
    first, second = build_task("gqa", parquet(tmp_path, documents)).samples()
    assert (first.id, first.prompt, first.reference, first.kind) == ("0", ASKED, {"answer": "no"}, "binary")
    assert second.kind == "open"
    assert [open_image(sample.images[0]).getpixel((0, 0))[0] for sample in (first, second)] == [1, 0]


def test_the_benchmarks_own_form(tmp_path):
    question = {"question": "Is it overcast?", "answer": "no", "imageId": "n161313"}
    task = build_task("gqa", gqa_own(tmp_path, {"201307251": question}, {"n161313": picture(3)}))
    (sample,) = task.samples()
    assert (sample.id, sample.prompt) == ("201307251", ASKED)
    assert open_image(sample.images[0]).getpixel((0, 0)) == (3, 0, 0)
    assert task.expected_rows == 12_578


def test_mistakes(tmp_path):
    folder = parquet(tmp_path, [{"question": "Why?", "imageId": "n7"}])
    refused(r"parquet, row 1: image n7 is not in testdev_balanced_images", "gqa", folder)
    folder = parquet(tmp_path, [{"question": "Why?", "id": "1"}, {"question": "Who?", "id": "1"}])
    refused(r"row 2: id '1' appears twice, first in .*row 1", "gqa", folder)
    folder = parquet(tmp_path, [{"question": "Why?"}, {"question": "Who?", "answer": None}])
    refused(r"row 2: no answers, so this is another split's file; use that of 'testdev'", "gqa", folder)
    (tmp_path / "testdev_balanced_questions.json").write_text('{"1": {"question": "Why?", "answer": "no"}}')
    refused(r"testdev_balanced_questions\.json, '1': no column imageId", "gqa", tmp_path)
