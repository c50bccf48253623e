"""Scores, paired differences, means and curves by hand; the paper's layout; anchors, and what is flagged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evaluation.intervals import bootstrap_interval, quantile_interval, resampled_means
from subtoken_train.evaluation.reporting.curves import make_curves, method_words, within
from subtoken_train.evaluation.reporting.runs import ArmResults, read_results
from subtoken_train.evaluation.reporting.score_tables import PAPER_TASKS, Estimate, difference_of, make_tables, score_of
from subtoken_train.evaluation.results import SAMPLES_GLOB
from subtoken_train.evaluation.tasks import TASKS
from tests.support.refusals import refuses
from tests.support.report_results import ROWS, answers, facts, paper_grid, register, write_run, write_subtasks


def by_name(folder) -> dict[str, ArmResults]:
    return {arm.name: arm for arm in read_results([folder])}


def test_score_difference_and_intervals_of_one_task(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(30)))
    write_run(tmp_path, facts("b"), "pope", answers(range(4, 28)))
    write_run(tmp_path, facts("c"), "pope", answers(range(5)), digest="others")
    arms = by_name(tmp_path)
    score = score_of(arms["a"], ["pope"])
    assert (score.value, score.n, score.form, score.marks) == (pytest.approx(0.75), 40, "fraction", ())
    assert score.error == pytest.approx(np.sqrt(0.75 * 0.25 / 40), rel=0.05)  # of a mean of 40 draws
    difference = difference_of(arms["a"], arms["b"], ["pope"])
    assert difference.value == pytest.approx(6 / 40)
    # six samples are +1 and 34 are 0: nothing is lost, so the interval may not go below 0
    assert 0 <= difference.low < 6 / 40 < difference.high < 0.3
    assert difference.error == pytest.approx(np.sqrt(0.15 * 0.85 / 40), rel=0.05)
    assert difference_of(arms["a"], arms["c"], ["pope"]) == "other samples"
    assert difference_of(arms["a"], arms["c"], ["pope", "pope"]) is None


def test_pairing_is_by_id_and_over_shared_samples(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(10))[:20], rows=40)
    write_run(tmp_path, facts("b"), "pope", answers(range(5)))
    write_run(tmp_path, facts("c"), "gqa", answers(range(9))[:10], rows=20)
    write_run(tmp_path, facts("none"), "gqa", [], rows=20)
    arms = by_name(tmp_path)
    difference = difference_of(arms["a"], arms["b"], ["pope"])
    assert (difference.value, difference.n) == (5 / 20, 20)
    assert difference.marks == ("incomplete: 20 of 40",)
    assert score_of(arms["a"], ["pope"]).value == pytest.approx(0.5)
    assert score_of(arms["c"], ["gqa"]).marks == ("incomplete: 10 of 20", "partial: 20 of 40")
    assert score_of(arms["none"], ["gqa"]) is None


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
    assert (score.value, score.n, score.high) == (0.75, 40, 1.0)
    assert score.low < 0.45  # both draws may be the worse seed
    paired = difference_of(arms["a"], arms["b"], ["pope"])
    assert (paired.value, paired.marks) == (pytest.approx(0.1), ())
    assert paired.high < 0.25  # seed by seed: the seeds' own spread is gone
    alone = difference_of(arms["a"], arms["c"], ["pope"])
    assert (alone.value, alone.marks) == (pytest.approx(0.25), ("anchor of other seeds",))


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
    refuses("no scores", resampled_means, [[1.0], []])


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


def test_images_apart_from_text_and_no_mean_of_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(TASKS["fake"], "modality", "text")
    paper_grid(tmp_path, ["mmbench", "textvqa", "gqa", "fake", "other"])
    paper, *others = make_tables(read_results([tmp_path]))
    assert paper.rows[0].scores["3-mean"].value == pytest.approx(0.9)
    assert paper.rows[0].scores["7-mean"] is paper.rows[0].scores["mme"] is paper.rows[2].differences["7-mean"] is None
    found = [(table.title, list(table.columns)) for table in others]
    assert found == [("Scores, image tasks", ["other"]), ("Scores, text tasks", ["fake"])]
    assert others[1].rows[2].differences["fake"].value == pytest.approx(0.15)


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
    less = "the anchor keeps less: 20.000% of the KV against 25.000%"
    fewer = "the anchor takes {} fewer bytes (measured)"
    assert flags(tmp_path) == {
        "anchor": (), "fat": (less, fewer.format("20.00%")), "lean": (fewer.format("0.99%"),), "indexed": (),
        "alone": ("its anchor absent has no results here",),
    }  # fmt: skip


def rewritten(place, file, *pair):
    (path,) = place.glob(file)
    path.write_text(path.read_text().replace(*pair))


def test_flags_of_compression_that_did_nothing(tmp_path):
    late = {"acts": "after prefill"}
    write_run(tmp_path, facts("late", 0.2, **late), "pope", answers(range(9)), new_tokens=2)
    write_run(tmp_path, facts("first", 0.2, protocol="context_first", **late), "pope", answers(range(9)), new_tokens=2)
    off = write_run(tmp_path, facts("off"), "pope", answers(range(9)))
    rewritten(off, "manifest.json", '"acts": "-"', '"acts": "in prefill"')
    pages = write_run(tmp_path, facts("pages"), "pope", answers(range(9)))
    rewritten(pages, SAMPLES_GLOB, '"unread_bytes":0', '"unread_bytes":10000')
    rewritten(pages, "manifest.json", '"acts": "-"', '"acts": "after prefill"')
    assert flags(tmp_path) == {
        "late": ("compression after prefill cannot change answers and choices of one token (pope)",),
        "first": (),
        "off": ("compression did nothing: no entry left the cache",),
        "pages": ("it frees no memory: each decoding step reads 75.0% of the prompts' stored KV",),
    }


@pytest.mark.parametrize(
    ("prediction", "tokens", "most", "moot"),
    [
        ([-1.0] * 4, [4], None, True),  # letters
        ([-1.0] * 4, [5], None, False),  # one choice has two tokens
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


@pytest.mark.parametrize(
    ("losses", "tolerance", "expected"),
    [
        ([0.0, 0.2, 0.4], 0.1, 0.25),
        ([0.0, 0.1, 0.4], 0.1, 0.5),
        ([0.0, 0.05, 0.08], 0.1, 1.0),
        ([0.0, 0.2, 0.0], 0.1, 1.0),  # it comes back: eq. 7 and 8 ask for the largest r
        ([0.3, 0.4, 0.5], 0.1, None),
        ([-0.1, 0.1, 0.3], 0.2, 0.75),
    ],
)
def test_compression_within_a_tolerance(losses, tolerance, expected):
    assert within([0.0, 0.5, 1.0], losses, tolerance) == (None if expected is None else pytest.approx(expected))


def kept(keep: float):
    return facts("lora") if keep == 1 else facts(f"fastv{keep}", keep, reducer=f"fastv {keep}")


def test_a_familys_curve(tmp_path):
    for task, full in (("pope", 40), ("gqa", 20)):
        for keep, share in ((1, 1), (0.5, 0.9), (0.25, 0.7)):
            write_run(tmp_path, kept(keep), task, answers(range(round(full * share))))
    write_run(tmp_path, kept(0.75), "pope", answers(range(40)))
    (curve,) = make_curves(read_results([tmp_path]))
    # the arm that answered pope alone takes gqa out of the family
    assert (curve.name, curve.tasks, curve.reference) == ("fastv", ("pope",), True)
    assert [point.kv for point in curve.points] == [1.0, 0.75, 0.5, 0.25]
    assert [point.estimate.value for point in curve.points] == pytest.approx([1.0, 1.0, 0.9, 0.7])
    assert [point.loss for point in curve.points] == pytest.approx([0, 0, 0.1, 0.3])
    assert curve.span == (0, 0.75)
    assert curve.area == pytest.approx((0.25 * 1 + 0.25 * 0.95 + 0.25 * 0.8) / 0.75)
    assert curve.edges == pytest.approx({0.1: 0.5, 0.2: 0.625})


@pytest.mark.parametrize(
    ("task", "key", "names", "primary"),
    [("ruler", "task", ("vt", "qa_1"), "string_match"), ("longbench", "set", ("triviaqa", "hotpotqa"), "score")],
)
def test_every_task_of_a_benchmark_counts_in_the_loss(tmp_path, task, key, names, primary):
    # A: 100/100/100, B: 20/10/0 at r = 0/.5/.75; of the mean curve 60/55/50 the losses would be a third of these
    for keep, second in ((1, 0.2), (0.5, 0.1), (0.25, 0.0)):
        write_subtasks(tmp_path, kept(keep), task, key, dict(zip(names, (1.0, second), strict=True)), primary)
    (curve,) = make_curves(read_results([tmp_path]))
    assert [point.loss for point in curve.points] == pytest.approx([0, 0.25, 0.5])
    assert curve.edges == pytest.approx({0.1: 0.20, 0.2: 0.40})
    assert curve.reached_text(0.1) == "0.2000"
    assert sorted(curve.scored) == sorted(f"{task}/{name}" for name in names)
    assert curve.area == pytest.approx((0.5 * 0.575 + 0.25 * 0.525) / 0.75)


def test_where_nothing_is_reached_it_is_said_and_two_arms_at_one_budget_are_no_curve(tmp_path):
    for keep in (1, 0.5):
        write_subtasks(tmp_path / "zero", kept(keep), "ruler", "task", {"vt": 1.0, "qa_2": 0.0}, "string_match")
    (zero,) = make_curves(read_results([tmp_path / "zero"]))
    assert (zero.edges, zero.reached_text(0.1)) == ({}, "ruler/qa_2: 0 uncompressed")
    for name, keep in (("a", 0.5), ("b", 0.5), ("c", 0.25)):
        write_run(tmp_path / "two", facts(name, keep, reducer=f"fastv {keep}"), "pope", answers(range(9)))
    first, alone = make_curves(read_results([tmp_path / "two"]))
    points = {curve.name: [point.arm.name for point in curve.points] for curve in (first, alone)}
    assert points == {"fastv": ["a", "c"], "fastv: b": ["b"]}
    assert (alone.reference, alone.area, alone.edges) == (False, None, {})


def test_families(tmp_path):
    for arm in (
        facts("a", 0.5, reducer="fastv 0.5"),
        facts("b", 0.5, reducer="fastv 0.5", groups="S16K4 linear"),
        facts("c", 0.5, reducer="fastv 0.5", eviction="snapkv 1,024 tokens all int8"),
        facts("bytes", 0.2, groups="S16 bytes 0.2 linear"),
        facts("d", 0.5, eviction="snapkv 0.3", trained=False, protocol="context_first"),
    ):
        write_run(tmp_path, arm, "pope", answers(range(9)))
    assert [method_words(arm) for arm in read_results([tmp_path])] == [
        "fastv", "fastv + S16K4 linear", "S16 bytes linear", "fastv 0.5 + snapkv all int8",
        "snapkv (untrained, context first)",
    ]  # fmt: skip
