"""Markdown, CSV and LaTeX of a small case, exactly."""

from __future__ import annotations

import csv
import io

import pytest

from subtoken_train.evaluation.reporting.exports import HEADINGS, report_csv
from subtoken_train.evaluation.reporting.latex import escape as latex_escape
from subtoken_train.evaluation.reporting.latex import report_latex
from subtoken_train.evaluation.reporting.markdown import escape, report_markdown
from subtoken_train.evaluation.reporting.report import make_report
from tests.support.report_results import answers, facts, register, write_run


@pytest.fixture
def small(tmp_path, monkeypatch):
    """All right against all wrong, so that every interval is a point; the anchor is incomplete."""
    register(monkeypatch, "ruler_4k")
    arm = facts("our_arm", 0.25, reducer="fastv 0.5", groups="S8K0 linear", anchor="our_arm_anchor")
    write_run(tmp_path, arm, "ruler_4k", answers(range(40)))
    anchor = facts("our_arm_anchor", 0.25, reducer="fastv 0.25")
    write_run(tmp_path, anchor, "ruler_4k", answers([])[:30], rows=40)
    return make_report([tmp_path])


def test_latex(small):
    assert (
        report_latex(small)
        == r"""% \usepackage{booktabs}

\begin{table}
\centering
\caption{Scores, image tasks}
\begin{tabular}{lrrrr}
\toprule
arm & KV nominal & KV measured & query-aware & ruler\_4k \\
\midrule
$n$ &  &  &  & 40 \\
our\_arm\_anchor & 25.000\% & 25.000\% & yes & 0.00 {\scriptsize n = 30; incomplete: 30 of 40} \\
our\_arm & 25.000\% & 25.000\% & yes & 100.00 \\
\quad $\Delta$ to our\_arm\_anchor &  &  &  & $+100.00$ {\scriptsize [+100.00, +100.00] n = 30; incomplete: 30 of 40} \\
\bottomrule
\end{tabular}
\end{table}
"""
    )


def test_csv(small):
    text = report_csv(small)
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
    assert tuple(rows[0]) == HEADINGS
    assert [row["score"] for row in rows] == 2 * ["accuracy", "worst", "kind:colour", "kind:count"]
    assert rows[0]["value"] == "0.000000"
    assert rows[0]["marks"] == "incomplete: 30 of 40"


def test_markdown(small):
    text = report_markdown(small)
    assert (
        r"""## Scores, image tasks

| arm | ruler\_4k (n = 40) |
| --- | --- |
| our\_arm\_anchor | 0.00 [0.00, 0.00] (n = 30; incomplete: 30 of 40) |
| our\_arm | 100.00 [100.00, 100.00] |
| Δ to our\_arm\_anchor | +100.00 [+100.00, +100.00] (n = 30; incomplete: 30 of 40) |
"""
        in text
    )
    assert "| method | tasks | points | r | AUC | r within 10% | r within 20% |" in text
    assert (
        r"| fastv + S8K0 linear | ruler\_4k | 1 | 0.7500 to 0.7500 | - | no uncompressed arm | no uncompressed arm |"
        in text
    )
    assert "| colour (n = 20) | 0.00 [0.00, 0.00] (n = 15; incomplete: 30 of 40) | 100.00 [100.00, 100.00] |" in text
    widths = {line.count(" | ") for line in text.split("### Budgets")[1].strip().splitlines()[:4]}
    assert len(widths) == 1


def test_text_is_printed_as_it_is():
    assert escape("a|b\n*c* <x>") == r"a\|b \*c\* \<x\>"
    assert latex_escape(r"50% of $x_1 & {\y}#") == r"50\% of \$x\_1 \& \{\textbackslash{}y\}\#"
    assert latex_escape("~^|<") == r"\textasciitilde{}\textasciicircum{}\textbar{}\textless{}"
