"""FastV (Chen et al., 2024): rank visual tokens by the attention they get from the last prompt token at L_f - 1.

Kept rows stay in order at their original positions. The official code ranks batch element 0 for the whole batch; here
every sample ranks its own. L_f = 0, the official random branch, is the ``random`` reducer here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from subtoken_train.reducers.base import RankingReducer
from subtoken_train.reducers.staged import RankedCuts
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.view import View

FastVStage = Literal["embeds", "decoder"]
Ranking = Literal["adapted", "frozen"]


@dataclass(frozen=True, kw_only=True)
class FastV(RankingReducer, RankedCuts):
    """FastV.

    Attributes:
        stage: where it cuts. ``embeds``: a no-grad scout runs the first layers and ranks, then the shortened input
            starts again at layer 0; every layer's cache is short, and the scout's time counts as prefill (the paper's
            lengths count this). ``decoder``: the published FastV, rows leave at layer ``layer``.
        layer: L_f; the ranking is the head-mean attention of layer L_f - 1, counted from 0.
        ranking: by which weights the scout ranks. ``adapted``: with the LoRA that is being trained, so that every
            adapter drifts to tokens of its own; ``frozen``: by the backbone alone, so that all adapters of a backbone
            keep the same tokens. Stage ``embeds`` only: a cut in the decoder reads the layers that run.
        merge_dropped: of the n tokens that a sample keeps, the best n - 1 stay as they are and the n-th becomes the
            mean of itself and of all that are dropped: of their input embeddings, or in the stage ``decoder`` of the
            states that layer ``layer`` would have seen. It stays at its own position, ranks last and costs what n
            tokens cost. A row that a token is read from never becomes a mean: the worst other one does.
    """

    name: str = "fastv"
    stage: FastVStage = "embeds"
    layer: int = setting(2, 1, 10_000)
    ranking: Ranking = "adapted"
    merge_dropped: bool = False

    ranks: ClassVar[bool] = True
    scout_layers = by_settings(lambda self: self.layer)
    frozen_scout = by_settings(lambda self: self.ranking == "frozen")
    merges_dropped = by_settings(lambda self: self.merge_dropped)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frozen_scout and self.stage != "embeds":
            raise ValueError(
                f"reducer.ranking 'frozen' ranks by a scout, and FastV's stage {self.stage!r} has none; set "
                "reducer.stage: embeds, or reducer.ranking: adapted"
            )

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        return (self.layer,) if self.stage == "decoder" else ()

    @property
    def words(self) -> str:
        frozen = "frozen ranking" if self.frozen_scout else ""
        merged = "one token of them the mean of what is dropped" if self.merge_dropped else ""
        return ", ".join(filter(None, [f"stage {self.stage}, L_f={self.layer}", frozen, merged]))

    def scores(self, view: View) -> Tensor:
        return view.attention_row(self.layer - 1)
