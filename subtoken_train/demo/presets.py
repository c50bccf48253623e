"""Pictures and questions that the page offers: those of ``data/samples``."""

from __future__ import annotations

from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.resources import resource
from subtoken_train.types import Turn


def presets() -> list[tuple[str, str]]:
    """(path of a picture, question) of every shipped sample."""
    records = InstructionRecords(resource("data/samples") / "questions.json")
    found = [records[i] for i in range(len(records))]
    return [(str(record.images[0]), _question(record.turns[-1])) for record in found]


def _question(turn: Turn) -> str:
    return turn.prompt.removeprefix("<image>").strip()
