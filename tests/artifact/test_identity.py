"""The digest of an adapter folder is of its settings and tensors, not of its name or its card."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from subtoken_train.artifact.identity import adapter_digest
from subtoken_train.families.backbone_config import resolve

ADAPTER = Path(resolve("checkpoints/adapters/tiny_fastv25_s16k4"))


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
