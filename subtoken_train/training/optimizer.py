"""AdamW with warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from subtoken_train.errors import unknown_name

Schedule = Literal["cosine", "constant"]


@dataclass
class OptimizerConfig:
    """Optimiser settings.

    Attributes:
        learning_rate: peak rate of LoRA, and of the routers unless they have their own.
        router_learning_rate: peak rate of the routers; None: the same.
        weight_decay: AdamW's decay.
        warmup_steps: optimiser steps of linear warm-up.
        schedule: after warm-up: ``cosine`` down to ``final_fraction`` at the last step, or ``constant``.
        final_fraction: share of the peak rate left at the end of ``cosine``.
    """

    learning_rate: float = 2e-4
    router_learning_rate: float | None = None
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    final_fraction: float = 0.0


def rate_scale(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """The factor on the peak learning rate as a function of the optimiser step (0-based)."""
    if config.schedule not in get_args(Schedule):
        raise unknown_name("schedule", config.schedule, get_args(Schedule))

    def scale(step: int) -> float:
        warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.schedule == "constant":
            return warm
        span = max(1, total_steps - config.warmup_steps)
        progress = min(1.0, max(0, step - config.warmup_steps) / span)
        floor = config.final_fraction
        return warm * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    return scale


def build_optimizer(
    lora: list[nn.Parameter], routers: list[nn.Parameter], config: OptimizerConfig, total_steps: int
) -> tuple[AdamW, LambdaLR]:
    """AdamW over LoRA and routers (two groups, named), and its schedule per optimiser step."""
    router_rate = config.learning_rate if config.router_learning_rate is None else config.router_learning_rate
    rates = {"lora": config.learning_rate, "router": router_rate}
    groups = [
        {"params": parameters, "lr": rates[name], "name": name}
        for name, parameters in (("lora", lora), ("router", routers))
        if parameters
    ]
    optimizer = AdamW(groups, weight_decay=config.weight_decay)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate_scale(config, total_steps))
