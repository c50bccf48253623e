"""benchmarks/real_ruler.py: a record holds finished arms alone, on the same prompts; the page shows it."""

from __future__ import annotations

import json

import pytest

from benchmarks import real_needles
from benchmarks.real_ruler import RECORDS, compact, joined, table, tables
from benchmarks.real_text import PAGES
from tests.support.places import shown


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


def test_tasks_that_the_full_cache_cannot_do_are_named_and_not_judged(tmp_path, capsys):
    write_arm(tmp_path, "full", "-", [1.0, 1.0, 0.0, 0.5], 99)
    write_arm(tmp_path, "some", "kvzip 0.2", [1.0, 0.5, 1.0, 1.0], 21)
    write_arm(tmp_path, "stopped", "snapkv 0.2", [1.0, 1.0], 21)
    write_arm(tmp_path, "values", "-", [0.0] * 4, 89, groups="S16K12", backbone="qwen05-axes")
    rows = table(compact(tmp_path)).splitlines()
    assert capsys.readouterr().out == "stopped: 2 of 4 answers, left out\n"
    assert rows[0] == "| arm | bytes | vt | less the full cache |"
    assert rows[2] == "| full cache | 100.0% | 100 |  |"
    assert rows[3].startswith("| kvzip 0.2 | 22.0% | 75 | -25.0 [")
    assert rows[4].startswith("| S16K12, values turned | 90.0% | 0 | -100.0 [")
    assert rows[6] == (
        "Qwen2.5-Coder-0.5B (cpu): 2 samples a task of at most 1,024 tokens; the full cache cannot do fwe."
    )
    assert len(rows) == 7


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


def test_the_page_shows_the_records():
    for file in RECORDS.glob("*.json"):
        assert len(json.loads(file.read_text())["kinds"]) >= 60
    assert shown(PAGES / "ruler.md", "ruler") == tables()


def test_the_maps_of_needles_are_of_the_record():
    record = json.loads(real_needles.RECORD.read_text())
    assert len(record["kinds"]) == 30
    assert shown(PAGES / "ruler.md", "needles") == real_needles.table(record)
    assert real_needles.PICTURE.read_text() == real_needles.picture(record)
    full, *others = real_needles.figure(record).axes
    scores = record["arms"]["full cache"]["scores"]
    assert sum(int(text.get_text()) for text in full.texts) == pytest.approx(100 * sum(scores) / 2)
    assert len(others) >= 1
