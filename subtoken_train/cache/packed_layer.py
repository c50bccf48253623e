"""One layer of a packed cache: ``update`` hands the layer itself to the attention function.

The prompt's entries are put in once, by ``store_prompt``; what comes after it is appended in full to a tail, in tensors
that have room in advance. A number on the device says where, while steps have *one shape* (``decode_step.py``).

Legend: B batch, h key-value heads, R rows (samples, or heads of samples), T tail places, N stored entries and tail
tokens, d head width, q new tokens.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from subtoken_train.cache.by_sample import select_samples
from subtoken_train.cache.entries import EvictionState, keep_entries
from subtoken_train.cache.key_basis import KeyBasis
from subtoken_train.errors import refuse
from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.kernels.dispatch import attend
from subtoken_train.kernels.formats import MODEL, Format, Payload
from subtoken_train.kernels.row_table import FusedState, Workspace, unserved
from subtoken_train.kernels.storage import Block, BlockPart, CacheWindow, Fill, Tail

SLACK = 64  # tokens by which a full tail grows


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a packed cache: blocks of the prompt, and the tail of later tokens.

    Under a ``window`` every token sees what stands less than so many positions before it; entries that leave it stay.
    ``keys`` and ``values`` are the tail's, [B, h, T, d], of which ``tail_length`` places are tokens.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.tail_length = self.reserved = 0  # ``reserved`` places stay, whether tokens are there or not
        self.tail_start_B: Tensor | None = None
        self.written: Tensor | None = None
        self.fused = FusedState(workspace or Workspace())
        self.fill: Fill | None = None  # what pieces that are not stored read as; set before their blocks
        self.basis: KeyBasis | None = None  # in which all keys stand, the tail's too; None: their own
        self.blocks = []
        self.prompt_length = self.settled_length = 0  # of the unreduced prompt, padding included; of evicted tails
        self.eviction_state: EvictionState | None = None
        self.chooses_pages = False
        self.window: int | None = None
        self.first_B: Tensor | None = None  # position of the tail's first place; only while the cache may append
        self.extent = 0  # positions from the oldest entry of any sample to the latest first token of a tail

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin an empty tail like the given [B, h, q, d] states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[-1])
        self.values = self.keys.clone()
        self.is_initialized = True

    def reserve(self, tokens: int) -> None:
        """Allocate room for ``tokens`` more; it stays, and counts as slack until they come."""
        self.reserved = max(self.reserved, self.tail_length + tokens)
        if self.reserved > self.keys.shape[2]:
            self._resize(self.reserved)

    def write(self, key_Bhqd: Tensor, value_Bhqd: Tensor) -> None:
        """Append states to the tail. A step never copies the prompt, and seldom the tail."""
        new = key_Bhqd.shape[2]
        if self.written is not None:
            places_q = self.written + torch.arange(-new, 0, device=self.written.device)
            self.keys.index_copy_(2, places_q, key_Bhqd.to(self.dtype))  # autocast's differ
            self.values.index_copy_(2, places_q, value_Bhqd.to(self.dtype))
            return
        if (length := self.tail_length + new) > self.keys.shape[2]:
            self._resize(-(-length // SLACK) * SLACK)
        for room, states in ((self.keys, key_Bhqd), (self.values, value_Bhqd)):
            room.narrow(2, self.tail_length, new).copy_(states)
        self.tail_length = length

    def shorten(self, tokens: int) -> None:
        """Drop the last tokens of the tail; frees what exceeds a slack of room that was not reserved."""
        self.tail_length -= tokens
        if self.keys is not None and self.keys.shape[2] - max(self.tail_length, self.reserved) >= SLACK:
            self._resize(max(-(-self.tail_length // SLACK) * SLACK, self.reserved))

    def clear(self) -> None:
        """Drop all tokens; room that was not reserved is freed."""
        self.tail_length, self.tail_start_B = 0, None
        if self.keys.shape[2] > self.reserved:
            self._resize(self.reserved)

    @property
    def tail(self) -> Tail:
        """The tail as attention reads it."""
        return Tail(self.keys, self.values, self.tail_length, self.tail_start_B, self.written)

    @property
    def tail_bytes(self) -> tuple[int, int]:
        """(bytes of the tail's tokens, bytes of its slack)."""
        if not self.is_initialized:
            return 0, 0
        total, capacity = self.keys.nbytes + self.values.nbytes, max(1, self.keys.shape[2])
        used = total * self.tail_length // capacity
        return used, total - used

    def _resize(self, places: int) -> None:
        missing = (0, 0, 0, places - self.keys.shape[2])  # where negative, the last places go
        self.keys, self.values = (F.pad(states, missing) for states in (self.keys, self.values))

    @property
    def blocks(self) -> list[Block]:
        """The prompt's entries; replaced, never changed in place."""
        return self._blocks

    @blocks.setter
    def blocks(self, blocks: list[Block]) -> None:
        """Replace the entries, and drop the table of the earlier ones."""
        self._blocks, self.fused.table = blocks, None

    def prepare(self) -> None:
        """Build the table of the fused kernels now, so that no step has to; nothing where other kernels run."""
        if choose_kernel(self.device.type).path == "triton" and unserved(self.blocks, self.keys) is None:
            batch, kv_heads, _, width = self.keys.shape
            self.fused.table_of(self.blocks, batch, kv_heads, width, self.fill)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the prompt's keys, values, fill and basis."""
        stored = sum(payload.nbytes for block in self.blocks for payload in block.payloads)
        return stored + self.fill_bytes + self.basis_bytes

    @property
    def fill_bytes(self) -> int:
        """Bytes of the fill vectors, equal for every sample."""
        return 0 if self.fill is None else self.fill.nbytes

    @property
    def basis_bytes(self) -> int:
        """Bytes of the keys' basis, equal for every sample."""
        return 0 if self.basis is None else self.basis.nbytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the pieces' index and of the blocks' row numbers."""
        return sum(block.index_bytes for block in self.blocks)

    @property
    def unread_bytes(self) -> int:
        """Bytes of the prompt that one new token does not read: 0 unless pages are chosen."""
        return sum(block.unread_bytes for block in self.blocks)

    def store_prompt(
        self,
        blocks: list[Block],
        prompt_length: int,
        like_BhNd: Tensor,
        fill: Fill | None = None,
        basis: KeyBasis | None = None,
    ) -> None:
        """Take a prompt's packed entries; ``like_BhNd`` gives batch, heads, width, dtype and device of the tail."""
        assert not self.blocks
        self.lazy_initialization(like_BhNd, like_BhNd)
        self.fill, self.basis = fill, basis
        self.blocks, self.prompt_length = blocks, prompt_length

    def branch(self) -> Self:
        """Return a layer that shares the prompt, which neither changes, and has an empty tail of its own."""
        assert self.tail_length == self.settled_length == 0
        own = PackedLayer(self.fused.workspace)
        own.store_prompt(self.blocks, self.prompt_length, self.keys, self.fill, self.basis)
        own.fused.table = self.fused.table
        own.window, own.extent = self.window, self.extent
        own.eviction_state = None if self.eviction_state is None else self.eviction_state.copy()
        return own

    def begin_tail(self, position_B: Tensor) -> None:
        """Record, in a layer with a window, how far the tail's first token is from the oldest entry."""
        assert self.window is not None
        position_B = position_B.to(self.device)
        places = [part.position_RM for block in self.blocks for part in block.parts if part.position_RM is not None]
        oldest = torch.cat([position_B.flatten().int(), *(place.flatten() for place in places)]).amin()
        self.extent = int(position_B.amax() - oldest) + 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append [B, h, q, d] states to the tail; return the layer twice, in place of keys and values."""
        if not self.is_initialized:
            raise ValueError("a packed cache needs a prompt before it grows; SubTokenModel.generate stores it")
        self.write(key_states if self.basis is None else self.basis.keys(key_states), value_states)
        return self, self

    def attend(self, query_BHqd: Tensor, scale: float) -> Tensor:
        """Attend from the last q tokens to everything stored, [B, H, q, d]; call ``update`` first."""
        if self.eviction_state is not None:
            self.eviction_state.note(query_BHqd)
        if self.basis is not None:
            query_BHqd = self.basis.queries(query_BHqd)
        blocks = self.blocks if self.chooses_pages else [block.in_full for block in self.blocks]
        reach = None
        if self.reaches(self.tail_length if self.written is None else int(self.keys.shape[2])):
            assert self.window is not None
            assert self.first_B is not None
            reach = CacheWindow(self.window, self.first_B)
        return attend(query_BHqd, blocks, self.tail, scale, reach, self.fused, self.fill)

    @property
    def plain(self) -> tuple[list[Block], Tail] | None:
        """Blocks and tail, where attention reads nothing beside them, of the queries as they are; else None."""
        beside = self.eviction_state is not None or self.basis is not None or self.fill is not None
        return None if beside or self.reaches(self.tail_length) else (self.blocks, self.tail)

    def reaches(self, places: int) -> bool:
        """Return whether a tail of this length may extend beyond the layer's window."""
        return self.window is not None and self.extent + places > self.window

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding and evicted ones included."""
        return self.prompt_length + self.settled_length + self.tail_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask sizes that transformers asks for; no mask is built from them."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens of the tail (transformers passes a negative number)."""
        count, there = tokens_to_remove, self.tail_length
        gone = "eviction_every deletes tokens, so this cache cannot be cropped; leave eviction_every out"
        after = f"{there} came after the prompt, which is packed and stays; generate from the shorter prompt instead"
        refuse(
            (self.eviction_state is not None, gone),
            (count > 0, f"crop({count}): give a negative number; crop(-{count}) removes {count} tokens"),
            (-count > there, f"{-count} tokens cannot be removed: {after}"),
        )
        self.shorten(-tokens_to_remove)

    def offload(self, *_: Any) -> None:
        """Refuse to move or reorder one layer alone."""
        raise ValueError("one layer cannot be moved alone; call the cache's methods, and leave offloading out")

    prefetch = reorder_cache = batch_select_indices = batch_repeat_interleave = offload

    def select(self, samples: Tensor, with_prompt: bool = True) -> None:
        """Keep ``samples``, in that order; without the prompt only the tail is reordered."""
        if with_prompt:
            self.fill = None if self.fill is None else self.fill.select(samples)
            self.basis = None if self.basis is None else self.basis.select(samples)
            self.blocks = select_samples(self.blocks, samples.tolist(), self.keys.shape[1])
        chosen = (tail.index_select(0, samples.to(tail.device)) for tail in (self.keys, self.values))
        if self.written is not None:  # where a captured step finds them
            self.keys, self.values = (old.copy_(new) for old, new in zip((self.keys, self.values), chosen, strict=True))
            return
        self.keys, self.values = chosen
        if self.tail_start_B is not None:
            self.tail_start_B = self.tail_start_B.index_select(0, samples.to(self.tail_start_B.device))
        if self.eviction_state is not None:
            self.eviction_state.select(samples.to(self.keys.device))

    def own_keys(self, key_RcNd: Tensor) -> Tensor:
        """Return keys of all samples and heads as the model made them, out of the layer's basis."""
        if self.basis is None:
            return key_RcNd
        batch, heads = self.keys.shape[:2]
        return self.basis.own_keys(key_RcNd.reshape(batch, heads, *key_RcNd.shape[2:])).view_as(key_RcNd)

    def tail_rows(self) -> BlockPart:
        """Return the tail by the eviction state's rows: samples, or heads of samples."""
        assert self.eviction_state is not None
        used = [tail[:, :, : self.tail_length] for tail in (self.keys, self.values)]
        if len(self.eviction_state.place_RM) != len(self.keys):
            used = [tail.flatten(0, 1)[:, None] for tail in used]
        keys, values = (Payload(tail, None, tail.dtype, MODEL) for tail in used)
        return BlockPart(keys, values)

    def keep(self, keep_RN: Tensor, settles_B: Tensor, form: Format) -> None:
        """Keep the marked entries; the tail is packed in ``form`` (of samples that settle) and begins anew."""
        assert self.eviction_state is not None
        tail = self.tail_rows()
        settles_R = settles_B.repeat_interleave(len(keep_RN) // len(settles_B))
        self.blocks = keep_entries(self.blocks, keep_RN, tail, settles_R, form)
        self.eviction_state.keep(keep_RN, self.tail_length, self.tail_start_B)
        self.settled_length += self.tail_length
        self.clear()

    def reset(self) -> None:
        """Empty the layer."""
        self.__init__(self.fused.workspace)  # type: ignore[misc]
