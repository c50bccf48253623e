"""Whole and well-formed sets."""

from dataclasses import replace

import pytest
from PIL import Image

from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.whole_set import check_complete, check_samples, open_some
from tests.support.vqa_cases import Birds


@pytest.fixture
def two(tmp_path, monkeypatch):
    monkeypatch.setattr(Birds, "rows", 2)
    for name, size in (("a", (3, 2)), ("b", (5, 4))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    return [Sample(name, "<image>\nWhat?", {}, (tmp_path / f"{name}.png",)) for name in "ab"]


def test_a_whole_set(two):
    task = Birds()
    check_complete(task, two, None)
    check_samples(task, two)
    assert open_some(two) == [(3, 2), (5, 4)]


def test_a_part_needs_a_limit(two):
    with pytest.raises(ValueError, match=r"task birds has 1 of 2 samples in lmms-lab/birds\..* hf download"):
        check_complete(Birds(), two[:1], None)
    check_complete(Birds(), two[:1], 1)
    check_complete(Birds(), two, 3)
    with pytest.raises(ValueError, match="task birds has 1 of 2 samples"):
        check_complete(Birds(), two[:1], 2)
    with pytest.raises(ValueError, match=r"lmms-lab/birds holds no sample. hf download"):
        check_complete(Birds(), [], 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "a"}, "task birds, sample 2: id 'a' appears twice, first in task birds, sample 1"),
        ({"prompt": "What?"}, "sample 'b': 0 <image> in the prompt for 1 images"),
        ({"context_characters": 99}, "sample 'b': context_characters 99 lies outside its prompt of 13"),
    ],
)
def test_a_malformed_sample(two, change, message):
    with pytest.raises(ValueError, match=message):
        check_samples(Birds(), [two[0], replace(two[1], **change)])


def test_missing_and_broken_files(two, tmp_path):
    (tmp_path / "b.png").unlink()
    with pytest.raises(ValueError, match=r"task birds: 1 of 2 images are missing \(first: .*b.png\)\. hf download"):
        check_samples(Birds(), two)
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"b.png cannot be read"):
        open_some(two)


def test_spread_over_many(two):
    assert len(open_some(two * 50)) == 5
    assert open_some([Sample("t", "text", {})]) == []
