"""Router-free control: keep the groups that add most to the layer's output, by the norm of W_o,g v_g.

Legend: B batch, N positions, D value width, S value groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from subtoken_train.functional.group_norms import contribution_norms, head_grams
from subtoken_train.functional.quantized import dense_weight, is_readable
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.routing.base import RoutingConfig, Selector
from subtoken_train.view.view import View


class OutputNormSelector(Selector):
    """Scores of ``functional.contribution``: the value norm as ``o_proj`` sees it. No parameter, no gradient.

    The paper has no such control. It knows nothing of the attention that a token will get.
    """

    reads_output = True

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()

    def forward(self, view: View) -> Tensor:
        return view.output_norms()


class OutputNorms:
    """Contribution norms of every layer, from the Gram matrices of its output projection.

    A layer's matrices (fp32, d_v * d numbers) are made when they are first needed, so that a model can be laid out
    without weights, and kept: the projection is read once, as the frozen base weight, dequantised where it is
    quantised. LoRA on it is not followed.

    Args:
        projections: every layer's output projection, with or without LoRA around it.
        config: group settings.
        shape: cache geometry.
    """

    def __init__(self, projections: Sequence[nn.Module], config: RoutingConfig, shape: KVShape) -> None:
        self._projections = [_base_layer(projection) for projection in projections]
        self._config, self._shape = config, shape
        self._grams: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, layer: int, value_BND: Tensor) -> Tensor:
        """Norms [B, N, S] in fp32 of a layer's value vectors, whole as ``v_proj`` gives them; no gradient."""
        config, shape = self._config, self._shape
        gram = self._grams.get(layer)
        if gram is None or gram.device != value_BND.device:
            weight = dense_weight(self._projections[layer], torch.float32).to(value_BND.device)
            gram = head_grams(weight, shape.num_kv_heads, shape.head_dim, config.num_groups, config.layout)
            self._grams[layer] = gram
        return contribution_norms(value_BND, gram, config.num_groups, config.layout)


def _base_layer(projection: nn.Module) -> nn.Module:
    """The frozen layer under any LoRA."""
    layer: nn.Module = getattr(projection, "base_layer", projection)
    if not is_readable(layer):
        weight = getattr(layer, "weight", None)
        found = "no weight tensor" if weight is None else f"a weight of {str(weight.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"output_norm needs output projections in floating point, nf4 or int8, but o_proj has {found}: leave it "
            "unquantised, or use value_norm"
        )
    return layer
