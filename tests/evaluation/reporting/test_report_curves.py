"""Area, tolerance and families of curves against figures worked out by hand."""

from __future__ import annotations

import pytest

from subtoken_train.evaluation.reporting.curves import area, make_curves, method_words, within
from subtoken_train.evaluation.reporting.runs import read_results
from tests.support.report_results import answers, facts, register, write_run, write_subtasks


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    register(monkeypatch, "pope", "gqa")


def reached(curve):
    """Tolerance -> largest r within it."""
    return {tolerance: largest for tolerance, (largest, _) in curve.edges.items()}


@pytest.mark.parametrize(
    ("ratios", "scores", "expected"),
    [
        ([0.0, 0.5, 0.9], [80.0, 80.0, 80.0], 80),
        ([0.0, 0.5, 1.0], [100.0, 50.0, 0.0], 50),
        ([0.0, 0.25, 0.75], [1.0, 1.0, 0.0], (0.25 + 0.25) / 0.75),
    ],
)
def test_area_is_the_mean_over_the_range(ratios, scores, expected):
    assert area(ratios, scores) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("losses", "tolerance", "expected"),
    [
        ([0.0, 0.2, 0.4], 0.1, (0.25, 0.25)),
        ([0.0, 0.1, 0.4], 0.1, (0.5, 0.5)),
        ([0.0, 0.05, 0.08], 0.1, (1.0, 1.0)),
        ([0.0, 0.2, 0.0], 0.1, (1.0, 0.25)),  # it comes back: eq. 7 and 8 ask for the largest r
        ([0.3, 0.4, 0.5], 0.1, None),
        ([-0.1, 0.1, 0.3], 0.2, (0.75, 0.75)),
    ],
)
def test_compression_within_a_tolerance(losses, tolerance, expected):
    found = within([0.0, 0.5, 1.0], losses, tolerance)
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_familys_curve(tmp_path):
    for task, full in (("pope", 40), ("gqa", 20)):
        write_run(tmp_path, facts("lora"), task, answers(range(full)))
        for keep, share in ((0.5, 0.9), (0.25, 0.7)):
            arm = facts(f"fastv{keep}", keep, reducer=f"fastv {keep}")
            write_run(tmp_path, arm, task, answers(range(round(full * share))))
    write_run(tmp_path, facts("fastv0.75", 0.75, reducer="fastv 0.75"), "pope", answers(range(40)))
    curves = make_curves(read_results([tmp_path]))
    (curve,) = curves
    # the arm that answered pope alone takes gqa out of the family
    assert (curve.name, curve.tasks, curve.reference) == ("fastv", ("pope",), True)
    assert [point.kv for point in curve.points] == [1.0, 0.75, 0.5, 0.25]
    assert [point.estimate.value for point in curve.points] == pytest.approx([1.0, 1.0, 0.9, 0.7])
    assert [point.loss for point in curve.points] == pytest.approx([0, 0, 0.1, 0.3])
    assert curve.span == (0, 0.75)
    assert curve.area == pytest.approx((0.25 * 1 + 0.25 * 0.95 + 0.25 * 0.8) / 0.75)
    assert reached(curve) == pytest.approx({0.1: 0.5, 0.2: 0.625})


def test_the_loss_is_a_mean_over_tasks_of_relative_losses(tmp_path):
    for task, full, less in (("pope", 40, 20), ("gqa", 10, 10)):
        write_run(tmp_path, facts("lora"), task, answers(range(full)))
        write_run(tmp_path, facts("fastv", 0.5, reducer="fastv 0.5"), task, answers(range(less)))
    (curve,) = make_curves(read_results([tmp_path]))
    assert curve.points[1].loss == pytest.approx((0.5 + 0) / 2)
    assert curve.points[1].estimate.value == pytest.approx((0.5 + 0.25) / 2)
    assert reached(curve) == pytest.approx({0.1: 0.2, 0.2: 0.4})


@pytest.mark.parametrize(
    ("task", "key", "names", "primary"),
    [("ruler", "task", ("vt", "qa_1"), "string_match"), ("longbench", "set", ("triviaqa", "hotpotqa"), "score")],
)
def test_every_task_of_a_benchmark_counts_in_the_loss(tmp_path, task, key, names, primary):
    # A: 100/100/100, B: 20/10/0 at r = 0/.5/.75; of the mean curve 60/55/50 the losses would be a third of these
    for keep, second in ((1.0, 0.2), (0.5, 0.1), (0.25, 0.0)):
        arm = facts("lora") if keep == 1 else facts(f"fastv{keep}", keep, reducer=f"fastv {keep}")
        write_subtasks(tmp_path, arm, task, key, dict(zip(names, (1.0, second), strict=True)), primary)
    (curve,) = make_curves(read_results([tmp_path]))
    assert [point.loss for point in curve.points] == pytest.approx([0, 0.25, 0.5])
    assert reached(curve) == pytest.approx({0.1: 0.20, 0.2: 0.40})
    assert curve.reached_text(0.1) == "0.2000"
    assert sorted(curve.scored) == sorted(f"{task}/{name}" for name in names)
    assert curve.area == pytest.approx((0.5 * 0.575 + 0.25 * 0.525) / 0.75)


def test_where_nothing_is_reached_it_is_said(tmp_path):
    for keep in (1.0, 0.5):
        arm = facts("lora") if keep == 1 else facts(f"fastv{keep}", keep, reducer=f"fastv {keep}")
        write_subtasks(tmp_path / "zero", arm, "ruler", "task", {"vt": 1.0, "qa_2": 0.0}, "string_match")
    write_run(tmp_path / "alone", facts("fastv", 0.5, reducer="fastv 0.5"), "pope", answers(range(9)))
    (zero,), (alone,) = (make_curves(read_results([tmp_path / name])) for name in ("zero", "alone"))
    assert (zero.edges, zero.reached_text(0.1)) == ({}, "ruler/qa_2: 0 uncompressed")
    assert (alone.reference, alone.area, alone.edges) == (False, None, {})


def test_two_arms_at_one_budget_are_no_curve(tmp_path):
    for name, keep in (("a", 0.5), ("b", 0.5), ("c", 0.25)):
        write_run(tmp_path, facts(name, keep, reducer=f"fastv {keep}"), "pope", answers(range(9)))
    curves = make_curves(read_results([tmp_path]))
    assert {curve.name: [point.arm.name for point in curve.points] for curve in curves} == {
        "fastv": ["a", "c"],
        "fastv: b": ["b"],
    }


def test_families(tmp_path):
    arms = [
        facts("a", 0.5, reducer="fastv 0.5"),
        facts("b", 0.5, reducer="fastv 0.5", groups="S16K4 linear"),
        facts("c", 0.5, reducer="fastv 0.5", eviction="snapkv 1,024 tokens all int8"),
        facts("d", 0.5, eviction="snapkv 0.3", trained=False, protocol="context_first"),
    ]
    for arm in arms:
        write_run(tmp_path, arm, "pope", answers(range(9)))
    assert [method_words(arm) for arm in read_results([tmp_path])] == [
        "fastv",
        "fastv + S16K4 linear",
        "fastv 0.5 + snapkv all int8",
        "snapkv (untrained, context first)",
    ]
