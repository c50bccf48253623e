"""What Triton interprets has a process of its own: see ``tests/kernels/test_interpreter.py``, which starts it."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    from triton.language import constexpr

    from subtoken_train.kernels import formats, row_table, triton_attention, triton_decode
    from subtoken_train.kernels.formats import Kivi

    monkeypatch.setattr(row_table, "SHORTEST", 32)
    monkeypatch.setattr(triton_attention, "TAIL_STRETCH", 16)
    monkeypatch.setattr(triton_attention, "entries_of_tile", lambda *_: 16)
    monkeypatch.setattr(formats, "LATEST", 1)
    monkeypatch.setattr(Kivi, "run", 16)
    monkeypatch.setattr(triton_decode, "RUN", constexpr(16))
