"""AdamW with warm-up, its state in fp32 or in 8 bits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from subtoken_train.errors import MAX_COUNT, check_package, check_range, check_word

Schedule = Literal["cosine", "constant"]
OptimizerName = Literal["adamw", "paged_adamw_8bit"]
MIN_8BIT_ELEMENTS = 4096  # tensors with fewer elements keep an fp32 state in 8-bit AdamW (bitsandbytes' own limit)


@dataclass
class OptimizerConfig:
    """Optimiser settings.

    Attributes:
        name: ``adamw``, or ``paged_adamw_8bit``: bitsandbytes' AdamW, whose moments are held in 8 bits (in blocks of
            256) and may move to the host's memory where the device's runs out. Its results differ slightly.
        learning_rate: peak rate of LoRA, and of the routers unless they have their own.
        warmup_steps: optimiser steps of linear warm-up.
        schedule: after warm-up: ``cosine`` down to ``final_fraction`` of the peak at the last step, or ``constant``.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 2e-4
    router_learning_rate: float | None = None
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Schedule = "cosine"
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "router_learning_rate", "weight_decay"):
            check_range(f"optimizer.{name}", getattr(self, name), 0, 100)
        check_range("optimizer.warmup_steps", self.warmup_steps, 0, MAX_COUNT)
        check_range("optimizer.final_fraction", self.final_fraction, 0, 1)


def rate_scale(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """Return the factor on the peak learning rate as a function of the optimiser step (0-based)."""
    check_word("schedule", config.schedule, get_args(Schedule))

    def scale(step: int) -> float:
        warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.schedule == "constant":
            return warm
        progress = min(1.0, max(0, step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
        floor = config.final_fraction
        return warm * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    return scale


def build_optimizer(
    lora: list[nn.Parameter], routers: list[nn.Parameter], config: OptimizerConfig, total_steps: int
) -> tuple[Optimizer, LambdaLR]:
    """Build AdamW over LoRA and routers (two groups, named), and its schedule per optimiser step."""
    check_optimizer(config)
    rate, own = config.learning_rate, config.router_learning_rate
    parts = ("lora", lora, rate), ("router", routers, rate if own is None else own)
    groups = [{"params": each, "lr": peak, "name": name} for name, each, peak in parts if each]
    make: Callable[..., Optimizer] = AdamW
    if config.name == "paged_adamw_8bit":
        from bitsandbytes.optim.adamw import PagedAdamW8bit

        make = PagedAdamW8bit  # learning rate, betas, eps and decay have the same meaning in both
    optimizer = make(groups, weight_decay=config.weight_decay)
    return optimizer, LambdaLR(optimizer, rate_scale(config, total_steps))


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise ``ValueError`` if the optimiser's name is unknown or its package is not installed."""
    check_word("optimizer", config.name, get_args(OptimizerName))
    if config.name == "paged_adamw_8bit":
        check_package("bitsandbytes", "gpu", f"optimizer.name {config.name!r}", "set model.optimizer.name: adamw")
