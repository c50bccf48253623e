"""A compiled step with the fused kernels is one graph, in which each layer's attention is one node."""

from copy import deepcopy

import pytest
import torch
from transformers import CompileConfig

from subtoken_train.inference.fixed_step import FixedStep
from subtoken_train.inference.prefill import decode
from tests.support.generation_cells import CELLS, StepCell

ONE_LAYER = {"selector": "linear", "eviction": "own_sets", "protocol": "context_first"}
KIVI = {"precision": "kivi4", "groups": "2/1"}


def one_layer(**cell: str) -> StepCell:
    return StepCell(ONE_LAYER | cell, layers=1)


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv("SUBTOKEN_KERNEL", "triton")


@pytest.mark.parametrize("own", [{}, KIVI], ids=["model", "kivi4"])
@torch.no_grad()
def test_one_graph_with_one_node_a_layer(own):
    graphs, cell = [], one_layer(**own)

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    backbone, compiled, token_B1 = cell.filled()
    _, plain, _ = cell.filled()
    config = CompileConfig(fullgraph=True, backend=counting, mode=None)
    with torch._dynamo.config.patch(recompile_limit=1), FixedStep(backbone, compiled, 4, compile_config=config) as step:
        for _ in range(4):
            expected = decode(backbone, token_B1, plain)
            assert (step(token_B1) - expected).abs().max() < 1e-4
            token_B1 = expected.argmax(-1, keepdim=True)
    (graph,) = graphs
    nodes = [node for node in graph.graph.nodes if "fused_decoding" in str(node.target)]
    assert len(nodes) == len(compiled.layers)


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


@torch.no_grad()
def test_tables_are_there_before_a_step_is_compiled():
    backbone, cache, token_B1 = one_layer().filled()
    cache.batch_select_indices(torch.tensor([1, 0]))
    expected = decode(backbone, token_B1[:2], deepcopy(cache))
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    with FixedStep(backbone, cache, 1, compile_config=config) as step:
        assert (step(token_B1[:2]) - expected).abs().max() < 1e-4
