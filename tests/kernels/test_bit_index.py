"""Places found in packed bits are those of the flags, written out."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.kernels.storage import pack_bits, places_in_bits, prepare_bits
from tests.support.helpers import random_mask


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    rows=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4]),
    bits=st.sampled_from([1, 2, 4, 8]),
    entries=st.sampled_from([0, 1, 7, 8, 9, 33]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_places_are_those_of_the_flags(seed, rows, heads, bits, entries, share):
    pieces = 2 * heads
    flags_RSM = random_mask(seed, rows, bits, entries, share=share)
    piece_bit = torch.arange(pieces) * bits // pieces
    expected = [
        (row * heads + piece // 2) * entries + entry
        for row in range(rows)
        for piece in range(pieces)
        for entry in range(entries)
        if flags_RSM[row, piece_bit[piece], entry]
    ]
    prepare_bits(flags_RSM.device)
    got = places_in_bits(pack_bits(flags_RSM), piece_bit, heads, entries, len(expected))
    assert got.tolist() == expected
