"""The digest of an adapter folder is of its settings and tensors, not of its name or its card."""

from __future__ import annotations

import shutil

import pytest
import torch

from subtoken_train.artifact.identity import SAMPLED, adapter_digest, model_identity
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.reducers import build_reducer
from subtoken_train.resources import resource
from tests.support.text_families import text_family

ADAPTER = resource("checkpoints/adapters/tiny_fastv25_s16k4")


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(ADAPTER, tmp_path / "moved")


def test_the_place_and_the_card_do_not_count(copy):
    (copy / "README.md").write_text("another card")
    assert adapter_digest(copy) == adapter_digest(ADAPTER)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "router.safetensors", "subtoken_config.json"])
def test_one_byte_counts(copy, name):
    content = bytearray((copy / name).read_bytes())
    content[-1] ^= 1
    (copy / name).write_bytes(content)
    assert adapter_digest(copy) != adapter_digest(ADAPTER)


def test_a_second_lora_counts(copy):
    (copy / "output").mkdir()
    shutil.copy(copy / "adapter_model.safetensors", copy / "output")
    assert adapter_digest(copy) != adapter_digest(ADAPTER)


def test_a_model_is_told_by_every_column_of_its_rows_and_by_what_no_weight_shows():
    family = text_family("mistral_window", vocab_size=512)
    backbone = CompressedBackbone(family, build_reducer("none"))
    before = model_identity(backbone)
    table = family.model.get_input_embeddings().weight
    step = table.numel() // SAMPLED
    assert step % table.shape[1] == 0, "as many rows as would hide all columns but one"
    with torch.no_grad():
        table[:, 1:] += 1
        assert model_identity(backbone).weights != before.weights
        table[:, 1:] -= 1
    family.model.config.rms_norm_eps *= 2
    assert model_identity(backbone).weights != before.weights
