"""Pieces of a streamed answer are its stripped text, whole characters alone, cut before a stop text."""

from __future__ import annotations

import itertools

import pytest
import torch

from subtoken_train.inference.answer_stream import AnswerStream
from tests.support.chats import byte_level

TOKENIZER = byte_level()


def streamed(text, stops=(), size=1, stopped=lambda: False):
    """The pieces of a text that is said some tokens at a time, until the stream ends it."""
    pieces, ids = [], TOKENIZER.encode(text, add_special_tokens=False)
    stream = AnswerStream(TOKENIZER, pieces.append, stopped, stops)
    stream.put(torch.tensor([[7, 8, 9]]))
    for start in range(0, len(ids), size):
        stream.put(torch.tensor(ids[start : start + size]))
        if bool(stream(torch.zeros(1, 4, dtype=torch.long), None)):
            break
    stream.end()
    return pieces, stream


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("text", ["a tag", "  what is\n\n a file ? \n", "ein Bär: 東京 🦀!", "", " \n "])
def test_joined_pieces_are_the_stripped_answer(text, size):
    pieces, stream = streamed(text, size=size)
    assert "".join(pieces) == stream.text == text.strip()
    assert all(pieces)
    assert "\N{REPLACEMENT CHARACTER}" not in stream.text
    assert not stream.ended


@pytest.mark.parametrize(
    ("stops", "said"),
    [
        (["ile"], "what is a f"),
        (["\n\n"], "what is a file"),
        (["USER", "is a"], "what"),
        (["what"], ""),
        (["x", ""], None),
    ],
)
def test_a_stop_text_and_what_follows_is_never_said(stops, said):
    text = "what is a file\n\nUSER: a tag"
    pieces, stream = streamed(text, stops)
    assert "".join(pieces) == (text if said is None else said)
    assert stream.ended == (said is not None)
    if stops == ["ile"]:  # no token more than the stop text takes
        assert TOKENIZER.decode(stream.token_ids) == "what is a file"


def test_special_tokens_are_counted_and_not_said():
    pieces, stream = streamed("a tag</s>")
    assert "".join(pieces) == "a tag"
    assert stream.token_ids[-1] == TOKENIZER.eos_token_id


def test_whoever_is_asked_stops_it():
    asked = itertools.count()
    _, stream = streamed("a tag in a file", stopped=lambda: next(asked) == 2)
    assert len(stream.token_ids) == 3
    assert not stream.ended
