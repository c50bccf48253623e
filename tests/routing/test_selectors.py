"""Selectors: parameters, initialisation, precision, and what each one looks at."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subtoken_train.functional.masks import fixed_mask
from subtoken_train.routing import SELECTORS, RoutingConfig, build_selector
from subtoken_train.routing.routers import fp32_linear
from subtoken_train.view.view import View
from tests.support.helpers import random_scores

WIDTH, GROUPS = 128, 16
LEARNED = ("linear", "mlp", "bilinear")


def look(batch=2, length=12, width=WIDTH, seed=0, layer=0, dtype=torch.float32):
    """A random layer as selectors see it, with a query summary."""
    return View(
        hidden_BND=random_scores(seed, batch, length, width).to(dtype),
        value_groups_BNSg=random_scores(seed + 1, batch, length, GROUPS, 8).to(dtype),
        query_summary_BD=random_scores(seed + 2, batch, width),
        ordinal_BN=torch.arange(length).expand(batch, -1),
        sample_seed_B=torch.arange(batch) + 100,
        layer=layer,
        output_norms=lambda: random_scores(seed + 3, batch, length, GROUPS).abs(),
        query_attention=lambda: random_scores(seed + 4, batch, length).abs(),
        num_kv_heads=2,
    )


def build(name, width=WIDTH, **settings):
    torch.manual_seed(0)
    return build_selector(width, RoutingConfig(selector=name, num_groups=GROUPS, **settings))


LINEAR, MLP = WIDTH * GROUPS + GROUPS, WIDTH * 32 + 32 + 32 * GROUPS + GROUPS
PARAMETERS = {"linear": LINEAR, "mlp": MLP, "bilinear": LINEAR + 2 * WIDTH * 16 + 16 * GROUPS}


@pytest.mark.parametrize("query_conditioned", [False, True])
@pytest.mark.parametrize("name", SELECTORS)
def test_parameter_counts(name, query_conditioned):
    if name not in LEARNED and query_conditioned:
        return
    selector, of_query = build(name, query_conditioned=query_conditioned), WIDTH * (32 if name == "mlp" else GROUPS)
    expected = PARAMETERS.get(name, 0) + of_query * query_conditioned
    assert sum(parameter.numel() for parameter in selector.parameters()) == expected
    assert selector.learned == (expected > 0)


@pytest.mark.parametrize("name", LEARNED)
def test_initialisation(name):
    for key, parameter in build(name, width=512, query_conditioned=True).named_parameters():
        if key.endswith("bias"):
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.06)
            assert abs(parameter.mean().item()) < 0.002


@pytest.mark.parametrize("name", ["linear", "mlp"])
@torch.no_grad()
def test_equals_the_formula(name):
    selector, view = build(name, query_conditioned=True), look()
    summary = view.query_summary_BD[:, None].expand(-1, 12, -1)
    rows = torch.cat([view.hidden_BND, summary], -1)
    joined = torch.cat([selector.token.weight, selector.query.weight], 1)
    expected = F.linear(rows, joined, selector.token.bias)
    if name == "mlp":
        expected = selector.out(F.gelu(expected))
    assert torch.allclose(selector(view), expected, atol=1e-5)


@pytest.mark.parametrize("name", LEARNED)
@torch.no_grad()
def test_logits_are_fp32_under_autocast_and_with_bf16_parameters(name):
    selector = build(name, query_conditioned=True)
    view = look(dtype=torch.bfloat16)
    plain = selector(view)
    assert plain.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(selector(view), plain)
    selector.bfloat16()
    low = selector(view)
    assert low.dtype == torch.float32
    assert torch.equal(low, selector.float()(view))
    assert not torch.equal(low, low.bfloat16().float())


@pytest.mark.parametrize("name", SELECTORS)
def test_scores_have_a_gradient_only_where_something_is_learned(name):
    view = look()
    view.value_groups_BNSg.requires_grad_()
    scores = build(name)(view)
    assert scores.shape == (2, 12, GROUPS)
    assert scores.dtype == torch.float32
    assert scores.requires_grad == (name in LEARNED)


def test_value_norm_equals_the_manual_norm():
    view = look(dtype=torch.bfloat16)
    scores = build("value_norm")(view)
    for index in ((0, 0, 0), (1, 11, 15), (0, 5, 7)):
        channels = view.value_groups_BNSg[index].tolist()
        assert scores[index].item() == pytest.approx(sum(channel**2 for channel in channels) ** 0.5, rel=1e-5)


def test_random_differs_per_sample_token_layer_and_seed():
    scores = build("random")(look())
    assert not torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0, 0], scores[0, 1])
    assert not torch.equal(build("random")(look(layer=1)), scores)
    assert not torch.equal(build("random", seed=1)(look()), scores)
    assert torch.equal(build("random")(look(seed=5)), scores)


def test_random_follows_positions_not_slots():
    view = look(1)
    whole = build("random")(view)
    rows = torch.tensor([3, 7, 8])
    own = {"hidden_BND": view.hidden_BND[:, rows], "value_groups_BNSg": view.value_groups_BNSg[:, rows]}
    picked = view.replaced(ordinal_BN=rows[None], **own)
    assert torch.equal(build("random")(picked), whole[:, rows])


def test_static_is_one_set_per_layer_for_every_token_and_sample():
    layers = [fixed_mask(build("static", seed=3)(look(layer=layer)), 4) for layer in range(6)]
    for mask in layers:
        assert (mask == mask[:1, :1]).all()
    assert len({tuple(mask[0, 0].tolist()) for mask in layers}) > 1
    assert not torch.equal(build("static")(look()), build("static", seed=1)(look()))


@pytest.mark.parametrize(
    ("layout", "kv_heads", "best"),
    [
        ("contiguous", 2, [0, 8, 1, 9, 2, 10, 3, 11]),  # 8 groups of each of 2 heads: the first four of both
        ("per_head", 2, list(range(8))),  # group s is the s-th piece of every head
        ("contiguous", 32, list(range(8))),  # a group is two whole heads: none is earlier than another
        ("contiguous", 1, list(range(8))),
    ],
)
def test_leading_are_the_first_of_each_head_for_every_token(layout, kv_heads, best):
    view = look().replaced(num_kv_heads=kv_heads)
    mask = fixed_mask(build("leading", layout=layout)(view), 8)
    assert (mask == mask[:1, :1]).all()
    assert mask[0, 0].nonzero()[:, 0].tolist() == sorted(best)


def test_leading_weighs_groups_that_span_heads_by_their_channels():
    """16 groups of 12 channels on three heads of 64: group 5 ends the first head and begins the second."""
    view = look().replaced(value_groups_BNSg=torch.zeros(1, 2, GROUPS, 12), num_kv_heads=3)
    means = [sum((12 * group + i) % 64 for i in range(12)) / 12 for group in range(GROUPS)]
    expected = sorted(range(GROUPS), key=lambda group: means[group])
    scores = build("leading")(view)
    assert scores[0, 1].argsort(descending=True).tolist() == expected
    assert build("leading").same_for_all


HALF = [torch.bfloat16, torch.float16]


def layer_of(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 4, bias=bias)


def gradients(layer, inputs, upstream):
    layer.zero_grad()
    fp32_linear(layer, inputs).backward(upstream)
    return [parameter.grad.clone() for parameter in layer.parameters()]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 24), (2, 24)])
def test_a_half_precision_input_gives_value_and_gradients_of_its_fp32_copy(dtype, bias, shape):
    layer, inputs = layer_of(bias), random_scores(1, *shape).to(dtype).requires_grad_()
    copy = inputs.detach().float().requires_grad_()
    upstream = random_scores(2, *shape[:-1], 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fp32_linear(layer, inputs), fp32_linear(layer, copy))
    assert fp32_linear(layer, inputs).dtype == torch.float32
    for got, wanted in zip(gradients(layer, inputs, upstream), gradients(layer, copy, upstream), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert inputs.grad.dtype == dtype
    assert torch.allclose(inputs.grad.float(), copy.grad, rtol=1e-2, atol=1e-2)


def test_bf16_parameters_get_bf16_gradients():
    layer, inputs = layer_of().bfloat16(), random_scores(1, 2, 5, 24).bfloat16()
    found = gradients(layer, inputs, torch.ones(2, 5, 4))
    assert [gradient.dtype for gradient in found] == [torch.bfloat16] * 2
    assert torch.equal(found[1], torch.full((4,), 10.0, dtype=torch.bfloat16))


def test_no_fp32_copy_of_the_input_is_kept():
    layer, inputs = layer_of(), random_scores(1, 3, 5, 24).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        fp32_linear(layer, inputs)
    assert {(tensor.dtype, tensor.numel()) for tensor in kept} == {(torch.bfloat16, 360), (torch.float32, 96)}
