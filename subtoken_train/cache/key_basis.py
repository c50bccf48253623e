"""A basis of a layer's keys in which rounding costs less: centred, balanced and rotated, for every head.

    k' = ((k - m) / s) T        q' = (q s) T        q' . k' = q . k - q . m

``m`` is the mean of a prompt's keys, ``s`` the square root of every channel's root mean square about it, and ``T`` a
Hadamard rotation. ``q . m`` is the same for all keys, and a softmax over all of them does not see it: so the tail's
keys stand in the basis too, and every kernel reads the layer as it reads any other. Keys of language models have
channels that are large for all tokens (Qwen2's come from the biases of its projection) and set the scale of the whole
vector: the mean takes away what all tokens share, ``s`` halves what is left of the difference, in decades, and ``T``
spreads the rest. Last, an error of one channel is made up for in the next ones, as far as the prompt's queries see it.

Sources: ``s`` is SmoothAttention of QServe (Lin et al., 2024), which takes largest magnitudes of a calibration set and
folds them into the weights; rotated keys and queries after the rotary embedding are QuaRot's (Ashkboos et al., 2024);
that keys are best rounded by channel, about a zero point, is KIVI's finding (Liu et al., 2024). Not theirs: ``m`` and
``s`` are the prompt's own, once for all of its tokens, so an entry pays nothing for them. Values stay as they are:
rounding them costs little.

Legend: B batch, H query heads, h key-value heads, G = H / h, N entries, q new tokens, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

LEAST = 0.1
"""Least size of a channel, of the head's mean one: a channel that is constant has nothing to divide by."""

RIDGE = 0.01
"""Share of the mean energy of a channel of queries that is added to all, for queries that no prompt has."""


@lru_cache
def rotation(width: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix, fp32 [width, width]: Hadamard's, with signs, in the largest blocks that divide it.

    The signs are Rudin's and Shapiro's, so that vectors whose channels are alike are spread too.
    """
    block = width & -width
    place = torch.arange(block)
    hadamard = 1 - 2 * _parity(place[:, None] & place)
    signs = 1 - 2 * _parity(place & place >> 1)
    own = signs[:, None] * hadamard / block**0.5
    return torch.kron(torch.eye(width // block), own).to(device)


def _parity(numbers: Tensor) -> Tensor:
    """Return 1 where an odd number of a number's bits is set, else 0; below 2^16."""
    for shift in (8, 4, 2, 1):
        numbers = numbers ^ numbers >> shift
    return numbers & 1


@dataclass(frozen=True)
class KeyBasis:
    """The basis of one layer's keys.

    Attributes:
        centre_Bh1d: m, fp16.
        size_Bh1d: s, fp16; its mean logarithm is 0 in every head.
        turn_dd: T, fp32; a table that all layers share.
    """

    centre_Bh1d: Tensor
    size_Bh1d: Tensor
    turn_dd: Tensor

    @classmethod
    def of(cls, key_BhNd: Tensor, entries_BN: Tensor) -> KeyBasis:
        """Measure the keys of marked entries, before any eviction; heads without one keep their keys' sizes."""
        key, marks_B1N1 = key_BhNd.float(), entries_BN[:, None, :, None]
        count = marks_B1N1.sum(2, keepdim=True).clamp(min=1)
        centre = (key.where(marks_B1N1, 0).sum(2, keepdim=True) / count).half()
        square = (key - centre.float()).square().where(marks_B1N1, 0).sum(2, keepdim=True) / count
        least = (LEAST**4 * square.mean(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny)
        log_size = square.clamp(min=least).log() / 4
        size = (log_size - log_size.mean(-1, keepdim=True)).exp().half()
        return cls.given(centre, size)

    @classmethod
    def given(cls, centre_Bh1d: Tensor, size_Bh1d: Tensor) -> KeyBasis:
        """Build a basis from what is stored of it."""
        return cls(centre_Bh1d, size_Bh1d, rotation(centre_Bh1d.shape[-1], centre_Bh1d.device))

    def keys(self, key_BhNd: Tensor) -> Tensor:
        """Put keys into the basis, in their dtype."""
        turned = ((key_BhNd.float() - self.centre_Bh1d.float()) / self.size_Bh1d.float()) @ self.turn_dd
        return turned.to(key_BhNd.dtype)

    def own_keys(self, key_BhNd: Tensor) -> Tensor:
        """Take keys out of the basis again, in their dtype."""
        own = (key_BhNd.float() @ self.turn_dd.T) * self.size_Bh1d.float() + self.centre_Bh1d.float()
        return own.to(key_BhNd.dtype)

    def queries(self, query_BHqd: Tensor) -> Tensor:
        """Put queries into the basis, in their dtype."""
        batch, heads = self.size_Bh1d.shape[:2]
        by_head = query_BHqd.float().reshape(batch, heads, -1, *query_BHqd.shape[2:])
        turned = (by_head * self.size_Bh1d.float()[:, :, None]) @ self.turn_dd
        return turned.view_as(query_BHqd).to(query_BHqd.dtype)

    def feedback(self, moment_Bhdd: Tensor) -> Tensor:
        """Return what a channel's rounding error asks of those after it, unit lower triangular, fp32 [B, h, d, d].

        Of an error e of a key, queries see e^T S e, where S is their second moment in the basis. With S = L^T D L it is
        the sum of D_i ((L e)_i)^2, and (L e)_i may be made a rounding error alone.

        Args:
            moment_Bhdd: mean of q q^T over the queries of a head's group, fp32.
        """
        size_Bhd1 = self.size_Bh1d.float().mT
        turned = self.turn_dd.T @ (size_Bhd1 * moment_Bhdd * size_Bhd1.mT) @ self.turn_dd
        mean = turned.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=torch.finfo(torch.float32).tiny)
        eye = torch.eye(turned.shape[-1], device=turned.device)
        # the ridge makes it definite: nothing to check, or wait for
        flipped = (turned / mean + RIDGE * eye).flip(-1, -2)
        upper = torch.linalg.cholesky_ex(flipped)[0].flip(-1, -2)
        lower: Tensor = (upper / upper.diagonal(dim1=-2, dim2=-1)[..., None, :]).mT
        return lower

    def select(self, samples: Tensor) -> KeyBasis:
        """Return the basis of chosen samples, int64, in their order."""
        chosen = samples.to(self.size_Bh1d.device)
        return replace(self, centre_Bh1d=self.centre_Bh1d[chosen], size_Bh1d=self.size_Bh1d[chosen])

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored for each sample."""
        return self.centre_Bh1d.nbytes + self.size_Bh1d.nbytes
