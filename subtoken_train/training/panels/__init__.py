"""What a run shows. ``docs/watching.md`` describes every tag."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback

from subtoken_train.training.panels.alive import FirstGradients, SilentTensors
from subtoken_train.training.panels.per_layer import RoutingPanel, TrainedPanel
from subtoken_train.training.panels.throughput import Throughput


def watchers(throughput: Throughput) -> list[Callback]:
    """The callbacks that watch a run; ``throughput`` is made by the caller, who may pause its watch."""
    return [throughput, RoutingPanel(), TrainedPanel(), FirstGradients(), SilentTensors()]
