"""Rows, columns and means of the paper's layout, anchors and what is flagged."""

from __future__ import annotations

import pytest

from subtoken_train.evaluation.reporting.runs import read_results
from subtoken_train.evaluation.reporting.score_tables import PAPER_TASKS, make_tables
from subtoken_train.evaluation.results import SAMPLES_GLOB
from subtoken_train.evaluation.tasks import TASKS
from tests.support.report_results import answers, facts, paper_grid, register, write_run


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    register(monkeypatch, *PAPER_TASKS, "ruler", "other")


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
    write_run(tmp_path, facts("fat", 0.25, anchor="anchor"), "pope", answers(range(9)))
    write_run(tmp_path, facts("lean", 0.2, anchor="anchor"), "pope", answers(range(9)), overhead=64)
    write_run(tmp_path, facts("indexed", 0.2, anchor="anchor"), "pope", answers(range(9)), overhead=64, index=64)
    write_run(tmp_path, facts("alone", 0.2, anchor="absent"), "pope", answers(range(9)))
    found = flags(tmp_path)
    assert found["anchor"] == ()
    assert found["fat"] == (
        "the anchor keeps less: 20.000% of the KV against 25.000%",
        "measured, the anchor takes 20.00% fewer bytes",
    )
    assert found["lean"] == ("measured, the anchor takes 0.99% fewer bytes",)
    assert found["indexed"] == ()
    assert found["alone"] == ("its anchor absent has no results here",)


def test_flags_of_compression_that_did_nothing(tmp_path):
    write_run(tmp_path, facts("late", 0.2, acts="after prefill"), "pope", answers(range(9)), new_tokens=2)
    write_run(
        tmp_path,
        facts("first", 0.2, acts="after prefill", protocol="context_first"),
        "pope",
        answers(range(9)),
        new_tokens=2,
    )
    place = write_run(tmp_path, facts("off"), "pope", answers(range(9)))
    manifest = place / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"acts": "-"', '"acts": "in prefill"'))
    assert flags(tmp_path) == {
        "late": ("compression after prefill cannot change a first token or a log-likelihood (pope)",),
        "first": (),
        "off": ("compression did not act: nothing left the cache",),
    }


def test_an_arm_that_reads_a_part_says_that_it_frees_nothing(tmp_path):
    place = write_run(tmp_path, facts("pages"), "pope", answers(range(9)))
    (samples,) = place.glob(SAMPLES_GLOB)
    samples.write_text(samples.read_text().replace('"unread_bytes":0', '"unread_bytes":10000'))
    manifest = place / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"acts": "-"', '"acts": "after prefill"'))
    words = "it frees nothing: a step of decoding reads 75.0% of the prompts' stored KV"
    assert flags(tmp_path)["pages"][0] == words


def test_partial_and_incomplete_cells_are_marked(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(9))[:10], rows=20)
    (table,) = make_tables(read_results([tmp_path]))
    assert table.rows[0].scores["pope"].marks == ("incomplete: 10 of 20", "partial: 20 of 40")
    write_run(tmp_path, facts("b"), "pope", [], rows=20)
    (table,) = make_tables(read_results([tmp_path]))
    assert table.rows[1].scores["pope"] is None
