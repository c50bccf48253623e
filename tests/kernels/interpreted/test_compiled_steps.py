"""Captured steps of the fused kernels, whose graph another prompt takes over; the kernels' tables."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from subtoken_train.inference import decode_step
from subtoken_train.inference.prefill import decode, decode_joined
from subtoken_train.kernels import triton_attention
from tests.support.generation_cells import CELLS, ROUTED, StepCell
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
def test_rows_share_a_graph_and_one_that_comes_takes_the_place_of_one_that_left(captures, monkeypatch):
    """Formats and positions differ; who left goes on alone, and an idle place disturbs nobody."""
    kinds = [StepCell({**ROUTED, "batch": "one", "precision": form}, layers=1) for form in ("int4", "fp32", "int4")]
    rows = [[kind.filled() for _ in range(2)] for kind in kinds]
    backbone = rows[0][0][0]
    for _, cache, _ in (pair[0] for pair in rows):
        cache.reserve(20)
    for chosen, made in (((0, 1), 1), ((1,), 1), ((1, 2), 1), ((2, 0, 1), 2), ((2,), 3)):
        tokens_B1 = torch.cat([rows[n][0][2] + len(chosen) for n in chosen])
        got = decode_joined(backbone, tokens_B1, [rows[n][0][1] for n in chosen], captures=True)
        monkeypatch.setenv("SUBTOKEN_KERNEL", "cpu")
        alone = zip(chosen, tokens_B1.split(1), strict=True)
        wanted = torch.cat([decode(backbone, own, rows[n][1][1]) for n, own in alone])
        monkeypatch.setenv("SUBTOKEN_KERNEL", "triton")
        assert (got - wanted).abs().max() < 1e-4
        assert len(captures) == made
    monkeypatch.setenv("SUBTOKEN_KERNEL", "cpu")
    for (_, cache, token_11), (_, plain, _) in rows:
        assert torch.equal(cache.next_position, plain.next_position)
        cache.expected = 0
        cache.free_shape()
        assert (decode(backbone, token_11, cache) - decode(backbone, token_11, plain)).abs().max() < 1e-4


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
