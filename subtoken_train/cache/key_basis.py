"""Bases of a layer's keys, in which rounding or cutting them costs less; queries are put into the same basis.

    k' = A (k - m)        q' = A^-T q        q' . k' = q . k - q . m

``m`` is a mean of a prompt's keys, of every head its own; ``q . m`` is the same for all keys, and no softmax over them
sees it. So the tail's keys stand in the basis too.

**Balanced**, for 4 bits: k' = ((k - m) / s) T and q' = (q s) T, with ``s`` the square root of a channel's root mean
square about the mean, and ``T`` a Hadamard rotation. Sources: SmoothAttention of QServe (Lin et al., 2024), QuaRot
(Ashkboos et al., 2024), KIVI (Liu et al., 2024). Not theirs: ``m`` and ``s`` are the prompt's own. **Mirrored**,
for cut channels: k' = (k - m) Q (``functional/key_axes.py``).

Legend: B batch, H query heads, h key-value heads, G = H / h, N entries, q new tokens, d head width, r mirrors.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from subtoken_train.functional.key_axes import mirrored
from subtoken_train.kernels.formats import hadamard, parity

LEAST = 0.1  # least size of a channel, of the head's mean one: a channel that is constant has nothing to divide by

RIDGE = 0.01  # share of the mean energy of a channel of queries that is added to all, for queries that no prompt has


@lru_cache
def rotation(width: int, device: torch.device) -> Tensor:
    """Return Hadamard's orthogonal matrix in its largest blocks, fp32 [width, width], signs of Rudin and Shapiro."""
    place = torch.arange(width) % (width & -width)
    return (1 - 2 * parity(place & place >> 1))[:, None].to(device) * hadamard(width, device)


@dataclass(frozen=True)
class KeyBasis(ABC):
    """The basis of one layer's keys. Every field is stored for each sample; ``centre_Bh1d`` is m, fp16."""

    centre_Bh1d: Tensor

    @abstractmethod
    def _turned(self, apart_BhNd: Tensor) -> Tensor:
        """Put keys less their centre into the basis, fp32."""

    @abstractmethod
    def _turned_back(self, key_BhNd: Tensor) -> Tensor:
        pass

    @abstractmethod
    def _turned_queries(self, query_Bhnd: Tensor) -> Tensor:
        """Put queries into the basis, those of a head's group in a row, fp32."""

    def keys(self, key_BhNd: Tensor) -> Tensor:
        """Put keys into the basis, in their dtype."""
        return self._turned(key_BhNd.float() - self.centre_Bh1d.float()).to(key_BhNd.dtype)

    def own_keys(self, key_BhNd: Tensor) -> Tensor:
        """Take keys out of the basis again, in their dtype."""
        return (self._turned_back(key_BhNd.float()) + self.centre_Bh1d.float()).to(key_BhNd.dtype)

    def queries(self, query_BHqd: Tensor) -> Tensor:
        """Put queries into the basis, in their dtype."""
        batch, heads, _, width = self.centre_Bh1d.shape
        by_head = query_BHqd.float().reshape(batch, heads, -1, width)
        return self._turned_queries(by_head).view(query_BHqd.shape).to(query_BHqd.dtype)

    def select(self, samples: Tensor) -> Self:
        """Return the basis of chosen samples, int64, in their order."""
        chosen = samples.to(self.centre_Bh1d.device)
        return replace(self, **{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @property
    def stored(self) -> dict[str, Tensor]:
        """Tensors that are stored, by their names in a file."""
        return {field.name.partition("_")[0]: getattr(self, field.name) for field in fields(self)}

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored for each sample."""
        return sum(part.nbytes for part in self.stored.values())


@dataclass(frozen=True)
class BalancedBasis(KeyBasis):
    """Keys centred, balanced by s (``size_Bh1d``, fp16, mean log 0 a head), rotated: rounding costs less."""

    size_Bh1d: Tensor

    @classmethod
    def of(cls, key_BhNd: Tensor, entries_BhN: Tensor) -> Self:
        """Measure the keys of marked entries, [B, 1, N] where heads share them; heads without one keep their sizes."""
        key, marks_BhN1 = key_BhNd.float(), entries_BhN[..., None]
        count = marks_BhN1.sum(2, keepdim=True).clamp(min=1)
        centre = (key.where(marks_BhN1, 0).sum(2, keepdim=True) / count).half()
        square = (key - centre.float()).square().where(marks_BhN1, 0).sum(2, keepdim=True) / count
        least = (LEAST**4 * square.mean(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).tiny)
        log_size = square.clamp(min=least).log() / 4
        return cls(centre, (log_size - log_size.mean(-1, keepdim=True)).exp().half())

    @property
    def turn_dd(self) -> Tensor:
        """T, fp32: a table that all layers share."""
        return rotation(self.centre_Bh1d.shape[-1], self.centre_Bh1d.device)

    def _turned(self, apart_BhNd: Tensor) -> Tensor:
        return (apart_BhNd / self.size_Bh1d.float()) @ self.turn_dd

    def _turned_back(self, key_BhNd: Tensor) -> Tensor:
        return (key_BhNd @ self.turn_dd.T) * self.size_Bh1d.float()

    def _turned_queries(self, query_Bhnd: Tensor) -> Tensor:
        return (query_Bhnd * self.size_Bh1d.float()) @ self.turn_dd

    def feedback(self, moment_Bhdd: Tensor) -> Tensor:
        """Return what a channel's rounding error asks of those after it, unit lower triangular, fp32 [B, h, d, d].

        Of an error e of a key, queries see e^T S e, where S is their second moment in the basis. With S = L^T D L it is
        the sum of D_i ((L e)_i)^2, and (L e)_i may be made a rounding error alone. ``moment_Bhdd`` is the sum of q q^T
        over the queries of a head's group, fp32; its scale is of no account.
        """
        size_Bhd1 = self.size_Bh1d.float().mT
        turned = self.turn_dd.T @ (size_Bhd1 * moment_Bhdd * size_Bhd1.mT) @ self.turn_dd
        mean = turned.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=torch.finfo(torch.float32).tiny)
        # the ridge makes it definite: nothing to check, or wait for
        flipped = (turned / mean + RIDGE * torch.eye(turned.shape[-1], device=turned.device)).flip(-1, -2)
        upper = torch.linalg.cholesky_ex(flipped)[0].flip(-1, -2)
        lower: Tensor = (upper / upper.diagonal(dim1=-2, dim2=-1)[..., None, :]).mT
        return lower


@dataclass(frozen=True)
class MirroredBasis(KeyBasis):
    """Keys centred and turned by reflections, to be cut; ``mirrors_Bhdr``: V, fp16; ``joint_Bhrr``: T, fp32."""

    mirrors_Bhdr: Tensor
    joint_Bhrr: Tensor

    def _turned(self, apart_BhNd: Tensor) -> Tensor:
        return mirrored(apart_BhNd, self.mirrors_Bhdr, self.joint_Bhrr)

    def _turned_back(self, key_BhNd: Tensor) -> Tensor:
        return mirrored(key_BhNd, self.mirrors_Bhdr, self.joint_Bhrr.mT)

    def _turned_queries(self, query_Bhnd: Tensor) -> Tensor:
        return mirrored(query_Bhnd, self.mirrors_Bhdr, self.joint_Bhrr)
