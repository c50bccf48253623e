"""Floating-point operations of a training step of a frozen decoder with trained adapters; a multiply-add counts as two.

Per row of a layer with W weights: 2 W forward (Kaplan et al. 2020, section 2.1), 2 W backward; an adapter of p weights
2 p and 4 p; causal attention n (n + 1) / 2 pairs of 4 H d forward and twice that backward (PaLM, appendix B, counts
n^2). Layers below the first one that trains run forward only; the head on every row, both ways. Not counted: vision
tower, FastV's scout, norms, activations, recomputation of checkpointing, stage 2's frozen LoRA.

Legend: B batch, D model width, F width of the MLP, H query heads, h key-value heads, d head width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

PEAKS = {"H100": 989.4e12, "A100": 312e12}
"""Dense bf16 FLOP/s of named GPUs (SXM), by their maker's data sheets, which Lightning's table repeats."""
UTILISATION = 0.2
"""Share of the peak that predictions assume: what a training step of LLaMA-2-7B reached on an H200 (docs/launch.md)."""


@dataclass(frozen=True)
class DecoderSize:
    """A decoder of LLaMA's shape: gated MLP, grouped-query attention."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any, num_kv_heads: int, head_dim: int) -> Self:
        """Return the size of a decoder by its transformers configuration and the cache's geometry."""
        heads = config.num_attention_heads, num_kv_heads, head_dim
        return cls(config.hidden_size, config.intermediate_size, *heads, config.vocab_size)

    @property
    def layer_weights(self) -> int:
        """W: weights of q, k, v, o and the three MLP projections of one layer."""
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden * self.intermediate


@dataclass(frozen=True)
class TrainingFlops:
    """Cost of rows in each layer; ``trained`` counts the weights that train in each."""

    size: DecoderSize
    trained: Sequence[int]

    def per_row(self, layer: int) -> int:
        """Return the operations of one row in a layer, without attention's pairs."""
        return 2 * self.size.layer_weights * (1 + self._backward(layer)) + 6 * self.trained[layer]

    def per_pair(self, layer: int) -> int:
        """Return the operations of one (query row, visible key row) pair in a layer."""
        return 4 * self.size.num_heads * self.size.head_dim * (1 + 2 * self._backward(layer))

    def layers(self, lengths_B: Tensor, start: int, stop: int) -> Tensor:
        """Count layers ``start`` to ``stop`` (exclusive) on samples of ``lengths`` rows; fp32, on their device."""
        lengths = lengths_B.float()
        rows, pairs = lengths.sum(), (lengths * (lengths + 1) / 2).sum()
        span = range(start, stop)
        return rows * float(sum(map(self.per_row, span))) + pairs * float(sum(map(self.per_pair, span)))

    def head(self, lengths_B: Tensor) -> Tensor:
        """Count the language-model head on all rows, forward and backward; a scalar in fp32."""
        return lengths_B.float().sum() * float(4 * self.size.hidden * self.size.vocabulary)

    def sample(self, rows: Sequence[int]) -> float:
        """Return the operations in the layers of one sample, which has ``rows[layer]`` rows there; without the head."""
        cost = (self.layers(torch.tensor([count]), layer, layer + 1) for layer, count in enumerate(rows))
        return sum(float(each) for each in cost)

    def _backward(self, layer: int) -> bool:
        return any(self.trained[: layer + 1])
