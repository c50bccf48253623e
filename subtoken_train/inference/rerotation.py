"""Key re-rotation: what an eviction leaves stands at closed-up positions, and what follows counts from there.

A cached key is turned by the position of its token. Re-rotated, the kept keys of every head are turned as if they stood
at 0, 1, 2, ... in their order, and the next token comes right after them, so that positions in use never exceed what is
kept and appended: a cache of K entries leaves a model all but K of its positions.

Source: streaming-llm (Xiao et al., 2024; section 3.2 and ``kv_cache.py``) caches keys unrotated and turns them by their
place in the cache at every step; kvpress' ``KeyRerotationPress`` turns the kept keys once, after the prompt. This is
the latter: nothing of the stored keys changes while decoding, and one eviction after the prompt makes both the same.
What it does not do: the prompt itself runs at its own positions, so it must fit the model's; values and hidden states
are those of that pass. mRoPE ids (an image is a grid) have no closed-up form, and are refused.

Legend: B batch, h key-value heads, N rows of a layer, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.functional.rotary import Rotation


@dataclass
class Rerotation:
    """Closes up the keys of one layer after another.

    Attributes:
        rotate: what turns queries and keys at given position ids [B, N].
        count_B: entries that every head of the layers so far keeps, int64: where the next token stands.
    """

    rotate: Callable[[Tensor], Rotation]
    count_B: Tensor | None = None

    def closed_up(self, key_BhNd: Tensor, keep_BhN: Tensor, position_BN: Tensor) -> Tensor:
        """A layer's keys, those of kept entries turned to 0, 1, 2, ... in their order, per head; the others are void.

        Args:
            key_BhNd: rotated by ``position_BN``.
            keep_BhN: entries that stay, bool; [B, 1, N] where heads share a set.
            position_BN: position ids of its rows.

        Raises:
            ValueError: heads or layers of a sample that keep different numbers of entries.
        """
        count_Bh = keep_BhN.sum(-1)
        before_B = count_Bh[:, 0] if self.count_B is None else self.count_B.to(count_Bh.device)
        unlike_B = (count_Bh != before_B[:, None]).any(-1)
        if bool(unlike_B.any()):
            first = int(unlike_B.int().argmax())
            fewest, most = (int(each) for each in torch.cat([count_Bh[first], before_B[first, None]]).aminmax())
            raise ValueError(
                f"rerotate: heads or layers keep between {fewest} and {most} entries of a prompt, and what follows "
                "needs one position; take an eviction and a reducer that keep as many in each, or leave rerotate out"
            )
        self.count_B = before_B
        unrotated = self.rotate(position_BN).turn_back(key_BhNd)
        place_BhN = (keep_BhN.cumsum(-1) - 1).clamp(min=0)
        if keep_BhN.shape[1] == 1:
            return self.rotate(place_BhN[:, 0]).turn(unrotated).to(key_BhNd)
        heads = zip(place_BhN.unbind(1), unrotated.chunk(unrotated.shape[1], 1), strict=True)
        return torch.cat([self.rotate(place_BN).turn(head) for place_BN, head in heads], 1).to(key_BhNd)

    @property
    def next_position(self) -> Tensor:
        """Position id of the next token, [B, 1]."""
        assert self.count_B is not None
        return self.count_B[:, None]
