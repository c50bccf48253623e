"""AdamW's groups and the warm-up schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subtoken_train.training.optimizer import OptimizerConfig, build_optimizer, check_optimizer, rate_scale


def weight() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(("router_rate", "expected"), [(None, 0.2), (0.5, 0.5), (0.0, 0.0)])
def test_routers_have_their_own_rate_where_one_is_set(router_rate, expected):
    config = OptimizerConfig(learning_rate=0.2, router_learning_rate=router_rate)
    optimizer, _ = build_optimizer(weight(), weight(), config, total_steps=10)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {"lora": 0.2, "router": expected}


def test_cosine_after_warm_up():
    scale = rate_scale(OptimizerConfig(warmup_steps=4, final_fraction=0.1), total_steps=14)
    assert [scale(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert scale(9) == pytest.approx(0.55)
    assert scale(14) == pytest.approx(0.1)
    assert scale(99) == pytest.approx(0.1)


def paged(parameters):
    config = OptimizerConfig(name="paged_adamw_8bit", learning_rate=0.01, schedule="constant")
    return build_optimizer(parameters[:1], parameters[1:], config, total_steps=10)[0]


def two_weights():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 128), (16,))]


def steps(parameters, optimizer, count, first=0):
    for step in range(first, first + count):
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.step()


def test_paged_8_bit_adamw_holds_large_moments_in_a_byte():
    pytest.importorskip("bitsandbytes")
    parameters = two_weights()
    optimizer = paged(parameters)
    steps(parameters, optimizer, 1)
    dtypes = [optimizer.state[parameter]["state1"].dtype for parameter in parameters]
    assert dtypes == [torch.uint8, torch.float32]  # 8,192 and 16 elements
    assert [group["name"] for group in optimizer.param_groups] == ["lora", "router"]


def test_paged_8_bit_adamw_goes_near_adamw():
    pytest.importorskip("bitsandbytes")
    ours, plain = two_weights(), two_weights()
    steps(ours, paged(ours), 10)
    reference = build_optimizer(plain[:1], plain[1:], OptimizerConfig(learning_rate=0.01, schedule="constant"), 10)[0]
    steps(plain, reference, 10)
    moved = (plain[0] - two_weights()[0]).norm()
    assert (ours[0] - plain[0]).norm() < 0.05 * moved
    assert torch.allclose(ours[1], plain[1], atol=1e-6)


def test_what_is_not_there_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"unknown schedule 'cosin'\. Did you mean 'cosine'"):
        rate_scale(OptimizerConfig(schedule="cosin"), total_steps=10)
    with pytest.raises(ValueError, match=r"unknown optimizer 'adam'\. Did you mean 'adamw'"):
        check_optimizer(OptimizerConfig(name="adam"))
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'paged_adamw_8bit' needs bitsandbytes, which is not installed: pip install"):
        build_optimizer(weight(), [], OptimizerConfig(name="paged_adamw_8bit"), total_steps=10)
