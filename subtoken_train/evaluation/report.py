"""What a run of questions leaves: a JSON record, and a row of a table."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import plain
from subtoken_train.evaluation.answer import Answers
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.ledger.ledger import KVBudget, nominal_ledger, share_words

BYTES_NOTE = "KV nominal: before eviction; KV bytes: packed prompts, text and index included, of the dense cache"


@dataclass(frozen=True)
class ArmFacts:
    """What a table says of an arm besides its scores.

    Attributes:
        name: the arm's name.
        tokens: visual tokens kept of one image, and before reduction.
        groups: ``S16K4 linear``, or ``-`` for token-only arms.
        nominal: rho_total of the visual region, over all layers, from the ledger; before eviction.
        realised: the same from the entries and groups that were kept.
        eviction: method, budget and precision of the cache; ``-`` where there is none.
        bytes_share: measured bytes of the prompts' caches, text and index included, over those of dense caches.
    """

    name: str
    tokens: str
    groups: str
    nominal: float
    realised: float
    eviction: str
    bytes_share: float


def arm_facts(name: str, backbone: CompressedBackbone, answers: Answers, context_tokens: int | None = None) -> ArmFacts:
    """Read an arm's budget from its parts and its answers' ledger.

    Args:
        name: the arm's.
        backbone: what answered.
        answers: what it answered.
        context_tokens: a language model's context; None: the compressed region is an image.
    """
    family, reducer = backbone.family, backbone.reducer
    region, before = ("visual", family.visual_tokens()) if context_tokens is None else ("context", context_tokens)
    kept = reducer.kept_tokens(before)
    routing = backbone.active_routing
    budget = KVBudget(1.0) if routing is None else KVBudget(1.0, routing.num_groups, routing.kept_groups)
    ledger = nominal_ledger(family.shape, {region: before}, budget, reducer.cut_layer, kept_tokens=kept)
    groups = "-" if routing is None else f"S{routing.num_groups}K{routing.kept_groups} {routing.selector}"
    return ArmFacts(
        name,
        f"{kept}/{before}",
        groups,
        ledger.fraction(region),
        answers.ledger.fraction(region),
        answers.compression.label,
        answers.kv_bytes / answers.ledger.dense_bytes(),
    )


def run_record(facts: ArmFacts, answers: Answers, data: bytes, extra: dict[str, Any]) -> dict[str, Any]:
    """The JSON record of one run: facts, scores and predictions of every question, and a digest of what was asked.

    ``data`` is the question file's content, or what the questions are drawn by.
    """
    return {
        **extra,
        "arm": facts.name,
        "visual_tokens": facts.tokens,
        "groups": facts.groups,
        "nominal_kv": facts.nominal,
        "realised_kv": facts.realised,
        "eviction": facts.eviction,
        "kv_bytes": answers.kv_bytes,
        "dense_kv_bytes": answers.ledger.dense_bytes(),
        "prompts_with_an_emptied_region": answers.emptied,
        "data_sha256": hashlib.sha256(data).hexdigest(),
        "seconds": round(answers.seconds, 1),
        "kinds": [row.kind for row in answers.rows],
        "scores": [round(row.score, 4) for row in answers.rows],
        "predictions": [row.prediction for row in answers.rows],
    }


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a run's record as one JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=None, separators=(",", ":")) + "\n")


def score_table(arms: list[tuple[ArmFacts, Answers]]) -> Table:
    """A terminal table, one column per arm: budget, then the score of every question kind with its 95 % interval."""
    table = Table(title="held-out questions, greedy answers: score in %, 95 % interval", caption=BYTES_NOTE)
    table.add_column("")
    for facts, _ in arms:
        table.add_column(Text(plain(facts.name)), justify="right")
    facts_of = [facts for facts, _ in arms]
    table.add_row("visual tokens", *[facts.tokens for facts in facts_of])
    table.add_row("value groups", *[facts.groups for facts in facts_of])
    table.add_row("cache", *[Text(plain(facts.eviction)) for facts in facts_of])
    table.add_row("KV nominal", *[f"{facts.nominal:.3%}" for facts in facts_of])
    table.add_row("KV realised", *[f"{facts.realised:.3%}" for facts in facts_of])
    table.add_row("KV bytes", *[share_words(facts.bytes_share) for facts in facts_of], end_section=True)
    table.add_row("all", *[_cell([row.score for row in answers.rows]) for _, answers in arms])
    groups = [answers.by_kind() for _, answers in arms]
    for kind in groups[0]:
        table.add_row(Text(plain(kind)), *[_cell(group[kind]) for group in groups])
    table.add_section()
    table.add_row("seconds", *[f"{answers.seconds:.0f}" for _, answers in arms])
    return table


def _cell(scores: list[float]) -> str:
    low, high = bootstrap_interval(scores)
    return f"{100 * sum(scores) / len(scores):.1f} [{100 * low:.1f}, {100 * high:.1f}]"
