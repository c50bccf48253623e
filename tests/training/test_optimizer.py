"""AdamW's groups and the warm-up schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subtoken_train.training.optimizer import OptimizerConfig, build_optimizer, rate_scale


def weight() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(("router_rate", "expected"), [(None, 0.2), (0.5, 0.5), (0.0, 0.0)])
def test_routers_have_their_own_rate_where_one_is_set(router_rate, expected):
    config = OptimizerConfig(learning_rate=0.2, router_learning_rate=router_rate)
    optimizer, _ = build_optimizer(weight(), weight(), config, total_steps=10)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {"lora": 0.2, "router": expected}


def test_an_arm_without_routers_has_one_group():
    optimizer, _ = build_optimizer(weight(), [], OptimizerConfig(), total_steps=10)
    assert [group["name"] for group in optimizer.param_groups] == ["lora"]


def test_cosine_after_warm_up():
    scale = rate_scale(OptimizerConfig(warmup_steps=4, final_fraction=0.1), total_steps=14)
    assert [scale(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert scale(9) == pytest.approx(0.55)
    assert scale(14) == pytest.approx(0.1)
    assert scale(99) == pytest.approx(0.1)


def test_constant_and_unknown_schedules():
    scale = rate_scale(OptimizerConfig(warmup_steps=2, schedule="constant"), total_steps=10)
    assert [scale(step) for step in (0, 1, 9)] == [0.5, 1.0, 1.0]
    with pytest.raises(ValueError, match="Did you mean 'cosine'"):
        rate_scale(OptimizerConfig(schedule="cosin"), total_steps=10)
