"""The records of ``evaluate --out`` as scores with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from subtoken_train.artifact.scores import Arm, Evaluation, Score
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.documents import read_json
from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.ledger.ledger import share_words
from subtoken_train.typed import checked, shown

_KINDS: dict[str, Any] = {
    **dict.fromkeys(("arm", "data", "data_sha256", "visual_tokens", "groups", "eviction"), str),
    **dict.fromkeys(("nominal_kv", "realised_kv"), float),
    **dict.fromkeys(("kv_bytes", "dense_kv_bytes"), int),
    "kinds": list[str],
    "scores": list[float],
}
"""What is read of a run."""


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
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"it is {shown(content)}")
        runs = [_run(run, f"runs[{i}]") for i, run in enumerate(checked(list[Any], content.get("runs"), "runs"))]
    except ValueError as error:
        raise ValueError(f"metrics {path} is not a record of 'subtoken-train evaluate --out' ({error})") from None
    arms = {run["arm"]: _arm(run) for run in runs}
    asked = {(run["data"], run["data_sha256"], tuple(run["kinds"])) for run in runs}
    if arm not in arms:
        raise unknown_name(f"arm of {path}", arm, arms)
    if len(asked) != 1:
        raise ValueError(f"the arms of {path} answered different questions; evaluate them in one call")
    data, digest, _ = asked.pop()
    return Evaluation(data, digest, arms.pop(arm), tuple(arms.values()))


def _run(run: Any, place: str) -> dict[str, Any]:
    """The facts of a run that a card shows, each of its type."""
    content = {"data": "questions", **checked(dict[str, Any], run, place)}
    missing = [key for key in _KINDS if key not in content]
    if missing:
        raise ValueError(f"{place}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    made = {key: checked(kind, content[key], f"{place}.{key}") for key, kind in _KINDS.items()}
    if not made["scores"] or len(made["scores"]) != len(made["kinds"]) or made["dense_kv_bytes"] < 1:
        raise ValueError(f"{place}: every score needs its kind, and the cache some bytes")
    return made


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
