"""Real models, which a checkout holds below ``checkpoints/`` once they are fetched; tests on them skip elsewhere."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from subtoken_train import SubTokenModel
from tests.support.places import ROOT


def real_folder(name: str) -> Path:
    """Return the folder of a real model, or skip the test that asks."""
    folder = ROOT / "checkpoints" / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"checkpoints/{name} is absent; `subtoken-train data {name}` fetches it")
    return folder


def real_model(name: str) -> SubTokenModel:
    """Load a real model in fp32, uncompressed, or skip the test that asks."""
    folder = real_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return SubTokenModel(model, AutoTokenizer.from_pretrained(folder))
