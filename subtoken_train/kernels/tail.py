"""What was appended to a layer since its prompt, as attention reads it.

Legend: B batch, h key-value heads, T places of the room, d head width, q new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tail:
    """Keys and values in full, causal; the q new tokens are the last that are there.

    Attributes:
        room_keys_BhTd: keys; places after the last token hold finite numbers that nothing reads.
        room_values_BhTd: values, alike.
        length: tokens that are there.
        start_B: first real token of each sample, where tails are padded on the left; padding is seen by nothing but
            itself. None: none is.
        written: the same number as ``length``, int64 [1] on the device, where a step must have one shape whatever it is
            (captured, compiled): then ``length`` is not read. None otherwise.
    """

    room_keys_BhTd: Tensor
    room_values_BhTd: Tensor
    length: int
    start_B: Tensor | None = None
    written: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """Keys that are there, [B, h, T, d]; under ``written`` the whole room."""
        return self.room_keys_BhTd if self.written is not None else self.room_keys_BhTd.narrow(2, 0, self.length)

    @property
    def values(self) -> Tensor:
        """Values, alike."""
        return self.room_values_BhTd if self.written is not None else self.room_values_BhTd.narrow(2, 0, self.length)

    def own_places(self, new: int) -> Tensor:
        """Places of the new tokens, int64 [q]."""
        offsets = torch.arange(new, device=self.room_keys_BhTd.device)
        return offsets + (self.length - new if self.written is None else self.written - new)
