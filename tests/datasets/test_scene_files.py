"""Scenes as files (deterministic, balanced, with digits of their own split), and ``data/samples``, answered rightly."""

import csv
import json
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.scene_files import write_scene_split, write_scenes
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS, SHORT_KINDS, SPLITS, _glyphs, ask, draw_scene
from subtoken_train.resources import resource

SAMPLES = resource("data/samples")
RECALL = RecallTask(AutoTokenizer.from_pretrained(resource("checkpoints/tiny-llama")), num_questions=2)


@pytest.mark.parametrize(("name", "number"), [("a.png", 5), ("b.png", 10)])
def test_pictures_are_held_out_scenes(name, number):
    scene = draw_scene(np.random.default_rng([0, 2, number]), "test")
    np.testing.assert_array_equal(np.asarray(Image.open(SAMPLES / name)), scene.pixels)


def test_the_long_text_is_a_held_out_recall_context():
    sample = RecallRecords(RECALL, "test", 2)[1].text
    prompt = list(sample.input_ids)[: sample.prompt_length]
    assert RECALL.tokenizer((SAMPLES / "long.txt").read_text().rstrip("\n"))["input_ids"] == prompt


def test_own_data_are_held_out_scenes_and_questions_about_them():
    """As ``data/README.md`` says; a JPEG is not the same to the last bit with every version of its library."""
    with (SAMPLES / "mydata/questions.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["image", "question", "answer"]
    drawn = []
    for number in range(24):
        rng = np.random.default_rng([1, 2, number])
        scene, name = draw_scene(rng, "test"), f"images/{number:02d}.jpg"
        pixels = np.asarray(Image.open(SAMPLES / "mydata" / name)).astype(int)
        assert np.abs(pixels - scene.pixels).mean() < 4
        drawn += [[name, *ask(rng, scene.objects, kind)] for kind in ("exists", "color", "read", "where", "count")]
    assert rows == drawn


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_files_are_a_function_of_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_scenes(tmp_path / name, train=4, dev=2, test=2, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a").keys() == contents(tmp_path / "c").keys()
    alike = contents(tmp_path / "a").items() & contents(tmp_path / "c").items()
    assert [path.name for path, _ in alike] == [".subtoken-data.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.slow
def test_evaluation_splits_are_balanced_and_training_is_mixed(tmp_path):
    write_scene_split(tmp_path, "dev", 140, seed=0)
    kinds = Counter(row["kind"] for row in json.loads((tmp_path / "dev.json").read_text()))
    assert kinds == dict.fromkeys(DESCRIPTION_KINDS, 7) | dict.fromkeys(SHORT_KINDS, 18)
    write_scene_split(tmp_path, "train", 200, seed=0)
    kinds = Counter(row["kind"] for row in json.loads((tmp_path / "train.json").read_text()))
    assert set(kinds) == {*SHORT_KINDS, *DESCRIPTION_KINDS}
    assert 40 <= sum(kinds[kind] for kind in DESCRIPTION_KINDS) <= 80  # 60 expected


def test_splits_share_no_handwritten_digit():
    originals = {split: {glyph.tobytes() for shapes in _glyphs()[split] for glyph in shapes} for split in SPLITS}
    for first, second in combinations(SPLITS, 2):
        assert not originals[first] & originals[second]
