"""Value gate and score prior: neutral at the start, trainable, also over all groups, and what they do to values."""

import itertools

import pytest
import torch

from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.groups import split_groups
from subtoken_train.functional.masks import fixed_mask, standardised_log
from subtoken_train.functional.objective import balance_loss
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import ValueGate
from subtoken_train.types import Region
from tests.support.helpers import compress, make_batch, random_scores
from tests.support.sampling import sampled

MIXED = [(1, 9), (2, 7), (0, 12)]
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
    projection = tiny_family.decoder.layers[0].self_attn.v_proj.weight.requires_grad_(True)
    learnt, place, step = projection, (5, 7), 1e-3
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
    heads, mask = tiny_family.shape.num_kv_heads, state.masks[LAYER]
    for sample in range(len(value)):
        tokens = state.routed_BN[sample].nonzero()[:, 0].tolist()
        mu = torch.zeros(value.shape[2])
        if tokens and fill == "mean":
            mu = torch.stack([value[sample, token] for token in tokens]).mean(0)
        for token in range(value.shape[1]):
            own = value[sample, token]
            factor = mask[sample, token].float()
            if gate and token in tokens:
                factor = factor * factors["gate"][sample, token]
            wide = split_groups(torch.zeros_like(own)[None, None], groups["num_groups"], heads, layout)[0, 0]
            wide = (wide + factor[:, None])[None, None]
            # back to channels by the inverse of the split
            order = split_groups(torch.arange(len(own))[None, None], groups["num_groups"], heads, layout).flatten()
            by_channel = torch.empty_like(own).scatter(0, order, wide.flatten())
            assert torch.allclose(routed[sample, token], mu + by_channel * (own - mu), atol=1e-5)
            if token not in tokens:
                assert torch.equal(routed[sample, token], own)


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
        kept = state.masks[LAYER][state.routed_BN]
        best = [set(row.topk(4).indices.tolist()) for row in norms[state.routed_BN]]
        assert best == [set(row.nonzero()[:, 0].tolist()) for row in kept]
        assert best != [set(row.topk(4).indices.tolist()) for row in plain[state.routed_BN]]
