"""The records of ``evaluate --out`` as scores with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from subtoken_train.artifact.scores import Arm, Evaluation, Score
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.functional.ledger import share_words


def read_scores(path: Path, arm: str) -> Evaluation:
    """The scores of an arm and of the others that answered the same questions.

    Args:
        path: a file of ``evaluate --out``.
        arm: the name that the record gives the adapter.

    Raises:
        ValueError: the file is no such record, has no such arm, or its arms answered other questions.
    """
    if not path.is_file():
        raise ValueError(f"metrics {path} is not a file; 'subtoken-train evaluate --out FILE' writes one")
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        arms = {run["arm"]: _arm(run) for run in runs}
        asked = {(run.get("data", "questions"), run["data_sha256"], tuple(run["kinds"])) for run in runs}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"metrics {path} is not a record of 'subtoken-train evaluate --out' ({type(error).__name__} {error})"
        ) from error
    if arm not in arms:
        raise unknown_name(f"arm of {path}", arm, arms)
    if len(asked) != 1:
        raise ValueError(f"the arms of {path} answered different questions; evaluate them in one call")
    data, digest, _ = asked.pop()
    return Evaluation(data, digest, arms.pop(arm), tuple(arms.values()))


def _arm(run: dict[str, Any]) -> Arm:
    facts = {
        "visual tokens": run["visual_tokens"],
        "value groups": run["groups"],
        "eviction": run["eviction"],
        "KV nominal": f"{run['nominal_kv']:.3%}",
        "KV realised": f"{run['realised_kv']:.3%}",
        "KV bytes, text and index included": share_words(run["kv_bytes"] / run["dense_kv_bytes"]),
    }
    groups: dict[str, list[float]] = {}
    for kind, score in zip(run["kinds"], run["scores"], strict=True):
        groups.setdefault(kind, []).append(score)
    together = groups if len(groups) == 1 else {"all": run["scores"], **groups}
    metrics = {kind: "f1" if kind in DESCRIPTION_KINDS else "exact_match" for kind in groups}
    used = set(metrics.values())
    metrics["all"] = used.pop() if len(used) == 1 else "score"
    return Arm(run["arm"], facts, tuple(_score(kind, metrics[kind], values) for kind, values in together.items()))


def _score(kind: str, metric: str, values: list[float]) -> Score:
    low, high = bootstrap_interval(values)
    return Score(kind, metric, len(values), sum(values) / len(values), low, high)
