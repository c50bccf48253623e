"""``subtoken-train axes``: a folder that answers as its model, whose value groups lose less; what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from subtoken_train import SubTokenModel
from subtoken_train.calibrating.base import calibration_prompts
from tests.support.commands import printed, refused
from tests.support.places import ROOT

TINY = ROOT / "checkpoints/tiny-llama"
PROMPT = torch.arange(5, 200)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from subtoken_train.cli.main import main

    out = tmp_path_factory.mktemp("axes") / "turned"
    assert main(["axes", str(TINY), str(out), "--samples", "4"]) == 0
    return out


def test_the_copy_answers_alike_and_says_whose_axes_it_has(folder):
    whole, turned = (SubTokenModel.from_pretrained(path).backbone.model for path in (TINY, folder))
    with torch.no_grad():
        expected, found = whole(PROMPT).logits, turned(PROMPT).logits
    assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))
    config = json.loads((folder / "config.json").read_text())
    assert len(config["value_axes"]) == 64
    assert "value_axes" not in json.loads((TINY / "config.json").read_text())
    assert (folder / "tokenizer.json").exists()


@torch.no_grad()
def test_half_of_the_copy_s_value_groups_lose_less(folder):
    """Of the states that questions about recall contexts end with."""
    lost = {}
    for path in (TINY, folder):
        whole = SubTokenModel.from_pretrained(path).backbone
        half = SubTokenModel.from_pretrained(path, groups=(16, 8)).backbone
        batch = next(calibration_prompts(whole.family, None, 8, 8, 256, 7, answers=False).batches)
        expected, found = (each.run(batch, pad_left=True).hidden_BMD[:, -1] for each in (whole, half))
        lost[path] = float((found - expected).norm() / expected.norm())
    assert 0 < lost[folder] < 0.7 * lost[TINY]


def test_what_is_there_is_not_written_over_and_adapters_are_refused(tmp_path, capsys, folder):
    assert refused(capsys, "axes", TINY, folder) == f"{folder} exists; name another folder, or remove it"
    adapter = ROOT / "checkpoints/adapters/tiny_lora_only"
    assert "is an adapter; name its backbone" in refused(capsys, "axes", adapter, tmp_path / "new")
    assert "bfloat16" in refused(capsys, "axes", TINY, tmp_path / "new", "--dtype", "bfloat61")
    assert "--samples is 0" in refused(capsys, "axes", TINY, tmp_path / "new", "--samples", 0)
    missing = tmp_path / "missing.txt"
    assert "check the path" in refused(capsys, "axes", TINY, tmp_path / "new", "--data", missing)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_takes_images_reads_records(tmp_path, capsys):
    out = tmp_path / "turned"
    records = ROOT / "data/samples/questions.json"
    words = ("--data", records, "--samples", 2, "--dtype", "bfloat16")
    said = printed(capsys, "axes", ROOT / "checkpoints/tiny-llava", out, *words)
    assert said.startswith(f"{out} answers as {ROOT}/checkpoints/tiny-llava does (its last states moved by ")
    config = json.loads((out / "config.json").read_text())
    assert "value_axes" in config
    assert config["dtype"] == "bfloat16"


def test_adapters_of_the_model_do_not_fit_the_copy(folder, tmp_path):
    adapter = next(
        path.parent
        for path in sorted((ROOT / "checkpoints/adapters").glob("*/subtoken_config.json"))
        if json.loads(path.read_text())["backbone"]["path"].endswith("tiny-llama")
    )
    with pytest.raises(ValueError, match="load the backbone that it names"):
        SubTokenModel.from_pretrained(adapter, backbone=str(folder))
