"""Launches the fused kernels on a layer's row table.

Legend: B batch, H query heads, h key-value heads, q new tokens, d head width, T places of the tail's room.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from subtoken_train.kernels.row_table import DTYPES, RowTable, Workspace
from subtoken_train.kernels.storage import CacheWindow, Tail
from subtoken_train.kernels.triton_decode import Made, attend_stretch, join_stretches

TAIL_STRETCH = 512  # tail places of a program
STAGES = 3  # of the loop over a stretch's tiles: two are loaded ahead
MOST_NEW = 16  # tokens of a launch; more go in several

ELEMENTS = {dtype: getattr(tl, str(dtype).removeprefix("torch.")) for dtype in DTYPES}


def fused_decoding(
    query_BHqd: Tensor, table: RowTable, tail: Tail, scale: float, reach: CacheWindow | None, workspace: Workspace
) -> Tensor:
    """Attend from the last q tokens to entries and tail, [B, H, q, d]; keys and values have equal strides."""
    batch, heads, new, width = query_BHqd.shape
    out_BqHd = query_BHqd.new_empty(batch, new, heads, width)
    device = query_BHqd.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where Triton launches
        for start in range(0, new, MOST_NEW):
            stop = min(start + MOST_NEW, new)
            rows = query_BHqd[:, :, start:stop], out_BqHd[:, start:stop]
            _launch(*rows, new - stop, table, tail, scale, reach, workspace)
    return out_BqHd.transpose(1, 2)


def _launch(
    query_BHqd: Tensor,
    out_BqHd: Tensor,
    later: int,
    table: RowTable,
    tail: Tail,
    scale: float,
    reach: CacheWindow | None,
    workspace: Workspace,
) -> None:
    batch, heads, new, width = query_BHqd.shape
    keys, values = tail.room_keys_BhTd, tail.room_values_BhTd
    assert keys.stride() == values.stride()
    assert keys.stride(-1) == query_BHqd.stride(-1) == 1
    assert keys.dtype == values.dtype
    kv_heads, room = keys.shape[1:3]
    group = heads // kv_heads
    tail_stretches = -(-room // TAIL_STRETCH)
    late = batch * kv_heads * tail_stretches
    parts = (table.slots + late) * group * new
    scratch = workspace.take(parts * (width + 2), query_BHqd.device)
    sums, peaks = scratch[: parts * width], scratch[parts * width :]
    sizes = tiles(width, table.piece, group * new, query_BHqd.dtype)
    none = table.owners  # stands where nothing is read
    given: dict[str, Any] = {
        "kv_heads": kv_heads, "group": group, "width": width, "piece": table.piece, "row_heads": table.heads,
        "aligned": table.aligned, "cut": table.cut, "filled": table.fill_dtype is not None,
        "fill_dtype": ELEMENTS[table.fill_dtype or torch.float32], "padded": tail.start_B is not None,
        "fixed": tail.written is not None, "window": reach is not None, "dtype": ELEMENTS[query_BHqd.dtype],
        "tail_stretch": TAIL_STRETCH,
    } | sizes  # fmt: skip
    for alike, items in table.launches:
        programs = len(items) * table.heads
        attend_stretch[(programs + late, -(-group * new // sizes["tile"]))](
            query_BHqd, *query_BHqd.stride()[:3],
            keys, values, *keys.stride()[:3], none if tail.start_B is None else tail.start_B,
            none if tail.written is None else tail.written, tail.length, later,
            table.rows, items, programs, none if reach is None else reach.first_B, 0 if reach is None else reach.size,
            sums, peaks, table.slots, tail_stretches, scale * math.log2(math.e), new, table.stretch,
            Made(*alike[:2], *(ELEMENTS[DTYPES[own]] for own in alike[2:]), **given), num_stages=STAGES,
            num_warps=warps(width, group * new, query_BHqd.dtype, alike.shared),
        )  # fmt: skip
        late = 0  # the first launch has the tail
    rows = min(16, next_power_of_2(group * new))
    join_stretches[(batch * kv_heads, -(-group * new // rows))](
        sums, peaks, table.owners, table.slots, tail_stretches, new, out_BqHd, out_BqHd.stride(0), out_BqHd.stride(2),
        out_BqHd.stride(1), kv_heads, group, width, next_power_of_2(width), rows,
    )  # fmt: skip


def tiles(width: int, piece: int, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the sizes of a program's tiles, powers of 2; products need at least 16 rows, entries and channels."""
    pieces = next_power_of_2(width // piece)
    return {
        "tile": min(max(16, next_power_of_2(rows)), 32),  # of 64, Hopper's own product of pieces does not compile
        "block": entries_of_tile(width, dtype),
        "key_tile": max(16, next_power_of_2(width)),
        "piece_count": pieces,
        "piece_tile": max(next_power_of_2(piece), 16 // pieces),
    }


def entries_of_tile(width: int, dtype: torch.dtype) -> int:
    """Return the entries of a tile that leave keys, values and places in registers."""
    return 16 if next_power_of_2(width) * dtype.itemsize > 512 else 32


def warps(width: int, rows: int, dtype: torch.dtype, shared: int) -> int:
    """Return the warps of a program."""
    if dtype == torch.float32:
        return 8
    return 2 if width <= 128 and rows <= 16 and not shared else 4
