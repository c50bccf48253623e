"""The published table is what the committed run records say, and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.arm_training import digest
from benchmarks.comparison_lists import EMBEDDED, read_comparison
from benchmarks.comparison_tables import comparison_markdown, read_records
from subtoken_train.datasets.scene_questions import DESCRIPTION_KINDS
from subtoken_train.ledger.kv_budget import KVBudget
from tests.support.places import RECIPES, ROOT

RESULTS = ROOT / "benchmarks" / "results"
LISTS = [EMBEDDED, *map(read_comparison, sorted((RECIPES / "ablations").glob("*.yaml")))]
RUNS = [
    (path, comparison.arms[name])
    for comparison in LISTS
    for name in comparison.arms
    for path in sorted((RESULTS / comparison.folder).glob(f"{name}-seed*.json"))
]


README = RECIPES / "README.md"
PAGES = dict.fromkeys(("screens", "fill"), ROOT / "docs" / "trials.md")


TABLES = ("comparison", "visionzip", "two_stage", "recall", "routed_recall", "beyond", "screens", "matched", "fill")


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_regenerated_from_the_records(name):
    text = PAGES.get(name, README).read_text()
    printed = text.split(f"<!-- {name}:start -->\n")[1].split(f"\n<!-- {name}:end -->")[0]
    chosen = EMBEDDED if name == "comparison" else read_comparison(RECIPES / "ablations" / f"{name}_tiny.yaml")
    assert printed == comparison_markdown(read_records(RESULTS / chosen.folder), chosen)


def test_records_cover_every_arm_with_the_same_seeds_and_questions():
    arms = read_records(RESULTS)
    assert set(EMBEDDED.arms) <= set(arms)
    assert {len(arms[name].scores_sn) for name in EMBEDDED.arms} == {5}
    kinds = next(iter(arms.values())).kinds
    assert (~np.isin(kinds, DESCRIPTION_KINDS)).sum() >= 4000
    assert all((arm.kinds == kinds).all() for arm in arms.values())


def test_dropping_tokens_costs_enough_to_show_anything():
    """On short questions; what it costs descriptions stands in the table."""
    arms = read_records(RESULTS)
    unrouted = arms["tiny_fastv25"].scores_of("questions").mean()
    assert unrouted - arms["tiny_fastv25_s16k4_anchor"].scores_of("questions").mean() > 0.04
    assert unrouted - arms["tiny_fastv12p5_s16k4_anchor"].scores_of("questions").mean() > 0.08


def test_every_record_belongs_to_a_table():
    folders = {comparison.folder for comparison in LISTS}
    found = {path for folder in folders for path in (RESULTS / folder).glob("*-seed*.json")}
    assert found == {path for path, _ in RUNS}


@pytest.mark.parametrize(("path", "arm"), RUNS, ids=lambda part: part.stem if hasattr(part, "stem") else "")
def test_records_belong_to_the_recipes_as_they_are(path, arm):
    record = json.loads(path.read_text())
    assert record["recipe_sha256"] == digest(arm)
    assert record["realised_kv"] == pytest.approx(record["nominal_kv"])
    assert len(record["predictions"]) == len(record["scores"]) == len(record["kinds"])
    assert path.name == f"{arm.name}-seed{record['seed']}.json"


def test_compared_arms_hold_equal_bytes():
    arms = read_records(RESULTS)
    for first, second in EMBEDDED.pairs[:4]:
        assert arms[first].nominal_kv == pytest.approx(arms[second].nominal_kv)
    assert arms["tiny_fastv25_s16k4"].nominal_kv == KVBudget(0.25, 16, 4).total_kv_fraction


def test_mixed_question_files_are_refused(tmp_path):
    record = {
        "arm": "a",
        "seed": 0,
        "kinds": ["read"],
        "scores": [1.0],
        "visual_tokens": "1/1",
        "nominal_kv": 1,
        "realised_kv": 1,
    }
    with pytest.raises(ValueError, match="no run records"):
        read_records(tmp_path)
    for seed, asked in enumerate(("x", "y")):
        (tmp_path / f"a-seed{seed}.json").write_text(json.dumps({**record, "data_sha256": asked}))
    with pytest.raises(ValueError, match="different question files"):
        read_records(tmp_path)
