"""Shared fixtures: random tiny models of the real classes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def shared() -> Path:
    """Reference material of the original implementations; not part of the project."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("reference material (../shared) is absent")
    return folder


@pytest.fixture
def tiny_family():
    """A LlavaFamily over a randomly initialised tiny LLaVA (64 visual tokens, 4 layers)."""
    import torch

    from checkpoints.tiny_llava import build_model, build_processor
    from subtoken_train.families.llava import LlavaFamily

    torch.manual_seed(0)
    return LlavaFamily(build_model(text_layers=4).eval(), build_processor())


@pytest.fixture(scope="session")
def vlm_adapter(tmp_path_factory) -> Path:
    """An adapter folder over a random tiny LLaVA, see ``helpers``."""
    from tests.support.helpers import write_vlm_adapter

    return write_vlm_adapter(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="session")
def text_adapter(tmp_path_factory) -> Path:
    """An adapter folder over a random tiny Llama, see ``helpers``."""
    from tests.support.helpers import write_text_adapter

    return write_text_adapter(tmp_path_factory.mktemp("text"))


@pytest.fixture
def dummy_evictions(monkeypatch):
    """Registers the eviction methods ``first`` and ``first_visual``."""
    from subtoken_train.evictions import EVICTIONS
    from tests.support.helpers import FirstEntries, FirstVisual

    for method in (FirstEntries, FirstVisual):
        monkeypatch.setitem(EVICTIONS, method.name, method)
