"""Layers that the kernel packs in one launch are, number for number, those of ``cache/pack.py``.

Where a format sums (norms, rotations, what a scale loses), the sums' order is another, and of fifty vectors one may
take the code beside. What a fill leaves of bf16 values is left to a GPU: the interpreter cuts it, and does not round.
"""

import os

import pytest
import torch

from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.kernels import triton_pack
from subtoken_train.kernels.formats import FORMATS
from tests.support.packing import FusedCell, layer_of, numbers


def packed_both_ways(make, summed, monkeypatch):
    """Blocks that ``make`` gives by the kernel are those of the reference; return how often the kernel ran."""
    found, calls, fused = {}, [], triton_pack.launch_packing
    monkeypatch.setattr(triton_pack, "launch_packing", lambda *given: calls.append(1) or fused(*given))
    for path in ("reference", "triton"):
        monkeypatch.setenv("SUBTOKEN_KERNEL", path)
        found[path] = numbers(make())
    assert found["triton"].keys() == found["reference"].keys()
    for name, expected in found["reference"].items():
        got = found["triton"][name]
        if isinstance(expected, torch.Tensor):
            assert got.dtype == expected.dtype, name
            assert got.shape == expected.shape, name
            assert got.is_contiguous(), name
            bits = torch.uint8 if got.dtype == torch.float8_e4m3fn else got.dtype
            unlike = got.view(bits) != expected.view(bits)
            vectors = unlike.flatten(0, -2).any(-1) if summed and unlike.dim() > 1 else unlike
            assert int(vectors.sum()) <= (-(-len(vectors) // 50) if summed and "keys" in name else 0), name
        else:
            assert got == expected, name
    return len(calls)


FIRST, COUNT = int(os.environ.get("DRAWN_FIRST", "0")), int(os.environ.get("DRAWN_COUNT", "44"))
FORMS = [*FORMATS]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_drawn(seed, monkeypatch):
    form, dtype = FORMS[seed % len(FORMS)], ["float32", "float16", "bfloat16"][seed // len(FORMS) % 3]
    odd = (seed + seed // len(FORMS)) % 2  # every format has both, however many there are
    mixes, per_code, given = FORMATS[form].mixes, FORMATS[form].per_code, {"dtype": dtype, "fed": odd == 0}
    given |= ({"cut": False} if mixes else {}) | ({"fill": "none"} if dtype == "bfloat16" else {})
    given |= {"width": 4 * per_code, "pieces": ["none", "halves"][odd]} if per_code > 2 else {}
    cell = FusedCell.drawn(seed, form=form, **given)
    assert cell.form == form
    ran = packed_both_ways(lambda: layer_of(cell, seed, "cpu", 1 + seed % 3), mixes, monkeypatch)
    assert ran == (cell.keeps != "none"), cell


@pytest.mark.parametrize("form", ["int4", "kivi4", "turboquant4", "int4_rotated"])
@pytest.mark.parametrize(("width", "pieces"), [(64, "few"), (80, "many"), (128, "few"), (256, "none")])
def test_widths_of_published_models(width, pieces, form, monkeypatch):
    given = {"heads": 2, "entries": 70, "keeps": "some", "share": 0.25, "dtype": "float16", "cut": form == "int4"}
    cell = FusedCell.drawn(width, width=width, pieces=pieces, form=form, **given)
    assert packed_both_ways(lambda: layer_of(cell, width, "cpu"), FORMATS[form].mixes, monkeypatch) == 1


@pytest.mark.parametrize("form", [form for form, own in FORMATS.items() if own.rounds and not own.mixes])
def test_ties_zeros_and_ends(form, monkeypatch):
    """In steps of 1, numbers on codes and halfway between; vectors of zeros, of little, and of more than fp16 holds."""
    own, generator = FORMATS[form], torch.Generator().manual_seed(0)
    top, least = int(own.rounding("values", 32).top), 0 if own.zero else -1
    states = torch.randint(2 * least * top, 2 * top + 1, (2, 1, 2, 80, 32), generator=generator) / 2
    for channels in (states, states.mT):  # of keys by channel and of all others, both ends of a block
        channels[..., ::16], channels[..., 1::16] = top, least * top
    states[:, :, :, 3] = torch.tensor([0.0, -0.0]).repeat(16)
    states[:, :, :, 4] *= 1e-9
    states[:, :, :, 5] *= 1e6
    plan = layer_plan(torch.ones(1, 1, 80, dtype=torch.bool), torch.rand(1, 80, 4, generator=generator) < 0.5)
    assert packed_both_ways(lambda: pack_layer(*states, plan, Packing(form=own)), False, monkeypatch) == 1


def test_what_no_program_holds_is_packed_by_torch(monkeypatch):
    cell = FusedCell.drawn(1, form="int8", width=320, pieces="none", cut=False)
    assert packed_both_ways(lambda: layer_of(cell, 1, "cpu"), False, monkeypatch) == 0
