"""The published tables and the mini-suite are what the committed run records say; their arms are recipes."""

from xml.etree import ElementTree

import pandas as pd
import pytest

from benchmarks import mini_suite, pruners_scenes, trained_results
from benchmarks.arm_training import digest
from benchmarks.comparison_lists import read_comparison
from benchmarks.comparison_tables import long_rows, read_records
from benchmarks.run_records import read_runs
from subtoken_train.evaluation.reporting.exports import frame_csv
from subtoken_train.evaluation.runner.arms import arm_name
from subtoken_train.evaluation.runner.spec import suite
from tests.support.places import ROOT, run_recipes, shown
from tests.support.sampling import sampled

RESULTS = ROOT / "benchmarks" / "results"
LISTS = list(map(read_comparison, sorted((ROOT / "benchmarks/ablations").glob("*.yaml"))))


def test_tables_are_regenerated_from_the_records():
    for name in trained_results.SHOWN:
        assert shown(trained_results.PAGE, name) == trained_results.listed(name)
    assert shown(trained_results.PAGE, "front") == trained_results.table()
    assert shown(ROOT / "docs/choosing.md", "matched") == trained_results.choices()


def test_the_table_of_all_arms_is_of_the_records():
    written = pd.read_csv(trained_results.CSV, keep_default_na=False)
    assert list(written["list"].unique()) == ["matched", *trained_results.LISTS, *trained_results.TRIALS]
    own = read_comparison(ROOT / f"benchmarks/ablations/{(name := 'routed_recall')}_tiny.yaml")
    rows = pd.DataFrame(long_rows(name, read_records(RESULTS / own.folder), own))
    kept = written[written["list"] == name].reset_index(drop=True)
    assert kept[["arm", "less", "seeds", "group", "measure"]].equals(rows[["arm", "less", "seeds", "group", "measure"]])
    assert kept[["mean", "low", "high"]].to_numpy() == pytest.approx(rows[["mean", "low", "high"]].to_numpy(), rel=1e-3)


@pytest.mark.parametrize("topic", ["evictions", "four bits", "value groups", "embedded"])
def test_trials_without_records_are_printed_from_their_table(topic):
    assert shown(ROOT / "docs/trials.md", topic) == trained_results.trials(topic)


@sampled("folder", sorted({comparison.folder for comparison in LISTS}), every=3)
def test_records_belong_to_an_arm_of_a_table_as_it_is(folder):
    arms = {name: arm for listed in LISTS if listed.folder == folder for name, arm in listed.arms.items()}
    for run in read_runs(RESULTS / folder):
        assert run["recipe_sha256"] == digest(arms[run["arm"]]), run["arm"]
        assert run["realised_kv"] <= run["nominal_kv"] + 1e-9  # a byte budget holds its index, too
        assert len(run["scores"]) == len(run["kinds"])


def test_listed_arms_are_recipes():
    assert {arm.recipe for listed in LISTS for arm in listed.arms.values()} <= {path.stem for path in run_recipes()}


def test_the_page_shows_the_committed_figures():
    assert shown(mini_suite.PAGE, "mini") == mini_suite.table()


def test_the_arms_are_those_of_the_suite(tmp_path, monkeypatch):
    monkeypatch.setattr("subtoken_train.evaluation.runner.spec.SCENES", 1)
    grids = suite("mini", tmp_path)
    names = {arm_name(spec).replace("-seed0", "", 1) for grid in grids for spec in grid.arms}
    assert names == set(mini_suite.ARMS)
    assert set(mini_suite.read_scores().arm) == names
    assert {task.name for grid in grids for task in grid.tasks} == {*mini_suite.SCENES, "recall"}


def test_the_committed_csv_is_written_as_it_was_read():
    assert frame_csv(mini_suite.read_scores()) == mini_suite.CSV_FILE.read_bytes().decode()


def test_answers_of_one_word_after_an_eviction_are_marked():
    late = {arm for (arm, _), row in mini_suite.printed_scores().items() if mini_suite.is_moot(row)}
    assert len(late) == 6
    rows = [line for line in mini_suite.table().splitlines() if line.startswith("|")]
    assert "".join(rows).count("†") == len(late & set(mini_suite.PRINTED)) * len(mini_suite.ONE_WORD)


def test_the_picture_is_drawn_from_the_committed_csv():
    text = pruners_scenes.SVG_FILE.read_text(encoding="utf-8")
    assert text == pruners_scenes.drawing()
    words = " ".join(ElementTree.fromstring(text).itertext())
    assert all(name in words for name, _ in pruners_scenes.means() if name != pruners_scenes.WHOLE)
