"""What dropped groups read as: beside a plain loop, its gradient, its scores, neutral starts, and refusals."""

import pytest
import torch

from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.groups import split_groups
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress, make_batch
from tests.support.sampling import sampled

MIXED = [(1, 9), (2, 7), (0, 12)]
FASTV = {"name": "fastv", "keep_ratio": 0.25}
LAYER = 1


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


def total_loss(backbone, batch):
    result = backbone.run(batch)
    return backbone.logits(result)[result.rows.visible_BM].logsumexp(-1).sum()


def test_the_gradient_flows_through_the_mean(tiny_family):
    """Autograd against finite differences of a bias of the value projection, which the mean moves with."""
    tiny_family.model.double()
    backbone = compress(tiny_family, RoutingConfig("static", fill="mean"))
    batch, projection = make_batch(MIXED[:1]), tiny_family.decoder.layers[0].self_attn.v_proj
    projection.weight.requires_grad_(True)
    total_loss(backbone, batch).backward()
    expected, step = projection.weight.grad[5, 7].item(), 1e-3
    losses = []
    with torch.no_grad():
        for sign in (1, -1):
            projection.weight[5, 7] += sign * step
            losses.append(total_loss(backbone, batch).item())
            projection.weight[5, 7] -= sign * step
    assert expected == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.02)


@sampled("budget", ["per_token", "global", "ranked"], every=3)
@pytest.mark.parametrize("fill", ["mean", "zero"])
def test_checkpointing_gives_the_same_gradients(tiny_family, fill, budget):
    add_lora(tiny_family, LoraSettings(dropout=0.0))
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        backbone = compress(tiny_family, RoutingConfig(budget=budget, fill=fill), **FASTV).train()
        if checkpointing:
            enable_checkpointing(tiny_family, backbone.bank)
        backbone.zero_grad()
        total_loss(backbone, make_batch(MIXED)).backward()
        trained = [p for p in backbone.parameters() if p.requires_grad]
        found.append(torch.cat([p.grad.flatten() for p in trained]))
        backbone.detach()
    assert torch.allclose(*found, atol=1e-5)


def test_a_fill_stays_without_a_router():
    assert RoutingConfig(fill="mean").without_router("value_norm").fill == "mean"
