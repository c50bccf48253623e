"""The router bank on the tiny model: what it changes, when, what masks depend on; value gate and score prior."""

import copy
import itertools

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.groups import split_groups
from subtoken_train.functional.masks import contribution_norms, fixed_mask, head_grams, ranked_counts, standardised_log
from subtoken_train.functional.objective import balance_loss
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.routing import SELECTORS, RoutingConfig
from subtoken_train.routing.bank import RouterBank, RoutingState, ValueGate
from subtoken_train.routing.routers import OutputNorms
from subtoken_train.types import Region
from tests.support.helpers import compress, gqa_family, make_batch, random_scores, sharpen, watch_last
from tests.support.sampling import sampled

MIXED = [(1, 9), (2, 7), (0, 12)]
REDUCERS = {"fastv": {"stage": "embeds"}, "fastv, cut late": {"stage": "decoder"}, "random": {}}


def with_other_tokens(batch, region):
    """The same batch with every token of ``region`` replaced by another word."""
    other, ids = copy.copy(batch), batch.input_ids_BN
    other.input_ids_BN = torch.where(batch.regions_BN == region, (ids + 17) % 50 + 10, ids)
    return other


def masks_of(backbone, batch):
    """Hard masks of all layers at visual positions, stacked."""
    masks = backbone.run(batch).state.masks
    return torch.stack([masks[layer][batch.regions_BN == Region.VISUAL] for layer in sorted(masks)])


@pytest.mark.parametrize("layout", ["contiguous", "per_head"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_only_dropped_groups_of_routed_values_change(tiny_family, selector, layout):
    """q, k and o are what their modules give; unrouted values and kept groups are bit-equal, dropped groups 0."""
    batch = make_batch(MIXED)
    backbone = compress(tiny_family, RoutingConfig(selector=selector, layout=layout))
    seen = {}
    for layer, block in enumerate(tiny_family.decoder.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            watch_last(
                getattr(block.self_attn, name),
                lambda _, args, output, key=(layer, name): seen.__setitem__(key, (args[0], output)),
            )
    state = backbone.run(batch).state
    captured = dict(seen)
    visual = batch.regions_BN == Region.VISUAL
    assert torch.equal(state.routed_BN, visual)
    for (layer, name), (hidden, output) in captured.items():
        plain = getattr(tiny_family.decoder.layers[layer].self_attn, name)(hidden)
        if name != "v_proj":
            assert torch.equal(output, plain)
            continue
        mask = state.masks[layer]
        assert mask[~visual].all()
        assert (mask[visual].sum(-1) == 4).all()
        assert torch.equal(output[~visual], plain[~visual])
        groups, plain_groups = (split_groups(value, 16, 4, layout) for value in (output, plain))
        assert torch.equal(groups[mask], plain_groups[mask])
        assert not groups[~mask].any()


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("name", REDUCERS)
def test_a_ranked_budget_follows_the_reducer(tiny_family, monkeypatch, name, pad_left):
    """Counts fall with the score that the reducer gave each token, two images of a sample ranked together."""
    sharpen(tiny_family)
    reducer = {"name": name.partition(",")[0], "keep_ratio": 0.25, **REDUCERS[name]}
    backbone = compress(tiny_family, RoutingConfig(budget="ranked"), **reducer)
    seen, scores_of = [], backbone.reducer.scores
    monkeypatch.setattr(type(backbone.reducer), "scores", lambda _, view: seen.append(scores_of(view)) or seen[-1])
    result = backbone.run(make_batch(MIXED, pad_left), pad_left=pad_left)
    assert len(seen) == 1
    rows, state = result.rows, result.state
    for sample, tokens in enumerate((16, 32, 0)):
        routed = state.routed_BN[sample]
        order = seen[0][sample, rows.index_BM[sample, routed]].argsort(descending=True, stable=True)
        expected = ranked_counts(torch.arange(tokens)[None], torch.ones(1, tokens, dtype=torch.bool), 4, 16)[0]
        for mask in state.masks.values():
            assert torch.equal(mask[sample, routed].sum(-1)[order], expected)


@pytest.mark.parametrize("reducer", [{}, {"name": "fastv", "keep_ratio": 1.0}], ids=["none", "everything"])
def test_a_ranked_budget_needs_a_ranking(tiny_family, reducer):
    with pytest.raises(ValueError, match=r"budget 'ranked' follows .*keep_ratio=1 ranks nothing; use fastv with"):
        compress(tiny_family, RoutingConfig(budget="ranked"), **reducer)


@pytest.mark.parametrize("selector", SELECTORS)
def test_balance_is_of_the_routed_tokens_and_only_for_learned_routers(tiny_family, selector):
    backbone = compress(tiny_family, RoutingConfig(selector=selector))
    logits = []
    backbone.bank.selectors[2].register_forward_hook(lambda _, __, scores: logits.append(scores))
    state = backbone.run(make_batch(MIXED)).state
    if not backbone.bank.learned:
        assert not state.choices
        assert state.mean_balance().item() == 0
        return
    assert list(state.choices) == [0, 1, 2, 3]
    expected = balance_loss(logits[0], state.masks[2], state.routed_BN)
    assert torch.equal(state.balances()[2], expected)
    assert expected[2].item() == 0
    assert state.balances().shape == (4, len(MIXED))
    assert torch.equal(state.mean_balance(), state.balances().mean())


def test_hooks_are_inactive_outside_the_block(tiny_family):
    batch = make_batch(MIXED[:1])
    backbone = compress(tiny_family, RoutingConfig())
    calls = []
    for layer, selector in enumerate(backbone.bank.selectors):
        selector.register_forward_hook(lambda *_, layer=layer: calls.append(layer))
    tiny_family.run_layers(tiny_family.embed(batch), batch.regions_BN != Region.PADDING, tiny_family.positions(batch))
    assert calls == []
    cache = DynamicCache(config=tiny_family.decoder.config)
    backbone.run(batch, cache=cache)
    assert calls == [0, 1, 2, 3]
    tiny_family.model(input_ids=torch.tensor([[11]]), **{CACHE: cache})
    assert calls == [0, 1, 2, 3]


def test_the_state_is_restored_after_nesting_and_after_errors():
    bank = RouterBank(RoutingConfig(num_groups=4, kept_groups=1), 8, KVShape(1, 2, 4))
    projection = torch.nn.Linear(8, 8)
    bank.attach([projection], [torch.nn.Linear(8, 8)])
    hidden, routed = torch.randn(1, 3, 8), torch.ones(1, 3, dtype=torch.bool)
    outer, inner = (RoutingState(routed, ~routed, torch.arange(3)[None], torch.zeros(1).long()) for _ in range(2))
    with bank.routing(outer):
        with bank.routing(inner):
            projection(hidden)
        assert outer.masks == {}
        assert list(inner.masks) == [0]
        projection(hidden)
    assert list(outer.masks) == [0]
    with pytest.raises(RuntimeError, match="inside"), bank.routing(outer):
        raise RuntimeError("inside")
    outer.masks.clear()
    projection(hidden)
    assert outer.masks == {}


@pytest.mark.parametrize("selector", ["linear", "mlp"])
@pytest.mark.parametrize("query_conditioned", [False, True])
def test_query_tokens_matter_only_to_conditioned_routers(tiny_family, selector, query_conditioned):
    batch = make_batch(MIXED)
    torch.manual_seed(1)
    backbone = compress(tiny_family, RoutingConfig(selector=selector, query_conditioned=query_conditioned))
    before = masks_of(backbone, batch)
    assert torch.equal(before, masks_of(backbone, with_other_tokens(batch, Region.QUERY))) != query_conditioned
    assert torch.equal(before, masks_of(backbone, with_other_tokens(batch, Region.ANSWER)))


@pytest.mark.parametrize("pad_left", [False, True])
def test_the_query_summary_is_the_mean_over_the_query_up_to_the_ranking_token(tiny_family, pad_left):
    """Query tokens of later turns, answers, padding and samples without image do not enter."""
    batch = make_batch(MIXED, pad_left)
    batch.rank_position_B = torch.where(batch.rank_position_B >= 0, batch.rank_position_B - 2, -1)
    backbone = compress(tiny_family, RoutingConfig(query_conditioned=True))
    views = []
    backbone.bank.selectors[1].register_forward_hook(lambda _, args, __: views.append(args[0]))
    backbone.run(batch)
    hidden, summary = views[0].hidden_BND, views[0].query_summary_BD
    for sample, rank in enumerate(batch.rank_position_B.tolist()):
        rows = [n for n in range(rank + 1) if batch.regions_BN[sample, n] == Region.QUERY]
        assert len(rows) == [5, 3, 0][sample]
        assert torch.allclose(summary[sample], hidden[sample, rows].mean(0) if rows else torch.zeros(128), atol=1e-6)


BATCH = [(1, 9), (0, 6)]
READERS = [RoutingConfig(selector="output_norm"), RoutingConfig(score_prior="output_norm")]


@sampled("layout", ["contiguous", "per_head"], every=3)
@sampled("kv_heads", [4, 2, 1], every=3)
def test_chooses_by_each_layers_own_projection(layout, kv_heads):
    family = gqa_family(kv_heads)
    add_lora(family, LoraSettings(dropout=0.0))
    shape = family.shape
    backbone = compress(family, RoutingConfig(selector="output_norm", num_groups=8, kept_groups=3, layout=layout))
    values = []
    for block in family.decoder.layers:
        block.self_attn.v_proj.base_layer.register_forward_hook(lambda _, __, value: values.append(value))
    state = backbone.run(make_batch(BATCH)).state
    for layer, block in enumerate(family.decoder.layers):
        gram = head_grams(block.self_attn.o_proj.weight, shape.num_kv_heads, shape.head_dim, 8, layout)
        expected = fixed_mask(contribution_norms(values[layer], gram, 8, layout), 3)
        assert torch.equal(state.masks[layer][state.routed_BN], expected[state.routed_BN])


@pytest.mark.parametrize("config", READERS, ids=["selector", "prior"])
def test_nothing_is_read_before_the_first_pass_and_nothing_saved_and_training_comes_after(tiny_family, config):
    """Lightning validates in inference mode; what it made there must serve a pass with gradients."""
    with torch.device("meta"):
        RouterBank(config, 128, KVShape(1, 4, 32)).attach([nn.Linear(128, 128)], [nn.Linear(128, 128)])
    add_lora(tiny_family, LoraSettings(dropout=0.0))
    backbone = compress(tiny_family, config)
    before = set(backbone.bank.state_dict())
    with torch.inference_mode():
        checked = backbone.run(make_batch(BATCH)).state.masks
    assert set(backbone.bank.state_dict()) == before
    assert not any("gram" in name or "proj" in name for name in before)
    result = backbone.train().run(make_batch(BATCH))
    assert all(torch.equal(mask, checked[layer]) for layer, mask in result.state.masks.items())
    backbone.logits(result).logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in backbone.parameters() if p.requires_grad)


def test_lora_on_the_projection_is_not_followed():
    base = nn.Linear(16, 16, bias=False)
    wrapped = nn.Module()
    wrapped.base_layer, wrapped.weight = base, nn.Parameter(torch.zeros(16, 16))
    config, shape = RoutingConfig(num_groups=4, kept_groups=1), KVShape(1, 2, 8)
    value = random_scores(0, 1, 3, 16)
    assert torch.equal(OutputNorms([wrapped], config, shape)(0, value), OutputNorms([base], config, shape)(0, value))


@pytest.mark.parametrize("config", READERS, ids=["selector", "prior"])
@pytest.mark.parametrize(("dtype", "words"), [(torch.uint8, "a weight of uint8"), (None, "no weight tensor")])
def test_a_quantised_projection_is_refused(config, dtype, words):
    projection = nn.Module()
    if dtype is not None:
        projection.weight = nn.Parameter(torch.zeros(64, 1, dtype=dtype), requires_grad=False)
    bank = RouterBank(config, 128, KVShape(1, 4, 32))
    with pytest.raises(ValueError, match=rf"output_norm needs an o_proj .*, not {words}: use value_norm"):
        bank.attach([nn.Linear(128, 128)], [projection])
    RouterBank(RoutingConfig(), 128, KVShape(1, 4, 32)).attach([nn.Linear(128, 128)], [projection])


FASTV = {"name": "fastv", "keep_ratio": 0.25}
LAYER = 1


def set_betas(backbone, value):
    with torch.no_grad():
        for gate in backbone.bank.gates:
            gate.beta.fill_(value)


def gradients(backbone, loss):
    """Sum of absolute gradients of (routers, betas), per layer."""
    backbone.zero_grad()
    loss.backward()
    bank = backbone.bank
    routers = [[p.grad.abs().sum().item() for p in selector.parameters()] for selector in bank.selectors]
    return routers, [gate.beta.grad.abs().item() for gate in bank.gates]


def answer_like_loss(backbone, result):
    return backbone.logits(result)[result.rows.visible_BM].logsumexp(-1).sum()


def test_the_formula_and_its_slope():
    gate, logits = ValueGate(), random_scores(0, 1, 3, 4)
    assert torch.equal(gate(logits), torch.ones(1, 3, 4))
    gate(logits).sum().backward()
    assert torch.allclose(gate.beta.grad, logits.sum()[None] / 2)
    with torch.no_grad():
        gate.beta.fill_(1.5)
    assert torch.allclose(gate(logits), 2 / (1 + (-1.5 * logits).exp()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gate(logits).dtype == torch.float32


@sampled("selector", ("linear", "mlp"), every=3)
@pytest.mark.parametrize("budget", ["per_token", "global"])
@pytest.mark.parametrize("prior", ["none", "value_norm", "output_norm"])
def test_neutral_settings_with_a_gate_are_the_backbone_bit_for_bit(tiny_family, selector, budget, prior):
    batch = make_batch(MIXED)
    plain = compress(tiny_family)
    expected = plain.logits(plain.run(batch))
    add_lora(tiny_family, LoraSettings(dropout=0.0))
    routing = RoutingConfig(selector, 16, 16, budget=budget, value_gate=True, score_prior=prior)
    neutral = compress(tiny_family, routing, name="fastv", keep_ratio=1.0)
    real = batch.regions_BN != Region.PADDING
    assert torch.equal(neutral.logits(neutral.run(batch))[real], expected[real])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("budget", ["per_token", "global", "ranked"])
@sampled(("selector", "prior"), [("linear", "none"), ("linear", "output_norm"), ("mlp", "value_norm")], every=3)
def test_every_router_and_every_beta_learns_without_balance_loss(tiny_family, selector, prior, budget, checkpointing):
    add_lora(tiny_family, LoraSettings(dropout=0.0))
    routing = RoutingConfig(selector, 16, 4, budget=budget, value_gate=True, score_prior=prior)
    backbone = compress(tiny_family, routing, **FASTV).train()
    if checkpointing:
        enable_checkpointing(tiny_family, backbone.bank)
    for beta in (0.0, 0.5):
        set_betas(backbone, beta)
        routers, betas = gradients(backbone, answer_like_loss(backbone, backbone.run(make_batch(MIXED))))
        assert all(size > 0 for size in itertools.chain(*routers, betas))
    assert all(p.grad is not None for p in backbone.model.parameters() if p.requires_grad)


GATED = RoutingConfig(num_groups=16, kept_groups=16, value_gate=True)


@pytest.mark.parametrize("routing", [GATED, RoutingConfig("static", fill="mean")])
def test_the_exact_gradient_against_finite_differences(tiny_family, routing):
    """Of a router's bias under a gate, and of the value projection, which the mean that fills moves with."""
    tiny_family.model.double()
    backbone, batch = compress(tiny_family, routing), make_batch(MIXED[:1])
    set_betas(backbone, 0.5)
    learnt, place, step = tiny_family.decoder.layers[0].self_attn.v_proj.weight.requires_grad_(True), (5, 7), 1e-3
    if routing.value_gate:
        learnt, place, step = backbone.bank.selectors[0].token.bias, 3, 0.05
    answer_like_loss(backbone, backbone.run(batch)).backward()
    slope = 0.0
    with torch.no_grad():
        for sign in (1, -1):
            learnt[place] += sign * step
            slope += sign * answer_like_loss(backbone, backbone.run(batch)).item() / (2 * step)
            learnt[place] -= sign * step
    assert learnt.grad[place].item() == pytest.approx(slope, rel=0.02)


def test_everything_reads_the_logits_with_the_prior(tiny_family):
    """Choice, balance loss and gate; the straight-through sigmoid takes the same tensor."""
    backbone = compress(tiny_family, RoutingConfig(score_prior="value_norm", value_gate=True))
    set_betas(backbone, 1.0)
    seen = {}
    backbone.bank.prior.register_forward_hook(lambda _, __, norms: seen.setdefault("norms", norms))
    backbone.bank.selectors[0].register_forward_hook(lambda _, __, logits: seen.update(logits=logits))
    backbone.bank.gates[0].register_forward_hook(lambda _, args, __: seen.update(gated=args[0]))
    state = backbone.run(make_batch(MIXED)).state
    logits = seen["logits"] + standardised_log(seen["norms"], state.routed_BN)
    assert torch.equal(seen["gated"], logits)
    hard = fixed_mask(logits, 4)
    assert torch.equal(state.masks[0], hard | ~state.routed_BN[..., None])
    assert state.routed_BN[:, state.reach].any(0)[[0, -1]].all()
    assert torch.equal(state.balances()[0], balance_loss(logits, hard, state.routed_BN))


def run_layer(backbone, batch):
    """A pass, and what entered and left one layer's value projection."""
    seen, projection = [], backbone.family.decoder.layers[LAYER].self_attn.v_proj
    handle = projection.register_forward_hook(lambda _, __, value: seen.append(value))
    route = backbone.bank._hook

    def routed(layer, *call):
        value = route(layer, *call)
        seen.extend([value] if layer == LAYER else [])
        return value

    backbone.bank._hook = routed
    state = backbone.run(batch).state
    handle.remove()
    del backbone.bank._hook
    return state, *seen


@pytest.mark.parametrize("layout", ["contiguous", "per_head"])
@pytest.mark.parametrize("fill", ["mean", "zero"])
@pytest.mark.parametrize(("selector", "gate"), [("linear", True), ("mlp", False), ("value_norm", False)])
@torch.no_grad()
def test_a_layers_values_are_those_of_a_loop(tiny_family, selector, gate, fill, layout):
    groups = {"num_groups": 16, "kept_groups": 4} if layout == "contiguous" else {"num_groups": 4, "kept_groups": 1}
    backbone = compress(
        tiny_family, RoutingConfig(selector, **groups, layout=layout, value_gate=gate, fill=fill), **FASTV
    )
    factors = {}
    if gate:
        for each in backbone.bank.gates:
            each.beta.fill_(1.5)
        backbone.bank.gates[LAYER].register_forward_hook(lambda _, __, out: factors.update(gate=out))
    state, value, routed = run_layer(backbone, make_batch(MIXED))
    heads, factor, width = tiny_family.shape.num_kv_heads, state.masks[LAYER].float(), value.shape[2]
    if gate:
        factor = torch.where(state.routed_BN[..., None], factor * factors["gate"], factor)
    # back to channels by the inverse of the split
    order_Sc = split_groups(torch.arange(width)[None, None], groups["num_groups"], heads, layout)[0, 0]
    by_channel = torch.empty_like(value)
    by_channel[..., order_Sc] = factor[..., None].expand(-1, -1, -1, order_Sc.shape[1])
    for own, got, wide, marks in zip(value, routed, by_channel, state.routed_BN, strict=True):
        mu = own[marks].mean(0) if marks.any() and fill == "mean" else torch.zeros(width)
        assert torch.allclose(got, mu + wide * (own - mu), atol=1e-5)
        assert torch.equal(got[~marks], own[~marks])


@pytest.mark.parametrize("selector", ["value_norm", "output_norm"])
@torch.no_grad()
def test_norms_are_of_what_is_left_without_the_fill(tiny_family, selector):
    """A router-free selector scores v - mu, and so does the prior of a router: with a silent router they agree."""
    masks = []
    for routing in (RoutingConfig(selector, fill="mean"), RoutingConfig("linear", score_prior=selector, fill="mean")):
        backbone = compress(tiny_family, routing, **FASTV)
        for parameter in backbone.bank.parameters():
            parameter.zero_()
        state, value, _ = run_layer(backbone, make_batch(MIXED[:2]))
        masks.append(state.masks[LAYER])
    assert torch.equal(*masks)
    if selector == "value_norm":
        weight = state.routed_BN.float()[..., None]
        mean = (value * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        norms = split_groups(value - mean, 16, tiny_family.shape.num_kv_heads).norm(dim=-1)
        plain = split_groups(value, 16, tiny_family.shape.num_kv_heads).norm(dim=-1)
        best = [set(row.topk(4).indices.tolist()) for row in norms[state.routed_BN]]
        assert best == [set(row.nonzero()[:, 0].tolist()) for row in state.masks[LAYER][state.routed_BN]]
        assert best != [set(row.topk(4).indices.tolist()) for row in plain[state.routed_BN]]
