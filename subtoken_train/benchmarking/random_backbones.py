"""Backbones of a real architecture with weights drawn at random: as fast as real ones, without a download.

A backbone can be made smaller, for machines that do not hold it; whoever reports its seconds says so. What it answers
means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from subtoken_train.families.backbone_config import BackboneConfig, resolve
from subtoken_train.families.family import Family
from subtoken_train.families.load import layout_family, with_processor

_TOWERS = {"llava": ("num_hidden_layers", None), "qwen2_5_vl": ("depth", "out_hidden_size")}
"""Model types that are made narrower: where their tower says its layers, and the language model's width."""


@dataclass(frozen=True)
class Shrink:
    """The reductions of an architecture.

    Attributes:
        layers: of the language model; None: all.
        narrower: by which widths and numbers of heads of the language model are divided (heads keep their width); the
            tower then has as many layers as the language model. 1: by nothing. Model types that are not known to take
            it stay as they are.
    """

    layers: int | None = None
    narrower: int = 1

    def apply(self, config: Any) -> None:
        """Change a backbone's configuration in place; more layers than there are raise a ``ValueError``."""
        text = config.get_text_config()
        if self.layers is not None:
            if self.layers > text.num_hidden_layers:
                raise ValueError(
                    f"--layers {self.layers}: the model has {text.num_hidden_layers}; give at most as many"
                )
            text.num_hidden_layers = self.layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[: self.layers]
        if self.narrower > 1 and config.model_type in _TOWERS:
            depth, width = _TOWERS[config.model_type]
            text.hidden_size //= self.narrower
            text.intermediate_size //= self.narrower
            text.num_attention_heads //= self.narrower
            text.num_key_value_heads = max(1, text.num_key_value_heads // self.narrower)
            setattr(config.vision_config, depth, text.num_hidden_layers)
            if hasattr(config.vision_config, "fullatt_block_indexes"):  # the last block sees the whole image, as it did
                config.vision_config.fullatt_block_indexes = [text.num_hidden_layers - 1]
            if width is not None:
                setattr(config.vision_config, width, text.hidden_size)


def random_family(config: BackboneConfig, shrink: Shrink, device: torch.device, seed: int = 0) -> Family:
    """A backbone's architecture with random weights, in evaluation mode.

    It has the processor of a local folder, and none where ``config`` names a Hub id: nothing is asked of the Hub where
    the architecture is known here.
    """
    if config.quantization != "none":
        raise ValueError(
            f"--random draws weights in {config.dtype}, and quantization {config.quantization!r} is asked for; leave "
            "--random out, or set quantization to none"
        )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        family = layout_family(config, shrink.apply, device)
    family.model.eval()
    return with_processor(family, config) if Path(resolve(config.path)).exists() else family
