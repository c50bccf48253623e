"""Markdown, CSV and LaTeX of a small case, exactly."""

import csv
import io
from dataclasses import replace
from types import SimpleNamespace

import pytest

from subtoken_train.cli.report import print_summary
from subtoken_train.evaluation.reporting import exports
from subtoken_train.evaluation.reporting.page import report_html
from subtoken_train.evaluation.reporting.report import human_names, make_report, query_aware_text, sections, verdicts
from tests.support.report_results import ROWS, FakeAccuracy, answers, facts, write_run

SECONDS = ROWS * (0.1 + 0.2)  # what the records of one run say


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """All right against all wrong, so that every interval is a point; the anchor is incomplete."""
    folder = tmp_path_factory.mktemp("small")
    arm = facts("our_arm", 0.25, reducer="fastv 0.5", groups="S8K0 linear", anchor="our_arm_anchor")
    write_run(folder, arm, "ruler_4k", answers(range(40)))
    write_run(folder, facts("our_arm_anchor", 0.25, reducer="fastv 0.25"), "ruler_4k", answers([])[:30], rows=40)
    return make_report([folder])


def test_a_papers_numbers_stand_beside_the_scores(tmp_path):
    write_run(tmp_path, facts("ours", 0.25), "ruler_4k", answers(range(30)), paper=77.5)
    write_run(tmp_path, facts("older", 0.5), "ruler_4k", answers(range(20)))
    report = make_report([tmp_path])
    assert list(sections(report)[0].frame.set_index("id")["ruler_4k, paper"][["ours", "older"]]) == ["77.50", None]
    assert r"ruler\_4k, paper" in exports.report_latex(report)
    rows = csv.DictReader(io.StringIO(exports.report_csv(report)))
    assert [row["paper"] for row in rows if row["score"] == "accuracy"] == ["", "0.775000"]
    assert "77.50" in report_html(report)


def test_latex(small):
    assert (
        exports.report_latex(small)
        == r"""% \usepackage{booktabs,xcolor}

\begin{table}
\centering
\caption{Scores, image tasks}
\begin{tabular}{lrrrrr}
\toprule
arm & id & KV nominal & KV measured & query-aware & ruler\_4k (n = 40) \\
\midrule
FastV 25 \% & our\_arm\_anchor & 25.000\% & 25.000\% & yes & 0.00 {\scriptsize n = 30; incomplete: 30 of 40} \\
FastV 50 \% + S8K0 router & our\_arm & 25.000\% & 25.000\% & yes & 100.00 \\
$\Delta$ to FastV 25 \% &  &  &  &  & $+100.00$ {\scriptsize [+100.00, +100.00] n = 30; incomplete: 30 of 40} \\
\bottomrule
\end{tabular}
\end{table}
"""
    )


def test_csv(small):
    text = exports.report_csv(small)
    ours = "our_arm,llava-hf/llava-1.5-7b-hf,adapters/lora,fastv 0.5,S8K0 linear,-,yes,in prefill,yes,"
    ours += ",0.250000,0.250000,0.250000,0.400000,our_arm_anchor,ruler_4k,"
    assert text.splitlines()[5:9] == [
        ours + "accuracy,fraction,1.000000,1.000000,1.000000,0.000000,40,"
        "1.000000,1.000000,1.000000,30,difference: incomplete: 30 of 40",
        ours + "worst,fraction,1.000000,,,,40,,,,,",
        ours + "kind:colour,fraction,1.000000,1.000000,1.000000,0.000000,20,,,,,",
        ours + "kind:count,fraction,1.000000,1.000000,1.000000,0.000000,20,,,,,",
    ]
    rows = list(csv.DictReader(io.StringIO(text)))
    assert tuple(rows[0]) == exports.HEADINGS
    assert [row["score"] for row in rows] == 2 * ["accuracy", "worst", "kind:colour", "kind:count"]
    assert rows[0]["value"] == "0.000000"
    assert rows[0]["marks"] == "incomplete: 30 of 40"


def test_markdown(small):
    text = exports.report_markdown(small)
    for lines in (
        r"""## Scores, image tasks

| arm | id | KV nominal | KV measured | query-aware | ruler\_4k (n = 40) |
| --- | --- | --- | --- | --- | --- |
| FastV 25 % | our\_arm\_anchor | 25.000% | 25.000% | yes | 0.00 \[0.00, 0.00\] (n = 30; incomplete: 30 of 40) |
| FastV 50 % + S8K0 router | our\_arm | 25.000% | 25.000% | yes | 100.00 \[100.00, 100.00\] |
| Δ to FastV 25 % |  |  |  |  | +100.00 \[+100.00, +100.00\] (n = 30; incomplete: 30 of 40) |
""",
        "| method | tasks | points | r | AUC | r within 10% | r within 20% |",
        r"| FastV + S8K0 linear | ruler\_4k | 1 | 0.7500 to 0.7500 | - | no uncompressed arm | no uncompressed arm |",
        r"| colour (n = 20) | 0.00 \[0.00, 0.00\] (n = 15; incomplete: 30 of 40) | 100.00 \[100.00, 100.00\] |",
    ):
        assert lines in text


def test_a_compressed_question_is_seen_under_either_protocol():
    def arm(protocol, *compressed):
        runs = {f"task{i}": {None: SimpleNamespace(question_compressed=held)} for i, held in enumerate(compressed)}
        return SimpleNamespace(facts=facts("a", 0.5, protocol=protocol), runs=runs)

    assert query_aware_text(arm("query_aware", False)) == "yes"
    assert query_aware_text(arm("context_first", False)) == "no"
    assert query_aware_text(arm("context_first", True)) == "yes"
    mixed = arm("context_first", False, True)
    assert query_aware_text(mixed) == "yes on task1"
    assert [query_aware_text(mixed, task) for task in mixed.runs] == ["no", "yes"]


def test_text_is_printed_as_it_is():
    assert exports.markdown_escape("a|b\n*c* <x>") == r"a\|b \*c\* \<x\>"
    assert exports.latex_escape(r"50% of $x_1 & {\y}#") == r"50\% of \$x\_1 \& \{\textbackslash{}y\}\#"
    assert exports.latex_escape("~^|<") == r"\textasciitilde{}\textasciicircum{}\textbar{}\textless{}"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Five arms against one anchor that is right on 20 of 40; only some of them at its budget."""
    folder = tmp_path_factory.mktemp("compared")
    write_run(folder, facts("anchor", 0.25, reducer="fastv 0.25"), "pope", answers(range(20)))
    for name, right, changes in (
        ("better", range(35), {}),
        ("worse", range(5), {}),
        ("level", range(2, 23), {}),
        ("late", range(40), {"acts": "after prefill", "eviction": "snapkv 0.25"}),
    ):
        arm = facts(name, 0.25, **{"reducer": "fastv 0.5", "groups": "S8K4 linear", "anchor": "anchor", **changes})
        write_run(folder, arm, "pope", answers(right), new_tokens=1)
    write_run(folder, facts("fat", 0.5, reducer="fastv 0.5", anchor="anchor"), "pope", answers(range(40)))
    return make_report([folder])


def test_verdicts_say_what_the_intervals_say(compared):
    method = "FastV 50 % + S8K4 router"
    first = "against FastV 25 %"
    lines = {line.split(f" {first}")[0]: line.split(first)[1] for line in verdicts(compared)}
    same = ", both at 25.000% of the KV: "
    assert lines[f"{method} (better)"].startswith(f"{same}better on POPE (+37.50 [+")
    assert lines[f"{method} (worse)"].startswith(f"{same}worse on POPE (-37.50 [-")
    assert lines[f"{method} (level)"] == f"{same}level on POPE."
    assert lines[f"{method} + SnapKV 25 %"] == f"{same}not affected on POPE."
    fat = ": no verdict, the budgets differ (nominal 50.000% against 25.000%; measured, anchor over arm 0.5000)."
    assert lines["FastV 50 %"] == fat
    assert len(lines) == 5
    text = exports.report_markdown(compared)
    assert all(exports.markdown_escape(line) in text for line in verdicts(compared))


def test_where_less_is_better_the_verdict_turns_and_the_column_says_so(compared, tmp_path, monkeypatch, capsys):
    estimate = next(row.differences["pope"] for row in compared.tables[0].rows if row.arm.name == "better")
    changed = ({}, {"falling": True}, {"low": 0.0}, {"low": None}, {"signed": False})
    assert [replace(estimate, **changes).verdict for changes in changed] == ["better", "worse", "level", None, None]
    write_run(tmp_path, facts("ours", 0.25), "ruler_4k", answers(range(20)))
    monkeypatch.setattr(FakeAccuracy, "higher_is_better", False)
    report = make_report([tmp_path])
    assert report.tables[0].columns == {"ruler_4k": "ruler_4k (accuracy, lower is better)"}
    assert verdicts(report) == ["No arm was compared: none names an anchor that has results here."]
    print_summary(report)
    assert "fractions in %" in " ".join(capsys.readouterr().out.split())
    assert "1 arm on 1 task: ruler_4k." in report_html(report)


def test_what_compression_could_not_change_is_marked(compared):
    assert r"\textcolor{gray}{100.00 \dag{}}" in exports.report_latex(compared)
    assert r"| 100.00 † \[100.00, 100.00\] |" in exports.report_markdown(compared)
    assert r"\textcolor{gray}{$+50.00 \dag{}$" in exports.report_latex(compared)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "no compression"),
        ({"adapter": None}, "no compression, no adapter"),
        ({"reducer": "fastv 0.15625"}, "FastV 15.6 %"),
        ({"reducer": "fastv 0.25", "groups": "S16K4 linear"}, "FastV 25 % + S16K4 router"),
        ({"groups": "S16 bytes 0.2 linear"}, "S16 bytes 0.2 router"),
        ({"groups": "S16K4 value_norm", "trained": False}, "S16K4 by value norm, untrained"),
        ({"eviction": "snapkv 1,024 tokens all int8"}, "SnapKV 1,024 tokens all int8"),
        ({"eviction": "kvcompose 0.2", "protocol": "context_first"}, "KVCompose 20 %, context first"),
        ({"reducer": "theirs 0.5"}, "theirs 50 %"),
    ],
)
def test_arms_have_human_names(changes, words):
    arm = facts("an_arm", **changes)
    assert human_names({"a": arm}) == {"a": words}
    assert human_names({"a": arm, "b": arm}) == {"a": f"{words} (a)", "b": f"{words} (b)"}


def time_rows(folder):
    (section,) = [part for part in sections(make_report([folder])) if part.title == "Time"]
    return {row["arm"]: dict(row) for row in section.frame.to_dict("records")}


def test_methods_are_means_over_their_checkpoints(tmp_path):
    """Table 6: two routed arms and one of two seeds of the anchor; the mean is over checkpoints, not over arms."""
    for task in ("mmlu", "ruler_4k"):
        write_run(tmp_path, facts("full"), task, answers(range(40)))
        for seed in (0, 1):
            write_run(tmp_path, facts(f"quest-seed{seed}", 0.25, reducer="quest 0.25", seed=seed), task, answers([]))
        for keep in ("0.25", "0.125"):
            arm = facts(f"routed{keep}", float(keep), reducer=f"quest {keep}", groups="S8K7 linear")
            write_run(tmp_path, arm, task, answers([]))
    rows = time_rows(tmp_path)
    assert len(rows) == 4 + 3
    for method, count in (("no compression", 1), ("Quest", 2), ("Quest + groups", 2)):
        row = rows[f"mean: {method}, llava-hf/llava-1.5-7b-hf"]
        assert row["checkpoints"] == str(count)
        assert row["mmlu (s)"] == row["ruler_4k (s)"] == f"{SECONDS:.1f}"
        assert row["total (min)"] == f"{2 * SECONDS / 60:.2f}" == "0.40"
    assert rows["Quest 25 %"]["checkpoints"] == "2"


def test_unequal_numbers_of_samples_have_no_mean(tmp_path):
    """A limited run says how many samples it timed; beside a whole one no mean is printed."""
    write_run(tmp_path, facts("whole", 0.25, reducer="quest 0.25"), "mmlu", answers([]))
    write_run(tmp_path, facts("part", 0.125, reducer="quest 0.125"), "mmlu", answers([])[:10])
    rows = time_rows(tmp_path)
    assert rows["Quest 25 %"]["mmlu (s)"] == f"{SECONDS:.1f}"
    assert rows["Quest 12.5 %"]["mmlu (s)"] == "3.0 (10 samples)"
    mean = rows["mean: Quest, llava-hf/llava-1.5-7b-hf"]
    assert (mean["mmlu (s)"], mean["total (min)"]) == ("-", "-")
