"""Which printed row is whose, and means of printed cells."""

from __future__ import annotations

import json

import pytest

from subtoken_train.evaluation.reporting.paper import compare_paper, recomputed_means
from subtoken_train.evaluation.reporting.runs import read_results
from subtoken_train.evaluation.reporting.score_tables import PAPER_TASKS
from tests.support.report_results import answers, facts, paper_grid, register, write_run

CELLS = dict(zip(PAPER_TASKS.values(), [60.0, 50.0, 40.0, 80.0, 70.0, 65.0, 75.0], strict=True))
LOWER = {name: value - 1 for name, value in CELLS.items()}


def row(method: str, **changes) -> dict:
    standard = {
        "table": "1", "model": "LLaVA-1.5-7B", "method": method, "token_method": "FastV", "total_kv": 15.625,
        "token_keep": 25.0, "S": 16, "K": 4, "variant": "subtoken", "scores": CELLS,
        "printed_3m": 55.0, "printed_7m": 62.86, "printed_d3": 5.5, "printed_d7": 1.0,
    }  # fmt: skip
    return {**standard, **changes}


@pytest.fixture
def printed(tmp_path):
    anchor = {"token_keep": 15.625, "S": None, "K": None, "variant": "token_only", "printed_d3": None}
    rows = [
        row("FastV25+S16K4"),
        row("FastV25+S16K4, two stages", table="4"),
        row("FastV25+S16K4_MLP", variant="subtoken_MLP"),
        row("FastV25+S8K2", S=8, K=2),
        row("VisionZip25+S16K4", token_method="VisionZip"),
        row("13B", model="LLaVA-1.5-13B"),
        row("FastV15.625", scores=LOWER, printed_d7=None, **anchor),
    ]
    language = {"table": "3", "model": "LLaMA-2-7B", "token_method": "Quest", "total_kv": 23.438, "variant": "subtoken"}
    language |= {"method": "Quest25+S8K7", "token_keep": 25.0, "S": 8, "K": 7, "mmlu": 43.95, "printed_delta": 1.55}
    bare = {**language, "method": "Quest23.438", "token_keep": 23.438, "S": None, "K": None, "variant": "token_only"}
    path = tmp_path / "printed.json"
    path.write_text(json.dumps({"vlm_rows": rows, "llm_rows": [language, {**bare, "mmlu": 42.4}]}))
    return path


def test_means_of_printed_cells():
    assert recomputed_means(CELLS) == {"3-mean": 50, "7-mean": pytest.approx(440 / 7)}


def test_printed_recomputed_ours(tmp_path, monkeypatch, printed):
    register(monkeypatch, *PAPER_TASKS)
    paper_grid(tmp_path / "results", PAPER_TASKS)
    found = compare_paper(read_results([tmp_path / "results"]), printed)
    assert list(dict.fromkeys(zip(found.arm, found.row, strict=True))) == [
        ("fastv25_s16k4", "Table 1, LLaVA-1.5-7B, FastV25+S16K4"),
        ("fastv25_s16k4_anchor", "Table 1, LLaVA-1.5-7B, FastV15.625"),
    ]
    routed, anchor = (each.set_index("column") for _, each in found.groupby("arm"))
    assert routed.printed["3-mean"] == 55
    recomputed = {"3-mean": 50, "7-mean": 440 / 7, "Δ 3-mean": 1, "Δ 7-mean": 1}
    assert routed.recomputed.dropna().to_dict() == pytest.approx(recomputed)
    assert routed.ours["Δ 3-mean"].value == pytest.approx(0.15)
    assert list(routed.index) == [*PAPER_TASKS.values(), "3-mean", "7-mean", "Δ 3-mean", "Δ 7-mean"]
    assert "Δ 3-mean" not in anchor.index


def test_variants_by_name(tmp_path, monkeypatch, printed):
    register(monkeypatch, "pope", "mmlu")
    standard = {"reducer": "fastv 0.25", "groups": "S16K4 linear"}
    for name, changes in {
        "x_stage2": {},
        "x_mlp": {"groups": "S16K4 mlp"},
        "x_norm": {"groups": "S16K4 value_norm"},
        "x_evicted": {"eviction": "snapkv 0.1"},
        "x_olora": {},
    }.items():
        write_run(tmp_path / "r", facts(name, 0.2, **{**standard, **changes}), "pope", answers(range(9)))
    llama = {"backbone": "/models/Llama-2-7b-hf", "reducer": "quest 0.25", "groups": "S8K7 linear"}
    write_run(tmp_path / "r", facts("llama", 0.234375, **llama), "mmlu", answers(range(10)))
    found = compare_paper(read_results([tmp_path / "r"]), printed)
    assert {each.arm: each.row.split(", ", 2)[2] for each in found.itertuples()} == {
        "x_stage2": "FastV25+S16K4, two stages",
        "x_mlp": "FastV25+S16K4_MLP",
        "llama": "Quest25+S8K7",
    }
    llama = found[found.arm == "llama"].set_index("column")
    assert llama.printed.to_dict() == {"MMLU": 43.95, "Δ MMLU": 1.55}
    assert llama.recomputed["Δ MMLU"] == pytest.approx(1.55)
    assert llama.ours["MMLU"].value == 0.25


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
    register(monkeypatch, "pope")
    write_run(tmp_path / "r", facts("a"), "pope", answers(range(9)))
    arms = read_results([tmp_path / "r"])
    with pytest.raises(ValueError, match=r"absent\.json does not exist; --compare-paper takes"):
        compare_paper(arms, tmp_path / "absent.json")
