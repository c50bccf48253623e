"""Scores of a training run: those while it goes on, and those on its model card with what else the card says of it.

``training`` and ``evaluation`` do not know each other: they meet here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from subtoken_train.artifact.card import CardSections
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.runner.data_file import answer_records, read_scores
from subtoken_train.ledger.kv_budget import entry_bytes
from subtoken_train.training.panels.midway_scores import Evaluate, EvaluationConfig
from subtoken_train.training.preflight import NominalPrompt, layer_bands, nominal_prompt, prompt_ledger


def midway_evaluator(config: EvaluationConfig, attention: str) -> Evaluate:
    """A function from a backbone to its scores on the recipe's ``evaluation`` band; the data are read at once.

    Scores are means: ``accuracy`` over all questions (exact match; F1 of the objects for scene descriptions), and one
    per kind where the records name several.
    """
    check_attention(attention)
    records = InstructionRecords(config.data, config.image_folder, config.images_outside_folder)

    def evaluate(backbone: CompressedBackbone) -> dict[str, float]:
        answers = answer_records(
            backbone,
            records,
            max_length=config.max_length,
            batch_size=config.batch_size,
            max_new_tokens=config.max_new_tokens,
            limit=config.limit,
        )
        kinds = answers.by_kind()
        named = {"accuracy": answers.scores, **(kinds if len(kinds) > 1 else {})}
        return {name: sum(found) / len(found) for name, found in named.items()}

    return evaluate


def check_attention(attention: str) -> None:
    """Raise a worded ``ValueError`` for an attention that cannot read packed caches."""
    if attention == "eager":
        raise ValueError("evaluation decodes from a packed cache, which eager attention cannot; use attention: sdpa")


def card_sections(
    cli: Any, parts: CompressedBackbone, recipe: Path | None, arm: str, metrics: str | None, repo_id: str | None
) -> CardSections:
    """Return the sections of a model card besides the configuration; without a recipe the scores alone.

    Scores are those of ``arm`` in ``metrics``, a file of ``evaluate --out``. The backbone may be on the meta device.
    """
    evaluation = None if metrics is None else read_scores(Path(metrics), arm)
    if recipe is None:
        return CardSections(evaluation=evaluation, repo_id=repo_id)
    table = budget_table(parts, nominal_prompt(parts.family, cli.datamodule))
    return CardSections(recipe.read_text(encoding="utf-8"), table, evaluation, repo_id)


def budget_table(parts: CompressedBackbone, prompt: NominalPrompt) -> str:
    """The ledger by layers and region as Markdown, in the bytes of the backbone's dtype."""
    ledger, dtype = prompt_ledger(parts, prompt), str(parts.family.model.dtype).removeprefix("torch.")
    lines = [
        f"One prompt of {prompt.note}; bytes of one layer, {dtype}. Keys stay whole; the index names the kept groups.",
        "",
        "| layers | region | tokens | kept | keys B | values B | index B | KV kept |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for band in layer_bands(ledger):
        for row in band.rows:
            share = row.payload_bytes / (entry_bytes(ledger.shape) * row.tokens_before)
            counts = (row.tokens_before, row.tokens, row.key_bytes, row.value_bytes, row.index_bytes)
            cells = " | ".join(f"{count:,}" for count in counts)
            lines.append(f"| {band.first}-{band.last} | {row.region} | {cells} | {share:.4%} |")
    whole, region = ledger.bytes_of(with_index=False), ledger.bytes_of(prompt.region, with_index=False)
    lines += [
        "",
        f"All layers: {region:,} of {ledger.dense_bytes(prompt.region):,} bytes of the {prompt.region} region "
        f"({ledger.fraction(prompt.region):.4%}), {whole:,} of {ledger.dense_bytes():,} of the prompt "
        f"({ledger.fraction():.4%}); {ledger.bytes_of() - whole:,} bytes of index are not counted.",
    ]
    return "\n".join(lines)
