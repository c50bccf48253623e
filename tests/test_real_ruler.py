"""benchmarks/real_ruler.py: a record holds finished arms alone, on the same prompts; the page shows it."""

from __future__ import annotations

import json

import pytest

from benchmarks import real_needles
from benchmarks.real_ruler import RECORDS, compact, joined, judges
from benchmarks.real_text import read


def write_arm(folder, name, eviction, scores, kept, prompt="p", groups="-", backbone="qwen05", device="cpu"):
    place = folder / name / "ruler_synthetic"
    place.mkdir(parents=True)
    options = {"tasks": ["vt", "fwe"], "length": 1024, "samples_per_task": 2}
    arm = {"backbone": backbone, "adapter": None, "reducer": "-", "groups": groups, "eviction": eviction}
    manifest = {"arm": arm, "options": options, "expected_rows": 4, "settings": {"device": device}}
    (place / "manifest.json").write_text(json.dumps(manifest))
    samples = [
        {"id": name, "prompt_sha256": prompt, "score": score, "region_bytes": kept, "region_dense_bytes": 100}
        | {"index_bytes": 1}
        for name, score in zip(("vt-0", "vt-1", "fwe-0", "fwe-1"), scores, strict=False)
    ]
    (place / "samples-0-of-1.jsonl").write_text("\n".join(map(json.dumps, samples[::-1])) + "\n")


def test_a_record_has_finished_arms_and_tasks_that_the_full_cache_can_do(tmp_path, capsys):
    write_arm(tmp_path, "full", "-", [1.0, 1.0, 0.0, 0.5], 99)
    write_arm(tmp_path, "some", "kvzip 0.2", [1.0, 0.5, 1.0, 1.0], 21)
    write_arm(tmp_path, "stopped", "snapkv 0.2", [1.0, 1.0], 21)
    write_arm(tmp_path, "values", "-", [0.0] * 4, 89, groups="S16K12", backbone="qwen05-axes")
    record = compact(tmp_path)
    assert capsys.readouterr().out == "stopped: 2 of 4 answers, left out\n"
    assert list(record["arms"]) == ["full cache", "kvzip 0.2", "S16K12, values turned"]
    assert record["arms"]["kvzip 0.2"]["share"] == [0.22] * 4
    assert judges(record) == ["vt"]


@pytest.mark.parametrize("other", [{"prompt": "q"}, {"backbone": "smollm2"}, {"device": "cuda"}])
def test_arms_that_were_asked_otherwise_are_refused(tmp_path, other):
    write_arm(tmp_path, "full", "-", [1.0] * 4, 99)
    write_arm(tmp_path, "some", "kvzip 0.2", [1.0] * 4, 21, **other)
    with pytest.raises(ValueError, match="asked otherwise"):
        compact(tmp_path)


def test_a_record_keeps_its_arms_where_the_same_was_asked(tmp_path):
    write_arm(tmp_path / "a", "full", "-", [1.0] * 4, 99)
    write_arm(tmp_path / "b", "some", "kvzip 0.2", [0.5] * 4, 21)
    write_arm(tmp_path / "b", "again", "-", [0.0] * 4, 99)
    earlier = compact(tmp_path / "a")
    record = joined(earlier, compact(tmp_path / "b"))
    assert {words: arm["scores"][0] for words, arm in record["arms"].items()} == {"full cache": 0.0, "kvzip 0.2": 0.5}
    with pytest.raises(SystemExit, match="asked otherwise"):
        joined({**earlier, "kinds": []}, record)


def test_records_are_of_enough_samples():
    for file in RECORDS.glob("*.jsonl.xz"):
        assert [len(record["kinds"]) >= 60 for record in read(file)] == [True]


def test_the_maps_of_needles_are_of_the_record():
    record = json.loads(real_needles.RECORD.read_text())
    assert len(record["kinds"]) == 30
    assert real_needles.PICTURE.read_text() == real_needles.picture(record)
    full, *others = real_needles.figure(record).axes
    scores = record["arms"]["full cache"]["scores"]
    assert sum(int(text.get_text()) for text in full.texts) == pytest.approx(100 * sum(scores) / 2)
    assert len(others) >= 1
