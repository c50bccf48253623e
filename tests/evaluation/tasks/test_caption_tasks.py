"""COCO Captions and TextCaps: prompt, references, and what is refused."""

from io import BytesIO

import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task

PROMPT = "<image>\nProvide a one-sentence caption for the provided image."


def png():
    content = BytesIO()
    Pictures.new("RGB", (3, 2), (9, 0, 0)).save(content, "PNG")
    return content.getvalue()


def write(folder, name_column, captions_column, rows):
    content = {
        name_column: [name for name, _ in rows],
        captions_column: [captions for _, captions in rows],
        "image": [{"bytes": png(), "path": None}] * len(rows),
    }
    features = Features({name_column: Value("string"), captions_column: List(Value("string")), "image": Image()})
    (folder / "data").mkdir()
    Dataset.from_dict(content, features=features).to_parquet(folder / "data" / "val-00000-of-00001.parquet")


@pytest.mark.parametrize(
    ("name", "columns"), [("coco_caption", ("question_id", "answer")), ("textcaps", ("image_id", "caption_str"))]
)
def test_samples(tmp_path, name, columns):
    write(tmp_path, *columns, [("one.jpg", ["A dog.", "dogs"]), ("two.jpg", ["A cat."])])
    first, second = build_task(name, tmp_path).samples()
    assert (first.id, first.prompt, first.reference) == ("one.jpg", PROMPT, {"captions": ["A dog.", "dogs"]})
    assert (second.id, second.max_new_tokens, second.choices) == ("two.jpg", 64, ())
    assert open_image(first.images[0]).size == (3, 2)


def test_a_split_without_captions(tmp_path):
    write(tmp_path, "image_id", "caption_str", [("one", [])])
    with pytest.raises(ValueError, match="no answers, so this is another split's file; use that of 'val'"):
        build_task("textcaps", tmp_path).samples()


def test_one_caption_that_is_no_list_is_not_taken_letter_by_letter(tmp_path):
    (tmp_path / "data").mkdir()
    content = {"image_id": ["one"], "caption_str": ["A dog."], "image": [{"bytes": png(), "path": None}]}
    Dataset.from_dict(content).to_parquet(tmp_path / "data" / "val-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"row 1: caption_str is 'A dog\.', and a list of texts is wanted"):
        build_task("textcaps", tmp_path).samples()


def test_years_are_different_sets():
    assert build_task("coco_caption").expected_rows == 40_504
    later = build_task("coco_caption", year=2017)
    assert (later.source, later.expected_rows) == ("lmms-lab/COCO-Caption2017", 5_000)
    with pytest.raises(ValueError, match="Allowed: 2014, 2017"):
        build_task("coco_caption", year=2015)


def test_missing_java_stops_before_a_model_runs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="no 'java' on the PATH"):
        build_task("textcaps").check_requirements()
    build_task("ruler").check_requirements()
