"""Layers that the kernel packs in one launch are, number for number, those of ``cache/pack.py``.

What a fill leaves of bf16 values is left to a GPU: the interpreter cuts it instead of rounding it.
"""

import os

import pytest
import torch

from subtoken_train.kernels import triton_pack
from subtoken_train.kernels.storage import RoutedValues
from tests.support.packing import FusedCell, layer_of


def tensors(blocks):
    """Every tensor and number of some blocks, by what it is."""
    for number, block in enumerate(blocks):
        yield (number, "rows"), block.rows
        yield (number, "numbers"), block.numbers
        yield (number, "channels"), block.channels
        for place, part in enumerate(block.parts):
            yield (number, place, "cut"), part.cut
            yield (number, place, "positions"), part.position_RM
            for name, payload in zip(("keys", "values"), part.payloads, strict=True):
                yield (number, place, name, "format"), (payload.format, payload.dtype)
                yield (number, place, name), payload.data
                yield (number, place, name, "scale"), payload.scale
            if isinstance(part.values, RoutedValues):
                for name in ("index", "offsets", "piece_bit", "entries", "heads", "bounds"):
                    yield (number, place, name), getattr(part.values, name)


def packed_both_ways(cell, seed, monkeypatch, batch=2):
    """The blocks of the reference, and of the kernel; how often it ran."""
    found, calls, fused = {}, [], triton_pack.launch_packing
    monkeypatch.setattr(triton_pack, "launch_packing", lambda *given: calls.append(1) or fused(*given))
    for path in ("reference", "triton"):
        monkeypatch.setenv("SUBTOKEN_KERNEL", path)
        found[path] = dict(tensors(layer_of(cell, seed, "cpu", batch)))
    assert found["triton"].keys() == found["reference"].keys()
    for name, expected in found["reference"].items():
        got = found["triton"][name]
        if isinstance(expected, torch.Tensor):
            assert got.dtype == expected.dtype, (name, cell)
            assert got.shape == expected.shape, (name, cell)
            assert got.is_contiguous(), (name, cell)
            assert torch.equal(got, expected), (name, cell)
        else:
            assert got == expected, (name, cell)
    return len(calls)


FIRST, COUNT = int(os.environ.get("DRAWN_FIRST", "0")), int(os.environ.get("DRAWN_COUNT", "20"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_drawn(seed, monkeypatch):
    given = {"form": ["model", "int8", "int4"][seed % 3], "dtype": ["float32", "float16", "bfloat16"][seed // 3 % 3]}
    given |= {"fill": "none"} if given["dtype"] == "bfloat16" else {}
    cell = FusedCell.drawn(seed, **given)
    assert packed_both_ways(cell, seed, monkeypatch, batch=1 + seed % 3) == (cell.keeps != "none")


@pytest.mark.parametrize(("width", "pieces"), [(64, "few"), (80, "many"), (128, "few"), (256, "none")])
def test_widths_of_published_models(width, pieces, monkeypatch):
    given = {"heads": 2, "entries": 70, "keeps": "some", "share": 0.25, "form": "int4", "dtype": "float16"}
    assert packed_both_ways(FusedCell.drawn(width, width=width, pieces=pieces, **given), width, monkeypatch) == 1


@pytest.mark.parametrize("form", ["kivi4", "int8_channel", "turboquant4", "int4_rotated"])
def test_other_formats_are_packed_as_before(form, monkeypatch):
    assert packed_both_ways(FusedCell.drawn(1, form=form, width=16), 1, monkeypatch) == 0
