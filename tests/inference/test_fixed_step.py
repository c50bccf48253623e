"""Steps of one shape: equal to plain steps, compiled whole and once, captured on CUDA; the cache goes on afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import CompileConfig

from subtoken_train.cache.packed_layer import SLACK
from subtoken_train.inference.fixed_step import FixedStep
from subtoken_train.inference.prefill import decode
from subtoken_train.kernels import native
from tests.support.generation_cells import CELLS, StepCell
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.sampling import sampled
from tests.support.truth_models import TEXT

SERVED = [name for name, cell in CELLS.items() if "every" not in cell.compression]
ROUTED = {"selector": "linear"}
SHORT = {
    "own_heads": StepCell(ROUTED | {"eviction": "own_sets", "protocol": "context_first"}, layers=1),
    "pages": StepCell({"eviction": "quest_steps"}, compression={"keep": 0.2}, layers=1),
    "window": StepCell(ROUTED | {"family": "mistral_window", "precision": "int8"}, layers=1),
}
"""Models of one layer, which compile in seconds."""


@pytest.fixture(autouse=True)
def in_torch(monkeypatch):
    """Make plain steps attend in torch, as fixed ones do; ``tests/kernels/test_native.py`` bounds what C rounds."""
    monkeypatch.setattr(native, "library", lambda: None)


def compare(cell: StepCell, tokens: int, bound: float = 1e-5, **settings) -> None:
    """Fixed steps beside plain ones on another cache of the same prompts; then both go on plainly."""
    backbone, plain, token_B1 = cell.filled()
    _, fixed, _ = cell.filled()
    with FixedStep(backbone, fixed, tokens, **settings) as step:
        for _ in range(tokens):
            expected = decode(backbone, token_B1, plain)
            assert (step(token_B1) - expected).abs().max() <= bound
            assert fixed.get_seq_length() == plain.get_seq_length()
            token_B1 = expected.argmax(-1, keepdim=True)
    assert torch.equal(fixed.next_position, plain.next_position)
    for cache in (plain, fixed):
        cache.crop(-3)
    found = [decode(backbone, token_B1.repeat(1, 2), cache) for cache in (plain, fixed)]
    assert (found[0] - found[1]).abs().max() <= bound


@sampled("name", SERVED, every=4)
@torch.no_grad()
def test_a_fixed_step_is_a_plain_step(name):
    compare(CELLS[name], 5, 0.05 if name == "bf16" else 1e-5)


@torch.no_grad()
def test_a_fixed_step_under_autocast_is_a_plain_step():
    with torch.autocast("cpu", torch.bfloat16):
        compare(CELLS["bits"], 3, 0.05)


@sampled(("name", "backend"), [("own_heads", "eager"), ("pages", "aot_eager"), ("window", "eager")], every=3)
@torch.no_grad()
def test_a_compiled_step_is_one_graph_for_all_tokens(name, backend):
    """Over the places where a plain tail would grow; a break in the graph would raise, and so would a second graph.

    Other caches' steps count for themselves.
    """
    made = []

    def counting(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    backbone, compiled, token_B1 = SHORT[name].filled()
    _, uncompiled, _ = SHORT[name].filled()
    _, plain, _ = SHORT[name].filled()
    config = CompileConfig(fullgraph=True, backend=counting, mode=None)
    tokens = SLACK + 20
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        FixedStep(backbone, compiled, tokens, compile_config=config) as ours,
        FixedStep(backbone, uncompiled, tokens) as theirs,
    ):
        for _ in range(tokens):
            got, alike, expected = ours(token_B1), theirs(token_B1), decode(backbone, token_B1, plain)
            assert torch.equal(got, alike) or backend != "eager"
            assert (got - expected).abs().max() < 1e-5
            token_B1 = expected.argmax(-1, keepdim=True)
    assert len(made) == 1
    assert torch.equal(compiled.next_position, plain.next_position)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_every_kind_compiles(name):
    cell = CELLS[name]
    if cell.cell.get("family", "llama") in TEXT:
        cell = replace(cell, layers=1)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compare(cell, 5, 0.05 if name == "bf16" else 1e-5, compile_config=config)


@torch.no_grad()
def test_what_is_not_served_is_one_message():
    backbone, cache, token_B1 = CELLS["one"].filled()

    def refused(words, *given, **more):
        with pytest.raises(ValueError, match=words):
            FixedStep(*given, **more)

    refused("tokens=0: a fixed step", backbone, cache, 0)
    refused("is on 'cpu'", backbone, cache, 1, cuda_graph=True)
    with FixedStep(backbone, cache, 1) as step:
        step(token_B1)
        with pytest.raises(ValueError, match="made for 1 tokens"):
            step(token_B1)
        again = FixedStep(backbone, cache, 1).__enter__
        plain, repeat = (lambda: decode(backbone, token_B1, cache)), (lambda: cache.batch_repeat_interleave(2))
        for use in (lambda: cache.crop(-1), repeat, plain, again):
            with pytest.raises(ValueError, match="a fixed step is open"):
                use()
    cache.reset()
    refused("needs a cache with a prompt", backbone, cache, 1)
    refused("leave eviction_every out", *CELLS["online"].filled()[:2], 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_a_captured_step_is_a_plain_step(name):
    compare(replace(CELLS[name], device="cuda"), SLACK + 20, 0.05 if name == "bf16" else 1e-4, cuda_graph=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["own_heads", "window"])
@torch.no_grad()
def test_a_step_compiled_to_reduce_overhead_is_a_plain_step(name):
    compare(replace(SHORT[name], device="cuda"), SLACK + 20, 1e-4, compile_config=CompileConfig(fullgraph=True))
