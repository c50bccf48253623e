"""The evaluation that training runs now and then, put together here: ``training`` does not know ``evaluation``."""

from __future__ import annotations

from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.data_file import answer_records
from subtoken_train.training.panels.midway_scores import Evaluate, EvaluationConfig


def midway_evaluator(config: EvaluationConfig, attention: str) -> Evaluate:
    """A function from a backbone to its scores on the recipe's ``evaluation`` band; the data are read at once.

    Scores are means: ``accuracy`` over all questions (exact match; F1 of the objects for scene descriptions), and one
    per kind where the records name several.

    Args:
        config: the band.
        attention: of the recipe's backbone.

    Raises:
        ValueError: data that are missing or wrong, or an attention that cannot read packed caches.
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
        of_kinds = {kind: sum(found) / len(found) for kind, found in kinds.items()} if len(kinds) > 1 else {}
        return {"accuracy": sum(answers.scores) / len(answers.scores), **of_kinds}

    return evaluate


def check_attention(attention: str) -> None:
    """Raise a worded ``ValueError`` for an attention that cannot read packed caches."""
    if attention == "eager":
        raise ValueError("evaluation decodes from a packed cache, which eager attention cannot; use attention: sdpa")
