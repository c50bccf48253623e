"""Context reducers: Quest's pages beside loops and two releases, budgets to the token; evictions' scores."""

import pickle
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.evictions import EVICTIONS as METHODS
from subtoken_train.evictions.base import Eviction
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.objective import answer_loss, predicting_rows
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts, prefill
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.contexts import keep_by_page, page_bounds, page_index, page_scores
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from subtoken_train.view.scores import Scores
from tests.support.golden_cases import alike, load, near
from tests.support.helpers import compress, random_mask, random_scores
from tests.support.prompt_views import CONTEXT, QUERY, SYSTEM, context_view, rope
from tests.support.refusals import refuses, refusing
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

SHORT = {
    "compactor": {"sinks": 2, "last": 1, "chunk": 7}, "expected_attention": {"sinks": 2, "future": 9},
    "h2o": {"recent_share": 0.25}, "snapkv": {"window": 3}, "streaming_llm": {"sinks": 2}, "knorm": {}, "keydiff": {},
    "tova": {}, "lagkv": {"sinks": 2, "lag": 5}, "q_filter": {}, "cur": {"sinks": 2, "local": 5},
    "kvzip": {"sinks": 2, "chunk": 9}, "kvgrad": {"sinks": 2, "chunk": 9}, "capkv": {"sinks": 2, "future": 9},
}  # fmt: skip
"""Each eviction that serves, with settings that a few tokens notice."""
EVICTIONS = {
    name: METHODS[name](**({"seed": 0} if name == "compactor" else {}), **own, **METHODS[name].evenly)
    for name, own in SHORT.items()
}
NAMES = ["compactor", "expected_attention"]


def made(name, keep_ratio=0.5, **own):
    return build_reducer(name, keep_ratio, **{**SHORT[name], **own})


@pytest.mark.parametrize("name", NAMES)
def test_equal_tokens_stay_in_order_and_a_sample_without_context_keeps_none(name):
    view = context_view([[CONTEXT] * 12 + [QUERY] * 2, [SYSTEM] * 3 + [QUERY] * 4])
    alike = {part: torch.ones_like(getattr(view, part)) for part in ("query_BHNd", "key_BhNd", "value_BhNd")}
    view = view.replaced(**alike, rotate=lambda at: rope(torch.zeros_like(at)))
    kept = made(name).keep_context(view)
    assert kept.sum(-1).tolist() == [6, 0]
    if name == "expected_attention":  # all alike: the lower index; Compactor's mean of three falls at both ends
        assert kept[0, :6].all()


@pytest.mark.parametrize("name", SHORT)
@sampled("kind", ["llama", "qwen3"], every=2)
def test_the_eviction_before_the_question_keeps_the_same_with_one_set_for_all_heads(name, kind):
    """In every layer, packed and in training: the eviction under ``context_first``, scores averaged, is it."""

    @dataclass(frozen=True)
    class Shared(type(EVICTIONS[name])):
        heads_share: ClassVar[bool] = True

        def at_budget(self, scores, competes_BN, count_Bh):
            found = super().at_budget(scores, competes_BN, count_Bh)
            return replace(found, scores_BhN=found.scores_BhN.mean(1, keepdim=True))

    family, contexts = text_family(kind), [24, 17, 21]
    batch = text_batch([(24, 6, 0), (17, 4, 0), (21, 3, 0)])

    def kept(backbone, compression, protocol):
        opened = open_prompts(backbone, batch, PackedCache(family.shape.num_layers), compression, protocol)
        places = [[set(row[row >= 0].tolist()) for row in part.entries_BN] for part in opened.plan.layers]
        return opened.logits_BV, places

    evicted, of_eviction = kept(compress(family), Compression(Shared(**asdict(EVICTIONS[name])), 0.5), "context_first")
    reducer = compress(family, **{"name": name, "keep_ratio": 0.5, **SHORT[name]})
    reduced, of_reducer = kept(reducer, Compression(), "context_first")
    assert of_reducer == of_eviction
    torch.testing.assert_close(reduced, evicted, rtol=1e-4, atol=1e-4)
    whole, _ = kept(reducer, Compression(), "query_aware")
    torch.testing.assert_close(whole, evicted, rtol=1e-4, atol=1e-4)
    trained = reducer.train().run(batch).kept
    for layer, sets in enumerate(of_eviction):
        for sample, context in enumerate(contexts):  # alone, contexts are padded on the left
            places = {place - (24 - context) for place in sets[sample]}
            assert set(trained[layer][sample, : 1 + context].nonzero()[:, 0].tolist()) == places


@pytest.mark.parametrize("name", ["snapkv", "kvzip", "kvgrad"])
@pytest.mark.parametrize("pad_left", [False, True])
def test_neither_question_nor_answer_changes_what_stays(name, pad_left):
    """Training passes hold both, and choose what inference chooses."""
    backbone = compress(text_family(), **{"name": name, "keep_ratio": 0.5, **SHORT[name]})
    batch = text_batch([(24, 6, 5), (16, 4, 7)], pad_left)
    context, late = batch.regions_BN == Region.CONTEXT, batch.regions_BN >= Region.QUERY
    others = replace(batch, input_ids_BN=torch.where(late, (batch.input_ids_BN + 7) % 80 + 5, batch.input_ids_BN))
    first, second = backbone.run(batch).kept, backbone.run(others).kept
    assert all(torch.equal(first[layer] & context, second[layer] & context) for layer in first)
    assert [[int((first[layer] & context)[i].sum()) for i in range(2)] for layer in first] == [[12, 8]] * 3


@pytest.mark.parametrize("name", ["kvzip", "kvgrad"])
def test_a_training_step_keeps_what_inference_keeps(name):
    """The second pass has neither dropout nor gradient; LoRA and routers have theirs."""
    family = text_family()
    add_lora(family, LoraSettings(dropout=0.5))
    for part, parameter in family.model.named_parameters():
        if "lora_B" in part:
            torch.nn.init.normal_(parameter, std=0.3)
    router = RoutingConfig("linear", num_groups=8, kept_groups=2)
    backbone = compress(family, router, name=name, keep_ratio=0.5, chunk=9)
    enable_checkpointing(family, backbone.bank)
    batch = text_batch([(24, 6, 5), (16, 4, 7)])
    rows, targets = predicting_rows(batch.labels_BN)
    result = backbone.train().run(batch)
    answer_loss(backbone.logits(result, rows), targets).backward()
    assert all(part.grad.isfinite().all() and part.grad.any() for part in backbone.parameters() if part.requires_grad)
    with torch.no_grad():
        inferred = backbone.eval().run(batch).kept
        assert all(torch.equal(result.kept[layer], inferred[layer]) for layer in range(3))
        with pytest.raises(ValueError, match=f"prefill_chunk: reducer '{name}' runs a context twice"):
            prefill(backbone, text_batch([(24, 6, 0)]), PackedCache(3), Compression(prefill_chunk=8))


test_what_cannot_serve_is_refused = refusing(
    [
        *((name, "divides its budget between layers or heads") for name in ("pyramidkv", "kvcompose", "duo_attention")),
        ("quest_steps", "chooses anew at every step of decoding"),
        ("tgv_kv", "reads the attention between text and image"),
        ("elastic", "merges what it evicts into what stays"),
        ("ada(snapkv)", "a wrapper changes what an eviction does with its budget"),
        ("kvzap", "reads what a layer projects, which a context reducer is not shown"),
    ],
    lambda name: build_reducer(name, 0.5),
)


def test_an_eviction_of_another_package_serves_by_its_name(monkeypatch):
    @dataclass(frozen=True)
    class Every(Eviction):
        name: ClassVar[str] = "every"
        step: int = 2

        def score(self, view):
            places_BN = view.entries_BN.cumsum(-1)
            return Scores((places_BN % self.step == 0).float()[:, None], torch.zeros_like(view.entries_BN))

    monkeypatch.setitem(METHODS, "every", Every)
    reducer = build_reducer("every", 0.25, step=4)
    assert reducer.keep_context(context_view([[CONTEXT] * 16 + [QUERY]]))[0].nonzero()[:, 0].tolist() == [3, 7, 11, 15]
    assert pickle.loads(pickle.dumps(reducer)) == replace(reducer) == reducer
    assert (reducer.words, reducer.stage) == ("step=4", "context")


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name):
    view = context_view([[CONTEXT] * 40 + [QUERY] * 3])
    plain = made(name).keep_context(view)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made(name).keep_context(view), plain)


def test_only_a_blind_reducer_compresses_a_context_before_its_question():
    family, batch = text_family(), text_batch([(24, 6, 0)])
    quest = compress(family, **{"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 4})
    with pytest.raises(ValueError, match="reducer 'quest' chooses by the question"):
        open_prompts(quest, batch, PackedCache(3), Compression(), "context_first")
    router = RoutingConfig("linear", num_groups=8, kept_groups=2, query_conditioned=True)
    asking = compress(family, router, **{"name": "compactor", "keep_ratio": 0.5, **SHORT["compactor"]})
    with pytest.raises(ValueError, match="the routers are conditioned on the question"):
        open_prompts(asking, batch, PackedCache(3), Compression(), "context_first")


@pytest.mark.parametrize(("name", "always"), [("compactor", 12), ("expected_attention", 4)])
def test_a_short_context_is_served(name, always):
    """A budget below what always stays keeps the latest of that."""
    reducer = build_reducer(name, 0.25)
    for tokens in (1, 2, 5, 13, 17, 40):
        view = context_view([[CONTEXT] * tokens + [QUERY] * 2, [SYSTEM] + [CONTEXT] * 60 + [QUERY]])
        kept = reducer.keep_context(view)
        assert kept.sum(-1).tolist() == [max(1, tokens // 4), 15]
        if tokens <= always:
            assert kept[0].nonzero()[:, 0].tolist() == list(range(tokens - max(1, tokens // 4), tokens))
    assert build_reducer(name, 0.25).kept_tokens(512) == 128
    assert build_reducer(name, 0.21875, round_up=True).kept_tokens(512) == 112
    assert build_reducer(name, 1.0).kept_tokens(5) == 5


def quest(keep_ratio=0.25, **settings):
    return build_reducer(name="quest", keep_ratio=keep_ratio, **settings)


def test_the_window_is_half_of_the_budget_at_most():
    kept_B = torch.tensor([1, 2, 3, 100, 127, 128, 512])
    assert quest().protected_tokens(kept_B).tolist() == [0, 1, 1, 50, 63, 64, 64]
    assert not quest(window=0).protected_tokens(kept_B).any()


def by_hand_of_quest(scores, tokens, page_size, window, kept):
    """Places among a sample's context tokens: the window, then page by page, the latest of a page first."""
    free = list(range(tokens - window))
    pages = [free[start : start + page_size] for start in range(0, len(free), page_size)]
    order = sorted(range(len(pages)), key=lambda page: (-scores[page], page))
    chosen = [place for page in order for place in reversed(pages[page])]
    return set(chosen[: kept - window]) | set(range(tokens - window, tokens))


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 17), st.integers(0, 20), st.integers(1, 99),
    st.sampled_from(["left", "right"]), st.integers(0, 99),
)  # fmt: skip
def test_what_stays_by_a_plain_loop(lengths, page_size, window, percent, pad, seed):
    """Exactly the budget of every sample, whatever its length, its neighbours and its padding."""
    view = context_view([[Region.SYSTEM] + [Region.CONTEXT] * n + [Region.QUERY] * 2 for n in lengths], pad, seed)
    kept = quest(percent / 100, page_size=page_size, window=window).keep_context(view)
    page = page_index(view.in_scope_BN, page_size)
    scores = page_scores(view.query_BHNd, view.asks_BN, *page_bounds(view.key_BhNd, page, 40))
    for sample, tokens in enumerate(lengths):
        count = max(1, tokens * percent // 100) if tokens else 0
        expected = by_hand_of_quest(scores[sample].tolist(), tokens, page_size, min(window, count // 2), count)
        assert set(kept[sample, view.in_scope_BN[sample].nonzero()[:, 0]].nonzero()[:, 0].tolist()) == expected
        assert int(kept[sample].sum()) == count


def test_a_page_that_the_budget_cuts_keeps_its_latest_tokens():
    view = context_view([[Region.CONTEXT] * 12 + [Region.QUERY]])
    kept = quest(0.5, page_size=4, window=0).keep_context(view)[0, :12].view(3, 4)
    assert sorted(map(tuple, kept.tolist())) == [(False,) * 4, (False, False, True, True), (True,) * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_pages_stay_in_order(dtype):
    view = context_view([[Region.CONTEXT] * 12 + [Region.QUERY]], dtype=dtype)
    alike = view.replaced(key_BhNd=torch.ones_like(view.key_BhNd))
    assert quest(0.5, page_size=4, window=1).keep_context(alike)[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 7, 11]


def test_a_query_region_of_zero_tokens():
    view = context_view([[Region.CONTEXT] * 8])
    refuses("a query region of zero tokens", lambda: quest(0.5, page_size=2, window=2).keep_context(view))


def test_a_sample_without_context_keeps_none_and_needs_no_query():
    view = context_view([[Region.CONTEXT] * 8 + [Region.QUERY], [Region.SYSTEM] * 9])
    kept = quest(0.5, page_size=2, window=2).keep_context(view)
    assert kept.sum(-1).tolist() == [4, 0]
    assert kept[0, 6:8].all()


sizes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 14), st.integers(1, 5))


def scores_by_loop(query, key, context, asks, page_size):
    """One page at a time: the mean over heads and rows that ask of the larger of both products, channel by channel."""
    rows_HQd, shared_HNd = query[:, asks].float(), key.float().repeat_interleave(len(query) // len(key), 0)
    pages = context.nonzero()[:, 0].split(page_size) if context.any() else []
    bounds = [(shared_HNd[:, page].amin(1, True), shared_HNd[:, page].amax(1, True)) for page in pages]
    return [float(torch.maximum(rows_HQd * low, rows_HQd * high).sum(-1).mean()) for low, high in bounds]


@pytest.mark.slow
@given(sizes, st.integers(1, 6), st.integers(0, 100), st.sampled_from([torch.float32, torch.bfloat16]))
def test_scores_equal_a_plain_loop(size, page_size, seed, dtype):
    batch, kv_heads, group, length, width = size
    query = random_scores(seed, batch, kv_heads * group, length, width, dtype=dtype)
    key = random_scores(seed + 1, batch, kv_heads, length, width, dtype=dtype)
    context, asks = random_mask(seed + 2, batch, length), random_mask(seed + 3, batch, length, share=0.4)
    low, high = page_bounds(key, page_index(context, page_size), -(-length // page_size))
    scores = page_scores(query, asks, low, high)
    for sample in range(batch):
        expected = scores_by_loop(query[sample], key[sample], context[sample], asks[sample], page_size)
        if asks[sample].any():
            torch.testing.assert_close(scores[sample, : len(expected)], torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_golden_of_quest(shared):
    params, golden = load(shared, "quest_official")
    check_heads(
        "quest_official", golden["query"], golden["keys"], golden["page_scores"][:, :, -1], params["chunk_size"]
    )


def test_golden_of_kvcache_factory(shared):
    params, golden = load(shared, "quest_factory_pages")
    keys, size = golden["keys_repeated"], params["page_size"]
    batch, heads, length, _ = keys.shape
    low, high = page_bounds(keys, page_index(torch.ones(batch, length, dtype=torch.bool), size), -(-length // size))
    alike("quest", "quest_factory_pages: smallest of a page", low, golden["page_min"])
    alike("quest", "quest_factory_pages: largest of a page", high, golden["page_max"])
    check_heads("quest_factory_pages", golden["queries"][:, :, -1:], keys, golden["page_scores"], size)
    choice = length - params["recent_size"]  # its window is outside the choice
    context = (torch.arange(length) < choice).expand(batch, -1)
    page, none = page_index(context, size), torch.zeros(batch, dtype=torch.long)
    for head in range(heads):
        kept = keep_by_page(golden["page_scores"][:, head], context, size, none + size * params["page_budget"], none)
        chosen = torch.stack([row[marks].unique() for row, marks in zip(page, kept, strict=True)])
        alike("quest", "quest_factory_pages", chosen, golden["selected_pages"][:, head].sort(-1).values)


def check_heads(case, query, keys, expected_BHP, page_size):
    """The released codes score every head for itself; a one-head call does the same."""
    batch, _, length, _ = keys.shape
    page = page_index(torch.ones(batch, length, dtype=torch.bool), page_size)
    asks = torch.ones(batch, query.shape[2], dtype=torch.bool)
    for head in range(query.shape[1]):
        low, high = page_bounds(keys[:, head : head + 1], page, expected_BHP.shape[-1])
        scores = page_scores(query[:, head : head + 1], asks, low, high)
        near("quest", f"{case}: scores", scores, expected_BHP[:, head], rtol=1e-5, atol=1e-5)


def test_autocast_does_not_coarsen_the_choice():
    """In bf16 many pages would tie, and training would keep other pages than inference."""
    query, key = random_scores(0, 1, 8, 4, 32), random_scores(1, 1, 8, 256, 32)
    page = page_index(torch.ones(1, 256, dtype=torch.bool), 4)
    asks = torch.ones(1, 4, dtype=torch.bool)
    expected = page_scores(query, asks, *page_bounds(key, page, 64))
    with torch.autocast("cpu", torch.bfloat16):
        scores = page_scores(query, asks, *page_bounds(key, page, 64))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, expected)
