"""Columns of the table by which the fused kernels find packed entries.

Legend: M entries of a part, P pieces of a row, J stretches of a row, S flags of an entry.
"""

from __future__ import annotations

from enum import IntEnum

from subtoken_train.kernels.fill import Fill


class Field(IntEnum):
    """Columns of ``RowTable.rows``, int64; addresses are those of the row's first head. 0: there is none."""

    KEYS = 0
    KEY_SCALES = 1
    KEY_WIDTH = 2  # channels of a stored key
    CHANNELS = 3  # their numbers, where keys are cut
    VALUES = 4  # where values are routed, of the part's first piece
    VALUE_SCALES = 5
    FLAGS = 6  # uint8 [S, FLAG_BYTES]
    FLAG_BYTES = 7
    PIECE_BIT = 8  # int32 [P]
    STARTS = 9  # int32 [P, J]: the first stored piece of each stretch
    STRETCHES = 10  # J
    POSITIONS = 11  # int32 [M]
    ENTRIES = 12  # M
    SAMPLE = 13
    HEAD = 14  # the row's first head
    SLOTS = 15  # of each of its heads
    FILL = 16  # of the row's first head, where values are routed and pieces that are not stored read as something
    FILL_STEP = 17  # bytes from head to head


def fill_fields(fill: Fill | None, sample: int, head: int) -> dict[Field, int]:
    """Where the fill of a row of a sample lies, whose first head is ``head``; none without one."""
    if fill is None:
        return {}
    vectors = fill.vectors_Bhd
    assert vectors.stride(2) == 1
    first = vectors.data_ptr() + (sample * vectors.stride(0) + head * vectors.stride(1)) * vectors.element_size()
    return {Field.FILL: first, Field.FILL_STEP: vectors.stride(1) * vectors.element_size()}
