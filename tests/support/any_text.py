"""Texts of any characters, to draw from."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


def any_text(min_size: int = 0, max_size: int | None = None) -> SearchStrategy[str]:
    """``st.text``, ready to be drawn from.

    Where no run has left one, Hypothesis makes a table of all characters, for seconds: here, and not in a test's first
    draw, which it would call too slow.
    """
    texts = st.text(min_size=min_size, max_size=max_size)
    texts.validate()
    return texts
