"""benchmarks/recall_screen.py: its arms, what an arm's settings do to an adapter, and its records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.recall_screen import backbone_of, read_records, table
from benchmarks.recall_trials import FINAL, REFERENCE, SCORERS, SCREEN, Trial, trials
from subtoken_train.evaluation.intervals import bootstrap_interval
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


@pytest.mark.parametrize("asked", [SCREEN, FINAL], ids=["screen", "final"])
def test_records_are_whole_and_make_the_table(asked):
    records = read_records(asked)
    for name, runs in records.items():
        assert [run["seed"] for run in runs] == list(asked.trained_seeds)
        for run in runs:
            assert (run["arm"], run["split"]) == (name, f"{asked.split}, seed {asked.seed}")
            assert len(run["scores"]) == run["contexts"] == asked.contexts
            assert abs(sum(run["scores"]) / run["contexts"] - run["recall"]) < 1e-3
    assert table(records, asked.references) in (places.ROOT / "benchmarks/README.md").read_text()


def test_finalists_hold_no_more_bytes_than_the_peer():
    records = read_records(FINAL)
    assert set(records) == {trial.name for trial in FINAL.arms}
    shares = {name: max(run["kv"] for run in runs) for name, runs in records.items()}
    assert max(shares.values()) == shares[REFERENCE] == 112 / 512


def test_value_groups_recall_more_than_the_peer_and_every_token_only_twin():
    """The issue's goal: the same LoRA, the same contexts, no more bytes; over three seeds of the LoRA."""
    records = read_records(FINAL)
    best = "lora_only-under_compactor-r0.3125-k10-keys0.75-context_first"
    for reference in FINAL.references:
        pair = [np.array([run["scores"] for run in records[name]]) for name in (best, reference)]
        assert bootstrap_interval(pair[0] - pair[1])[0] > 0.01, reference
    assert max(run["kv_index"] for run in records[best]) < 112 / 512
