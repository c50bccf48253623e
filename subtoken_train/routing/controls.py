"""Router-free controls that read a value or nothing; ``output_norm.py`` has the one that reads the output projection.

Legend: B batch, N positions, S value groups, g channels of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.functional.hashing import uniform_hash
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
    """Router-free control: the first groups of each head, the same for all tokens, which nothing has to name.

    Groups are scored by how early in a head their channels lie on average; ties go to the lower group.
    Of values turned to their axes (``subtoken-train axes``), whose first channels hold the most, this is the low-rank
    cut of every value: what a choice for each token has to beat in the same bytes.
    """

    same_for_all = True

    def forward(self, view: View) -> Tensor:
        batch, length, num_groups, channels = view.value_groups_BNSg.shape
        device = view.value_groups_BNSg.device
        order_S = torch.arange(num_groups, device=device)
        if self.config.layout == "contiguous":
            width = num_groups * channels // view.num_kv_heads
            places_Sg = torch.arange(num_groups * channels, device=device).view(num_groups, channels) % width
            order_S = places_Sg.sum(1).argsort(stable=True).argsort()
        return -order_S.float().expand(batch, length, num_groups)
