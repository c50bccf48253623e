"""The stages that shorten a batch: in the vision tower, and between decoder layers.

Legend: B batch, N positions before the reducer, M rows of a stretch of layers, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from subtoken_train.reducers.base import TowerReducer
from subtoken_train.reducers.staged import CutView, DecoderReducer
from subtoken_train.types import Batch, Region, VisualStates


def tower_reduced(
    family: Family, reducer: TowerReducer, batch: Batch, rows: Rows, states: VisualStates
) -> tuple[Tensor, Tensor]:
    """Embeddings [B, N, D] with each image's features replaced by fewer ones, and the rows that stay, bool [B, N].

    Args:
        family: the backbone.
        reducer: merges what the tower saw.
        batch: the prompts.
        rows: of the whole batch.
        states: what the tower saw.

    Raises:
        ValueError: the batch has another number of visual tokens than its images have features.
    """
    keep, visual = rows.visible_BM.clone(), rows.regions_BM == Region.VISUAL
    sizes = [len(tokens) for tokens in states.tokens]
    tokens = visual.sum(-1).tolist()
    batch.check_features(sum(tokens), sum(sizes))
    states = replace(states, images_per_sample=images_of_samples(tokens, sizes))
    merged = reducer.merge(states, list(rows_read(batch)[visual].split_with_sizes(sizes)))
    keep[visual] = torch.cat(merged.slots)
    return family.place(batch, family.project(torch.cat(merged.tokens)), keep), keep


def images_of_samples(tokens: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Count the images of every sample.

    Args:
        tokens: visual tokens of each sample.
        sizes: those of each image of the batch, sample after sample; of a video a frame (or a layer of two) is one.
    """
    counts, image = [], 0
    for own in tokens:
        first, seen = image, 0
        while seen < own:
            seen, image = seen + sizes[image], image + 1
        assert seen == own
        counts.append(image - first)
    return counts


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
