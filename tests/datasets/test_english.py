"""The embedded English: the committed file, split without overlap."""

import pytest

from subtoken_train.datasets import english


def test_splits_share_no_paragraph_and_are_prose():
    splits = {split: english.documents(split) for split in english.SPLITS}
    paragraphs = {split: [p for text in texts for p in text.split("\n")] for split, texts in splits.items()}
    everything = [p for some in paragraphs.values() for p in some]
    assert len(everything) == len(set(everything))
    assert all(p.endswith(".") and len(p.split()) >= 6 for p in everything)
    assert {split: sum(map(len, texts)) // 1000 for split, texts in splits.items()} == EXPECTED_THOUSANDS


EXPECTED_THOUSANDS = {"train": 202, "dev": 14, "test": 17}


def test_unknown_split():
    with pytest.raises(ValueError, match=r"unknown split 'val'\. Allowed: dev, test, train"):
        english.documents("val")


def test_another_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "other").write_bytes(b"other")
    monkeypatch.setattr(english, "resource", lambda name: tmp_path / "other")
    english.topics.cache_clear()
    with pytest.raises(ValueError, match=r"topics.json.xz has the SHA-256 .*; restore the committed file"):
        english.topics()
