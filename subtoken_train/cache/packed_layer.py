"""One layer of a packed cache: ``update`` hands the layer itself to the attention function.

The prompt's entries are put in once, by ``fill``; what comes after it (generated tokens, a further turn) is appended
in full to a tail (``cache/tail_room.py``). Where tokens are evicted while decoding, a *record* says of each entry which
one it is, and ``keep`` packs what stays of the tail.

Legend: B batch, h key-value heads, R rows (samples, or heads of samples), T tail tokens, N stored entries and tail
tokens, d head width, q new tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subtoken_train.cache.by_sample import chosen_samples, repeated_samples, select_samples
from subtoken_train.cache.entries import keep_entries
from subtoken_train.cache.entry_record import EntryRecord
from subtoken_train.cache.stored_prompt import StoredPrompt
from subtoken_train.cache.tail_room import TailRoom
from subtoken_train.kernels.dispatch import attend
from subtoken_train.kernels.fill import Fill
from subtoken_train.kernels.fused_state import Workspace
from subtoken_train.kernels.reach import Reach
from subtoken_train.kernels.storage import Block, BlockPart, Payload


class PackedLayer(StoredPrompt, TailRoom):
    """One layer: packed blocks of the prompt, and the tail.

    ``record`` is None where nothing is evicted while decoding. Under a ``window`` every token sees what stands less
    than so many positions before it, ``begins_B`` being the position of the tail's first token. What leaves the window
    while tokens are decoded stays stored, and counts as such: a cropped cache sees it again.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, workspace: Workspace | None = None) -> None:
        super().__init__(workspace)
        self.prompt_length = 0
        self.settled_length = 0  # tokens that were in the tail before it was packed
        self.record: EntryRecord | None = None
        self.chooses_pages = False
        self.window: int | None = None
        self.begins_B: Tensor | None = None
        self.extent = 0  # positions from the oldest entry of any sample to the latest first token of a tail

    def fill(self, blocks: list[Block], prompt_length: int, like_BhNd: Tensor, filler: Fill | None = None) -> None:
        """Take a prompt's packed entries; ``like_BhNd`` gives batch, heads, width, dtype and device of the tail."""
        assert not self.blocks
        self.lazy_initialization(like_BhNd, like_BhNd)
        self.filler = filler
        self.blocks, self.prompt_length = blocks, prompt_length

    def branch(self) -> PackedLayer:
        """A layer with the same prompt, which both read and neither changes, and an empty tail of its own."""
        assert self.tail_length == self.settled_length == 0
        own = PackedLayer(self.fused.workspace)
        own.fill(self.blocks, self.prompt_length, self.keys, self.filler)
        own.fused.table = self.fused.table
        own.window, own.begins_B, own.extent = self.window, self.begins_B, self.extent
        own.record = None if self.record is None else self.record.copy()
        return own

    def begin_tail(self, position_B: Tensor) -> None:
        """Say where the first token of every sample's tail stands, in a layer with a window."""
        assert self.window is not None
        position_B = position_B.to(self.device)
        places = [part.position_RM for block in self.blocks for part in block.parts if part.position_RM is not None]
        oldest = torch.cat([position_B.flatten().int(), *(place.flatten() for place in places)]).amin()
        self.begins_B, self.extent = position_B, int(position_B.amax() - oldest) + 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append [B, h, q, d] states to the tail; returns the layer twice, in the place of keys and values."""
        if not self.is_initialized:
            raise ValueError("a packed cache is filled before it grows; SubTokenModel.generate makes and fills it")
        self.write(key_states, value_states)
        return self, self

    def attend(self, query_BHqd: Tensor, scale: float) -> Tensor:
        """Attention of the last q tokens over everything stored, [B, H, q, d]; ``update`` comes first."""
        if self.record is not None:
            self.record.note(query_BHqd)
        blocks = self.blocks
        if not self.chooses_pages:
            blocks = [block.in_full for block in blocks]
        reach = None
        if self.window is not None and self.extent + self.reach_length > self.window:
            assert self.begins_B is not None
            first_B = self.begins_B if self.tail_start_B is None else self.begins_B - self.tail_start_B
            reach = Reach(self.window, first_B)
        return attend(query_BHqd, blocks, self.tail, scale, reach, self.fused, self.filler)

    def get_seq_length(self) -> int:
        """Tokens seen, padding and evicted ones included."""
        return self.prompt_length + self.settled_length + self.tail_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As transformers asks; no mask is built from it."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of the tail (transformers passes a negative number).

        Raises:
            ValueError: a positive number, as transformers' own layers refuse it, or more than the tail holds; the
                prompt is packed and cannot be shortened. Always, where tokens are evicted while decoding.
        """
        if self.record is not None:
            raise ValueError(
                "eviction_every lets tokens go for good: a cache cannot be taken back to an earlier one; leave it out "
                "to crop the cache"
            )
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give a negative number; crop(-{tokens_to_remove}) removes "
                f"{tokens_to_remove} tokens"
            )
        if -tokens_to_remove > self.tail_length:
            raise ValueError(
                f"{-tokens_to_remove} tokens cannot be removed: {self.tail_length} came after the prompt, which is "
                "packed and stays; generate from the shorter prompt instead"
            )
        self.shorten(-tokens_to_remove)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the samples ``indices``, in that order: of this layer alone.

        Raises:
            ValueError: no samples, or samples that are not there.
        """
        if self.is_initialized:
            self.select(chosen_samples(indices, len(self.keys)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The same, as beam search asks for it."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sample ``repeats`` times in a row."""
        if self.is_initialized:
            self.select(repeated_samples(len(self.keys), repeats))

    def offload(self) -> None:
        """Not served.

        Raises:
            ValueError: always; attention reads the packed pieces where they lie.
        """
        raise ValueError("a packed cache stays on its device; leave offloading out: it is small already")

    def prefetch(self) -> None:
        """Not served, see ``offload``."""
        self.offload()

    def select(self, samples: Tensor, with_prompt: bool = True) -> None:
        """Keep ``samples``, in that order; without the prompt only the tail is reordered."""
        if with_prompt:
            self.filler = None if self.filler is None else self.filler.select(samples)
            self.blocks = select_samples(self.blocks, samples.tolist(), self.keys.shape[1])
        self.keys, self.values = (tail.index_select(0, samples.to(tail.device)) for tail in (self.keys, self.values))
        if self.tail_start_B is not None:
            self.tail_start_B = self.tail_start_B.index_select(0, samples.to(self.tail_start_B.device))
        if self.begins_B is not None:
            self.begins_B = self.begins_B.index_select(0, samples.to(self.begins_B.device))
        if self.record is not None:
            self.record.select(samples.to(self.keys.device))

    def tail_rows(self) -> BlockPart:
        """The tail by rows of the record: samples, or heads of samples."""
        assert self.record is not None
        used = [tail[:, :, : self.tail_length] for tail in (self.keys, self.values)]
        if len(self.record.place_RM) != len(self.keys):
            used = [tail.flatten(0, 1)[:, None] for tail in used]
        keys, values = (Payload(tail, None, tail.dtype) for tail in used)
        return BlockPart(keys, values)

    def keep(self, keep_RN: Tensor, settles_B: Tensor, bits: int) -> None:
        """Keep the marked entries, see ``keep_entries``; the tail is packed and begins anew."""
        assert self.record is not None
        tail = self.tail_rows()
        settles_R = settles_B.repeat_interleave(len(keep_RN) // len(settles_B))
        self.blocks = keep_entries(self.blocks, keep_RN, tail, settles_R, bits)
        self.record.keep(keep_RN, self.tail_length, self.tail_start_B)
        self.settled_length += self.tail_length
        self.clear()

    def reset(self) -> None:
        """Empty again."""
        self.__init__(self.fused.workspace)  # type: ignore[misc]
