"""Attention of one new token in C, where torch takes up to sixty small operations a layer; the softmax stays torch's.

``attention.c`` is compiled when a process first needs it (about a second). It serves fp32 and bf16 on a CPU, and one
new token that sees everything; all else goes the way of ``cpu.py``. It sums what a prompt's keys receive, and rounds
rotated keys, too.

Legend: B batch, H query heads, h key-value heads, R rows of a block, c heads of a row, X = R * c of all blocks of a
call, G = H / h, N entries of the longest row and its tail, d head width.
"""

import ctypes
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from subtoken_train.errors import SubTokenWarning
from subtoken_train.functional import causal_attention
from subtoken_train.functional.causal_attention import SlidingWindow, attention_received
from subtoken_train.kernels.choice import choose_kernel, compiler
from subtoken_train.kernels.formats import Format, Payload, Rotated
from subtoken_train.kernels.storage import Block, BlockPart, RoutedValues, Tail

SOURCE = Path(__file__).with_name("attention.c")
FLAGS: tuple[list[str], ...] = (["-march=native", "-fopenmp"], ["-march=native"], [])
"""Tried in turn: not every compiler knows all of them."""
CUTS = 4  # of a head's channels, which threads share, at most
MANY = 8  # heads for each thread from which none is cut
SPLIT = 2**17  # products of channels in a block from which a second thread gains anything
TALL = 48  # rows whose scores over all keys exist at a time
WIDEST = 512  # head whose codes the functions have room for
BITS = {torch.float32: 32, torch.bfloat16: 16}  # by dtype: bits of a channel that is not rounded
_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, _ADDRESS) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, _ADDRESS) for name in ("bits", "piece_bit", "starts")),
        *((name, _NUMBER) for name in ("entries", "apart", "stored", "pieces", "flags", "bytes", "of_cache")),
        ("channel_bits", _NUMBER),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, _ADDRESS) for name in ("parts", "rows")),
        *((name, _NUMBER) for name in ("num_parts", "num_rows", "heads", "columns", "width", "entries")),
        *((name, _NUMBER) for name in ("first", "before")),
        ("tail", _Part),
    )


class _Asked(ctypes.Structure):
    _fields_ = (
        *((name, _ADDRESS) for name in ("queries", "keys", "places", "weights", "hidden")),
        *((name, _NUMBER) for name in ("query_head", "query_row", "key_row", "columns", "marked", "entries", "width")),
        *((name, _NUMBER) for name in ("channel_bits", "first", "largest")),
    )


@lru_cache
def library() -> ctypes.CDLL | None:
    """Compile and load the functions; None where there is no compiler or (with a warning) it fails."""
    if (found := compiler()) is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "attention.so"
        for flags in FLAGS:
            command = [found, "-O3", *flags, "-shared", "-fPIC", str(SOURCE), "-o", str(built)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode == 0:
                loaded = ctypes.CDLL(str(built))
                loaded.block_scores.argtypes = [_ADDRESS, _NUMBER, _ADDRESS, ctypes.c_float, _NUMBER, _ADDRESS]
                loaded.block_sums.argtypes = [_ADDRESS, _NUMBER, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS]
                loaded.keys_received.argtypes = [_ADDRESS, ctypes.c_float, _NUMBER, *[_ADDRESS] * 3]
                loaded.round_keys.argtypes = [*[_ADDRESS] * 3, *[_NUMBER] * 4, ctypes.c_float, _NUMBER, *[_ADDRESS] * 2]
                for function in (loaded.block_scores, loaded.block_sums, loaded.keys_received, loaded.round_keys):
                    function.restype = None
                return loaded
    words = f"decoding is slower: {found} did not compile {SOURCE.name}: {run.stderr.strip()[:200]}"
    warnings.warn(words, SubTokenWarning, stacklevel=2)
    return None


THRESHOLDS = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 * 2**20), "MALLOC_TRIM_THRESHOLD_": (-1, 256 * 2**20)}
"""By glibc's variables, the number for ``mallopt``, and bytes: of a block that is mapped alone, and that stay free."""


@lru_cache
def keep_freed_memory() -> None:
    """Let glibc keep what a packed layer frees, or the next one faults in all its pages; its own variables go first."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not os.environ.keys() & {"GLIBC_TUNABLES", *THRESHOLDS}:
        for parameter, size in THRESHOLDS.values():
            mallopt(parameter, size)


class _Layout:
    """Holds what the functions read of a block; a copied block makes its own. Scales become floats each time."""

    def __init__(self, block: Block, dtype: torch.dtype, width: int) -> None:
        self.of = dtype, width
        self.plain = block.channels is None and all(
            payload.dtype == dtype
            and payload.format.bits in payload.format.native
            and (payload.format.rounds or payload.data.dtype == dtype)
            and payload.data.is_contiguous()
            for payload in block.payloads
        )
        parts = [_part(part, width) for part in block.parts] if self.plain else []
        self.parts = (_Part * len(parts))(*parts)
        self.entries = sum(part.entries for part in block.parts)
        self.scaled = any(payload.scale is not None for payload in block.payloads)
        self.rows, self.shape = None if block.rows is None else block.rows.data_ptr(), (block.num_rows, block.heads)
        wide = width // max(payload.format.per_code for payload in block.payloads)
        self.cuts = math.gcd(wide, CUTS, *(part.pieces // block.heads for part in self.parts))

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def _layout(block: Block, dtype: torch.dtype, width: int) -> _Layout:
    found = block.layout
    if not isinstance(found, _Layout) or found.of != (dtype, width):
        found = block.layout = _Layout(block, dtype, width)
    return found


Caches = Mapping[int, tuple[Sequence[Block], Tail]]
"""Maps the row of the batch with which each cache begins to what it stores; all are of one shape and dtype."""


def serves(query_BHqd: Tensor, blocks: Sequence[Block], tail: Tail) -> bool:
    """Return whether ``native_attention`` takes these."""
    keys, dtype, width = tail.room_keys_BhTd, query_BHqd.dtype, query_BHqd.shape[3]
    return (
        query_BHqd.shape[2] == 1
        and query_BHqd.device.type == keys.device.type == "cpu"
        and query_BHqd.dtype == keys.dtype
        and dtype in BITS
        and tail.start_B is None
        and tail.written is None
        and width <= WIDEST
        and not torch.compiler.is_compiling()
        and all(block.pages is None and _layout(block, dtype, width).plain for block in blocks)
        and library() is not None
    )


def native_attention(query_BH1d: Tensor, caches: Caches, scale: float) -> Tensor:
    """Attend from one new token of each row to what its cache stores, [B, H, 1, d]; only where ``serves`` says so.

    Caches of unlike lengths take one call, where their lengths have as many bits. Rows of no cache are zeros.
    """
    query, dtype = query_BH1d.float().contiguous(), query_BH1d.dtype
    sums, alive = torch.zeros_like(query), list[object]()
    alike: dict[int, list[tuple[_Block, int]]] = defaultdict(list)
    for first, (blocks, tail) in caches.items():
        keys, values, length = tail.room_keys_BhTd.contiguous(), tail.room_values_BhTd.contiguous(), tail.length
        _, kv_heads, room, width = keys.shape
        last = _Part(keys.data_ptr(), values.data_ptr(), entries=length, apart=room * width, of_cache=1)
        last.channel_bits = BITS[dtype]
        shape = query.shape[1] // kv_heads, width
        alive.append((keys, values))
        for block in blocks:
            layout = _layout(block, dtype, width)
            parts = layout.parts
            if layout.scaled:
                parts = (_Part * len(parts))(*parts)
                for part, of in zip(block.parts, parts, strict=True):
                    scales = [None if x.scale is None else x.scale.float().contiguous() for x in part.payloads]
                    of.key_scales, of.value_scales = (None if scale is None else scale.data_ptr() for scale in scales)
                    alive.append(scales)
            alive.append(parts)
            about = ctypes.addressof(parts), layout.rows, len(parts), *layout.shape, *shape
            own = _Block(*about, layout.entries + length, first * kv_heads, 0, last)
            alike[own.entries.bit_length()].append((own, layout.cuts))
    for group in alike.values():
        _attend(query, group, scale, sums)
    del alive  # only now
    return sums.to(dtype)


def _attend(query_BH1d: Tensor, group: Sequence[tuple[_Block, int]], scale: float, sums_BH1d: Tensor) -> None:
    """Add the sums of blocks, each with the cuts of a head that it allows; the longest one's scores set their room."""
    compiled, heads, most = library(), 0, max([own.entries for own, _ in group])
    assert compiled is not None
    for own, _ in group:
        own.entries, own.before = most, heads
        heads += own.num_rows * own.heads
    first, columns = group[0][0], group[0][0].columns
    blocks = first if len(group) == 1 else (_Block * len(group))(*[own for own, _ in group])
    where, threads = ctypes.addressof(blocks), 1
    if heads * columns * most * query_BH1d.shape[3] >= SPLIT:
        threads = torch.get_num_threads()
    scores_XGN = query_BH1d.new_empty(heads, columns, most)
    if len(group) > 1:  # what a shorter one leaves
        scores_XGN.fill_(-torch.inf)
    compiled.block_scores(where, heads, query_BH1d.data_ptr(), scale, threads, scores_XGN.data_ptr())
    weights_XGN = scores_XGN.softmax(-1)
    cuts = math.gcd(*(cuts for _, cuts in group)) if threads > 1 and heads < MANY * threads else 1
    compiled.block_sums(where, heads, weights_XGN.data_ptr(), cuts, threads, sums_BH1d.data_ptr())


def _part(part: BlockPart, width: int) -> _Part:
    values, (stored, held) = part.values, part.payloads
    own = _Part(stored.data.data_ptr(), held.data.data_ptr(), entries=part.entries, apart=part.entries * width)
    own.channel_bits = stored.format.bits or BITS[stored.dtype]
    if not isinstance(values, RoutedValues):
        return own
    own.stored, own.pieces = len(values.pieces.data), len(values.piece_bit)
    own.piece_bit, own.starts = values.piece_bit.data_ptr(), values.offsets.data_ptr()
    if values.index is not None:
        own.bits, own.flags, own.bytes = values.index.data_ptr(), *values.index.shape[1:]
    return own


def received(
    query_BHNd: Tensor,
    key_BhKd: Tensor,
    rows_BN: Tensor,
    keys_BK: Tensor,
    scale: float,
    offset: int = 0,
    window: SlidingWindow | None = None,
    weight_BN: Tensor | None = None,
    largest: bool = False,
    most: int | None = None,
) -> Tensor:
    """Return ``attention_received``, from C where that serves; scores of few rows exist at a time."""
    query, key, compiled = query_BHNd, key_BhKd, None
    (batch, heads, _, width), (kv_heads, entries) = query.shape, key.shape[1:3]
    read = query.device.type == "cpu" not in causal_attention.DEVICES
    if window is None and read and query.dtype == key.dtype in BITS and width <= WIDEST:
        compiled = library() if choose_kernel("cpu").path == "cpu" else None
    if compiled is None:
        return attention_received(query, key, rows_BN, keys_BK, scale, offset, window, weight_BN, largest, most)
    query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
    hidden_BK = None if keys_BK.all() else torch.zeros(keys_BK.shape).masked_fill_(~keys_BK, -torch.inf)
    weight_BN = None if weight_BN is None else weight_BN.float().contiguous()
    threads, columns, rounded = torch.get_num_threads(), heads // kv_heads, -(-entries // 64) * 64
    turned, room = torch.empty(rounded, width), torch.empty(threads, TALL, rounded + 16 + width)
    found = torch.zeros(batch, kv_heads, threads, columns, rounded)
    for sample in range(batch):
        places = rows_BN[sample].nonzero()
        of_rows = (None if x is None else x[sample].data_ptr() for x in (weight_BN, hidden_BK))
        held = places.data_ptr(), *of_rows, query.stride(1), query.stride(2), key.stride(2), columns, len(places)
        for head in range(kv_heads):
            states = query[sample, head * columns].data_ptr(), key[sample, head].data_ptr()
            asked = _Asked(*states, *held, entries, width, BITS[query.dtype], offset, largest)
            addresses = (x.data_ptr() for x in (turned, room, found[sample, head]))
            compiled.keys_received(ctypes.byref(asked), scale, threads, *addresses)
    return (found.amax(2) if largest else found.sum(2)).flatten(1, 2)[..., :entries]


def stored_keys(form: Format, keys: Tensor, feedback: Tensor | None = None) -> Payload:
    """Return ``form.store_keys``, from C where that serves; sums in another order may move a key to the next code."""
    on_cpu, lead, (entries, width) = keys.device.type == "cpu", keys.shape[:-2], keys.shape[-2:]
    served = form.rotates and on_cpu and width <= WIDEST and choose_kernel("cpu").path == "cpu"
    compiled = library() if served else None
    if compiled is None or not isinstance(form, Rotated):
        return form.store_keys(keys, feedback)
    wide, scales = keys.float().contiguous(), form.scales_of(keys).float()
    fed = None if feedback is None else feedback.expand(*lead, width, width).contiguous()
    codes, chosen = torch.empty_like(wide), torch.empty_like(scales[..., :1])
    read = wide.data_ptr(), scales.data_ptr(), None if fed is None else fed.data_ptr()
    sizes = math.prod(lead), entries, width, scales.shape[-1], form.top, torch.get_num_threads()
    compiled.round_keys(*read, *sizes, codes.data_ptr(), chosen.data_ptr())
    return Payload(form.coded(codes), chosen.half(), keys.dtype, form)
