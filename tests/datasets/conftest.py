"""Fixtures of the text data."""

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


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
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=0,
            show_progress=False,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        tokenizer.train_from_iterator([], trainer)
        special = {"pad_token": "<pad>", "eos_token": "</s>", **({"bos_token": "<s>"} if bos else {})}
        return CountingTokenizer(tokenizer_object=tokenizer, **special)

    return make
