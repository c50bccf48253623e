"""Numbers as text, the same in every format."""

from __future__ import annotations

from collections.abc import Sequence

from subtoken_train.evaluation.reporting.curves import TOLERANCES, Curve
from subtoken_train.evaluation.reporting.estimates import Figure
from subtoken_train.evaluation.reporting.paper import Comparison
from subtoken_train.evaluation.reporting.report import TaskFacts
from subtoken_train.evaluation.reporting.runs import Arm
from subtoken_train.evaluation.reporting.score_tables import Row
from subtoken_train.ledger.ledger import share_words

NOTHING = "-"

NOTES = (
    "Scores are computed from the stored answers; fractions are shown in %. Means are computed, and only where all of "
    "their tasks are there: 3-mean = MMBench, TextVQA, GQA; 7-mean = all seven.",
    "In brackets: bootstrap 95 % interval over samples, of several seeds over seeds and samples; for means samples are "
    "resampled within each task. Differences to the anchor are paired by sample and seed. A score without brackets is "
    "no mean over samples.",
    "KV nominal: what the ledger promises of the compressed region's bytes. KV measured: the same from the packed "
    "tensors; with index: and what finds the stored value groups; KV prompt: everything, the text included. Anchor KV "
    "over ours is of KV measured, and must not be below 1.",
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


def verdict(figure: Figure) -> str:
    """``good`` or ``bad`` where the interval leaves out zero, nothing otherwise."""
    if figure.low is None or figure.high is None:
        return ""
    return "good" if figure.low > 0 else "bad" if figure.high < 0 else ""


def method_text(arm: Arm) -> str:
    """Reducer, groups and eviction, and when compression acted."""
    facts = arm.facts
    parts = [part for part in (facts.reducer, facts.groups, facts.eviction) if part != NOTHING] or ["uncompressed"]
    trained = "" if facts.trained else ", untrained"
    aware = [] if facts.acts == NOTHING else [f"{facts.acts}, query-aware: {query_aware_text(arm)}{trained}"]
    seeds = [f"seeds {seeds_text(arm)}"] if len(arm.seeds) > 1 else []
    return "; ".join([" + ".join(parts), *aware, *seeds])


def shortened(text: str, most: int = 700) -> str:
    """Long text without its middle."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"


def share_text(share: float | None) -> str:
    """``15.625%``, see ``share_words``."""
    return NOTHING if share is None else share_words(share)


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
    "cache",
    "trained",
    "seeds",
    "query-aware",
    "acts",
    "KV nominal",
    "KV measured",
    "with index",
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
        share_text(cost.payload_share),
        share_text(cost.region_share),
        share_text(cost.prompt_share),
        share_text(cost.entries_share),
        facts.anchor or NOTHING,
        NOTHING if row.anchor_ratio is None else f"{row.anchor_ratio:.4f}",
    ]


def _scaled(value: float, figure: Figure) -> float:
    return 100 * value if figure.form == "fraction" else value


CURVE_NOTE = (
    "r: share of the compressed region's KV that is gone, measured. AUC: mean score over the range of r; compare it "
    "over one range only. r within 10% (20%): the largest r whose relative loss, a mean over tasks, is not above that."
)
CURVE_HEADINGS = ("method", "tasks", "points", "r", "AUC", *(f"r within {tolerance:.0%}" for tolerance in TOLERANCES))


def curve_rows(curves: Sequence[Curve]) -> list[list[str]]:
    """A row per curve, one cell per heading of ``CURVE_HEADINGS``; plain text."""
    rows = []
    for curve in curves:
        low, high = curve.span
        area = NOTHING if curve.area is None else f"{100 * curve.area:.2f}"
        reached = [_reached_text(curve, tolerance) for tolerance in TOLERANCES]
        tasks = ", ".join(curve.tasks)
        rows.append([curve.name, tasks, str(len(curve.points)), f"{low:.4f} to {high:.4f}", area, *reached])
    return rows


POINT_HEADINGS = ("method", "arm", "KV with index", "score", "standard error", "n")


def point_rows(curves: Sequence[Curve]) -> list[list[str]]:
    """A row per point of every curve, one cell per heading of ``POINT_HEADINGS``; plain text."""
    rows = []
    for curve in curves:
        for point in curve.points:
            figure = point.figure
            error = NOTHING if figure.error is None else f"{100 * figure.error:.2f}"
            numbers = [share_text(point.kv), value_text(figure), error, f"{figure.n:,}"]
            rows.append([curve.name, point.arm.name, *numbers])
    return rows


TASK_HEADINGS = ("task", "score", "options", "read from", "samples", "digest", "arms")


def task_cells(facts: TaskFacts) -> list[str]:
    """One cell per heading of ``TASK_HEADINGS``."""
    words = (facts.task, facts.score, facts.options, facts.source, facts.samples, facts.digest)
    return [*words, ", ".join(facts.arms)]


def _reached_text(curve: Curve, tolerance: float) -> str:
    """The compression reached; where the curve left the tolerance before and came back, that, too."""
    reached, first = curve.reached.get(tolerance), curve.first_crossed.get(tolerance)
    if reached is None or first is None:
        return NOTHING if curve.reference else "no uncompressed arm"
    whole = ", the whole curve" if reached == first == curve.span[1] else ""
    return f"{reached:.4f}{whole}" if reached == first else f"{reached:.4f} (first left at {first:.4f})"


def comparison_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Headings and the three rows of a comparison; plain text."""

    def plain(values: dict[str, float], column: str) -> str:
        form = "+.2f" if column.startswith("Δ") else ".2f"
        return f"{values[column]:{form}}" if column in values else NOTHING

    def ours(column: str) -> str:
        figure = comparison.ours.get(column)
        if figure is None:
            return NOTHING
        text = difference_text if column.startswith("Δ") else score_text
        return text(figure, figure.n)

    columns = comparison.columns
    return ["", *columns], [
        ["printed", *(plain(comparison.printed, column) for column in columns)],
        ["recomputed", *(plain(comparison.recomputed, column) for column in columns)],
        ["ours", *map(ours, columns)],
        ["n", *(f"{comparison.ours[column].n:,}" if column in comparison.ours else NOTHING for column in columns)],
    ]
