"""Printed rows of the paper beside ours: what is printed, the means of the printed cells, and what was measured here.

The printed tables are a file that the reader passes; the package ships none of them. Twelve of the paper's 93 printed
3-means are means over other columns, so each mean is shown both as printed and as its cells give it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from subtoken_train.documents import read_json
from subtoken_train.evaluation.reporting.runs import ArmResults
from subtoken_train.evaluation.reporting.score_tables import (
    MEANS,
    PAPER_TASKS,
    Estimate,
    anchor_of,
    difference_of,
    score_of,
)
from subtoken_train.typed import chosen

VARIANTS = {"linear": "subtoken", "mlp": "subtoken_MLP", "olora": "subtoken_oLoRA"}
"""Names of an arm's router, ours and the paper's."""
TWO_STAGE = "4"
"""The paper's table of two-stage training."""
AVERAGED = {**MEANS, "MMLU": ("mmlu",)}
DELTAS = {
    "Δ 3-mean": ("3-mean", "printed_d3"),
    "Δ 7-mean": ("7-mean", "printed_d7"),
    "Δ MMLU": ("MMLU", "printed_delta"),
}
_EVERY: dict[str, Any] = {
    **dict.fromkeys(("table", "model", "method", "variant"), str),
    **dict.fromkeys(("total_kv", "token_keep"), float),
    **dict.fromkeys(("S", "K"), int | None),
    "token_method": str | None,
}
_VLM: dict[str, Any] = {
    "scores": dict[str, float],
    **dict.fromkeys(("printed_3m", "printed_7m"), float),
    **dict.fromkeys(("printed_d3", "printed_d7"), float | None),
}
_SCORES: dict[str, Any] = dict.fromkeys(PAPER_TASKS.values(), float)
_LLM: dict[str, Any] = {"mmlu": float, "printed_delta": float | None}
"""Keys that are read of a printed row."""
COLUMNS = (*PAPER_TASKS.values(), *AVERAGED, *DELTAS)


FRAME = ("arm", "row", "column", "printed", "recomputed", "ours")
"""Columns of ``compare_paper``; a row for each column of a printed row that is an arm's.

``recomputed`` is the mean or difference of the printed cells, ``ours`` an ``Estimate``; each is None where there is
none. ``printed`` and ``recomputed`` are in %, or points of %.
"""


def compare_paper(arms: Sequence[ArmResults], path: Path) -> pd.DataFrame:
    """Return the printed numbers beside ours, for all arms whose backbone, reducer and groups are those of a row."""
    try:
        rows = _rows(read_json(path))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; --compare-paper takes the JSON file of the printed tables") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a file of printed tables ({error})") from None
    pairs = [(arm, row) for arm in arms for row in rows if _same_method(arm, row)]
    found = [each for arm, row in pairs for each in _compared(arm, anchor_of(arm, arms), row, rows)]
    return pd.DataFrame(found, columns=FRAME, dtype=object)


def _rows(content: Any) -> list[dict[str, Any]]:
    rows = []
    for key, own in (("vlm_rows", _VLM), ("llm_rows", _LLM)):
        listed = content.get(key) if isinstance(content, dict) else None
        if not isinstance(listed, list):
            raise ValueError(f"it has no list {key}")
        for i, given in enumerate(listed):
            row = chosen({**_EVERY, **own}, given, f"{key}[{i}]")
            if "scores" in own:
                row["scores"] |= chosen(_SCORES, row["scores"], f"{key}[{i}].scores")
            rows.append(row)
    return rows


def recomputed_means(scores: dict[str, float]) -> dict[str, float]:
    """Return the declared means of printed cells, in their units."""
    cells = {mean: [scores[PAPER_TASKS[task]] for task in tasks] for mean, tasks in MEANS.items()}
    return {mean: float(np.mean(values)) for mean, values in cells.items()}


def _same_method(arm: ArmResults, row: dict[str, Any]) -> bool:
    """Tell whether a printed row is an arm's; ``llava-hf/llava-1.5-7b-hf`` is the printed LLaVA-1.5-7B."""
    facts = arm.facts
    name, _, keep = facts.reducer.partition(" ")
    printed = (row["token_method"] or "-").lower()
    if facts.eviction != "-" or name.lower() != printed or row["model"].lower() not in facts.backbone.lower():
        return False
    if keep and not math.isclose(100 * float(keep), row["token_keep"], abs_tol=0.01):
        return False
    words = f"{facts.name} {facts.adapter or ''}".lower()
    if facts.groups == "-":
        return row["S"] is None and row["table"] != TWO_STAGE and (facts.adapter is None) == (row["variant"] == "full")
    groups, selector = facts.groups.split()[:2]
    variant = VARIANTS.get("olora" if "olora" in words else selector)
    two_stage = "stage2" in words
    return (
        groups == f"S{row['S']}K{row['K']}" and row["variant"] == variant and (row["table"] == TWO_STAGE) == two_stage
    )


def _compared(
    arm: ArmResults, anchor: ArmResults | None, row: dict[str, Any], rows: list[dict[str, Any]]
) -> Iterator[tuple[object, ...]]:
    base, means = _printed_anchor(row, rows), _means(row)
    printed, recomputed = dict(means), dict[str, float]()
    ours: dict[str, Estimate | None] = {}
    if "scores" in row:
        printed = {**row["scores"], "3-mean": row["printed_3m"], "7-mean": row["printed_7m"]}
        recomputed = dict(means)
        ours = {label: score_of(arm, [task]) for task, label in PAPER_TASKS.items()}
    for label, (mean, key) in DELTAS.items():
        if mean in means:
            ours[mean] = score_of(arm, AVERAGED[mean])
            if row[key] is not None and base is not None:
                printed[label], recomputed[label] = row[key], means[mean] - _means(base)[mean]
                apart = None if anchor is None else difference_of(arm, anchor, AVERAGED[mean])
                ours[label] = apart if isinstance(apart, Estimate) else None
    words = f"Table {row['table']}, {row['model']}, {row['method']}"
    for column in filter(printed.__contains__, COLUMNS):
        yield arm.name, words, column, printed[column], recomputed.get(column), ours.get(column)


def _means(row: dict[str, Any]) -> dict[str, float]:
    return {"MMLU": row["mmlu"]} if "mmlu" in row else recomputed_means(row["scores"])


def _printed_anchor(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    if row["variant"] in {"token_only", "full", "lora_only"}:
        return None
    keys = ("table", "model", "token_method", "total_kv")
    alike = (other for other in rows if all(other[key] == row[key] for key in keys))
    return next((other for other in alike if other["variant"] == "token_only"), None)
