"""What every registered eviction and wrapper must pass, originals' recorded scores and sets, what wrappers do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evictions import EVICTIONS, WRAPPERS, build_eviction, notation_names
from subtoken_train.evictions.base import Eviction, Wrapper
from subtoken_train.evictions.keys import KNorm
from subtoken_train.evictions.kvzip import KVCompose
from subtoken_train.evictions.wrappers import PerLayer, chunk_ranks
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from tests.support import prompt_views
from tests.support.golden_cases import close, golden_view, load, same_sets
from tests.support.refusals import refuses
from tests.support.tape import unread
from tests.support.truth_models import SHORT, OwnSets

SETTINGS = {
    "snapkv": {"window": 4},
    "pyramidkv": {"window": 4, "beta": 4},
    "chunk": {"length": 1},  # fits any budget; longer ones have their own tests
    "per_layer": {"shares": (3, 1, 2)},
    "compactor": {"sinks": 2, "last": 1, "chunk": 4},
    "lagkv": {"sinks": 1, "lag": 4},
    "cake": {"window": 4},
    "headkv": {"window": 4},
    "sparsemm": {"window": 4},
    **SHORT,
}

CHAINS = [
    *("ada(snapkv)", "ada(critical(knorm))", "ada(pyramidkv)", "ada(h2o)", "critical(h2o)", "critical(tgv_kv)"),
    *("chunk(snapkv)", "chunk(critical(knorm))", "per_layer(aircache)", "per_layer(ada(vl_cache))", "pooled(h2o)"),
    *("lkv(snapkv)", "lkv(kvzap)"),
]
"""Wrappers around some of them."""
SHARES = {"per_layer": {"shares": [1] * prompt_views.LAYERS}}


@pytest.fixture(params=[*EVICTIONS, *CHAINS])
def method(request):
    names = notation_names(request.param)
    settings = {f"{name}.{key}": value for name in names for key, value in SETTINGS.get(name, {}).items()}
    return build_eviction(request.param, **settings, **prompt_views.settings_for(request.param))


@pytest.fixture
def prompts(method):
    return list((prompt_views.WITH_IMAGE if method.needs_image else prompt_views.PROMPTS).values())


def test_padding_neighbours_and_rows_that_are_no_entries_change_nothing(method, prompts):
    prompt_views.check_padding(method, prompts, dropped=[(1, 0.5), (2, 0.9)])


def test_layers_that_decide_alone_keep_the_same(method, prompts):
    """Unless a method says that what a layer keeps depends on others, a layer is planned before others have run."""
    for dropped in ([], [(1, 0.5), (2, 0.9)]):
        views = prompt_views.layer_views(prompts, method.needs, "left", dropped=dropped)
        together = prompt_views.plan(method, views, 0.3)[2]
        alone = [prompt_views.plan(method, [view], 0.3)[2][0] for view in views]
        assert method.across_layers or all(map(torch.equal, together, alone))


@pytest.mark.parametrize("scope", ["visual", "all"])
def test_any_scope(method, scope):
    """Whatever a method compresses by default, it can be given other candidates; the rest stays."""
    views = prompt_views.layer_views(list(prompt_views.WITH_IMAGE.values()), method.needs, "right")
    scores = [method.score(view) for view in views]
    regions = [view.regions_BN for view in views]
    competes = [codes == Region.VISUAL if scope == "visual" else codes > 0 for codes in regions]
    candidates = Candidates(regions, competes, torch.stack([each.sum(-1) // 3 for each in competes]))
    counts, kept = method.counts(scores, candidates), method.keep(scores, candidates)
    for layer, view in enumerate(views):
        assert ((kept[layer] & competes[layer][:, None]).sum(-1) == prompt_views.by_head(counts)[layer]).all()
        assert ((view.entries_BN & ~competes[layer])[:, None] <= kept[layer]).all()
        assert not (kept[layer] & ~view.entries_BN[:, None]).any()


def test_bf16_inputs_score_as_their_values(method, prompts):
    for view in prompt_views.layer_views(prompts, method.needs | {"values"}, dtype=torch.bfloat16):
        query, key, value = [each.float() for each in (view.query_BHNd, view.key_BhNd, view.value_BhNd)]
        same = view.replaced(query_BHNd=query, key_BhNd=key, value_BhNd=value)
        ours, its = method.score(view).scores_BhN, method.score(same).scores_BhN
        assert ours.dtype == torch.float32
        assert torch.equal(ours, its)


def test_heads_share_a_set_where_a_method_says_so(method, prompts):
    views = prompt_views.layer_views(prompts, method.needs)
    for view, kept in zip(views, prompt_views.plan(method, views, 0.3)[2], strict=True):
        assert kept.shape[1] == (1 if method.heads_share else view.key_BhNd.shape[1])


def snapkv(**settings):
    def given(params):
        pooling = params.get("pooling", "avgpool").removesuffix("pool")
        return {"window": params["window_size"], "kernel": params["kernel_size"], "pooling": pooling, **settings}

    return given


def h2o(params):
    return {"recent_share": 0.0, "window": params["window_size"], "group": params.get("gqa_score_agg", "mean")}


def sinks(params):
    """KVCache-Factory's class of that name has a fixed window: what it leaves of the capacity is the first entries."""
    found = [params[name] for name in ("n_sink", "sink", "start_size") if name in params]
    return {"sinks": found[0] if found else params["max_capacity_prompt"] - params["window_size"]}


CASES = [
    # recording, method, settings, keys, recorded scores (None: sets alone), recorded places
    ("kvpress_knorm", "knorm", {}, "keys", "scores", "kept_positions"),
    ("kvpress_keydiff", "keydiff", {}, "keys", "scores", "kept_positions"),
    ("kvpress_tova", "tova", {"protect_last": True}, "keys", "scores", "kept_positions"),
    ("streamingllm_original", "streaming_llm", sinks, "keys", None, "kept_positions_call"),
    ("streamingllm_original", "streaming_llm", sinks, "keys", None, "kept_positions_evict_for_space_{num_coming}"),
    ("kvpress_streamingllm", "streaming_llm", sinks, "keys", None, "kept_positions"),
    ("streamingllm_adakv", "streaming_llm", sinks, "keys", None, "kept_positions"),
    ("streamingllm_factory", "streaming_llm", sinks, "keys", None, "kept_positions"),
    ("h2o_factory_prompt", "h2o", h2o, "keys_repeated", None, "kept_positions"),
    ("h2o_factory_prompt_kvhead", "h2o", h2o, "keys", None, "kept_positions"),
    ("kvpress_observed_attention", "h2o", {"recent_share": 0.0, "normalise": True}, "keys", "scores", "kept_positions"),
    # a set per query head: the recording repeats the keys, as the released code does
    ("snapkv_original_avgpool", "snapkv", snapkv(), "keys_repeated", None, "kept_positions"),
    *(
        (f"snapkv_factory_kvhead_{group}", "snapkv", given, "keys", "pooled_scores", "kept_positions")
        for group, given in ((each, snapkv(group=each, pool_per="kv_head")) for each in ("mean", "max"))
    ),
    ("kvpress_snapkv", "snapkv", snapkv(rows="mean"), "keys", "scores", "kept_positions"),
    ("kvpress_snapkv_from_attn", "snapkv", snapkv(rows="mean"), "keys", "scores", "kept_positions"),
]


@pytest.mark.parametrize(("name", "notation", "settings", "keys", "scores", "places"), CASES)
def test_scores_and_sets_are_the_original_s(shared, name, notation, settings, keys, scores, places):
    """Presses score a window, or the last entry, above all others, where here it is protected: these are left out."""
    params, tensors = load(shared, name)
    method = build_eviction(notation, **(settings(params) if callable(settings) else settings))
    view = golden_view(method, tensors, keys)
    if scores is not None:
        theirs = tensors[scores]
        free = theirs.shape[-1]
        if scores == "scores" and notation in ("snapkv", "tova"):
            free -= params["window_size"] if notation == "snapkv" else 1
        ours = method.score(view).scores_BhN[..., :free]
        close(method, f"{name}: scores", ours.expand_as(theirs[..., :free]), theirs[..., :free])
    case = name + places.removeprefix("kept_positions").removesuffix("_{num_coming}").replace("_", " ", 1)
    same_sets(method, case, view, tensors[places.format(**params)])


def test_tova_s_own_code(shared):
    _, tensors = load(shared, "tova_original")
    method, attention = build_eviction("tova"), tensors["attention"]
    view = prompt_views.DenseView(
        attention, torch.full(attention.shape[::3], int(Region.QUERY)), method.needs, tensors["values"]
    )
    same_sets(method, "tova_original", view, tensors["kept_positions"])


def around(name, base):
    return WRAPPERS[name](base, **SHARES.get(name, {}))


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_a_method_says_of_itself_is_passed_on(name):
    for task in ("aware", "agnostic"):
        base = KVCompose(task=task)
        wrapper = around(name, base)
        assert wrapper.name == f"{name}(kvcompose)"
        assert type(wrapper).name == name
        assert wrapper.needs >= base.needs
        assert wrapper.reads_question == base.reads_question
        regions = torch.tensor([prompt_views.PROMPTS["image last"]])
        assert torch.equal(wrapper.second_pass(regions), base.second_pass(regions))
        assert wrapper.inside == (base,)
    assert not around(name, build_eviction("knorm")).needs_image
    assert around("per_layer", build_eviction("aircache")).needs_image
    assert around("per_layer", build_eviction("aircache")).reads_question
    assert around("per_layer", build_eviction("aircache")).heads_share


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_method_that_says_itself_what_stays_is_refused(name):
    refuses(f"own_sets decides itself what stays, so {name} cannot go around it", lambda: around(name, OwnSets()))
    with pytest.raises(ValueError, match=f"quest_steps keeps every entry and reads some, so {name} has nothing"):
        around(name, build_eviction("quest_steps"))


def test_nothing_of_a_base_is_forgotten():
    """All is passed on or said anew, but own ways to keep or read and a wrapper as a context reducer (``evenly``)."""
    alone = {*"keep reads pages evenly decides needs_file".split()}
    public = {key for key in vars(Eviction) if not key.startswith("_")} - alone
    assert public <= {*vars(Wrapper), *vars(around("ada", build_eviction("knorm")))}


def planned(method, keep):
    """``plan`` for the prompt of a context."""
    return prompt_views.plan(method, prompt_views.layer_views([prompt_views.PROMPTS["context"]], method.needs), keep)


def test_layers_keep_what_they_are_told():
    _, counts, _, candidates = planned(PerLayer(KNorm(), (3, 2, 1)), 0.4)
    assert candidates.budget_LB[:, 0].tolist() == [10, 10, 10]
    assert counts[:, 0].tolist() == [15, 10, 5]
    assert planned(PerLayer(KNorm(), (0.3, 0.2, 0.1)), 0.4)[1][:, 0].tolist() == [15, 10, 5]


def test_as_many_shares_as_layers():
    for chain in ("per_layer(knorm)", "ada(per_layer(knorm))"):
        with pytest.raises(ValueError, match="per_layer has 2 shares and the backbone 3 layers; give one each"):
            build_eviction(chain, shares=[1, 2]).check_shape(3, 2, 8)
        build_eviction(chain, shares=[1, 2]).check_shape(2, 2, 8)


def plain_triples(scores, candidates, total):
    """Triples of one sample that stay: each head's first, then the best of all that are left."""
    order = []
    for layer, own in enumerate(scores):
        for place in candidates.competes_LBN[layer][0].nonzero()[:, 0].tolist():
            safe = bool(own.protected_BN[0, place])  # these are alike, and the latest of a head comes first
            for head, score in enumerate(own.scores_BhN[0, :, place].tolist()):
                order.append((-torch.inf, layer, head, -place) if safe else (-score, layer, head, place))
    triples = [(layer, head, abs(place)) for _, layer, head, place in sorted(order)]
    firsts = list({triple[:2]: triple for triple in reversed(triples)}.values())
    others = [triple for triple in triples if triple not in firsts]
    return set([*firsts, *others][:total])


@pytest.mark.parametrize("keep", [0.1, 0.4, 1.0])
@pytest.mark.parametrize(("base", "settings"), [("knorm", {}), ("snapkv", {"window": 3}), ("streaming_llm", {})])
def test_the_best_of_all_layers_and_heads_stay(base, settings, keep):
    scores, _, kept, candidates = planned(build_eviction(f"pooled({base})", **settings), keep)
    competes = candidates.competes_LBN
    assert {
        (layer, head, place)
        for layer, kept_BhN in enumerate(kept)
        for head, place in (kept_BhN[0] & competes[layer]).nonzero().tolist()
    } == plain_triples(scores, candidates, int(candidates.budget_LB.sum()) * scores[0].scores_BhN.shape[1])


def plain_order(scores, competes, protected, length):
    """Competing places of one sample, best chunk first, in it the best entry; scores are sums over heads."""
    able = [place for place, able in enumerate(competes) if able]
    chunks = [able[start : start + length] for start in range(0, len(able), length)]

    def worth(chunk):
        free = [scores[place] for place in chunk if not protected[place]]
        return sum(free) / len(free) if free else -float("inf")

    ranked = sorted(chunks, key=lambda chunk: -worth(chunk))
    return [place for chunk in ranked for place in sorted(chunk, key=lambda place: -scores[place])]


@st.composite
def choices(draw):
    return *prompt_views.draw_scores(draw, 3, 11, [-8.0, -1.5, -0.0, 0.0, 0.5, 2.0, 64.0]), draw(st.integers(1, 12))


@settings(deadline=None, max_examples=60)
@given(choices())
def test_the_order_is_the_plain_one(choice):
    scores, competes, protected, length = choice
    ranks = chunk_ranks(*choice)
    assert ranks.sort(-1).values.tolist() == [list(range(scores.shape[-1]))] * len(scores)
    for sample, of_heads in enumerate(scores):
        expected = plain_order(of_heads.sum(0).tolist(), competes[sample], protected[sample], length)
        assert ranks[sample].argsort()[: len(expected)].tolist() == expected


def test_heads_that_differ_are_refused():
    with pytest.raises(
        ValueError, match=r"chunk keeps one set for all heads, and heads of ada\(knorm\) keep different"
    ):
        build_eviction("chunk(ada(knorm))")
    with pytest.raises(ValueError, match=r"heads of per_layer\(ada\(knorm\)\) keep different numbers"):
        build_eviction("chunk(per_layer(ada(knorm)))", shares=[1])
    refuses("heads of kvcompose keep different numbers", build_eviction, "chunk(kvcompose)", structured=False)


COUNTED = {
    "h2o": {}, "elastic": {}, "prefixkv": {}, "finch": {}, "kvcompose": {"task": "aware"}, "look_m": {}, "meda": {},
    "aircache": {"window": "last"}, "tgv_kv": {}, "lagkv": {"lag": 4, "cross_scoring": True},
    "compactor": {"sinks": 1, "last": 1, "chunk": 8, "blending": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_of_a_gpu_one_number_is_read_for_all_layers(name, monkeypatch):
    """The first layer counts rows, those that ask or all; the others read nothing, and score the same."""
    method = build_eviction(name, **COUNTED[name])
    prompts = [prompt_views.PROMPTS["text before and after"], prompt_views.PROMPTS["two images"]]
    expected = [method.score(view) for view in prompt_views.layer_views(prompts, method.needs)]
    views = prompt_views.layer_views(prompts, method.needs)
    for view in views:
        view.regions_BN = views[0].regions_BN  # as of all layers that run on the same rows
    monkeypatch.setattr("subtoken_train.functional.causal_attention.DEVICES", ("cpu",))
    method.score(views[0])
    for view, plain in zip(views[1:], expected[1:], strict=True):
        with unread():
            found = method.score(view)
        assert torch.allclose(found.scores_BhN, plain.scores_BhN, atol=1e-5)
