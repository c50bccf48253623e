"""What came of a campaign, in numbers and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.hostile.case import Expect, Outcome, Verdict

COUNTED = {
    "tracebacks": Verdict.TRACEBACK,
    "hangs": Verdict.HANG,
    "wrong_acceptances": Verdict.WRONG,
    "code_run": Verdict.CODE,
    "lost": Verdict.LOST,
    "memory": Verdict.MEMORY,
    "left_behind": Verdict.LEFT,
    "messages": Verdict.MESSAGE,
    "wrong_refusals": Verdict.REFUSAL,
}


def counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Cases, clean ones, and the others by verdict; how many were known to be wrong, and known to be right."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    expected = Counter(outcome.expect for outcome in outcomes)
    codes = Counter(outcome.code for outcome in outcomes)
    return {
        "cases": len(outcomes),
        "clean": verdicts[Verdict.CLEAN],
        **{name: verdicts[verdict] for name, verdict in COUNTED.items()},
        "known_invalid": expected[Expect.REFUSED],
        "known_valid": expected[Expect.TAKEN],
        "either": expected[Expect.EITHER],
        "compared": sum(outcome.compared for outcome in outcomes),
        "refused": codes[2],
        "accepted": codes[0],
    }


def table(content: dict[str, Any]) -> str:
    """The figures as Markdown: one row per class and their sum."""
    columns = {
        "cases": "cases", "known_invalid": "known wrong", "known_valid": "known right", "either": "either",
        "refused": "refused", "compared": "compared", "clean": "clean", "tracebacks": "tracebacks", "hangs": "hangs",
        "wrong_acceptances": "wrong acceptances", "wrong_refusals": "wrong refusals", "code_run": "code run",
        "lost": "lost", "messages": "messages",
    }  # fmt: skip
    rows = {**content["classes"], "all": content["total"]}
    lines = [f"| class | {' | '.join(columns.values())} |", "|" + "---|" * (len(columns) + 1)]
    return "\n".join(
        [*lines, *(f"| {name} | {' | '.join(f'{row[key]:,}' for key in columns)} |" for name, row in rows.items())]
    )
