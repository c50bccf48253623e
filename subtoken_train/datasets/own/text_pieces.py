"""Plain texts as documents, a few long ones cut at paragraphs, so that each split gets some."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from subtoken_train.datasets.own.folder_scan import OwnFolder
from subtoken_train.documents import read_text, text_problem

MAX_TOTAL = 2**30
"""Bytes of all texts together; more is a corpus, which recipes read as it lies."""
ENOUGH = 30
"""Documents; fewer are cut."""
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def read_texts(own: OwnFolder) -> list[str]:
    """The text files of a folder.

    Raises:
        ValueError: one is too large, is not UTF-8 or is no file; all are too large together, or empty.
    """
    texts, total = [], 0
    for name in own.texts:
        text = read_text(own.path / name).removeprefix("\ufeff")
        total += len(text)
        if total > MAX_TOTAL:
            raise ValueError(
                f"the texts of {own.path} have more than {MAX_TOTAL:,} characters; make them Parquet or JSON lines, "
                "which a recipe reads itself (data.train)"
            )
        if "\0" in text:
            raise ValueError(f"{own.path / name} holds NUL characters, so it is no text; take it out")
        if text.strip() and (problem := text_problem(text)):
            raise ValueError(f"{own.path / name} {problem}; mend it, or move it away")
        texts.append(text)
    if not any(text.strip() for text in texts):
        raise ValueError(f"the texts of {own.path} are empty")
    return texts


def documents_of(texts: Sequence[str]) -> list[str]:
    """Documents: the texts themselves where there are many, else runs of their paragraphs of about equal length."""
    whole = [text.replace("\r\n", "\n").strip() for text in texts if text.strip()]
    if len(whole) >= ENOUGH:
        return whole
    length = max(1, sum(map(len, whole)) // ENOUGH)
    return [piece for text in whole for piece in _pieces(text, length)]


def _pieces(text: str, length: int) -> Iterator[str]:
    """Whole paragraphs, each piece of ``length`` characters or more but the last; lines of a single paragraph."""
    parts = _BLANK_LINES.split(text)
    parts, joint = (parts, "\n\n") if len(parts) > 1 else (text.split("\n"), "\n")
    piece: list[str] = []
    gathered = 0
    for part in parts:
        piece.append(part)
        gathered += len(part)
        if gathered >= length:
            yield joint.join(piece)
            piece, gathered = [], 0
    if piece:
        yield joint.join(piece)
