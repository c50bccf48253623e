"""A pass whose reducer cuts between decoder layers: stretches of layers, each on fewer rows than the one before.

Legend: B batch, N positions before any cut, M rows of a stretch, D model width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subtoken_train.engine.attention_rows import LayerAttention
from subtoken_train.engine.modes import evaluation_mode, gathered_weights
from subtoken_train.engine.prompt_pass import Rows, rows_read
from subtoken_train.engine.spans import PassCall
from subtoken_train.families.family import Family
from subtoken_train.functional.gather import take_rows
from subtoken_train.functional.hashing import sample_seeds
from subtoken_train.functional.merging import joined_means
from subtoken_train.reducers.staged import CutView, DecoderReducer
from subtoken_train.types import Region


class CutCourse:
    """Makes the cuts of one pass; the embeddings are looked at once, before layer 0.

    ``rank_BN`` is the last cut's rank of every row of the unreduced sequence; None where nothing is ranked.

    Args:
        family: the backbone.
        reducer: which cuts.
        call: what runs.
        embeds_BND: input embeddings.
        always: make cuts that keep all, too: their ranking is read, the machinery is tested, or a model is trained.
    """

    def __init__(
        self, family: Family, reducer: DecoderReducer, call: PassCall, embeds_BND: Tensor, always: bool = False
    ) -> None:
        self.family, self.reducer, self.call = family, reducer, call
        self.depth = depth = family.shape.num_layers
        self.rank_BN: Tensor | None = None
        batch = call.batch
        self.layers, self.always = reducer.cuts(depth), always
        visual = (batch.regions_BN == Region.VISUAL).sum(-1).tolist()
        self.counts = [reducer.layer_tokens(tokens, depth) if tokens else [0] * depth for tokens in visual]
        self.read_BN, self.seed_B = rows_read(batch), sample_seeds(batch.record_ids, batch.regions_BN.device)
        places_N = torch.arange(batch.regions_BN.shape[1], device=batch.regions_BN.device)
        visible_BN = batch.regions_BN != Region.PADDING
        self.prompt_BN = visible_BN & (places_N <= batch.rank_position_B[:, None])
        with torch.no_grad():
            self.asking_BN = reducer.asking(embeds_BND, batch.regions_BN, self.prompt_BN)

    def keeps_all(self, layer: int) -> bool:
        """Whether the cut before ``layer`` leaves nothing out."""
        return not self.always and all(counts[layer] == counts[layer - 1] for counts in self.counts)

    def cut(self, layer: int, given_BMD: Tensor, hidden_BMD: Tensor, rows: Rows) -> tuple[Rows, Tensor]:
        """The rows that ``layer`` sees, and their states.

        Args:
            layer: first layer after the cut.
            given_BMD: input of the layer below.
            hidden_BMD: its output.
            rows: of both.
        """
        family, below = self.family, self.family.decoder.layers[layer - 1]
        with gathered_weights(below), evaluation_mode(below):
            with torch.no_grad():
                attention = LayerAttention(family, layer - 1, given_BMD, rows.visible_BM, rows.position)
            made = self.reducer.cut(self._view(layer, hidden_BMD, rows, attention))
        policy = "original" if rows.position.dim() == 3 else made.policy
        kept, gather = rows.take(made.keep_BM, self.call.pad_left, policy)
        # layers below the cut hold keys at the places of the whole prompt
        moved = kept.position + (rows.next_position - kept.next_position)
        kept = replace(kept, position=moved, next_position=rows.next_position)
        if made.joins_BM is not None:
            hidden_BMD = joined_means(hidden_BMD[:, None], made.joins_BM[:, None].to(hidden_BMD.device))[:, 0]
        self.rank_BN = None if made.rank_BM is None else self._of_all(made.rank_BM, rows)
        return kept, take_rows(hidden_BMD, gather)

    def _view(self, layer: int, hidden_BMD: Tensor, rows: Rows, attention: LayerAttention) -> CutView:
        def here(marks_BN: Tensor) -> Tensor:
            return take_rows(marks_BN, rows.index_BM) & rows.visible_BM

        prompt_BM = here(self.prompt_BN)
        index_BM = rows.index_BM.masked_fill(~prompt_BM, -1)
        return CutView(
            layer=layer,
            regions_BM=rows.regions_BM,
            read_BM=here(self.read_BN),
            last_BM=prompt_BM & (index_BM == index_BM.amax(-1, keepdim=True)),
            prompt_BM=prompt_BM,
            asking_BM=None if self.asking_BN is None else here(self.asking_BN),
            count_B=torch.tensor([counts[layer] for counts in self.counts], device=rows.index_BM.device),
            sample_seed_B=self.seed_B,
            hidden_BMD=hidden_BMD,
            attention=attention.blocks,
            rotary_pull=attention.pull_blocks,
        )

    def _of_all(self, rank_BM: Tensor, rows: Rows) -> Tensor:
        """Ranks by the rows of the unreduced sequence, int64 [B, N]; 0 where a row is gone."""
        ranks_BN = torch.zeros_like(self.call.batch.input_ids_BN)
        real = rank_BM.masked_fill(~rows.visible_BM, 0)  # padding points to row 0
        return ranks_BN.scatter_add_(-1, rows.index_BM, real)
