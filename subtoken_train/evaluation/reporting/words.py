"""Numbers as text, the same in every format."""

from __future__ import annotations

from subtoken_train.evaluation.reporting.figures import Figure
from subtoken_train.evaluation.reporting.layout import Row
from subtoken_train.evaluation.reporting.reading import Arm

NOTHING = "-"

NOTES = (
    "Scores are computed from the stored answers; fractions are shown in %. Means are computed, and only where all of "
    "their tasks are there: 3-mean = MMBench, TextVQA, GQA; 7-mean = all seven.",
    "In brackets: bootstrap 95 % interval over samples, of several seeds over seeds and samples; for means samples are "
    "resampled within each task. Differences to the anchor are paired by sample and seed. A score without brackets is "
    "no mean over samples.",
    "KV nominal: what the ledger promises of the compressed region. KV region and KV prompt: measured bytes over those "
    "of the dense cache, group index included; the prompt holds the text, too.",
)


def value_text(figure: Figure) -> str:
    """``61.20``: per cent of a fraction, or points as they are."""
    return f"{_scaled(figure.value, figure):.2f}"


def signed_text(figure: Figure) -> str:
    """``+1.38``."""
    return f"{_scaled(figure.value, figure):+.2f}"


def interval_text(figure: Figure, sign: bool = False) -> str:
    """``[60.11, 62.30]``; nothing where there is no interval."""
    if figure.low is None or figure.high is None:
        return ""
    form = "+.2f" if sign else ".2f"
    return f"[{_scaled(figure.low, figure):{form}}, {_scaled(figure.high, figure):{form}}]"


def remark_text(figure: Figure, samples: int) -> str:
    """What a cell adds: its own n where it is not the column's, and its marks."""
    own = [f"n = {figure.n:,}"] if figure.n != samples else []
    return "; ".join([*own, *figure.marks])


def score_text(figure: Figure | None, samples: int) -> str:
    """A whole cell: value, interval, remarks."""
    if figure is None:
        return NOTHING
    remark = remark_text(figure, samples)
    return " ".join(filter(None, [value_text(figure), interval_text(figure), f"({remark})" if remark else ""]))


def difference_text(figure: Figure | str | None, samples: int) -> str:
    """A whole cell of a difference."""
    if figure is None or isinstance(figure, str):
        return figure or NOTHING
    remark = remark_text(figure, samples)
    return " ".join(
        filter(None, [signed_text(figure), interval_text(figure, sign=True), f"({remark})" if remark else ""])
    )


def share_text(share: float | None) -> str:
    """``15.625%``."""
    return NOTHING if share is None else f"{share:.3%}"


def seeds_text(arm: Arm) -> str:
    """``0, 1, 2``."""
    return ", ".join(map(str, arm.seeds)) or NOTHING


def query_aware_text(arm: Arm) -> str:
    """Whether the question was there when the cache was compressed."""
    return "yes" if arm.facts.protocol == "query_aware" else "no"


FACT_HEADINGS = (
    "arm",
    "backbone",
    "adapter",
    "reducer",
    "groups",
    "eviction",
    "trained",
    "seeds",
    "query-aware",
    "acts",
    "KV nominal",
    "KV region",
    "KV prompt",
    "entries kept",
    "anchor",
    "anchor KV / ours",
)


def fact_cells(row: Row) -> list[str]:
    """One cell per heading of ``FACT_HEADINGS``."""
    facts, cost = row.arm.facts, row.cost
    return [
        row.arm.name,
        facts.backbone,
        facts.adapter or NOTHING,
        facts.reducer,
        facts.groups,
        facts.eviction,
        "yes" if facts.trained else "no",
        seeds_text(row.arm),
        query_aware_text(row.arm),
        facts.acts,
        share_text(facts.nominal_kv),
        share_text(cost.region_share),
        share_text(cost.prompt_share),
        share_text(cost.entries_share),
        facts.anchor or NOTHING,
        NOTHING if row.anchor_ratio is None else f"{row.anchor_ratio:.4f}",
    ]


def _scaled(value: float, figure: Figure) -> float:
    return 100 * value if figure.form == "fraction" else value
