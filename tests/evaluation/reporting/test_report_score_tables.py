"""Scores, paired differences and means by hand; rows and columns of the paper's layout; anchors and what is flagged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evaluation.intervals import bootstrap_interval, quantile_interval, resampled_means
from subtoken_train.evaluation.reporting.runs import ArmResults, read_results
from subtoken_train.evaluation.reporting.score_tables import PAPER_TASKS, Estimate, difference_of, make_tables, score_of
from subtoken_train.evaluation.results import SAMPLES_GLOB
from subtoken_train.evaluation.tasks import TASKS
from tests.support.report_results import ROWS, answers, facts, paper_grid, register, write_run


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    register(monkeypatch, *PAPER_TASKS, "ruler", "other")


def by_name(folder) -> dict[str, ArmResults]:
    return {arm.name: arm for arm in read_results([folder])}


def test_score_difference_and_intervals_of_one_task(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(30)))
    write_run(tmp_path, facts("b"), "pope", answers(range(4, 28)))
    arms = by_name(tmp_path)
    score = score_of(arms["a"], ["pope"])
    assert (score.value, score.n, score.form, score.marks) == (pytest.approx(0.75), 40, "fraction", ())
    assert score.error == pytest.approx(np.sqrt(0.75 * 0.25 / 40), rel=0.05)  # of a mean of 40 draws
    difference = difference_of(arms["a"], arms["b"], ["pope"])
    assert difference.value == pytest.approx(6 / 40)
    # six samples are +1 and 34 are 0: nothing is lost, so the interval may not go below 0
    assert 0 <= difference.low < 6 / 40 < difference.high < 0.3
    assert difference.error == pytest.approx(np.sqrt(0.15 * 0.85 / 40), rel=0.05)


def test_pairing_is_by_id_and_over_shared_samples(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(10))[:20], rows=40)
    write_run(tmp_path, facts("b"), "pope", answers(range(5)))
    arms = by_name(tmp_path)
    difference = difference_of(arms["a"], arms["b"], ["pope"])
    assert (difference.value, difference.n) == (5 / 20, 20)
    assert difference.marks == ("incomplete: 20 of 40",)
    assert score_of(arms["a"], ["pope"]).value == pytest.approx(0.5)


def test_other_samples_are_not_paired(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(10)))
    write_run(tmp_path, facts("b"), "pope", answers(range(5)), digest="others")
    arms = by_name(tmp_path)
    assert difference_of(arms["a"], arms["b"], ["pope"]) == "other samples"
    assert difference_of(arms["a"], arms["b"], ["pope", "pope"]) is None


def test_a_score_that_is_no_mean_over_samples_has_no_interval(tmp_path, monkeypatch):
    register(monkeypatch, "pope", primary="worst")
    for name, right in (("a", 30), ("b", 20)):
        write_run(tmp_path, facts(name), "pope", answers(range(right)), primary="worst")
    arms = by_name(tmp_path)
    assert score_of(arms["a"], ["pope"]) == Estimate(pytest.approx(0.5625), None, None, None, 40)
    difference = difference_of(arms["a"], arms["b"], ["pope"])
    assert (difference.value, difference.low) == (pytest.approx(0.5625 - 0.25), None)


def test_a_mean_wants_all_of_its_tasks_and_resamples_within_them(tmp_path):
    for name, right in (("a", 30), ("b", 20)):
        write_run(tmp_path, facts(name), "pope", answers(range(right)))
        write_run(tmp_path, facts(name), "gqa", answers(range(10))[:10], rows=10, expected=10)
    arms = by_name(tmp_path)
    mean = score_of(arms["a"], ["pope", "gqa"])
    assert (mean.value, mean.n) == (pytest.approx((0.75 + 1) / 2), 50)
    # gqa has no spread, so the error is half of pope's: a pooled resample would give another
    assert mean.error == pytest.approx(0.5 * np.sqrt(0.75 * 0.25 / 40), rel=0.05)
    assert score_of(arms["a"], ["pope", "gqa", "mme"]) is None
    assert difference_of(arms["a"], arms["b"], ["pope", "gqa"]).value == pytest.approx(10 / 40 / 2)
    assert difference_of(arms["a"], arms["b"], ["pope", "mme"]) is None


def test_seeds_are_averaged_and_their_spread_is_in_the_interval(tmp_path):
    for seed, right in ((0, 40), (1, 20)):
        write_run(tmp_path, facts(f"a-seed{seed}", seed=seed), "pope", answers(range(right)))
        write_run(tmp_path, facts(f"b-seed{seed}", seed=seed), "pope", answers(range(right - 4)))
    write_run(tmp_path, facts("c"), "pope", answers(range(20)))
    arms = by_name(tmp_path)
    assert arms["a"].seeds == [0, 1]
    score = score_of(arms["a"], ["pope"])
    assert (score.value, score.n) == (0.75, 40)
    assert score.low < 0.45  # both draws may be the worse seed
    assert score.high == 1.0
    paired = difference_of(arms["a"], arms["b"], ["pope"])
    assert paired.value == pytest.approx(0.1)  # seed by seed: the seeds' own spread is gone
    assert paired.high < 0.25
    assert paired.marks == ()
    alone = difference_of(arms["a"], arms["c"], ["pope"])
    assert alone.value == pytest.approx(0.25)
    assert alone.marks == ("anchor of other seeds",)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=30), st.integers(1, 3))
def test_counts_of_equal_columns_have_the_distribution_of_single_draws(values, seeds):
    table = np.array([np.roll(values, shift) for shift in range(seeds)])
    draws = resampled_means([table])
    assert draws.mean() == pytest.approx(table.mean(), abs=4 * draws.std() / np.sqrt(len(draws)) + 1e-9)
    low, high = bootstrap_interval(table)
    step = 0.02 + 2 / table.shape[1]  # quantiles of a discrete mean move by whole steps
    assert quantile_interval(draws) == (pytest.approx(low, abs=step), pytest.approx(high, abs=step))


def test_the_mean_over_tasks_shares_the_seeds_draw():
    bad, good = np.zeros((2, 10)), np.zeros((2, 10))
    bad[0], good[1] = 1, 1
    assert resampled_means([bad, good]).std() == 0  # one seed's loss is its gain on the other task
    assert resampled_means([bad, bad]).std() == pytest.approx(np.sqrt(0.125), rel=0.05)
    with pytest.raises(ValueError, match="no scores"):
        resampled_means([[1.0], []])


def test_the_papers_columns_and_order(tmp_path):
    paper_grid(tmp_path, PAPER_TASKS)
    (table,) = make_tables(read_results([tmp_path]))
    headings = ["MMBench", "TextVQA", "GQA", "POPE", "MME", "SciQA", "VQAv2", "3-mean", "7-mean"]
    assert list(table.columns.values()) == headings
    assert table.samples == {**dict.fromkeys(PAPER_TASKS, 40), "3-mean": 120, "7-mean": 280}
    full, anchor, routed = table.rows
    assert [row.arm.name for row in table.rows] == ["lora_only", "fastv25_s16k4_anchor", "fastv25_s16k4"]
    assert full.scores["7-mean"].value == pytest.approx(0.9)
    assert anchor.differences == {}
    assert routed.anchor is anchor.arm
    assert routed.differences["3-mean"].value == pytest.approx(6 / 40)
    assert routed.differences["3-mean"].n == 120
    assert routed.differences["7-mean"].error < routed.differences["3-mean"].error
    assert routed.anchor_ratio == 1
    assert [row.flags for row in table.rows] == [(), (), ()]


def test_a_mean_stands_only_where_all_of_its_tasks_do(tmp_path):
    paper_grid(tmp_path, ["mmbench", "textvqa", "gqa", "pope", "ruler"])
    paper, others = make_tables(read_results([tmp_path]))
    assert paper.rows[0].scores["3-mean"].value == pytest.approx(0.9)
    assert paper.rows[0].scores["7-mean"] is None
    assert paper.rows[0].scores["mme"] is None
    assert paper.rows[2].differences["7-mean"] is None
    assert list(others.columns) == ["ruler"]
    assert others.rows[2].differences["ruler"].value == pytest.approx(0.15)


def test_images_apart_from_text(tmp_path, monkeypatch):
    monkeypatch.setattr(TASKS["ruler"], "modality", "text")
    paper_grid(tmp_path, ["ruler", "other"])
    tables = make_tables(read_results([tmp_path]))
    assert [(table.title, list(table.columns)) for table in tables] == [
        ("Scores, image tasks", ["other"]), ("Scores, text tasks", ["ruler"]),
    ]  # fmt: skip


def test_arms_stand_below_their_anchor_largest_budget_first(tmp_path):
    for keep in (0.1, 0.5):
        write_run(tmp_path, facts(f"z_anchor{keep}", keep, reducer=f"fastv {keep}"), "pope", answers(range(9)))
        for groups in (4, 16):
            arm = facts(f"a{keep}_s{groups}", keep, reducer=f"fastv {2 * keep}", anchor=f"z_anchor{keep}")
            write_run(tmp_path, arm, "pope", answers(range(9)))
    write_run(tmp_path, facts("lora"), "pope", answers(range(9)))
    (table,) = make_tables(read_results([tmp_path]))
    names = [row.arm.name for row in table.rows]
    assert names == ["lora", "z_anchor0.5", "a0.5_s16", "a0.5_s4", "z_anchor0.1", "a0.1_s16", "a0.1_s4"]


def flags(folder) -> dict[str, tuple[str, ...]]:
    return {row.arm.name: row.flags for table in make_tables(read_results([folder])) for row in table.rows}


def test_flags_of_anchors(tmp_path):
    write_run(tmp_path, facts("anchor", 0.2), "pope", answers(range(9)))
    for name, share, anchor, extra in (
        ("fat", 0.25, "anchor", {}),
        ("lean", 0.2, "anchor", {"overhead": 64}),
        ("indexed", 0.2, "anchor", {"overhead": 64, "index": 64}),
        ("alone", 0.2, "absent", {}),
    ):
        write_run(tmp_path, facts(name, share, anchor=anchor), "pope", answers(range(9)), **extra)
    assert flags(tmp_path) == {
        "anchor": (),
        "fat": (
            "the anchor keeps less: 20.000% of the KV against 25.000%",
            "measured, the anchor takes 20.00% fewer bytes",
        ),
        "lean": ("measured, the anchor takes 0.99% fewer bytes",),
        "indexed": (),
        "alone": ("its anchor absent has no results here",),
    }


def rewritten(place, file, *pair):
    (path,) = place.glob(file)
    path.write_text(path.read_text().replace(*pair))


def test_flags_of_compression_that_did_nothing(tmp_path):
    late = {"acts": "after prefill"}
    write_run(tmp_path, facts("late", 0.2, **late), "pope", answers(range(9)), new_tokens=2)
    first = facts("first", 0.2, protocol="context_first", **late)
    write_run(tmp_path, first, "pope", answers(range(9)), new_tokens=2)
    off = write_run(tmp_path, facts("off"), "pope", answers(range(9)))
    rewritten(off, "manifest.json", '"acts": "-"', '"acts": "in prefill"')
    pages = write_run(tmp_path, facts("pages"), "pope", answers(range(9)))
    rewritten(pages, SAMPLES_GLOB, '"unread_bytes":0', '"unread_bytes":10000')
    rewritten(pages, "manifest.json", '"acts": "-"', '"acts": "after prefill"')
    assert flags(tmp_path) == {
        "late": ("compression after prefill cannot change answers and choices of one token (pope)",),
        "first": (),
        "off": ("compression did not act: nothing left the cache",),
        "pages": ("it frees nothing: a step of decoding reads 75.0% of the prompts' stored KV",),
    }


@pytest.mark.parametrize(
    ("prediction", "tokens", "most", "moot"),
    [
        ([-1.0] * 4, [4], None, True),  # letters
        ([-1.0] * 4, [5], None, False),  # one choice has two tokens
        ([-1.0], [1], None, True),
        ([-1.0], [900], None, False),  # a text
        ("yes", [2], 2, False),  # two tokens are one and its end unless two were asked
        ("yes", [2], 3, True),
        ("yes", [2], None, True),
        ("yes", [2, 3], None, False),  # the answers of one seed go on
    ],
)
def test_what_compression_after_the_prompt_cannot_change(tmp_path, monkeypatch, prediction, tokens, most, moot):
    monkeypatch.setattr(TASKS["pope"], "options", {} if most is None else {"max_new_tokens": most})
    for seed, count in enumerate(tokens):
        arm = facts(f"late-seed{seed}", 0.2, acts="after prefill", seed=seed)
        write_run(tmp_path, arm, "pope", [prediction] * ROWS, new_tokens=count)
    (found,) = read_results([tmp_path])
    assert found.is_moot("pope") == moot


def test_partial_and_incomplete_cells_are_marked(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(9))[:10], rows=20)
    write_run(tmp_path, facts("b"), "pope", [], rows=20)
    (table,) = make_tables(read_results([tmp_path]))
    assert table.rows[0].scores["pope"].marks == ("incomplete: 10 of 20", "partial: 20 of 40")
    assert table.rows[1].scores["pope"] is None
