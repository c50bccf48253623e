"""A router: logits through a narrow layer, with settings of its own.

Legend: B batch, N positions, D model width, R the narrow layer, S value groups.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from subtoken_train.routing.base import RoutingConfig, Selector
from subtoken_train.routing.routers import fp32_linear, init_router
from subtoken_train.view.view import View


@dataclass(frozen=True)
class LowRankSettings:
    """What ``model.routing.selector_options`` may say.

    Attributes:
        rank: R.
        activation: whether a GELU lies between the two maps.
    """

    rank: int = 8
    activation: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"low_rank rank is {self.rank}; it must be 1 or more")


class LowRank(Selector):
    """a_i = U V h_i + b: fewer parameters than the linear router where R is small."""

    learned = True
    settings: ClassVar[type] = LowRankSettings

    def __init__(self, hidden_size: int, config: RoutingConfig, settings: LowRankSettings) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, settings.rank, bias=False)
        self.between = nn.GELU() if settings.activation else nn.Identity()
        self.up = nn.Linear(settings.rank, config.num_groups)
        init_router(self)

    def forward(self, view: View) -> Tensor:
        """Return logits [B, N, S] in fp32, under any autocast."""
        return fp32_linear(self.up, self.between(fp32_linear(self.down, view.hidden_BND)))
