"""Scenes as files: deterministic, balanced, readable, with digits of their own split."""

import json
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_files import write_scene_split, write_scenes
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS, SHORT_KINDS, SPLITS, _glyphs, draw_scene


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


def test_a_record_does_not_depend_on_the_number_of_records(tmp_path):
    for name, count in (("short", 2), ("long", 5)):
        write_scene_split(tmp_path / name, "train", count, seed=3)
    long = InstructionRecords(tmp_path / "long/train.json")
    assert [r.turns for r in InstructionRecords(tmp_path / "short/train.json")] == [long[0].turns, long[1].turns]


def test_records_hold_the_question_of_their_scene(tmp_path):
    write_scene_split(tmp_path, "test", 3, seed=0)
    records = InstructionRecords(tmp_path / "test.json")
    assert [record.id for record in records] == ["test-000000", "test-000001", "test-000002"]
    record = records[1]
    assert record.kind == SHORT_KINDS[1]
    assert record.turns[0].prompt.startswith("<image>\nis there a ")
    scene = draw_scene(np.random.default_rng([0, 2, 1]), "test")
    pixels = np.asarray(open_image(record.images[0], record.id)).astype(int)
    assert np.abs(pixels - scene.pixels).mean() < 4  # JPEG at quality 90


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


def test_only_what_it_made_is_replaced(tmp_path):
    folder = tmp_path / "scenes"
    write_scenes(folder, train=1, dev=1, test=1)
    for name in ("thesis.tex", "train/mine.jpg"):
        (folder / name).write_text("years of work")
        with pytest.raises(ValueError, match=rf"holds files that do not belong to a folder of scenes \({name}\)"):
            write_scenes(folder, train=1, dev=1, test=1, overwrite=True)
        (folder / name).unlink()
    write_scenes(folder, train=2, dev=1, test=1, overwrite=True)
    assert len(InstructionRecords(folder / "train.json")) == 2
    (folder / ".subtoken-data.json").unlink()  # somebody's own data of the same names
    with pytest.raises(ValueError, match="is not a folder of scenes"):
        write_scenes(folder, train=1, dev=1, test=1, overwrite=True)
    assert (folder / "train" / "000000.jpg").exists()
