"""The tail of a cache layer: what is appended after the prompt, in full, in tensors that have room in advance.

Room is made by whole slacks, or all at once where it is known how many tokens will come. While a step has *one shape*
(``inference/fixed_step.py``) the number of tokens is read from the device: tokens are written at the places that it
says, and attention reads the whole room.

Legend: B batch, h key-value heads, T places of the room, d head width, q new tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from subtoken_train.kernels.tail import Tail

SLACK = 64  # tokens by which a full tail grows


class TailRoom(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [B, h, T, d], the first ``tail_length`` places of which are tokens.

    Attributes:
        reserved: places that stay, whether tokens are there or not.
        tail_start_B: see ``Tail``.
        written: see ``Tail``; of all layers of a cache, which counts it up before a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tail_length = 0
        self.reserved = 0
        self.tail_start_B: Tensor | None = None
        self.written: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """An empty tail like the given [B, h, q, d] states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[-1])
        self.values = self.keys.clone()
        self.is_initialized = True

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens at once; it stays, and counts as slack until they come."""
        self.reserved = max(self.reserved, self.tail_length + tokens)
        if self.reserved > self.keys.shape[2]:
            self._widen(self.reserved)

    def write(self, key_Bhqd: Tensor, value_Bhqd: Tensor) -> None:
        """Append states. A step copies neither the prompt nor, in most steps, the tail."""
        new = key_Bhqd.shape[2]
        if self.written is not None:
            places_q = self.written + torch.arange(-new, 0, device=self.written.device)
            self.keys.index_copy_(2, places_q, key_Bhqd.to(self.dtype))  # autocast's differ
            self.values.index_copy_(2, places_q, value_Bhqd.to(self.dtype))
            return
        length = self.tail_length + new
        if length > self.keys.shape[2]:
            self._widen(-(-length // SLACK) * SLACK)
        self.keys[:, :, self.tail_length : length] = key_Bhqd
        self.values[:, :, self.tail_length : length] = value_Bhqd
        self.tail_length = length

    def shorten(self, tokens: int) -> None:
        """Forget the last tokens; more than a slack of room that was not reserved is given back."""
        self.tail_length -= tokens
        if self.keys is not None and self.keys.shape[2] - max(self.tail_length, self.reserved) >= SLACK:
            self._narrow(max(-(-self.tail_length // SLACK) * SLACK, self.reserved))

    def clear(self) -> None:
        """Forget all tokens; room that was not reserved is given back."""
        self.tail_length, self.tail_start_B = 0, None
        if self.keys.shape[2] > self.reserved:
            self._narrow(self.reserved)

    @property
    def tail(self) -> Tail:
        """As attention reads it."""
        return Tail(self.keys, self.values, self.tail_length, self.tail_start_B, self.written)

    @property
    def reach_length(self) -> int:
        """Tokens of the tail at most: those that are there, or places of its room while steps have one shape."""
        return self.tail_length if self.written is None else int(self.keys.shape[2])

    @property
    def tail_bytes(self) -> tuple[int, int]:
        """(bytes of the tail's tokens, bytes of its slack)."""
        if not self.is_initialized:
            return 0, 0
        total, capacity = self.keys.nbytes + self.values.nbytes, max(1, self.keys.shape[2])
        used = total * self.tail_length // capacity
        return used, total - used

    def _widen(self, places: int) -> None:
        missing = (0, 0, 0, places - self.keys.shape[2])
        self.keys, self.values = (F.pad(states, missing) for states in (self.keys, self.values))

    def _narrow(self, places: int) -> None:
        self.keys, self.values = (states[:, :, :places].clone() for states in (self.keys, self.values))
