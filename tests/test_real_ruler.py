"""benchmarks/real_ruler.py: a record holds finished arms alone, on the same prompts; the page shows it."""

from __future__ import annotations

import json

import pytest

from benchmarks import real_needles
from benchmarks.real_frontier import (
    PAGE,
    SVG_FILE,
    blind,
    measured,
    measured_on_tasks,
    picture,
    shipped,
    table,
    winners,
)
from benchmarks.real_ruler import RECORDS, compact, judges
from benchmarks.real_text import NAMES, read
from subtoken_train.cli.recommend import FILE
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


def record(share, facts, text):
    """One beside a full cache of 0.5 nats a fact and 3 a token."""
    own = {"share": [share] * 3, "facts": [[facts] * 2] * 3, "exact": [[1, 0]] * 3, "text": [text * 127] * 3}
    return {**own, "full": {**own, "facts": [[0.5] * 2] * 3, "text": [3.0 * 127] * 3}}


def test_a_size_names_what_fits_it_and_loses_least():
    records = {
        "full cache": record(1.0, 0.5, 3.0),
        "int8 of everything": record(0.51, 0.5, 3.25),
        "kvzip 50.0%": record(0.5, 0.75, 3.0),
        "kvzip 21.9%": record(0.22, 9.0, 9.0),
    }
    first, second, *rest = table(measured({"smollm2": records}), ["smollm2"]).splitlines()[2:]
    assert first.startswith("| 53.0% | SmolLM2-135M | int8 of everything (51.0%) | +0.00 [")
    assert "| kvzip 50.0% (50.0%) | +0.000 [" in first
    assert second.startswith("| 27.0% | SmolLM2-135M | kvzip 21.9% (22.0%) | +8.50 [")
    assert rest == []  # no record is small enough for the other sizes


def test_only_what_wins_somewhere_is_shipped():
    models = {
        "qwen05": {
            "full cache": record(1.0, 0.5, 3.0),
            "int8 of everything": record(0.5, 0.75, 3.5),
            "kvzip 21.9%": record(0.2, 1.0, 4.0),
            "snapkv 50.0%": record(0.5, 2.0, 5.0),  # at the same bytes it loses more
            "kvzap 21.9%": record(0.2, 1.0, 4.0),
        },
        "smollm2": {
            "full cache": record(1.0, 0.5, 3.0),
            "snapkv 21.9%": record(0.2, 0.5, 3.0),  # loses nothing, on the model that has its record
            "kvzip 21.9%": record(0.2, 1.0, 4.0),
        },
    }
    kept = winners(measured(models), list(models))
    assert [each.arm for each in kept] == ["kvzip 21.9%", "snapkv 21.9%", "int8 of everything"]
    assert [list(each.on) for each in kept] == [["qwen05", "smollm2"], ["smollm2"], ["qwen05"]]


def test_the_page_the_picture_and_what_the_command_reads_are_of_the_records():
    models = {name: blind(name) for name in NAMES}
    assert all("full cache" in records for records in models.values())
    found, names = measured(models), list(NAMES)
    assert shown(PAGE, "frontier") == table(found, names)
    own = shipped(text=(NAMES, winners(found, names)), tasks=measured_on_tasks())
    assert FILE.read_text(encoding="utf-8") == own
    assert SVG_FILE.read_text(encoding="utf-8") == picture(models["qwen05"])
