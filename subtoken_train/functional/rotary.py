"""Rotary position embeddings as an operation that can be undone.

Legend: B batch, h heads, N rows, d head width, r first channels, which are turned.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

Turn = Callable[[Tensor, Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]
"""Turns two tensors of vectors by (cosine, sine), as a model does queries and keys."""


@dataclass(frozen=True)
class Rotation:
    """Rotation of rows' vectors by their positions, fp32; ``form`` says which channels make pairs, linear in both."""

    cos_BNr: Tensor
    sin_BNr: Tensor
    form: Turn

    def turn(self, vectors_BhNd: Tensor) -> Tensor:
        """Rotate vectors [B, h, N, d] by their rows' positions, fp32."""
        return self._turned(vectors_BhNd.float(), self.sin_BNr)

    def turn_back(self, vectors_BhNd: Tensor) -> Tensor:
        """Undo ``turn``, fp32. A mean of rotations cannot be undone."""
        back = self._turned(vectors_BhNd.float(), -self.sin_BNr)
        stretch_BNr = self.cos_BNr.square() + self.sin_BNr.square()
        return back / F.pad(stretch_BNr, (0, back.shape[-1] - stretch_BNr.shape[-1]), value=1.0)[:, None]

    def mean(self) -> "Rotation":
        """Return the linear map that is the mean over the rows: [B, 1, d]."""
        return Rotation(self.cos_BNr.mean(1, keepdim=True), self.sin_BNr.mean(1, keepdim=True), self.form)

    def _turned(self, vectors_BhNd: Tensor, sin_BNr: Tensor) -> Tensor:
        turned, _ = self.form(vectors_BhNd, vectors_BhNd[:, :0], (self.cos_BNr, sin_BNr))
        return turned
