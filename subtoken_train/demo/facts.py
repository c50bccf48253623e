"""The page's table: what each cache took, promised and measured, and the seconds."""

from __future__ import annotations

from collections.abc import Sequence

from subtoken_train.demo.side_answer import SideAnswer
from subtoken_train.ledger.kv_budget import share_words

COLUMNS = (
    "model",
    "compressed by",
    "cache bytes",
    "of full",
    "nominal",
    "realised",
    "index bytes",
    "prefill s",
    "decode s",
    "tokens",
)
LEGEND = (
    "Nominal: the share of the picture's keys and values that reducer and routers promise, before an eviction. "
    "Realised: what is stored of them. Cache bytes are measured: text, answer and index with them, slack left out."
)


def facts_table(answers: Sequence[SideAnswer]) -> str:
    """Markdown: a row for each answer. Bytes are those of ``CacheReport``, without the slack."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, answers)]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", LEGEND])


def _row(answer: SideAnswer) -> tuple[str, ...]:
    report = answer.report
    held = report.total_bytes - report.slack_bytes
    return (
        answer.title,
        answer.method,
        f"{held:,}",
        share_words(held / report.dense_bytes, 1),
        f"{report.nominal_fraction:.3%}",
        f"{report.realised_fraction:.3%}",
        f"{report.index_bytes:,}",
        f"{answer.prefill_seconds:.2f}",
        f"{answer.decode_seconds:.2f}",
        str(answer.tokens),
    )
