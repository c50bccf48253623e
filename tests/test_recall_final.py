"""benchmarks/recall_final.py: its arms, what an arm's settings do to an adapter, and its records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.recall_final import (
    CONTEXTS,
    CONTEXTS_SEED,
    REFERENCE,
    SEEDS,
    SPLIT,
    TWINS,
    Trial,
    backbone_of,
    finalists,
    read_records,
    table,
)
from subtoken_train.evaluation.intervals import bootstrap_interval
from tests.support import places


def test_arms_have_names_of_their_own_and_recipes():
    names = [trial.name for trial in finalists()]
    assert len(set(names)) == len(names)
    assert REFERENCE in names
    assert set(TWINS) <= set(names)
    assert {trial.recipe for trial in finalists()} <= {path.stem for path in places.run_recipes()}


def test_an_arms_settings_replace_the_adapters():
    trial = Trial("tinylm_quest25_s16k12", keep_ratio=0.5, kept_groups=9)
    backbone = backbone_of(trial, Path("nowhere"), 0)
    assert backbone.reducer.keep_ratio == 0.5
    assert (backbone.group_budget.num_groups, backbone.group_budget.kept_groups) == (16, 9)
    with pytest.raises(AssertionError, match="tinylm_of_nobody is not trained"):
        backbone_of(Trial("tinylm_of_nobody"), Path("nowhere"), 0)


def test_records_are_whole_and_make_the_table():
    records = read_records()
    assert list(records) == [trial.name for trial in finalists()]
    for name, runs in records.items():
        assert [run["seed"] for run in runs] == list(SEEDS)
        for run in runs:
            assert (run["arm"], run["split"]) == (name, f"{SPLIT}, seed {CONTEXTS_SEED}")
            assert len(run["scores"]) == run["contexts"] == CONTEXTS
            assert abs(sum(run["scores"]) / run["contexts"] - run["recall"]) < 1e-3
    assert table(records) in (places.ROOT / "docs/quality/recall.md").read_text()


def test_finalists_hold_no_more_bytes_than_the_peer():
    shares = {name: max(run["kv"] for run in runs) for name, runs in read_records().items()}
    assert max(shares.values()) == shares[REFERENCE] == 112 / 512


def test_value_groups_recall_more_than_the_peer_and_every_token_only_twin():
    """The same LoRA, the same contexts, no more bytes; over three seeds of the LoRA."""
    records = read_records()
    best = "lora_only-under_compactor-r0.3125-k10-keys0.75-context_first"
    for reference in TWINS:
        pair = [np.array([run["scores"] for run in records[name]]) for name in (best, reference)]
        assert bootstrap_interval(pair[0] - pair[1])[0] > 0.01, reference
    assert max(run["kv_index"] for run in records[best]) < 112 / 512
