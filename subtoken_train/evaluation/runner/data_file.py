"""Questions of a data file (``evaluate --data FILE``), answered in memory and written as one file of runs; no grid.

Beside its score an answer has measures; their verdict says what several of them say together of a difference.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subtoken_train.artifact.card import CardColumn, Evaluation, Score
from subtoken_train.datasets.collate import answer_tokens
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.documents import read_json
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning, unknown_name
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evaluation.metrics.metric import MeanScores, Prediction
from subtoken_train.evaluation.metrics.scene_scores import SceneScore
from subtoken_train.evaluation.results import SampleRecord
from subtoken_train.evaluation.runner.arms import groups_words
from subtoken_train.evaluation.runner.cell import answer_batch, model_inputs, record_of
from subtoken_train.evaluation.tasks.embedded_tasks import instruction_samples
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.families.literal_marks import escaped
from subtoken_train.inference.batched import TokenScore, in_batches
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import who_drops
from subtoken_train.ledger.kv_budget import mean_deviation, share_words
from subtoken_train.ledger.measure import emptied_words
from subtoken_train.outputs import write_whole
from subtoken_train.typed import checked, chosen, shown
from subtoken_train.types import Batch, Protocol, Turn


@dataclass(frozen=True)
class Answers:
    """All answers to some samples.

    Attributes:
        records: one per sample, in the samples' order.
        realised: share of the compressed region's keys and values that is stored, in the model's dtype and without the
            index; 1 where nothing could be compressed.
        compression: eviction and precision that were in use.
        measures: what is known of the answers beside their score, by name (``MEASURES``); one figure per sample, in
            the samples' order, None where the sample has none. What no sample has is left out.
    """

    records: list[SampleRecord]
    realised: float
    seconds: float
    compression: Compression
    measures: dict[str, list[float | None]]

    @property
    def scores(self) -> list[float]:
        """Scores of all samples."""
        return [record.score for record in self.records]

    def by_kind(self) -> dict[str, list[float]]:
        """Return scores per question kind, in the order in which the kinds first appear."""
        return grouped([record.kind for record in self.records], self.scores)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over samples of the compressed region's share, see ``RunRecord``."""
        shares = [(x.region_bytes - x.index_bytes) / x.region_dense_bytes for x in self.records if x.region_dense_bytes]
        return mean_deviation(shares)[1] if self.compression.threshold is not None and shares else None

    def total(self, name: str) -> int:
        """Return the sum of a measured figure over all prompts, for instance ``kv_bytes``."""
        return sum(getattr(record, name) for record in self.records)


def grouped(kinds: Sequence[str], scores: Sequence[float]) -> dict[str, list[float]]:
    """Return the scores of every kind, in the order in which the kinds first appear."""
    groups: dict[str, list[float]] = {}
    for kind, score in zip(kinds, scores, strict=True):
        groups.setdefault(kind, []).append(score)
    return groups


def answer_records(
    backbone: CompressedBackbone,
    records: InstructionRecords,
    *,
    max_length: int = 2048,
    batch_size: int = 64,
    max_new_tokens: int = 64,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    compression: Compression | None = None,
) -> Answers:
    """Answer the last turn of every record, earlier turns given, and score it as ``SceneScore`` does.

    Where a record has a reference answer, its tokens (end of turn included) are scored too, see ``answer_samples``.
    ``max_length`` counts prompt tokens, visual ones included; ``limit`` takes only the first records; ``progress`` is
    called with (done, total) after every batch. Without a compression there is no eviction, and the model's dtype.
    """
    samples = instruction_samples(records, limit, max_new_tokens)
    order = sorted(range(len(samples)), key=lambda place: samples[place].kind in DESCRIPTION_KINDS)  # long answers last
    batches = list(in_batches(order, batch_size))

    def collate(samples: Sequence[Sample]) -> Batch:
        return model_inputs(samples, backbone.family, "image", max_length)[0]

    def reference(sample: Sample) -> list[int]:
        turns = [*sample.earlier, Turn(sample.prompt, escaped(sample.reference["answer"]))]
        return answer_tokens(Record(sample.id, [], turns), backbone.family)

    return answer_samples(backbone, samples, SceneScore(), batches, collate, progress, compression, reference=reference)


def answer_samples(
    backbone: CompressedBackbone,
    samples: Sequence[Sample],
    metric: MeanScores,
    batches: Sequence[Sequence[int]],
    collate: Callable[[Sequence[Sample]], Batch],
    progress: Callable[[int, int], None] | None = None,
    compression: Compression | None = None,
    protocol: Protocol = "query_aware",
    reference: Callable[[Sample], Sequence[int]] | None = None,
) -> Answers:
    """Answer samples without choices greedily; what is not said here is as in ``answer_records``.

    Beside the score, ``measures`` holds the metric's other figures and, of samples with reference tokens, under teacher
    forcing: ``token_accuracy``, the share of the reference's tokens that are the greedy choice after those before it,
    and ``log_likelihood``, their mean log-probability in nats. Both are read from the very cache that the answer is
    decoded from, so that every reducer, router, eviction and precision shows in them; at the cost of one pass over the
    references for each batch (of one per token, where a step chooses its pages). An eviction that acts after the whole
    prompt cannot change a reference's first token. With ``eviction_every`` there is no such cache to go back to, and
    both are left out.

    ``batches`` are places of ``samples`` that are answered together; all of them, each once. ``reference`` gives the
    token ids of a sample's reference answer, none where it has none; None: no sample has. A log-likelihood that is not
    finite raises a ``ValueError``.
    """
    compression, clock = Compression() if compression is None else compression, time.perf_counter()
    found: dict[int, SampleRecord] = {}
    figures: list[dict[str, float]] = [{} for _ in samples]
    if compression.every is not None:
        reference = None
    kept = before = 0.0
    for places in batches:
        batch = [samples[place] for place in places]
        tokens = [reference(sample) for sample in batch] if reference is not None else None
        outcomes = answer_batch(backbone, batch, collate(batch), [], compression, protocol, tokens)
        kept += sum(outcome.keys_after + outcome.values_after for outcome in outcomes) / 2
        before += sum(outcome.entries_before for outcome in outcomes)
        for place, sample, outcome in zip(places, batch, outcomes, strict=True):
            found[place] = record_of(sample, outcome, metric)
            figures[place] = _forced(sample, outcome.reference) | metric.figures(
                found[place].prediction, sample.reference
            )
        if progress is not None:
            progress(len(found), len(samples))
    records = [found[place] for place in range(len(samples))]
    emptied = [record.emptied for record in records]
    if words := emptied_words(emptied, *who_drops(backbone.active_routing, compression.label)):
        warnings.warn(words, SubTokenWarning, stacklevel=2)
    named = dict.fromkeys(name for each in figures for name in each if name != metric.names[0])
    measures = {name: [each.get(name) for each in figures] for name in named}
    return Answers(records, kept / before if before else 1.0, time.perf_counter() - clock, compression, measures)


def _forced(sample: Sample, score: TokenScore | None) -> dict[str, float]:
    """Return the figures of a reference's tokens; none where there is no reference."""
    if score is None:
        return {}
    if not math.isfinite(score.logprob):
        raise ValueError(
            f"sample {sample.id!r}: the model gave NaN or infinity; choose a wider dtype, or another adapter"
        )
    return {"token_accuracy": score.right / score.count, "log_likelihood": score.logprob / score.count}


MEASURES = {
    "token_accuracy": "token accuracy",
    "log_likelihood": "log-likelihood",
    "place_f1": "place F1",
    "color_f1": "colour F1",
    "digit_f1": "digit F1",
}
"""Name in records -> words of tables, in their order. Of all, more is better.

The first two score the reference's tokens under teacher forcing (``answer_samples``; the second in nats per token), the
others the attributes of scene descriptions (``attribute_f1``). A metric's further figures go by their own names.
"""


def measure_names(runs: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the measures that any of some runs has, those of ``MEASURES`` first."""
    named = dict.fromkeys(name for run in runs for name in run)
    return [name for name in MEASURES if name in named] + [name for name in named if name not in MEASURES]


def paired(first: Sequence[float | None], second: Sequence[float | None]) -> list[float]:
    """Subtract second from first, where both have a figure."""
    pairs = zip(first, second, strict=True)
    return [mine - its for mine, its in pairs if mine is not None and its is not None]


def verdict_words(intervals: Mapping[str, tuple[float, float]]) -> str:
    """Say what all measures of one difference say together; of all, more is better.

    ``ahead``: no interval lies below zero and at least one above it; ``behind``: the reverse; ``mixed``: some lie above
    and some below; ``level``: all hold zero. Where not all measures agree the words name them, in the order given:
    ``ahead (score, token accuracy; level: log-likelihood)``. Each interval is taken as it is: of many independent
    measures some would lie off zero by chance, and none is corrected for that.
    """
    assert intervals
    found: dict[str, list[str]] = {"ahead": [], "behind": [], "level": []}
    for name, (low, high) in intervals.items():
        found["ahead" if low > 0 else "behind" if high < 0 else "level"].append(name)
    ahead, behind, level = (", ".join(names) for names in found.values())
    rest = f"; level: {level}" if level else ""
    if ahead and behind:
        return f"mixed (ahead: {ahead}; behind: {behind}{rest})"
    for word, names in (("ahead", ahead), ("behind", behind)):
        if names:
            return f"{word} ({names}{rest})" if rest else word
    return "level"


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("arm", "data", "data_sha256", "visual_tokens", "groups", "eviction"), str),
    **dict.fromkeys(("nominal_kv", "realised_kv"), float),
    "realised_deviation": float | None,
    **dict.fromkeys(("kv_bytes", "dense_kv_bytes"), int),
    "kinds": list[str],
    "scores": list[float],
    "measures": dict[str, list[float | None]],
}
"""Keys that are read of a run."""


@dataclass(frozen=True)
class RunRecord:
    """Outcome of a run of questions: its budget, and every score and prediction in the order of the questions.

    Attributes:
        visual_tokens: tokens kept of one image (or context), and before reduction: ``16/64``.
        groups: ``S16K4 linear``, or ``-`` for token-only arms.
        nominal_kv: rho_total of the compressed region, over all layers, from the ledger; before eviction.
        realised_kv: the same from the entries and groups that were kept.
        eviction: method, budget and precision of the cache; ``-`` where there is none.
        kv_bytes: of all prompts' caches, measured, text and index included.
        dense_kv_bytes: of the same prompts uncompressed.
        unread_bytes: of ``kv_bytes``, what a step of decoding does not read: 0 unless pages are chosen in every step.
        prompts_with_an_emptied_region: of which a whole region was lost in some layer.
        measures: of every question beside its score, see ``Answers``; None where it has none.
        realised_deviation: standard deviation over the questions of what stays of a compressed region's bytes, where a
            threshold decides; None elsewhere.
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
    realised_deviation: float | None = None

    @classmethod
    def of(
        cls, arm: str, backbone: CompressedBackbone, answers: Answers, data: bytes, context_tokens: int | None = None
    ) -> RunRecord:
        """Make the record of some answers.

        ``data`` is the question file's content, or what the questions are drawn by; ``context_tokens`` a language
        model's context (None: the compressed region is an image).
        """
        before = backbone.family.visual_tokens() if context_tokens is None else context_tokens
        kept = backbone.reducer.kept_words(before, backbone.family.shape.num_layers)
        compression = answers.compression
        return cls(
            arm=arm,
            visual_tokens=f"{kept}/{before}",
            groups=groups_words(backbone.active_routing),
            nominal_kv=backbone.promised_fraction([before], compression.key_channels, compression.key_axes),
            realised_kv=answers.realised,
            eviction=compression.label,
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
            realised_deviation=answers.deviation,
        )

    def content(self, **named: Any) -> dict[str, Any]:
        """Return the record as JSON has it, after what else is ``named``."""
        rounded = {
            "seconds": round(self.seconds, 1),
            "scores": [round(score, 4) for score in self.scores],
            "measures": {
                name: [None if figure is None else round(figure, 4) for figure in figures]
                for name, figures in self.measures.items()
            },
        }
        content = {**named, **asdict(self), **rounded}
        if self.realised_deviation is None:
            del content["realised_deviation"]
        return content


def realised_words(share: float, deviation: float | None) -> str:
    """Return ``21.875%``; where a threshold decides with the standard deviation over the questions."""
    return f"{share:.3%}" + ("" if deviation is None else f" ± {deviation:.3%}")


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a run's record, or several, as one JSON file, which is not there yet."""
    write_whole(path, json.dumps(record, indent=None, separators=(",", ":")) + "\n", overwrite=False)


def read_scores(path: Path, arm: str) -> Evaluation:
    """Read the scores of an arm and of the others that answered the same questions, from a file of ``evaluate --out``.

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
    """Return the facts of a run that a card shows, each of its type."""
    older: dict[str, Any] = {
        "data": "questions",
        "measures": {},
        "realised_deviation": None,
    }  # what records do not always have
    made = chosen(_KINDS, {**older, **checked(dict[str, Any], run, place)}, place)
    if not made["scores"] or len(made["scores"]) != len(made["kinds"]) or made["dense_kv_bytes"] < 1:
        raise ValueError(f"{place}: every score needs its kind, and the cache some bytes")
    for name, figures in made["measures"].items():
        if len(figures) != len(made["kinds"]) or all(figure is None for figure in figures):
            raise ValueError(f"{place}.measures.{name} must have a figure or null for every question, and one figure")
        if not name.isidentifier():
            raise ValueError(f"{place}.measures: {shown(name)} is not the name of a measure, such as token_accuracy")
    return made


def _arm(run: dict[str, Any]) -> CardColumn:
    facts = {
        "visual tokens": run["visual_tokens"],
        "value groups": run["groups"],
        "eviction": run["eviction"],
        "KV nominal": f"{run['nominal_kv']:.3%}",
        "KV realised": realised_words(run["realised_kv"], run["realised_deviation"]),
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
    """Tell whether a kind's scores are the F1 of scenes; records without measures are older, and of scenes."""
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
