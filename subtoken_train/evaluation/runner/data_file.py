"""Questions of a data file (``evaluate --data FILE``), answered in memory and written as one file of runs; no grid."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from subtoken_train.artifact.card import CardColumn, Evaluation, Score
from subtoken_train.datasets.collate import answer_tokens
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.documents import parse_json, read_json
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import SubTokenWarning, at_place, check_word, refuse
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evaluation.metrics.metric import MeanScores
from subtoken_train.evaluation.results import SampleRecord
from subtoken_train.evaluation.runner.cell import Cell, Progress, answered, model_inputs
from subtoken_train.evaluation.tasks.embedded_tasks import SceneScore, instruction_samples
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.families.literal_marks import escaped
from subtoken_train.inference.batched import in_batches
from subtoken_train.inference.cache_report import Outcome, TokenScore
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import who_drops
from subtoken_train.ledger.kv_budget import mean_deviation, share_words
from subtoken_train.ledger.measure import emptied_words
from subtoken_train.outputs import append_whole, write_whole
from subtoken_train.typed import checked, chosen, shown, typed
from subtoken_train.types import Turn, grouped

Run = dict[str, Any]
"""A run of questions: its budget, and every score and prediction in the order of the questions. ``RUN`` names its keys.

``kv_bytes``, ``dense_kv_bytes`` and ``unread_bytes`` (what a step of decoding does not read) are sums over all prompts;
``nominal_kv`` is what the ledger promises of the compressed region before an eviction, ``realised_kv`` the share of its
keys and values that stayed, in the model's dtype and without the index. ``measures``: other figures by name, one per
question or None.
"""
SUMS = ("kv_bytes", "dense_kv_bytes", "unread_bytes")
RUN: dict[str, Any] = {
    **dict.fromkeys(("arm", "data", "data_sha256", "visual_tokens", "groups", "eviction"), str),
    **dict.fromkeys(("nominal_kv", "realised_kv"), float), "realised_deviation": float | None,
    **dict.fromkeys(SUMS, int), "kinds": list[str], "scores": list[float],
    "measures": dict[str, list[float | None]],
    "predictions": list[Any] | None,
}  # fmt: skip
"""Keys that are read of a run, and their types."""
Answers = Iterator[list[tuple[SampleRecord, Outcome]]]
Asking = Callable[[Sequence[Sequence[Sample]]], Answers]


def go_on(path: Path, kind: dict[str, Any], batches: Sequence[Sequence[Sample]], ask: Asking) -> Answers:
    """Yield answers that a file holds, a batch a line below ``kind``, then those that it lacks, each kept at once."""
    text, place = path.read_text("utf-8") if path.is_file() else "", str(path)
    lines = text[: text.rfind("\n") + 1].splitlines() or [json.dumps(kind)]  # without a line that was cut off
    first, *held = [parse_json(line, place) for line in lines]
    refuse((first != kind, f"{place} was begun with other questions or settings; remove it, or name another --out"))
    write_whole(path, "".join(f"{line}\n" for line in lines))
    for found in held:
        yield [(typed(SampleRecord, record, place), typed(Outcome, outcome, place)) for record, outcome in found]
    for pairs in ask(batches[len(held) :]):
        append_whole(path, json.dumps([list(map(asdict, pair)) for pair in pairs]) + "\n")
        yield pairs


def answer_records(
    backbone: CompressedBackbone,
    records: InstructionRecords,
    *,
    max_length: int = 2048,
    batch_size: int = 64,
    max_new_tokens: int = 64,
    limit: int | None = None,
    progress: Progress | None = None,
    compression: Compression | None = None,
    held: Callable[[Sequence[Sequence[Sample]], Asking], Answers] | None = None,
) -> Run:
    """Answer the last turn of every record, and score it and its reference answer's tokens."""
    samples = instruction_samples(records, limit, max_new_tokens)
    order = sorted(range(len(samples)), key=lambda place: samples[place].kind in DESCRIPTION_KINDS)  # long answers last
    batches = list(in_batches(order, batch_size))
    inputs = partial(model_inputs, family=backbone.family, modality="image", max_length=max_length)

    def reference(sample: Sample) -> list[int]:
        turns = [*sample.earlier, Turn(sample.prompt, escaped(sample.reference["answer"]))]
        return answer_tokens(Record(sample.id, [], turns), backbone.family)

    cell = Cell(samples, SceneScore(), inputs, compression or Compression(), reference=reference)
    return answer_samples(backbone, cell, batches, progress, held=held)


def answer_samples(
    backbone: CompressedBackbone,
    cell: Cell,
    batches: Sequence[Sequence[int]],
    progress: Progress | None = None,
    tokens: int | None = None,
    held: Callable[[Sequence[Sequence[Sample]], Asking], Answers] | None = None,
) -> Run:
    """Answer samples without choices greedily, those together whose places are a batch; each is in one batch.

    The run names neither its arm nor its data. ``tokens`` of a context may be compressed; None: an image's. Measures:
    other figures of the metric and, of references under teacher forcing on the answer's own cache, ``token_accuracy``
    (share of greedy choices) and ``log_likelihood`` (mean, nats): an eviction of the whole prompt does not show in the
    first token, and ``eviction_every`` leaves no such cache.
    """
    samples, metric, compression, clock = cell.samples, cell.metric, cell.compression, time.perf_counter()
    assert isinstance(metric, MeanScores)
    found: dict[int, SampleRecord] = {}
    figures: dict[int, dict[str, float]] = {}
    kept = before = 0.0
    asked = [[samples[place] for place in places] for places in batches]
    ask = partial(answered, cell if compression.every is None else replace(cell, reference=None), backbone)
    made = ask(asked) if held is None else held(asked, ask)
    for places, pairs in zip(batches, made, strict=True):
        for place, (record, outcome) in zip(places, pairs, strict=True):
            kept += (outcome.keys_after + outcome.values_after) / 2
            before += outcome.entries_before
            found[place] = record
            figures[place] = _of_reference(record.id, outcome.reference)
            figures[place] |= metric.figures(record.prediction, record.reference)
        if progress is not None:
            progress(len(found), len(samples))
    records = [found[place] for place in range(len(samples))]
    told = [figures[place] for place in range(len(samples))]
    lost = [record.emptied for record in records]
    if dropped := emptied_words(lost, *who_drops(backbone.active_routing, compression.label)):
        warnings.warn(dropped, SubTokenWarning, stacklevel=2)
    named = dict.fromkeys(name for each in told for name in each if name != metric.names[0])
    shares = [(x.region_bytes - x.index_bytes) / x.region_dense_bytes for x in records if x.region_dense_bytes]
    spread = {} if compression.threshold is None or not shares else {"realised_deviation": mean_deviation(shares)[1]}
    tokens, routing = backbone.family.visual_tokens() if tokens is None else tokens, backbone.active_routing
    return {
        "visual_tokens": f"{backbone.reducer.kept_words(tokens, backbone.family.shape.num_layers)}/{tokens}",
        "groups": "-" if routing is None else routing.words,
        "nominal_kv": backbone.promised_fraction([tokens], compression.key_channels, compression.key_axes),
        "realised_kv": kept / before if before else 1.0,
        "eviction": compression.label,
        **{name: sum(getattr(record, name) for record in records) for name in SUMS},
        "prompts_with_an_emptied_region": sum(bool(record.emptied) for record in records),
        "seconds": time.perf_counter() - clock,
        "kinds": [record.kind for record in records],
        "scores": [record.score for record in records],
        "predictions": [record.prediction for record in records],
        "measures": {name: [each.get(name) for each in told] for name in named},
        **spread,
    }


def _of_reference(name: str, score: TokenScore | None) -> dict[str, float]:
    if score is None:
        return {}
    mean = score.logprob / score.count
    words = f"sample {name!r}: the model gave NaN or infinity; choose a wider dtype, or another adapter"
    refuse((not math.isfinite(mean), words))
    return {"token_accuracy": score.right / score.count, "log_likelihood": mean}


def scores_by_kind(run: Run) -> dict[str, list[float]]:
    """Return a run's scores by question kind, in the order in which the kinds first appear."""
    return grouped(zip(run["kinds"], run["scores"], strict=True))


def written_run(run: Run, **named: Any) -> Run:
    """Return a run as a file has it, after what else is ``named``."""
    figures = {"scores": run["scores"], **run["measures"]}
    made = {name: [None if each is None else round(each, 4) for each in own] for name, own in figures.items()}
    return {**named, **run, "seconds": round(run["seconds"], 1), "scores": made.pop("scores"), "measures": made}


def write_runs(runs: Sequence[Run], path: Path) -> None:
    """Write runs as one JSON file, which is not there yet."""
    write_whole(path, json.dumps({"runs": runs}, indent=None, separators=(",", ":")) + "\n", overwrite=False)


def read_scores(path: Path, arm: str) -> Evaluation:
    """Read the scores of an arm and of the others in a file of ``evaluate --out``; all answered the same questions."""
    refuse((not path.is_file(), f"metrics {path} is not a file; 'subtoken-train evaluate --out FILE' writes one"))
    with at_place(f"metrics {path} is not a record of 'subtoken-train evaluate --out' (", ")"):
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"it is {shown(content)}")
        runs = [_checked(run, f"runs[{i}]") for i, run in enumerate(checked(list[Any], content.get("runs"), "runs"))]
    arms = {run["arm"]: column_of(run) for run in runs}
    asked = {(run["data"], run["data_sha256"], tuple(run["kinds"])) for run in runs}
    check_word(f"arm of {path}", arm, arms)
    refuse((len(asked) != 1, f"the arms of {path} answered different questions; evaluate them in one call"))
    data, digest, _ = asked.pop()
    return Evaluation(data, digest, arms.pop(arm), tuple(arms.values()))


def _checked(run: Any, place: str) -> Run:
    older: Run = {"data": "questions", "measures": {}, "unread_bytes": 0}
    older |= dict.fromkeys(("realised_deviation", "predictions"))
    made = chosen(RUN, {**older, **checked(dict[str, Any], run, place)}, place)
    counts = {len(made[key]) for key in ("scores", "kinds", "predictions") if made[key] is not None}
    if counts == {0} or len(counts) > 1 or made["dense_kv_bytes"] < 1:
        raise ValueError(f"{place}: every score needs its kind and its prediction, and the cache some bytes")
    for name, figures in made["measures"].items():
        if len(figures) != len(made["kinds"]) or all(figure is None for figure in figures):
            raise ValueError(f"{place}.measures.{name} must have a figure or null for every question, and one figure")
        if not name.isidentifier():
            raise ValueError(f"{place}.measures: {shown(name)} is not the name of a measure, such as token_accuracy")
    return made


def column_of(run: Run) -> CardColumn:
    """Return a run's budget and scores, by kind and by measure, as tables and model cards print them."""
    deviation, kinds, dense = run.get("realised_deviation"), run["kinds"], run["dense_kv_bytes"]
    facts = {
        "visual tokens": run["visual_tokens"],
        "value groups": run["groups"],
        "eviction": run["eviction"],
        "KV nominal": f"{run['nominal_kv']:.3%}",
        "KV realised": f"{run['realised_kv']:.3%}" + ("" if deviation is None else f" ± {deviation:.3%}"),
        "KV bytes, text and index included": share_words(run["kv_bytes"] / dense),
    }
    if run["unread_bytes"]:  # stored in full, and a table says so
        facts["read per step"] = f"{(run['kv_bytes'] - run['unread_bytes']) / dense:.1%}"
    having = {
        name: {kind: None for kind, figure in zip(kinds, figures, strict=True) if figure is not None}
        for name, figures in run["measures"].items()
    }
    described = {kind for name, of in having.items() if name.endswith("_f1") for kind in of}
    older = not run["measures"]  # records without measures are of scenes
    groups = scores_by_kind(run)
    listed = {kind for kind in DESCRIPTION_KINDS if older or kind in described}
    metrics = {kind: "f1" if kind in listed else "exact_match" for kind in groups}
    used = set(metrics.values())
    metrics["all"] = used.pop() if len(used) == 1 else "score"
    together = groups if len(groups) == 1 else {"all": run["scores"], **groups}
    scores = [_score(kind, metrics[kind], values) for kind, values in together.items()]
    for name, figures in run["measures"].items():
        of = "all" if len(having[name]) == len(groups) > 1 else " and ".join(having[name])
        scores.append(_score(of, name, [figure for figure in figures if figure is not None]))
    return CardColumn(run["arm"], facts, tuple(scores))


def _score(kind: str, metric: str, values: list[float]) -> Score:
    return Score(kind, metric, len(values), sum(values) / len(values), *bootstrap_interval(values))
