"""Selectors: parameters, initialisation, precision, and what each one looks at."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subtoken_train.engine.attention_rows import region_attention
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.masks import fixed_mask, standardised_log
from subtoken_train.routing import SELECTORS, RoutingConfig, build_selector
from subtoken_train.routing.bank import FeatureMap
from subtoken_train.routing.routers import fp32_linear
from subtoken_train.types import Region
from subtoken_train.view.view import View
from tests.routing.test_bank import masks_of, with_other_tokens
from tests.support.helpers import compress, make_batch, only_sample, random_mask, random_scores
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

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
    rows = torch.cat([view.hidden_BND, view.query_summary_BD[:, None].expand(-1, 12, -1)], -1)
    expected = F.linear(rows, torch.cat([selector.token.weight, selector.query.weight], 1), selector.token.bias)
    if name == "mlp":
        expected = selector.out(F.gelu(expected))
    assert torch.allclose(selector(view), expected, atol=1e-5)


@pytest.mark.parametrize("name", LEARNED)
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
    mask = fixed_mask(build("leading", layout=layout)(look().replaced(num_kv_heads=kv_heads)), 8)
    assert (mask == mask[:1, :1]).all()
    assert mask[0, 0].nonzero()[:, 0].tolist() == sorted(best)


def test_leading_weighs_groups_that_span_heads_by_their_channels():
    """16 groups of 12 channels on three heads of 64: group 5 ends the first head and begins the second."""
    view = look().replaced(value_groups_BNSg=torch.zeros(1, 2, GROUPS, 12), num_kv_heads=3)
    means = [sum((12 * group + i) % 64 for i in range(12)) / 12 for group in range(GROUPS)]
    expected = sorted(range(GROUPS), key=lambda group: means[group])
    assert build("leading")(view)[0, 1].argsort(descending=True).tolist() == expected
    assert build("leading").same_for_all


def layer_of(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 4, bias=bias)


def gradients(layer, inputs, upstream):
    layer.zero_grad()
    fp32_linear(layer, inputs).backward(upstream)
    return [parameter.grad.clone() for parameter in layer.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


def test_no_fp32_copy_of_the_input_is_kept():
    layer, inputs = layer_of(), random_scores(1, 3, 5, 24).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        fp32_linear(layer, inputs)
    assert {(tensor.dtype, tensor.numel()) for tensor in kept} == {(torch.bfloat16, 360), (torch.float32, 96)}


MIXED = [(1, 7), (1, 5), (0, 6)]
BOTH = ("norm", "attention")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_conditioned", [False, True])
@torch.no_grad()
def test_bilinear_equals_the_formula(dtype, query_conditioned):
    selector, view = build("bilinear", query_rank=3, query_conditioned=query_conditioned), look(dtype=dtype)
    found = selector(view)
    assert found.dtype == torch.float32
    weight = {name: parameter.double() for name, parameter in selector.named_parameters()}
    hidden, query = view.hidden_BND.double(), view.query_summary_BD.double()[:, None]
    meets = (hidden @ weight["token_side.weight"].T) * (query @ weight["query_side.weight"].T)
    expected = hidden @ weight["token.weight"].T + weight["token.bias"] + meets @ weight["meeting.weight"].T
    if query_conditioned:
        expected = expected + query @ weight["query.weight"].T
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_features_may_be_written_as_a_list():
    assert RoutingConfig("value_norm", features=[]).of_routers() == []
    assert RoutingConfig(features=["norm"]) == RoutingConfig(features=("norm",))


@pytest.mark.parametrize("names", [("norm",), ("attention",), BOTH])
def test_features_equal_their_definition(names):
    torch.manual_seed(0)
    features, view = FeatureMap(RoutingConfig(num_groups=GROUPS, features=names), GROUPS), look()
    routed = random_mask(0, 2, 12)
    found = features(view, routed)
    raw = {"norm": view.value_groups_BNSg.norm(dim=-1), "attention": view.query_attention()[..., None]}
    columns = torch.cat([standardised_log(raw[name], routed) for name in names], -1)
    assert torch.allclose(found, columns @ features.map.weight.T, atol=1e-5)
    assert not found[~routed].any()


def noted_attention(backbone, batch, **options):
    """What the routers of a pass were told of the query's attention, and the masks; by layer."""
    told, hooks = {}, []
    for layer, each in enumerate(backbone.bank.features):
        note = lambda _, args, __, layer=layer: told.update({layer: args[0].query_attention()})  # noqa: E731
        hooks.append(each.register_forward_hook(note))
    result = backbone.run(batch, **options)
    for hook in hooks:
        hook.remove()
    return told, result


@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_the_attention_is_the_mean_of_the_queries_rows_in_that_layer(tiny_family, pad_left):
    """Against transformers' eager attention of the reduced sample alone, where nothing is dropped."""
    batch = make_batch(MIXED, pad_left)
    told, _ = noted_attention(compress(tiny_family, RoutingConfig(kept_groups=15, features=BOTH)), batch)
    eager = copy.deepcopy(tiny_family.model)
    eager.set_attn_implementation("eager")
    seen = batch.regions_BN[0] != Region.PADDING
    one = only_sample(batch, 0)
    out = eager(input_ids=one.input_ids_BN[:, seen], pixel_values=one.pixel_values, output_attentions=True)
    expected = out.attentions[0][0][:, (batch.regions_BN[0] == Region.QUERY)[seen]].mean((0, 1))
    assert torch.allclose(told[0][0, seen], expected, atol=1e-5)
    assert not told[0][2].any()  # no question about an image


def test_a_language_models_attention_is_that_of_the_whole_context():
    family, batch = text_family(), text_batch([(24, 9, 2), (20, 7, 2)])
    routing = RoutingConfig("bilinear", num_groups=8, kept_groups=4, budget="global", features=("attention",))
    backbone = compress(family, routing, name="quest", keep_ratio=0.5, page_size=4, window=4)
    told, result = noted_attention(backbone, batch)
    hidden, visible = family.embed(batch), batch.regions_BN != Region.PADDING
    expected = region_attention(family, 0, hidden, visible, family.positions(batch), batch.regions_BN == Region.QUERY)
    assert torch.allclose(told[0], expected, atol=1e-5)
    assert sorted(told) == sorted(result.state.masks) == [0, 1, 2]


@sampled("name", ["linear", "mlp", "bilinear"], every=3)
def test_answers_and_padding_change_no_choice_and_the_question_does(tiny_family, name):
    batch = make_batch(MIXED)
    torch.manual_seed(1)
    backbone = compress(tiny_family, RoutingConfig(name, features=BOTH, budget="global"))
    before = masks_of(backbone, batch)
    assert not torch.equal(before, masks_of(backbone, with_other_tokens(batch, Region.QUERY)))
    assert torch.equal(before, masks_of(backbone, with_other_tokens(batch, Region.ANSWER)))
    left = make_batch(MIXED, pad_left=True)
    hard = [backbone.run(each).state.masks[1] for each in (batch, left)]
    for sample, rows in enumerate(batch.regions_BN != Region.PADDING):
        assert torch.equal(hard[0][sample, rows], hard[1][sample, left.regions_BN[sample] != Region.PADDING])


@pytest.mark.parametrize("reducer", [{}, {"stage": "decoder"}], ids=["embeds", "decoder"])
def test_every_tensor_learns_and_checkpointing_changes_nothing(tiny_family, reducer):
    add_lora(tiny_family, LoraSettings(dropout=0.3))
    torch.manual_seed(0)
    routing = RoutingConfig("bilinear", features=BOTH)
    backbone = compress(tiny_family, routing, name="fastv", keep_ratio=0.25, **reducer).train()
    batch, found = make_batch(MIXED), []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(tiny_family, backbone.bank)
        torch.manual_seed(5)  # of the dropout
        backbone.logits(backbone.run(batch)).square().mean().backward()
        trained = {name: part for name, part in backbone.bank.named_parameters() if part.requires_grad}
        found.append({name: part.grad.clone() for name, part in trained.items()})
        backbone.zero_grad()
    assert all(gradient.any() for gradient in found[0].values())
    assert any("features" in name for name in found[0])
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], atol=1e-6), name
