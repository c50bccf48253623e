"""All panels of a run, in the order in which they log."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback

from subtoken_train.training.panels.alive import FirstGradients, SilentTensors
from subtoken_train.training.panels.routing import RoutingPanel
from subtoken_train.training.panels.throughput import Throughput
from subtoken_train.training.panels.per_layer import TrainedPanel


def panels(throughput: Throughput) -> list[Callback]:
    """The callbacks that watch a run; ``throughput`` is made by the caller, who may pause its watch."""
    return [throughput, RoutingPanel(), TrainedPanel(), FirstGradients(), SilentTensors()]
