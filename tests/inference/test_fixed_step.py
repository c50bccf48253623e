"""Steps of one shape are plain steps, compiled whole and once; what layers with sliding windows hold and read."""

from dataclasses import replace

import pytest
import torch
from transformers import CompileConfig

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import SLACK
from subtoken_train.engine.mixed_heads import mixed_hidden
from subtoken_train.evictions import build_eviction
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.inference.batched import score_batch
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.fixed_step import FixedStep
from subtoken_train.inference.prefill import append, decode, open_prompts
from subtoken_train.kernels import native
from subtoken_train.routing import RoutingConfig
from tests.support.generation_cells import CELLS, StepCell
from tests.support.helpers import compress
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.sampling import sampled
from tests.support.text_families import WINDOW, text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of
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
    made, tokens = [], SLACK + 20

    def counting(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    (backbone, compiled, token_B1), (_, uncompiled, _), (_, plain, _) = (SHORT[name].filled() for _ in range(3))
    for module in backbone.model.modules():  # transformers leaves some where another test asked for attentions
        module._forward_hooks.clear()
    config = CompileConfig(fullgraph=True, backend=counting, mode=None)
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


CELL = PLAIN_CELL | {"family": "qwen2_window", "batch": "three_left"}


@torch.no_grad()
def test_what_left_the_window_is_not_stored_and_positions_are_counted():
    backbone, batch = backbone_of(CELL), batch_of(CELL)
    cache = PackedCache(3)
    opened = open_prompts(backbone, batch, cache, Compression(), "query_aware")
    tokens_B = (batch.regions_BN != 0).sum(-1).tolist()
    sizes = [[sum(part.entries for part in block.parts) for block in layer.blocks] for layer in cache.layers]
    assert [set(each) for each in sizes] == [{WINDOW - 1}, set(tokens_B), {WINDOW - 1}]
    assert all(part.position_RM is None for block in cache.layers[1].blocks for part in block.parts)
    found = account(backbone, batch, opened, cache)
    held = sum(layer.payload_bytes + layer.index_bytes for layer in cache.layers)
    assert sum(each.kv_bytes for each in found) == held
    side = 2 * backbone.family.shape.side_bytes
    for each, tokens in zip(found, tokens_B, strict=True):
        assert each.dense_kv_bytes == side * (tokens + 2 * (WINDOW - 1))
        assert each.kv_bytes >= each.dense_kv_bytes + 2 * 4 * (WINDOW - 1)
        assert each.entries_before == each.entries_after


@pytest.mark.parametrize("eviction", ["snapkv", "h2o", "kvzip", "kvcompose"])
@torch.no_grad()
def test_budgets_are_shares_of_what_is_still_seen(eviction):
    backbone, batch = backbone_of(CELL), batch_of(CELL)
    cache = PackedCache(3)
    compression = Compression(build_eviction(eviction), 0.5, scope="all")
    plan = open_prompts(backbone, batch, cache, compression, "query_aware").plan
    heads_Bh = [layer.heads_BNh.sum(1) if layer.heads_BNh is not None else None for layer in plan.layers]
    for layer in (0, 2):
        kept = (plan.layers[layer].entries_BN >= 0).sum(-1)[:, None] if heads_Bh[layer] is None else heads_Bh[layer]
        if eviction in ("snapkv", "h2o"):  # heads or layers of the others share a budget
            assert bool((kept <= WINDOW // 2).all())
        assert bool((kept >= 1).all())


def held_bytes(cache):
    """Bytes of every tensor to which an object of the layers leads, each storage once."""
    storages, known, left = {}, set(), list(cache.layers)
    while left:
        thing = left.pop()
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, list | tuple | dict):
            left += thing.values() if isinstance(thing, dict) else thing
        elif hasattr(thing, "__dict__") and id(thing) not in known:
            known.add(id(thing))
            left += vars(thing).values()
    return sum(storages.values())


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_window", "ministral3", "llama"])
@torch.no_grad()
def test_every_byte_that_layers_hold_is_reported(name):
    """Prompts of unlike lengths, before a token is decoded, after it, and after an answer of several tokens."""
    backbone, batch = compress(text_family(name)).eval(), text_batch([(40, 6, 0), (21, 4, 0)])
    compression, cache = Compression(build_eviction("knorm"), 0.5, scope="all", kv_dtype="int8"), PackedCache(3)
    opened = open_prompts(backbone, batch, cache, compression, "query_aware")
    for tokens in (0, 1, 5):
        if tokens:
            append(backbone, torch.ones(2, tokens, dtype=torch.long), cache)
        told = report(backbone, batch, opened.plan, cache, compression)
        assert held_bytes(cache) == told.total_bytes


@torch.no_grad()
def test_a_cropped_cache_sees_again_what_had_left_the_window():
    backbone, batch = backbone_of(CELL), batch_of(CELL)
    long, short = list(range(10, 40)), list(range(12, 20))
    one, two = (score_batch(backbone, batch, [order] * 3) for order in ([long, short], [short]))
    for both, alone in zip(one, two, strict=True):
        assert both.logprobs[1] == pytest.approx(alone.logprobs[0], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eviction": build_eviction("quest_steps"), "keep": 0.5}, "eviction 'quest_steps' does not go with"),
        ({"eviction": build_eviction("snapkv"), "keep": 0.5, "rerotate": True}, "rerotate does not go with"),
        ({"eviction": build_eviction("h2o"), "keep": 64, "unit": "tokens", "every": 8}, "eviction_every=8 does not go"),
    ],
)
def test_what_does_not_go_with_windows_is_refused(settings, words):
    family = text_family("mistral_window")
    with pytest.raises(ValueError, match=f"{words}.*sliding windows of mistral"):
        Compression(**settings).check(family)
    with pytest.raises(ValueError, match="mistral has sliding windows, and alphas of heads"):
        mixed_hidden(family, torch.zeros(1, 4, 64), torch.arange(4)[None], None)
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    family = text_family(layers=1, rope_parameters=scaled, max_position_embeddings=64)
    with pytest.raises(ValueError, match="positions of kind 'dynamic': their angles depend on a prompt's length"):
        Compression(build_eviction("knorm"), 0.5, rerotate=True).check(family)


def test_training_in_a_window_gives_gradients_and_no_nan():
    family, quest = text_family("qwen2_window"), {"keep_ratio": 0.5, "page_size": 4, "window": 4}
    add_lora(family, LoraSettings(rank=2, dropout=0.0))
    backbone = compress(family, RoutingConfig(num_groups=8, kept_groups=6), name="quest", **quest)
    batch = text_batch([(40, 8, 6), (24, 5, 3)], pad_left=True)
    result = backbone.run(batch)
    backbone.logits(result)[result.labels(batch.labels_BN) >= 0].square().mean().backward()
    moved = [p.grad for p in family.model.parameters() if p.grad is not None]
    assert moved
    assert all(bool(grad.isfinite().all()) for grad in moved)
