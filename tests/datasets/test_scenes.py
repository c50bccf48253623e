"""Scenes as files: deterministic, balanced, with digits of their own split."""

import json
from collections import Counter
from itertools import combinations

import pytest

from subtoken_train.datasets.scenes import (
    DESCRIPTION_KINDS,
    SHORT_KINDS,
    SPLITS,
    _glyphs,
    write_scene_split,
    write_scenes,
)


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
