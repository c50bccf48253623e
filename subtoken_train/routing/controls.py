"""Router-free controls: selectors without parameters, which read a value, the output projection, or nothing.

Legend: B batch, N positions, D value width, S value groups, g channels of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from subtoken_train.functional.group_norms import contribution_norms, head_grams
from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.functional.quantized import dense_weight, is_readable
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.routing.base import RoutingConfig, Selector
from subtoken_train.view.view import View


class Control(Selector):
    """A selector without parameters, which keeps the routing's settings."""

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()
        self.config = config


class ValueNormSelector(Control):
    """Router-free control: keep the groups with the largest value norm ||v_g||_2. A strong control."""

    def forward(self, view: View) -> Tensor:
        norms_BNS: Tensor = torch.linalg.vector_norm(view.value_groups_BNSg.detach().float(), dim=-1)
        return norms_BNS


class OutputNormSelector(Control):
    """Router-free control (ours): keep the groups that add most to the layer's output, by the norm of W_o,g v_g."""

    reads_output = True

    def forward(self, view: View) -> Tensor:
        return view.output_norms()


class RandomSelector(Control):
    """Router-free control: groups at random, from a hash of (seed, sample, layer, position, group): reproducible."""

    def forward(self, view: View) -> Tensor:
        groups_S = torch.arange(view.value_groups_BNSg.shape[2], device=view.hidden_BND.device)
        sample_B11, position_BN1 = view.sample_seed_B[:, None, None], view.ordinal_BN[..., None]
        return uniform_hash(sample_B11, position_BN1, groups_S, self.config.seed, view.layer)


class StaticSelector(Control):
    """Router-free control: one fixed set per layer for all tokens, by (seed, layer, group), as if ``v_proj`` shrank."""

    same_for_all = True

    def forward(self, view: View) -> Tensor:
        batch, length, num_groups, _ = view.value_groups_BNSg.shape
        groups_S = torch.arange(num_groups, device=view.hidden_BND.device)
        return uniform_hash(groups_S, self.config.seed, view.layer).expand(batch, length, num_groups)


class LeadingSelector(Control):
    """Router-free control: the first groups of each head, by their mean place in it, the same for all tokens.

    Of values turned to their axes (``subtoken-train axes``), whose first channels hold the most, this is the low-rank
    cut of every value: what a choice for each token has to beat in the same bytes.
    """

    same_for_all = True

    def forward(self, view: View) -> Tensor:
        batch, length, num_groups, channels = view.value_groups_BNSg.shape
        order_S = torch.arange(num_groups, device=view.value_groups_BNSg.device)
        if self.config.layout == "contiguous":
            width = num_groups * channels // view.num_kv_heads
            places_Sg = torch.arange(num_groups * channels, device=order_S.device).view(num_groups, channels) % width
            order_S = places_Sg.sum(1).argsort(stable=True).argsort()
        return -order_S.float().expand(batch, length, num_groups)


class OutputNorms:
    """Contribution norms of every layer, from the Gram matrices (fp32, made when needed) of its output projection."""

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
    layer: nn.Module = getattr(projection, "base_layer", projection)
    if not is_readable(layer):
        weight = getattr(layer, "weight", None)
        found = "no weight tensor" if weight is None else f"a weight of {str(weight.dtype).removeprefix('torch.')}"
        raise ValueError(
            f"output_norm needs output projections in floating point, nf4 or int8, but o_proj has {found}: leave it "
            "unquantised, or use value_norm"
        )
    return layer
