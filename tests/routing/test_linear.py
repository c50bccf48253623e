"""The fp32 linear map of half-precision states: value, gradients, and what it keeps for the backward pass."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from subtoken_train.routing.routers import fp32_linear
from tests.support.helpers import random_scores

HALF = [torch.bfloat16, torch.float16]


def layer_of(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 4, bias=bias)


def gradients(layer, inputs, upstream):
    layer.zero_grad()
    fp32_linear(layer, inputs).backward(upstream)
    return [parameter.grad.clone() for parameter in layer.parameters()]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 24), (2, 24)])
def test_a_half_precision_input_gives_value_and_gradients_of_its_fp32_copy(dtype, bias, shape):
    layer, inputs = layer_of(bias), random_scores(1, *shape).to(dtype).requires_grad_()
    copy = inputs.detach().float().requires_grad_()
    upstream = random_scores(2, *shape[:-1], 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fp32_linear(layer, inputs), fp32_linear(layer, copy))
    assert fp32_linear(layer, inputs).dtype == torch.float32
    for got, wanted in zip(gradients(layer, inputs, upstream), gradients(layer, copy, upstream), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert inputs.grad.dtype == dtype
    assert torch.allclose(inputs.grad.float(), copy.grad, rtol=1e-2, atol=1e-2)


def test_bf16_parameters_get_bf16_gradients():
    layer, inputs = layer_of().bfloat16(), random_scores(1, 2, 5, 24).bfloat16()
    found = gradients(layer, inputs, torch.ones(2, 5, 4))
    assert [gradient.dtype for gradient in found] == [torch.bfloat16] * 2
    assert torch.equal(found[1], torch.full((4,), 10.0, dtype=torch.bfloat16))


def test_no_fp32_copy_of_the_input_is_kept():
    layer, inputs = layer_of(), random_scores(1, 3, 5, 24).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        fp32_linear(layer, inputs)
    assert {(tensor.dtype, tensor.numel()) for tensor in kept} == {(torch.bfloat16, 360), (torch.float32, 96)}


def test_recomputed_under_checkpointing():
    layer, inputs = layer_of(), random_scores(1, 3, 5, 24).bfloat16().requires_grad_()
    plain = gradients(layer, inputs, torch.ones(3, 5, 4))
    layer.zero_grad()
    checkpoint(lambda states: fp32_linear(layer, states), inputs, use_reentrant=False).backward(torch.ones(3, 5, 4))
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(layer.parameters(), plain, strict=True))
