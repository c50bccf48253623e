"""benchmarks/recall_screen.py: its arms, what an arm's settings do to an adapter, and its records."""

from __future__ import annotations

from pathlib import Path

from benchmarks import recall_screen
from benchmarks.recall_screen import REFERENCE, SCORERS, Trial, backbone_of, read_records, table, trials
from tests.support import places


def test_arms_have_names_of_their_own_and_recipes():
    names = [trial.name for trial in trials()]
    assert len(set(names)) == len(names)
    assert REFERENCE in names
    recipes = {path.stem for path in places.run_recipes()}
    assert {trial.recipe for trial in trials()} <= recipes
    for scorer in SCORERS:  # unrouted, its anchor, a router, value norm
        assert sum(name.startswith(f"{scorer}25") and "-" not in name for name in names) == 4


def test_an_arms_settings_replace_the_adapters():
    trial = Trial("tinylm_quest25_s16k12", keep_ratio=0.5, kept_groups=9)
    backbone = backbone_of(trial, Path("nowhere"))
    assert backbone.reducer.keep_ratio == 0.5
    assert (backbone.group_budget.num_groups, backbone.group_budget.kept_groups) == (16, 9)
    assert backbone_of(Trial("tinylm_of_nobody"), Path("nowhere")) is None


def test_records_are_whole_and_make_the_table():
    records = read_records()
    made = table(records)
    for name, record in records.items():
        assert len(record["scores"]) == record["contexts"] == recall_screen.CONTEXTS
        assert abs(sum(record["scores"]) / record["contexts"] - record["recall"]) < 1e-3
        assert f"| {name} | {record['kv']:.3%} | {record['kv_index']:.3%} | {100 * record['recall']:.1f} |" in made
    assert made in (recall_screen.ROOT / "benchmarks/README.md").read_text()
