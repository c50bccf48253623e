"""Says what a row without turns is, by its names, and what to do: rows of other trainers, preferences, texts."""

from __future__ import annotations

from collections.abc import Collection

_INIT = "`subtoken-train init FOLDER` makes records of such a file"
_TURNS = 'write {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}'
_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("chosen", "rejected"), f"it is a preference pair, and preferences are not trained; {_TURNS} with the chosen one"),
    (("rejected",), f"it is a preference pair, and preferences are not trained; {_TURNS} with the better answer"),
    (
        ("preferred_output", "non_preferred_output"),
        f"it is OpenAI's preference pair, and preferences are not trained; {_TURNS} with the preferred output",
    ),
    (("instruction", "output"), f"it is an Alpaca row (instruction, input, output); {_INIT}, or {_TURNS}"),
    (("prompt", "completion"), f"it is a prompt/completion row; {_INIT}, or {_TURNS}"),
    (("query", "response"), f"it is a query/response row; {_INIT}, or {_TURNS}"),
    (("question", "answer"), f"it is a question/answer row; {_INIT}, or {_TURNS}"),
    (("prompt", "response"), f"it is a prompt/response row; {_INIT}, or {_TURNS}"),
    (("conversation",), f"it has a conversation, as ms-swift and XTuner write it; {_TURNS}"),
    (("input_ids",), f"it is tokenised already; give the texts: {_TURNS}"),
    (("reward_model",), f"it is a prompt for reinforcement learning, without an answer; {_TURNS}"),
    (
        ("text",),
        "it is a plain text, which a language model reads: data.train: {name: FILE}; for turns, " + _TURNS,
    ),
    (("prompt",), f"it is a prompt without an answer; {_TURNS}"),
)


def row_kind(names: Collection[str]) -> str | None:
    """Return what a row with these names is and what to do about it; None where nobody is known to write such rows."""
    return next((words for needed, words in _KINDS if all(name in names for name in needed)), None)
