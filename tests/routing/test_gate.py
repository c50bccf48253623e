"""Value gate and score prior: neutral at the start, trainable, also over all groups, and what they do to values."""

import itertools

import pytest
import torch

from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.group_norms import standardised_log
from subtoken_train.functional.groups import split_groups
from subtoken_train.functional.masks import fixed_mask
from subtoken_train.functional.objective import balance_loss
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import ValueGate
from subtoken_train.types import Region
from tests.support.helpers import compress, make_batch, random_scores, watch_last
from tests.support.sampling import sampled

MIXED = [(1, 9), (2, 7), (0, 12)]
FASTV = {"name": "fastv", "keep_ratio": 0.25}
LEARNED = ("linear", "mlp")


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


@sampled("selector", LEARNED, every=3)
@pytest.mark.parametrize("budget", ["per_token", "global"])
@pytest.mark.parametrize("prior", ["none", "value_norm", "output_norm"])
@torch.no_grad()
def test_neutral_settings_with_a_gate_are_the_backbone_bit_for_bit(tiny_family, selector, budget, prior):
    batch = make_batch(MIXED)
    plain = compress(tiny_family)
    expected = plain.logits(plain.run(batch))
    add_lora(tiny_family, LoraSettings(dropout=0.0))
    routing = RoutingConfig(selector, 16, 16, budget=budget, value_gate=True, score_prior=prior)
    neutral = compress(tiny_family, routing, name="fastv", keep_ratio=1.0)
    real = batch.regions_BN != Region.PADDING
    assert torch.equal(neutral.logits(neutral.run(batch))[real], expected[real])


@pytest.mark.parametrize("budget", ["per_token", "global", "ranked"])
@torch.no_grad()
def test_a_fresh_gate_changes_nothing_under_any_budget(tiny_family, budget):
    logits = []
    for gate in (False, True):
        torch.manual_seed(0)
        backbone = compress(tiny_family, RoutingConfig(budget=budget, value_gate=gate), **FASTV)
        logits.append(backbone.logits(backbone.run(make_batch(MIXED))))
    assert torch.equal(*logits)


@pytest.mark.parametrize("kept_groups", [4, 16])
@torch.no_grad()
def test_kept_groups_are_scaled_and_nothing_else(tiny_family, kept_groups):
    """The gated value is v_proj's output, which is what a cache stores."""
    backbone = compress(tiny_family, RoutingConfig(kept_groups=kept_groups, value_gate=True), **FASTV)
    set_betas(backbone, 2.0)
    seen = {}
    projection = tiny_family.decoder.layers[1].self_attn.v_proj
    watch_last(projection, lambda _, args, output: seen.update(hidden=args[0], value=output))
    backbone.bank.selectors[1].register_forward_hook(lambda _, __, logits: seen.update(logits=logits))
    state = backbone.run(make_batch(MIXED)).state
    routed_value, hidden, logits = seen["value"], seen["hidden"], seen["logits"]
    plain = split_groups(projection(hidden), 16, 4)
    factor = torch.where(state.routed_BN[..., None], 2 * torch.sigmoid(2 * logits) * state.masks[1], 1.0)
    assert torch.equal(split_groups(routed_value, 16, 4), plain * factor[..., None])


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


@pytest.mark.parametrize("reducer", [FASTV, {}], ids=["anchor", "unrouted"])
@pytest.mark.parametrize("selector", LEARNED)
def test_a_gate_over_all_groups_learns_with_its_exact_gradient(tiny_family, selector, reducer):
    """K = S: beta learns at once, the router from the moment that beta is not 0, and no gradient is estimated."""
    backbone = compress(tiny_family, RoutingConfig(selector, 16, 16, value_gate=True), **reducer)
    batch = make_batch(MIXED)
    routers, betas = gradients(backbone, answer_like_loss(backbone, backbone.run(batch)))
    assert all(size > 0 for size in betas)
    assert not any(itertools.chain(*routers))
    set_betas(backbone, 0.5)
    routers, betas = gradients(backbone, answer_like_loss(backbone, backbone.run(batch)))
    assert all(size > 0 for size in itertools.chain(*routers, betas))


def test_the_exact_gradient_against_finite_differences(tiny_family):
    tiny_family.model.double()
    backbone = compress(tiny_family, RoutingConfig(num_groups=16, kept_groups=16, value_gate=True))
    set_betas(backbone, 0.5)
    batch, bias = make_batch(MIXED[:1]), backbone.bank.selectors[0].token.bias
    answer_like_loss(backbone, backbone.run(batch)).backward()
    step, losses = 0.05, []
    for sign in (1, -1):
        with torch.no_grad():
            bias[3] += sign * step
            losses.append(answer_like_loss(backbone, backbone.run(batch)).item())
            bias[3] -= sign * step
    assert bias.grad[3].item() == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.02)


def test_a_text_only_batch_touches_every_beta(tiny_family):
    routing = RoutingConfig(value_gate=True, score_prior="value_norm")
    backbone = compress(tiny_family, routing, **FASTV)
    result = backbone.run(make_batch([(0, 8), (0, 6)]))
    assert result.state.mean_balance().item() == 0
    routers, betas = gradients(backbone, answer_like_loss(backbone, result) + result.state.mean_balance())
    assert not any(itertools.chain(*routers, betas))


@pytest.mark.parametrize("prior", ["value_norm", "output_norm"])
@pytest.mark.parametrize("budget", ["per_token", "global", "ranked"])
@torch.no_grad()
def test_with_a_silent_router_the_prior_is_its_selector(tiny_family, prior, budget):
    """Zero router weights leave the prior alone."""
    batch, masks = make_batch(MIXED), []
    for routing in (RoutingConfig(score_prior=prior, budget=budget), RoutingConfig(selector=prior, budget=budget)):
        backbone = compress(tiny_family, routing, **FASTV)
        for parameter in backbone.bank.parameters():
            parameter.zero_()
        masks.append(torch.stack(list(backbone.run(batch).state.masks.values())))
    assert torch.equal(*masks)


@torch.no_grad()
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
