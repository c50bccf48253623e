"""Captured steps of the fused kernels, whose graph another prompt takes over; the kernels' tables."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from subtoken_train.inference import decode_step
from subtoken_train.inference.prefill import decode
from subtoken_train.kernels import triton_attention
from tests.support.generation_cells import CELLS
from tests.support.tape import on_tape


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv("SUBTOKEN_KERNEL", "triton")


@pytest.fixture
def captures(monkeypatch):
    """Capture on tapes, on which each layer's attention is one operation; count the captures."""
    made, fused = [], triton_attention.fused_decoding

    def as_one_operation(*given):
        tape = torch.utils._python_dispatch._get_current_dispatch_mode()
        return fused(*given) if tape is None else tape.run(fused, *given)

    monkeypatch.setattr(triton_attention, "fused_decoding", as_one_operation)
    monkeypatch.setattr(decode_step, "DEVICES", ("cpu",))
    monkeypatch.setattr(decode_step, "capture", lambda *given: made.append(1) or on_tape(*given))
    return made


@pytest.mark.parametrize("name", ["own_heads", "window", "int4_rotated"])
@torch.no_grad()
def test_prompts_take_over_a_graph(name, captures):
    """Caches whose samples have unlike entries and lengths move into the tensors of one graph, in turns."""
    orders, cell = torch.tensor([[0, 1, 2], [2, 0, 1]]), replace(CELLS[name], layers=1)
    caches = [[cell.filled() for _ in range(2)] for _ in orders]
    for order, pair in zip(orders, caches, strict=True):
        for _, cache, _ in pair:
            cache.batch_select_indices(order)
    backbone = caches[0][0][0]
    for turn in (0, 1, 0):
        (_, caught, token_B1), (_, plain, _) = caches[turn]
        caught.reserve(20)
        got = decode(backbone, token_B1[orders[turn]], caught)
        assert (got - decode(backbone, token_B1[orders[turn]], plain)).abs().max() < 1e-4
    assert len(captures) == 1


@torch.no_grad()
def test_bytes_of_tables_and_scratch_are_counted():
    backbone, cache, token_B1 = CELLS["own_heads"].filled()
    tables = sum(layer.fused.table.nbytes for layer in cache.layers)  # made with the prompt
    assert cache.kernel_bytes == tables > 0
    decode(backbone, token_B1, cache)
    assert cache.kernel_bytes == tables + cache.workspace.nbytes > tables
    table = cache.layers[0].fused.table
    decode(backbone, token_B1, cache)
    assert cache.layers[0].fused.table is table
    cache.batch_select_indices(torch.tensor([0, 0, 1]))
    assert cache.layers[0].fused.table is None


@torch.no_grad()
def test_a_copied_cache_has_tables_of_its_own():
    """Addresses are those of the tensors that were copied, which may be gone when the copy is read."""
    backbone, cache, token_B1 = CELLS["own_heads"].filled()
    copied = deepcopy(cache)
    expected = decode(backbone, token_B1, cache)
    assert all(layer.fused.table is None for layer in copied.layers)
    del cache
    assert torch.equal(decode(backbone, token_B1, copied), expected)
    assert {id(layer.fused.workspace) for layer in copied.layers} == {id(copied.workspace)}
