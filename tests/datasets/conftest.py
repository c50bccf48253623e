"""Fixtures of the text data."""

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support import chats


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The datasets library's cache, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


class CountingTokenizer(PreTrainedTokenizerFast):
    """Counts the texts it tokenises."""

    tokenised = 0

    def __call__(self, text, **kwargs):
        self.tokenised += len(text) if isinstance(text, list) else 1
        return super().__call__(text, **kwargs)


@pytest.fixture
def byte_tokenizer():
    """Makes a tokenizer with one token per byte and ids 0-2 for pad, BOS and EOS; without a BOS on request."""

    def make(bos: bool = True) -> CountingTokenizer:
        made = chats.byte_tokenizer(["<pad>", "<s>", "</s>"], 0, "")
        special = {"pad_token": "<pad>", "eos_token": "</s>", **({"bos_token": "<s>"} if bos else {})}
        return CountingTokenizer(tokenizer_object=made.backend_tokenizer, **special)

    return make
