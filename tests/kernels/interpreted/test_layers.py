"""The fused kernels, interpreted (their bf16 products come out wrong: a GPU's): widths, one door, what is refused."""

import os

import pytest
import torch

from subtoken_train.kernels.dispatch import attend
from subtoken_train.kernels.reference import reference_attention
from subtoken_train.kernels.storage import Tail
from tests.support.packing import BOUNDS, FusedCell, deviation, layer_of


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("pieces", ["none", "few", "many"])
def test_widths_of_published_models(width, pieces):
    given = {"heads": 1, "group": 2, "entries": 33, "keeps": "all", "share": 0.25, "new": 1, "dtype": "float32"}
    cell = FusedCell.drawn(width, width=width, pieces=pieces, layout="per_head", **given)
    assert deviation(cell, width) < 5e-5, cell


@pytest.mark.parametrize("form", ["model", "int8_channel", "kivi4", "kivi2"])
def test_the_cache_takes_the_forced_path(form, monkeypatch):
    """By the one door: the kernels' own numbers come back, not those of another path."""
    given = {"dtype": "float16", "form": form, "entries": 50, "window": None, "keeps": "all", "cut": False}
    cell = FusedCell.drawn(1, **given, pieces="halves")
    blocks = layer_of(cell, 1, "cpu")
    stored = {payload.format.name for block in blocks for part in block.parts for payload in part.payloads}
    assert stored == {"model", form}
    states = torch.randn(2, cell.heads, 3, cell.width, generator=torch.Generator().manual_seed(0)).half()
    query, tail = states.repeat_interleave(cell.group, 1)[:, :, :1], Tail(states, states, 3)
    results = {}
    for path in ("triton", "cpu", "reference"):
        monkeypatch.setenv("SUBTOKEN_KERNEL", path)
        results[path] = attend(query, blocks, tail, 0.3)
    assert torch.equal(results["reference"], reference_attention(query, blocks, tail, 0.3))
    torch.testing.assert_close(results["triton"], results["reference"], atol=4e-3, rtol=0)
    assert not torch.equal(results["triton"], results["cpu"])


@pytest.mark.parametrize(("width", "dtype", "words"), [(264, "float32", "264 channels"), (8, "float64", "float64")])
def test_what_is_not_served_is_said(width, dtype, words, monkeypatch):
    cell = FusedCell.drawn(2, width=width, pieces="none", form="model", window=None, cut=False, dtype=dtype)
    blocks = layer_of(cell, 2, "cpu")
    states = torch.zeros(2, cell.heads, 1, width, dtype=getattr(torch, dtype))
    query = states.repeat_interleave(cell.group, 1)
    monkeypatch.setenv("SUBTOKEN_KERNEL", "triton")
    with pytest.raises(ValueError, match=words):
        attend(query, blocks, Tail(states, states, 1), 1.0)


FIRST, COUNT = int(os.environ.get("DRAWN_FIRST", "0")), int(os.environ.get("DRAWN_COUNT", "20"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_drawn(seed):
    cell = FusedCell.drawn(seed)
    assert deviation(cell, seed) < BOUNDS[cell.dtype], cell
