"""Captured steps (without a GPU: on a tape, or compiled whole) are plain steps; what sliding windows hold and read."""

import random
from collections import OrderedDict
from dataclasses import replace
from inspect import getclosurevars
from unittest.mock import Mock

import pytest
import torch
from transformers import StoppingCriteriaList

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import SLACK
from subtoken_train.engine.mixed_heads import mixed_hidden
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import build_eviction
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.inference import decode_step
from subtoken_train.inference.batched import score_batch
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import append, decode, decode_joined, open_prompts
from subtoken_train.kernels import native
from subtoken_train.routing import RoutingConfig
from tests.support.generation_cells import CELLS, SERVED_CALLS, StepCell, inputs_of, model_of, settings_of
from tests.support.helpers import compress
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.refusals import refuses
from tests.support.sampling import pairwise, sampled
from tests.support.tape import on_tape
from tests.support.text_families import WINDOW, text_batch, text_family
from tests.support.truth_cells import FACTORS, PLAIN_CELL, allowed, backbone_of, batch_of

SERVED = [name for name, cell in CELLS.items() if "every" not in cell.compression]
ROUTED = {"selector": "linear"}
SHORT = {
    "own_heads": StepCell(ROUTED | {"eviction": "own_sets", "protocol": "context_first"}, layers=1),
    "pages": StepCell({"eviction": "quest_steps"}, compression={"keep": 0.2}, layers=1),
    "window": StepCell(ROUTED | {"family": "mistral_window", "precision": "int8"}, layers=1),
}
"""Models of one layer, which compile in seconds."""
CAPTURED = [cell for cell in pairwise(FACTORS, allowed) if cell["family"] != "internvl"]  # whose positions are dynamic
DRAWN = random.Random(0).sample(CAPTURED, 300)
ROWS = [cell | {"batch": "one"} for cell in CAPTURED if cell["precision"] != "bf16"]
OF_ONE = [[cell for cell in ROWS if cell["family"] == name] for name in sorted({cell["family"] for cell in ROWS})]
SHARING = [random.Random(number).sample(OF_ONE[number % len(OF_ONE)], 3) for number in range(40)]
CELL = PLAIN_CELL | {"family": "qwen2_window", "batch": "three_left"}


@pytest.fixture
def captures(monkeypatch):
    """Capture on tapes, and list the devices of the captures; plain steps attend in torch, as captured ones do."""
    made = []
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(decode_step, "DEVICES", ("cpu",))
    monkeypatch.setattr(decode_step, "capture", lambda *given: made.append(given[2]) or on_tape(*given))
    monkeypatch.setattr(decode_step, "_graphs", type(decode_step._graphs)())
    return made


def compare(cell: StepCell, tokens: int, bound: float = 1e-4, expected: int | None = None) -> None:
    """Captured steps beside plain ones on another cache of the same prompts; then both go on plainly."""
    backbone, plain, token_B1 = cell.filled()
    _, caught, _ = cell.filled()
    caught.reserve(max(tokens, decode_step.FEW) if expected is None else expected)
    with caught.answering():
        for _ in range(tokens):
            wanted = decode(backbone, token_B1, plain)
            assert (decode(backbone, token_B1, caught) - wanted).abs().max() <= bound
            assert caught.get_seq_length() == plain.get_seq_length()
            token_B1 = wanted.argmax(-1, keepdim=True)
        assert caught.way == "captured in a graph"
    assert torch.equal(caught.next_position, plain.next_position)
    for cache in (plain, caught):
        cache.crop(-1)
    found = [decode(backbone, token_B1.repeat(1, 2), cache) for cache in (plain, caught)]
    assert (found[0] - found[1]).abs().max() <= bound


def bound_of(cell: StepCell) -> float:
    return 0.05 if cell.cell.get("precision") == "bf16" else 1e-4


@sampled("cell", DRAWN, every=20, ids=lambda cell: "-".join(cell.values()).replace("/", "k"))
def test_a_captured_step_of_a_drawn_cache_is_a_plain_step(cell, captures):
    compare(StepCell(cell), 4, bound_of(StepCell(cell)))
    assert len(captures) == 1


@sampled("cells", SHARING, every=5, ids=lambda own: "+".join([own[0]["family"], *(cell["precision"] for cell in own)]))
def test_rows_of_drawn_caches_are_captured_together(cells, captures):
    share(cells)
    assert len(captures) == 1 + len(cells)


@torch.no_grad()
def share(cells, device="cpu"):
    """Caches of one row, of unlike settings and formats, in one step; then each goes on alone."""
    made = [[StepCell(cell, device=device).filled() for cell in cells] for _ in range(2)]
    (bone, *_), *_ = filled = made[0]
    plain, caught = ([cache for _, cache, _ in each] for each in made)
    for cache in caught:
        cache.reserve(20)
    first_B1 = torch.cat([token_11 for *_, token_11 in filled])
    for ids_B1 in (first_B1, first_B1 + 1):
        wanted = torch.cat([decode(bone, own, cache) for own, cache in zip(ids_B1.split(1), plain, strict=True)])
        assert (decode_joined(bone, ids_B1, caught, captures=True) - wanted).abs().max() <= 1e-4
    for one, other in zip(plain, caught, strict=True):
        assert (decode(bone, ids_B1[:1], one) - decode(bone, ids_B1[:1], other)).abs().max() <= 1e-4


@sampled("name", SERVED, every=4)
def test_an_answer_outgrows_its_room(name, captures):
    compare(CELLS[name], SLACK + 3, bound_of(CELLS[name]), expected=decode_step.FEW)
    assert len(captures) == 2


@sampled(("name", "backend"), [("own_heads", "eager"), ("pages", "aot_eager"), ("window", "eager")], every=3)
@torch.no_grad()
def test_a_compiled_step_is_one_graph_for_all_tokens(name, backend, captures, monkeypatch):
    """A break in the graph would raise, and so would a second graph."""
    made = []

    def counting(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def compiled(step, again, device):
        run, caches = torch.compile(step, fullgraph=True, backend=counting), getclosurevars(step).nonlocals["caches"]
        run()
        again()
        return lambda: (caches[0].let_append(True), run())[1]

    monkeypatch.setattr(decode_step, "capture", compiled)
    for module in SHORT[name].filled()[0].model.modules():  # transformers' hooks of other tests are not compiled
        monkeypatch.setattr(module, "_forward_hooks", OrderedDict())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        compare(SHORT[name], SLACK - 1)
    assert len(made) == 1


@pytest.mark.parametrize("name", ["beams", "cuts", "processors", "penalties"])
def test_generate_says_the_same_from_captured_steps(name, captures, monkeypatch):
    model = model_of(eviction="own_sets")
    given = inputs_of(model) | settings_of(model) | {"max_new_tokens": 12} | SERVED_CALLS[name]
    said = []
    for devices in (("cuda",), ("cpu",)):
        monkeypatch.setattr(decode_step, "DEVICES", devices)
        torch.manual_seed(0)
        said.append(model.generate(**given))
    assert torch.equal(*said)
    assert len(captures) == 1
    assert str(model.cache_report()).endswith("; decoded captured in a graph")
    assert model.last.cache.shape is None


def test_a_graph_of_other_weights_is_never_replayed(captures):
    family = text_family("llama")
    add_lora(family, LoraSettings(rank=2, dropout=0.0))
    backbone, batch = compress(family).eval(), text_batch([(40, 6, 0)])
    layers = [each for each in family.model.modules() if hasattr(each, "lora_A")]
    for made, change in enumerate(
        (lambda: None, lambda: [layer.scaling.update(default=9.0) for layer in layers], family.model.double), start=1
    ):
        change()
        caches = [PackedCache(3) for _ in range(2)]
        for cache in caches:
            open_prompts(backbone, batch, cache, Compression(), "query_aware")
        caches[0].reserve(20)
        got, wanted = (decode(backbone, batch.input_ids_BN[:, :1], cache) for cache in caches)
        assert (got - wanted).abs().max() < 1e-5
        assert len(captures) == made


def test_what_is_not_captured_goes_step_by_step_and_says_so_once(captures, monkeypatch, recwarn):
    backbone, cache, token_B1 = CELLS["online"].filled()
    cache.reserve(20)
    decode(backbone, token_B1, cache)
    assert cache.way == "step by step, because eviction_every changes what is stored"
    backbone, cache, token_B1 = CELLS["one"].filled()
    cache.reserve(20)
    with torch.autocast("cpu", torch.bfloat16):
        decode(backbone, token_B1, cache)
    assert "autocast" in cache.way
    assert not captures
    assert not [each for each in recwarn if "step by step" in str(each.message)]

    fails = Mock(side_effect=torch.OutOfMemoryError("2 GiB"))
    states = backbone.family.token_states
    monkeypatch.setattr(backbone.family, "token_states", lambda ids: states(ids + 0 * ids.max().item()))
    for capture, words in ((fails, "memory does not suffice"), (on_tape, "the host reads a tensor")):
        monkeypatch.setattr(decode_step, "capture", capture)
        (_, plain, _), (_, cache, _) = (CELLS["one"].filled() for _ in range(2))
        cache.reserve(20)
        with pytest.warns(SubTokenWarning, match=f"step by step, because .*{words}"):
            got = decode(backbone, token_B1, cache)
        assert torch.equal(got, decode(backbone, token_B1, plain))
        assert cache.get_seq_length() == plain.get_seq_length()
        assert torch.equal(cache.next_position, plain.next_position)


def test_a_caller_that_leaves_leaves_a_good_graph(captures):
    model = model_of(eviction="own_sets")
    given = inputs_of(model) | settings_of(model) | {"max_new_tokens": 12}
    wanted = model.generate(**given)

    leaves = Mock(side_effect=[torch.zeros(3, dtype=torch.bool)] * 4 + [KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        model.generate(**given, stopping_criteria=StoppingCriteriaList([leaves]))
    assert torch.equal(model.generate(**given), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SERVED)
def test_a_step_captured_on_a_gpu_is_a_plain_step(name):
    compare(replace(CELLS[name], device="cuda"), SLACK + 20, 0.05 if name == "bf16" else 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cells", SHARING[:9])
def test_rows_are_captured_together_on_a_gpu(cells):
    share(cells, "cuda")


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
def test_every_byte_that_layers_hold_is_reported(name):
    """Prompts of unlike lengths, before a token is decoded, after it, and after an answer of several tokens."""
    backbone, batch = compress(text_family(name)).eval(), text_batch([(40, 6, 0), (21, 4, 0)])
    compression, cache = Compression(build_eviction("knorm"), 0.5, scope="all", kv_dtype="int8"), PackedCache(3)
    opened = open_prompts(backbone, batch, cache, compression, "query_aware")
    for tokens in (0, 1, 5):
        if tokens:
            append(backbone, torch.ones(2, tokens, dtype=torch.long), cache)
        assert held_bytes(cache) == report(backbone, batch, opened.plan, cache, compression).total_bytes


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
    refuses(f"{words}.*sliding windows of mistral", Compression(**settings).check, family)
    with pytest.raises(ValueError, match="mistral has sliding windows, and heads are weighed"):
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
