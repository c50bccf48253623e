"""The strategies that a recipe may name in ``trainer.strategy``; each is Lightning's own with our settings."""

from __future__ import annotations

from functools import partial

from lightning.pytorch.strategies import DDPStrategy, Strategy

from subtoken_train.errors import unknown_name
from subtoken_train.training.strategies.fsdp2 import Fsdp2Strategy
from subtoken_train.training.strategies.zero import ZeroStrategy

STRATEGIES: dict[str, type[Strategy] | partial[ZeroStrategy] | str] = {
    "auto": "auto",
    "ddp": "ddp",
    "zero1": partial(ZeroStrategy, stage=1),
    "zero2": partial(ZeroStrategy, stage=2),
    "zero3": partial(ZeroStrategy, stage=3),
    "zero3_offload": partial(ZeroStrategy, stage=3, offload=True),
    "fsdp2": Fsdp2Strategy,
}
"""By name: what makes the strategy, or Lightning's own name of it.

``auto``: one device, or DDP on several. ``ddp`` is Lightning's as it comes: NCCL on GPUs, gloo on CPUs, and every
trained tensor must get a gradient in every step (``find_unused_parameters=False``), from a text-only batch too.
"""


def build_strategy(name: str) -> Strategy | str:
    """The strategy of a name, as the trainer takes it.

    Raises:
        ValueError: unknown name (Lightning's other ones included), or DeepSpeed is asked for and not installed.
    """
    if name not in STRATEGIES:
        raise unknown_name("trainer.strategy", name, STRATEGIES)
    made = STRATEGIES[name]
    return made if isinstance(made, str) else made()


def strategy_class(name: str) -> type[Strategy]:
    """The class behind a name; of ``auto`` that of several devices.

    Raises:
        ValueError: unknown name.
    """
    if name not in STRATEGIES:
        raise unknown_name("trainer.strategy", name, STRATEGIES)
    made = STRATEGIES[name]
    if isinstance(made, str):
        return DDPStrategy
    kind = made.func if isinstance(made, partial) else made
    assert isinstance(kind, type)
    return kind


def shares_weights(strategy: Strategy) -> bool:
    """Whether the processes of a strategy hold parts of the weights, which no process may load before the others."""
    return isinstance(strategy, Fsdp2Strategy) or (isinstance(strategy, ZeroStrategy) and strategy.zero_stage_3)
