"""POPE in both forms."""

from random import Random

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import pope_own as own_form
from tests.support.benchmark_folders import pope_parquet as parquet
from tests.support.benchmark_folders import write_files
from tests.support.vqa_cases import expected_scores, picture, real_answers, refused

ASKED = "<image>\nIs there a snowboard in the image?\nAnswer the question using a single word or phrase."
CATEGORIES = ("adversarial", "popular", "random")


def test_the_parquet_form(tmp_path):
    asked = {"question": "Is there a snowboard in the image? ", "answer": "Yes", "question_id": "1"}
    documents = [{**asked, "category": name} for name in CATEGORIES]
    samples = build_task("pope", parquet(tmp_path, documents)).samples()
    assert [sample.id for sample in samples] == ["adversarial/1", "popular/1", "random/1"]
    assert {sample.prompt for sample in samples} == {ASKED}
    assert samples[1].reference == {"label": "yes", "category": "popular"}
    assert open_image(samples[2].images[0]).getpixel((0, 0)) == (2, 0, 0)
    (one,) = build_task("pope", tmp_path, category="popular").samples()
    assert (one.id, one.reference) == (samples[1].id, samples[1].reference)


def test_the_configuration_of_categories(tmp_path):
    for name in CATEGORIES:
        parquet(tmp_path, [{"category": name}], f"Full/{name}-00000-of-00001")
    assert [sample.kind for sample in build_task("pope", tmp_path).samples()] == list(CATEGORIES)


def test_the_benchmarks_own_form(tmp_path):
    own_form(tmp_path, [{"text": "Is there a snowboard in the image?", "label": "yes"}, {"question_id": 2}])
    write_files(tmp_path, {"val2014/COCO_val2014_000000310196.jpg": picture(5)})
    first, second = build_task("pope", tmp_path, category="random").samples()
    assert (first.id, first.prompt) == ("random/1", ASKED)
    assert first.reference == {"label": "yes", "category": "random"}
    assert open_image(second.images[0]).getpixel((0, 0)) == (5, 0, 0)


@pytest.mark.slow
def test_all_real_questions(shared):
    folder = shared / "realdata" / "pope"
    if not folder.is_dir():
        pytest.skip("reference material (pope) is absent")
    task = build_task("pope", folder)
    samples = task.samples()
    assert len(samples) == task.expected_rows == 9000
    assert len(build_task("pope", folder, category="popular").samples()) == 3000
    assert samples[0].prompt == ASKED
    assert sum(sample.reference["label"] == "yes" for sample in samples) == 4500
    with pytest.raises(ValueError, match=r"val2014/COCO_val2014_000000310196\.jpg does not exist"):
        open_image(samples[0].images[0])


def test_answers_of_llava_are_joined_by_id_whatever_their_order(shared):
    folder = shared / "realdata" / "pope"
    if not folder.is_dir():
        pytest.skip("reference material (pope) is absent")
    task = build_task("pope", folder, category="adversarial")
    references = {sample.id: sample.reference for sample in task.samples()}
    answers = [row for row in real_answers(shared, "pope_llava15_13b") if row["category"] == "adversarial"]
    assert len(answers) == 3000
    Random(0).shuffle(answers)
    metric = task.metric()
    metric.update(
        [row["pred"] for row in answers], [references[f"adversarial/{row['question_id']}"] for row in answers]
    )
    expected = expected_scores(shared, "pope_llava15_13b")["adversarial"]
    assert metric.compute()["accuracy"] == pytest.approx(expected["Accuracy"], abs=1e-6)
    assert metric.compute()["f1"] == pytest.approx(expected["F1 score"], abs=1e-6)


def test_mistakes(tmp_path):
    refused(r"has no coco_pope_adversarial\.json or coco/coco_pope_adversarial\.json\. Par", "pope", tmp_path)
    own_form(tmp_path, [{}, {}])
    refused(
        r"random\.json, line 2: id 'random/1' appears twice, first in .* line 1", "pope", tmp_path, category="random"
    )
    own_form(tmp_path, [{}, {"label": "maybe"}])
    refused(r"random\.json, line 2: the answer is 'maybe'; POPE's are yes and no", "pope", tmp_path, category="random")
    own_form(tmp_path, [{}, {"question_id": 2, "label": None}])
    refused(
        r"random\.json, line 2: no answers, so this is another split's file; use that",
        "pope",
        tmp_path,
        category="random",
    )
    cut = tmp_path / "coco_pope_random.json"
    own_form(tmp_path, [{}, {}])
    cut.write_text(cut.read_text()[:-20])
    refused(r"random\.json, line 2: invalid JSON", "pope", tmp_path, category="random")
