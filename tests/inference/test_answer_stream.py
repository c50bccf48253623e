"""Pieces of a streamed answer are its stripped text, whole characters alone, cut before a stop text."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from subtoken_train.inference.answer_stream import AnswerStream
from tests.support.chats import byte_level

TOKENIZER = byte_level()
WORDS = "what is do n't a file , ein Bär ? it 's . we 're ! 've"


def of_words(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes no space before the first word, or that joins words with their marks."""
    named = {"special_tokens": ["<unk>"], "show_progress": False}
    if kind == "metaspace":
        tokenizer, trainer = (
            Tokenizer(models.Unigram()),
            trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **named),
        )
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        trainer = trainers.WordPieceTrainer(vocab_size=90, **named)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=True)


TOKENIZERS = {"bytes": TOKENIZER, "metaspace": of_words("metaspace"), "wordpiece": of_words("wordpiece")}


def test_a_long_answer_is_decoded_in_parts(monkeypatch):
    """Not wholly with every token: its end alone, whatever characters tokens are cut in."""
    text = "what is ein Bär: 東京 🦀 in a file ?\n\n" * 40
    decoded, decode = [], TOKENIZER.decode
    monkeypatch.setattr(TOKENIZER, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    pieces, stream = streamed(text)
    assert "".join(pieces) == text.strip()
    assert len(stream.token_ids) > 1000
    assert max(decoded[:-1]) < 64
    assert decoded[-1] == len(stream.token_ids)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*WORDS.split(), "é", "🦀"]) | st.text(max_size=3), min_size=30, max_size=60),
    size=st.integers(1, 4),
    kind=st.sampled_from(["bytes", "metaspace", "wordpiece"]),
)
def test_what_was_said_is_the_beginning_of_all(parts, size, kind):
    """At every token it is what the tokens so far say together, for tokenizers that join and tidy words too."""
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(" ".join(parts), add_special_tokens=False)
    stream = AnswerStream(tokenizer, lambda piece: None)
    for start in range(0, len(ids), size):
        stream.token_ids += ids[start : start + size]
        assert stream._grown() == tokenizer.decode(stream.token_ids, skip_special_tokens=True)


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


STOPS = {"ile": "what is a f", "\n\n": "what is a file", "USER|is a": "what", "what": "", "x|": None}


@pytest.mark.parametrize("stops", STOPS)
def test_a_stop_text_and_what_follows_is_never_said(stops):
    text, said = "what is a file\n\nUSER: a tag", STOPS[stops]
    pieces, stream = streamed(text, stops.split("|"))
    assert "".join(pieces) == (text if said is None else said)
    assert stream.ended == (said is not None)
    assert stops != "ile" or TOKENIZER.decode(stream.token_ids) == "what is a file"  # no token more than it takes


def test_whoever_is_asked_stops_it_and_special_tokens_are_counted_and_not_said():
    asked = itertools.count()
    _, stream = streamed("a tag in a file", stopped=lambda: next(asked) == 2)
    assert (len(stream.token_ids), stream.ended) == (3, False)
    pieces, stream = streamed("a tag</s>")
    assert ("".join(pieces), stream.token_ids[-1]) == ("a tag", TOKENIZER.eos_token_id)
