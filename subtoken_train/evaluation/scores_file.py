"""The file of ``evaluate --data FILE --out``: one record per run, written, and read as scores with intervals."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subtoken_train.artifact.card import CardColumn, Evaluation, Score
from subtoken_train.datasets.scene_questions import DESCRIPTION_KINDS
from subtoken_train.documents import read_json
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.data_file import Answers, grouped
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evaluation.measures import measure_names
from subtoken_train.evaluation.metrics.metric import Prediction
from subtoken_train.evaluation.runner.arms import groups_words
from subtoken_train.ledger.kv_budget import share_words
from subtoken_train.outputs import write_whole
from subtoken_train.typed import checked, chosen, shown

_KINDS: dict[str, Any] = {
    **dict.fromkeys(("arm", "data", "data_sha256", "visual_tokens", "groups", "eviction"), str),
    **dict.fromkeys(("nominal_kv", "realised_kv"), float),
    **dict.fromkeys(("kv_bytes", "dense_kv_bytes"), int),
    "kinds": list[str],
    "scores": list[float],
    "measures": dict[str, list[float | None]],
}
"""What is read of a run."""


@dataclass(frozen=True)
class RunRecord:
    """What a run of questions leaves: its budget, and every score and prediction in the order of the questions.

    Attributes:
        arm: the arm's name.
        visual_tokens: tokens kept of one image (or context), and before reduction: ``16/64``.
        groups: ``S16K4 linear``, or ``-`` for token-only arms.
        nominal_kv: rho_total of the compressed region, over all layers, from the ledger; before eviction.
        realised_kv: the same from the entries and groups that were kept.
        eviction: method, budget and precision of the cache; ``-`` where there is none.
        kv_bytes: of all prompts' caches, measured, text and index included.
        dense_kv_bytes: of the same prompts uncompressed.
        unread_bytes: of ``kv_bytes``, what a step of decoding does not read: 0 unless pages are chosen in every step.
        prompts_with_an_emptied_region: of which a whole region was lost in some layer.
        data_sha256: digest of what was asked.
        seconds: what it took.
        measures: of every question beside its score, see ``Answers``; None where it has none.
    """

    arm: str
    visual_tokens: str
    groups: str
    nominal_kv: float
    realised_kv: float
    eviction: str
    kv_bytes: int
    dense_kv_bytes: int
    unread_bytes: int
    prompts_with_an_emptied_region: int
    data_sha256: str
    seconds: float
    kinds: list[str]
    scores: list[float]
    predictions: list[Prediction]
    measures: dict[str, list[float | None]]

    @classmethod
    def of(
        cls, arm: str, backbone: CompressedBackbone, answers: Answers, data: bytes, context_tokens: int | None = None
    ) -> RunRecord:
        """The record of some answers.

        Args:
            arm: the arm's name.
            backbone: what answered.
            answers: what it answered.
            data: the question file's content, or what the questions are drawn by.
            context_tokens: a language model's context; None: the compressed region is an image.
        """
        before = backbone.family.visual_tokens() if context_tokens is None else context_tokens
        kept = backbone.reducer.kept_words(before, backbone.family.shape.num_layers)
        return cls(
            arm=arm,
            visual_tokens=f"{kept}/{before}",
            groups=groups_words(backbone.active_routing),
            nominal_kv=backbone.promised_fraction([before], answers.compression.key_channels),
            realised_kv=answers.realised,
            eviction=answers.compression.label,
            kv_bytes=answers.total("kv_bytes"),
            dense_kv_bytes=answers.total("dense_kv_bytes"),
            unread_bytes=answers.total("unread_bytes"),
            prompts_with_an_emptied_region=sum(bool(record.emptied) for record in answers.records),
            data_sha256=hashlib.sha256(data).hexdigest(),
            seconds=answers.seconds,
            kinds=[record.kind for record in answers.records],
            scores=answers.scores,
            predictions=[record.prediction for record in answers.records],
            measures=answers.measures,
        )

    def content(self, **named: Any) -> dict[str, Any]:
        """As JSON has it, after what else is ``named``."""
        rounded = {
            "seconds": round(self.seconds, 1),
            "scores": [round(score, 4) for score in self.scores],
            "measures": {
                name: [None if figure is None else round(figure, 4) for figure in figures]
                for name, figures in self.measures.items()
            },
        }
        return {**named, **asdict(self), **rounded}


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a run's record, or several, as one JSON file."""
    write_whole(path, json.dumps(record, indent=None, separators=(",", ":")) + "\n")


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
    older = {"data": "questions", "measures": {}}  # what records did not always have
    made = chosen(_KINDS, {**older, **checked(dict[str, Any], run, place)}, place)
    if not made["scores"] or len(made["scores"]) != len(made["kinds"]) or made["dense_kv_bytes"] < 1:
        raise ValueError(f"{place}: every score needs its kind, and the cache some bytes")
    for name, figures in made["measures"].items():
        if len(figures) != len(made["kinds"]) or all(figure is None for figure in figures):
            raise ValueError(f"{place}.measures.{name} must have a figure or null for every question, and one figure")
        if not name.isidentifier():
            raise ValueError(f"{place}.measures: {shown(name)} is no name of a measure, such as token_accuracy")
    return made


def _arm(run: dict[str, Any]) -> CardColumn:
    facts = {
        "visual tokens": run["visual_tokens"],
        "value groups": run["groups"],
        "eviction": run["eviction"],
        "KV nominal": f"{run['nominal_kv']:.3%}",
        "KV realised": f"{run['realised_kv']:.3%}",
        "KV bytes, text and index included": share_words(run["kv_bytes"] / run["dense_kv_bytes"]),
    }
    groups = grouped(run["kinds"], run["scores"])
    together = groups if len(groups) == 1 else {"all": run["scores"], **groups}
    metrics = {kind: "f1" if _is_f1(kind, run) else "exact_match" for kind in groups}
    used = set(metrics.values())
    metrics["all"] = used.pop() if len(used) == 1 else "score"
    scores = [_score(kind, metrics[kind], values) for kind, values in together.items()]
    for name in measure_names([run["measures"]]):
        figures = run["measures"][name]
        having = dict.fromkeys(kind for kind, figure in zip(run["kinds"], figures, strict=True) if figure is not None)
        of = "all" if len(having) == len(groups) > 1 else " and ".join(having)
        scores.append(_score(of, name, [figure for figure in figures if figure is not None]))
    return CardColumn(run["arm"], facts, tuple(scores))


def _is_f1(kind: str, run: dict[str, Any]) -> bool:
    """Whether a kind's scores are the F1 of scenes; records that keep no measures are older, and of scenes."""
    having = {
        own
        for name, figures in run["measures"].items()
        for own, figure in zip(run["kinds"], figures, strict=True)
        if name.endswith("_f1") and figure is not None
    }
    return kind in DESCRIPTION_KINDS and (not run["measures"] or kind in having)


def _score(kind: str, metric: str, values: list[float]) -> Score:
    low, high = bootstrap_interval(values)
    return Score(kind, metric, len(values), sum(values) / len(values), low, high)
