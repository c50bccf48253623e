"""benchmarks/bf16_products.py: linear maps of bfloat16 numbers taken in fp32 are the rounded ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from benchmarks.bf16_products import WideProducts

UNIT = 2**-8
"""A bfloat16 number lies at most this part of itself from what it was rounded from."""


def exact(rows, weight, bias=None):
    with torch.autocast("cpu", enabled=False):
        return linear(rows.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_sums_are_rounded_once(biased, autocast):
    draw = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(shape, generator=draw).bfloat16() for shape in ((2, 5, 64), (7, 64), (7,)))
    given = (bias if biased else None,)
    truth = exact(rows, weight, *given)
    if autocast:
        rows, weight = rows.float(), weight.float()
    with WideProducts(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        first, again = (linear(rows, weight, *given) for _ in range(2))
        by_name = linear(rows, weight, bias=given[0])
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    assert torch.equal(first, by_name)
    assert bool(((first.double() - truth).abs() <= UNIT * truth.abs() + 1e-5).all())


def test_gradients_are_rounded_once():
    draw = torch.Generator().manual_seed(1)
    rows, weight, pull = (torch.randn(shape, generator=draw).bfloat16() for shape in ((6, 32), (9, 32), (6, 9)))
    rows.requires_grad_()
    weight.requires_grad_()
    with WideProducts():
        linear(rows, weight).backward(pull)
    truths = pull.double() @ weight.double(), pull.double().T @ rows.double()
    for own, truth in zip((rows.grad, weight.grad), truths, strict=True):
        assert bool(((own.double() - truth).abs() <= UNIT * truth.abs() + 1e-5).all())


def test_a_trained_weight_is_read_anew_and_fp32_is_left_alone():
    rows, weight = torch.ones(1, 4).bfloat16(), torch.ones(2, 4).bfloat16().requires_grad_()
    with WideProducts() as mode, torch.no_grad():
        assert linear(rows, weight).tolist() == [[4, 4]]
        weight.mul_(2)
        assert linear(rows, weight).tolist() == [[8, 8]]
        assert linear(rows.float(), weight.float()).dtype == torch.float32
    assert not mode.held
