"""What tensors of a packed cache must be before attention reads them: kernels look nothing up twice.

A number that points outside of its tensor would read, on a GPU, whatever lies there.

Legend: R rows of a block, c heads of a row, M entries of a part, P pieces of an entry, S bits, n stored pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from subtoken_train.kernels.bit_index import pack_bits, unpack_bits
from subtoken_train.kernels.page_index import PageIndex
from subtoken_train.kernels.storage import Block, BlockPart

_NAMED = 3


class TensorReader:
    """Tensors by name, each taken once and as what it must be."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = dict(tensors)

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> Tensor:
        """A tensor of one of the dtypes and of a shape (None: any number); of any shape where none is given.

        Raises:
            ValueError: it is missing, of another dtype or shape, or holds NaN or infinity.
        """
        if name not in self._left:
            raise ValueError(f"tensor {name} is missing")
        tensor = self._left.pop(name)
        if tensor.dtype not in dtypes:
            words = " or ".join(_dtype(dtype) for dtype in dtypes)
            raise ValueError(f"tensor {name} is of {_dtype(tensor.dtype)}; it must be of {words}")
        fits = tensor.dim() == len(shape) and all(
            wanted in (None, found) for wanted, found in zip(shape, tensor.shape, strict=True)
        )
        if shape and not fits:
            words = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"tensor {name} has shape {list(tensor.shape)}; it must be [{words}]")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"tensor {name} holds NaN or infinity")
        return tensor

    def check_all_taken(self) -> None:
        """Raise a worded ``ValueError`` where tensors are left."""
        if self._left:
            names = [name[:80] for name in sorted(self._left)[:_NAMED]]
            raise ValueError(f"{len(self._left)} tensors are not expected: {names}")


def check_within(name: str, numbers: Tensor, below: int) -> None:
    """Raise a worded ``ValueError`` unless whole numbers lie from 0 to below a number."""
    if numbers.numel() and not (int(numbers.min()) >= 0 and int(numbers.max()) < below):
        raise ValueError(f"tensor {name} holds numbers outside of 0 to {below - 1:,}")


def check_rows(place: str, blocks: Sequence[Block], batch: int, kv_heads: int) -> None:
    """Raise a worded ``ValueError`` unless blocks hold every row of a layer once: samples, or heads of samples."""
    heads = {block.heads for block in blocks}
    if len(heads) != 1 or not heads <= {1, kv_heads}:
        raise ValueError(f"{place}: its blocks have rows of {sorted(heads)} heads; all must have 1, or {kv_heads}")
    total = batch if heads == {kv_heads} else batch * kv_heads
    whole = list(range(total))
    named = [whole if block.rows is None else block.rows.tolist() for block in blocks]
    fits = all(len(own) == block.num_rows and own == sorted(own) for own, block in zip(named, blocks, strict=True))
    if not fits or sorted(row for own in named for row in own) != whole:
        raise ValueError(f"{place}: its blocks do not hold each of the {total} rows once, in order")


def check_channels(name: str, channels_Rck: Tensor, width: int) -> None:
    """Raise a worded ``ValueError`` unless channel numbers ascend below a head's width."""
    check_within(name, channels_Rck, width)
    if not channels_Rck.shape[2] or not bool((channels_Rck.long().diff(dim=-1) > 0).all()):
        raise ValueError(f"tensor {name} must hold ascending numbers of channels")


def check_routed(
    place: str, index: Tensor, offsets: Tensor, piece_bit: Tensor, stored: int, sizes: tuple[int, int, int]
) -> None:
    """Raise a worded ``ValueError`` unless what finds the stored pieces of routed entries finds each of them once.

    Args:
        place: for messages.
        index: either form of ``RoutedValues.index``.
        offsets: int32 [R * P].
        piece_bit: int32 [P].
        stored: n.
        sizes: (R, c, M).
    """
    rows, heads, entries = sizes
    bounds = torch.cat([offsets.long(), torch.tensor([stored])])
    counts = bounds.diff()
    if not len(counts) or int(bounds[0]) != 0 or bool((counts < 0).any()):
        raise ValueError(f"{place}: offsets do not divide {stored} stored pieces")
    check_within(f"{place}.piece_bit", piece_bit, len(piece_bit) if index.dim() != 3 else index.shape[1])
    if index.dtype == torch.uint8:
        if index.dim() != 3 or index.shape[0] != rows or index.shape[2] != -(-entries // 8):
            raise ValueError(f"{place}: an index of shape {list(index.shape)} does not find {entries} entries")
        flags_RSM = unpack_bits(index, entries)
        found = flags_RSM.index_select(1, piece_bit).sum(-1).flatten()
        if not torch.equal(pack_bits(flags_RSM), index) or not torch.equal(found, counts):
            raise ValueError(f"{place}: index and offsets disagree on what is stored")
        return
    if index.shape != (stored,):
        raise ValueError(f"{place}: an index of shape {list(index.shape)} does not find {stored} pieces")
    head = torch.arange(rows)[:, None] * heads + torch.arange(len(piece_bit)) // (len(piece_bit) // heads)
    bag_n = torch.arange(len(counts)).repeat_interleave(counts)
    entry_n = index.long() - head.flatten()[bag_n] * entries
    check_within(f"{place}.index", entry_n, entries)
    same_n = bag_n.diff() == 0
    if not bool((entry_n.diff()[same_n] > 0).all()):
        raise ValueError(f"{place}: an index must name ascending entries of each piece")


def check_pages(place: str, pages: PageIndex, parts: Sequence[BlockPart]) -> None:
    """Raise a worded ``ValueError`` unless a page index is that of one part that is stored whole."""
    number = pages.low.shape[2]
    fits = (
        len(parts) == 1
        and not parts[0].cut
        and len(parts[0].payloads[1].data.shape) == 4
        and pages.high.shape == pages.low.shape
        and pages.size > 0
        and 0 <= pages.count < number
        and pages.size * number <= parts[0].entries
        and int(pages.forced.sum(-1).max()) <= pages.count
    )
    if not fits:
        raise ValueError(f"{place}: its pages are not those of its entries")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
