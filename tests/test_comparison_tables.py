"""The published table is what the committed run records say, and nothing else."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks import trained_results
from benchmarks.arm_training import digest
from benchmarks.comparison_lists import read_comparison
from benchmarks.comparison_tables import long_rows, read_records, trials_markdown
from benchmarks.run_records import add_run, read_runs
from benchmarks.trials_page import comparisons, lines
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.ledger.kv_budget import KVBudget
from tests.support.places import RECIPES, ROOT, shown
from tests.support.sampling import sampled

RESULTS = ROOT / "benchmarks" / "results"
LISTS = list(map(read_comparison, sorted((RECIPES / "ablations").glob("*.yaml"))))
FIRST = read_comparison(RECIPES / "ablations/first_tiny.yaml")
TRIALS = comparisons()


@pytest.mark.parametrize("name", trained_results.LISTS)
def test_tables_are_regenerated_from_the_records(name):
    assert shown(trained_results.PAGE, name) == trained_results.listed(name)


def test_the_table_of_all_arms_is_of_the_records():
    written = pd.read_csv(trained_results.CSV, keep_default_na=False)
    assert list(written["list"].unique()) == ["matched", *trained_results.LISTS]
    own = read_comparison(RECIPES / f"ablations/{(name := 'routed_recall')}_tiny.yaml")
    rows = pd.DataFrame(long_rows(name, read_records(RESULTS / own.folder), own))
    kept = written[written["list"] == name].reset_index(drop=True)
    assert kept[["arm", "less", "seeds", "group", "measure"]].equals(rows[["arm", "less", "seeds", "group", "measure"]])
    assert kept[["mean", "low", "high"]].to_numpy() == pytest.approx(rows[["mean", "low", "high"]].to_numpy(), rel=1e-3)


@sampled("name", TRIALS, every=4)
def test_trials_are_regenerated_from_the_records(name):
    chosen, page = TRIALS[name], ROOT / "docs/trials/embedded.md"
    assert shown(page, name) == trials_markdown(read_records(RESULTS / chosen.folder), chosen)


@pytest.mark.parametrize("topic", ["evictions", "four bits", "value groups", "texts"])
def test_trials_without_records_are_printed_from_their_table(topic):
    assert shown(ROOT / "docs/trials.md", topic) == lines(topic)


def test_records_cover_every_arm_with_the_same_seeds_and_questions():
    arms = read_records(RESULTS)
    assert set(FIRST.arms) <= set(arms)
    assert {len(arms[name].scores_sn) for name in FIRST.arms} == {5}
    kinds = next(iter(arms.values())).kinds
    assert (~np.isin(kinds, DESCRIPTION_KINDS)).sum() >= 4000
    assert all((arm.kinds == kinds).all() for arm in arms.values())


def test_dropping_tokens_costs_enough_to_show_anything():
    """On short questions; what it costs descriptions stands in the table."""
    arms = read_records(RESULTS)
    unrouted = arms["tiny_fastv25"].scores_of("questions").mean()
    assert unrouted - arms["tiny_fastv25_s16k4_anchor"].scores_of("questions").mean() > 0.04
    assert unrouted - arms["tiny_fastv12p5_s16k4_anchor"].scores_of("questions").mean() > 0.08


@sampled("folder", sorted({comparison.folder for comparison in LISTS}), every=3)
def test_records_belong_to_an_arm_of_a_table_as_it_is(folder):
    arms = {name: arm for listed in LISTS if listed.folder == folder for name, arm in listed.arms.items()}
    for run in read_runs(RESULTS / folder):
        assert run["recipe_sha256"] == digest(arms[run["arm"]]), run["arm"]
        assert run["realised_kv"] <= run["nominal_kv"] + 1e-9  # a byte budget holds its index, too
        assert len(run["scores"]) == len(run["kinds"])


def test_compared_arms_hold_equal_bytes():
    arms = read_records(RESULTS)
    for first, second in FIRST.pairs[:4]:
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
        add_run(tmp_path, {**record, "seed": seed, "data_sha256": asked})
    with pytest.raises(ValueError, match="different question files"):
        read_records(tmp_path)
