"""``subtoken-train preview``: runs of tokens with their regions, what is trained, and the refusals of ``fit``."""

import json
import re
import shutil

import pytest
import torch
import yaml

from checkpoints.tiny_llava import build_processor
from subtoken_train.cli.preview import sample_lines
from subtoken_train.datasets.scenes import write_scene_split
from subtoken_train.types import Batch, Region
from tests.support.commands import printed
from tests.support.places import ROOT, recipe

TINY = ["--config", str(recipe("tiny_fastv25_s16k4")), "--data.val_file", "null"]


@pytest.fixture
def scenes(tmp_path):
    """The embedded VLM's recipe on four scenes."""
    write_scene_split(tmp_path / "scenes", "train", 4, seed=0)
    return [*TINY, "--data.train_file", str(tmp_path / "scenes/train.json"), "--data.batch_size", "2"]


def shown(capsys, argv):
    """What a preview that must succeed prints."""
    return printed(capsys, "preview", *argv)


def test_a_scene_as_the_loss_sees_it(scenes, capsys):
    out = shown(capsys, [*scenes, "--count", "2"])
    samples = re.findall(r"'train-00000\d', 1 image: (\d+) tokens \((.*)\), (\d+) trained", out)
    assert len(samples) == 2
    for tokens, counts, trained in samples:
        regions = {word: int(number) for number, word in (part.split() for part in counts.split(", "))}
        assert sum(regions.values()) == int(tokens)
        assert (regions["visual"], regions["answer"]) == (64, int(trained))
    assert out.count("  visual   masked      64  <image x 64>\n") == 2
    assert re.search(r"  query    masked +\d+  .* ASSISTANT:\n  answer   trained +\d+  .* </s>\n", out)


def test_a_corpus_is_shown_without_packing_it_and_without_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("subtoken_train.datasets.corpus.packed_blocks", None)
    shutil.copytree(ROOT / "checkpoints/tiny-llama", "llama", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "the module is imported " * 200}))
    model = {"backbone": {"path": "llama"}, "reducer": {"name": "quest", "keep_ratio": 0.5}}
    blocks = {"train": {"name": "text.jsonl"}, "block_length": 96, "context_length": 64, "prefix_tokens": 8}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": model, "data": blocks, "trainer": {"max_steps": 3}}))
    out = shown(capsys, ["--config", "mine.yaml"])
    assert re.findall(r"'block (\d)': 96 tokens \(64 context, 8 query, 24 answer\), 24 trained", out) == ["0", "1", "2"]


def test_a_sample_without_a_trained_token_is_warned_about():
    tokenizer = build_processor().tokenizer
    ids, regions = torch.tensor([[1, 7, 8, 0]]), torch.tensor([[Region.ANSWER, Region.QUERY, Region.QUERY, 0]])
    labels = torch.tensor([[1, -100, -100, -100]])  # the first token is never a target
    batch = Batch(ids, labels, regions, torch.tensor([-1]), None, torch.tensor([0]), ["odd"])
    text = "\n".join(sample_lines(batch, tokenizer))
    assert "'odd': 3 tokens (2 query, 1 answer), 0 trained\n  warning: no token of this sample is trained\n" in text
    assert text.count("masked") == 2
