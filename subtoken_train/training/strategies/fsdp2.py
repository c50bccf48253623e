"""Keep the path by which recipes of earlier versions name ``Fsdp2Strategy``."""

from subtoken_train.training.strategies import Fsdp2Strategy

__all__ = ["Fsdp2Strategy"]
