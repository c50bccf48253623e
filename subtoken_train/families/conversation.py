"""A conversation as the model's text: its turns, and the prompt that a family renders of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One exchange: what the user says (``<image>`` marks each image) and the answer (None: to be generated)."""

    prompt: str
    answer: str | None = None


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as the model's text.

    Attributes:
        text: the whole prompt; ``image_marker`` stands once per image.
        answer_spans: (start, end) character spans of the answers, end-of-turn token included.
        image_marker: the text of one image placeholder.
    """

    text: str
    answer_spans: list[tuple[int, int]]
    image_marker: str
