"""A router whose order of tokens follows the query, and the features that any learned router may read."""

from __future__ import annotations

import copy

import pytest
import torch

from subtoken_train.engine.attention_rows import region_attention
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.group_norms import standardised_log
from subtoken_train.routing import RoutingConfig, build_selector
from subtoken_train.routing.bank import FeatureMap
from subtoken_train.types import Region
from tests.routing.test_bank import masks_of, with_other_tokens
from tests.routing.test_selectors import GROUPS, WIDTH, look
from tests.support.helpers import compress, make_batch, only_sample, random_mask
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

MIXED = [(1, 7), (1, 5), (0, 6)]
BOTH = ("norm", "attention")


def build(**settings):
    torch.manual_seed(0)
    return build_selector(WIDTH, RoutingConfig(selector="bilinear", num_groups=GROUPS, **settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_conditioned", [False, True])
@torch.no_grad()
def test_equals_the_formula_token_by_token(dtype, query_conditioned):
    selector, view = build(query_rank=3, query_conditioned=query_conditioned), look(dtype=dtype)
    found = selector(view)
    assert found.dtype == torch.float32
    for sample, query in enumerate(view.query_summary_BD.double()):
        c = selector.query_side.weight.double() @ query
        for token, hidden in enumerate(view.hidden_BND[sample].double()):
            expected = selector.token.weight.double() @ hidden + selector.token.bias.double()
            a = selector.token_side.weight.double() @ hidden
            expected = expected + sum(selector.meeting.weight[:, r].double() * a[r] * c[r] for r in range(3))
            if query_conditioned:
                expected = expected + selector.query.weight.double() @ query
            assert torch.allclose(found[sample, token].double(), expected, atol=1e-5)


@torch.no_grad()
def test_the_order_of_tokens_within_a_group_follows_the_query():
    """What the additive map of the query cannot do: it adds one number per group."""
    view, additive = look(1, 64), build_selector(WIDTH, RoutingConfig(num_groups=GROUPS, query_conditioned=True))
    asked = [view.replaced(query_summary_BD=sign * 9 * view.query_summary_BD) for sign in (1, -1)]
    orders = [[selector(view)[0].argsort(0) for view in asked] for selector in (build(), additive)]
    assert not torch.equal(*orders[0])
    first, second = (additive(view)[0] for view in asked)
    assert torch.allclose(first - second, (first - second)[:1].expand_as(first), atol=1e-4)


def test_features_may_be_written_as_a_list():
    assert RoutingConfig("value_norm", features=[]).of_routers() == []
    assert RoutingConfig(features=["norm"]) == RoutingConfig(features=("norm",))


@pytest.mark.parametrize("names", [("norm",), ("attention",), BOTH])
@torch.no_grad()
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
    told = {}

    def note(layer):
        def hook(module, args, output):
            told[layer] = args[0].query_attention()

        return hook

    hooks = [each.register_forward_hook(note(layer)) for layer, each in enumerate(backbone.bank.features)]
    result = backbone.run(batch, **options)
    for hook in hooks:
        hook.remove()
    return told, result


@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_the_attention_is_the_mean_of_the_queries_rows_in_that_layer(tiny_family, pad_left):
    """Against transformers' eager attention of the reduced sample alone, where nothing is dropped."""
    batch = make_batch(MIXED, pad_left)
    backbone = compress(tiny_family, RoutingConfig(kept_groups=15, features=BOTH))
    told, _ = noted_attention(backbone, batch)
    eager = copy.deepcopy(tiny_family.model)
    eager.set_attn_implementation("eager")
    seen = batch.regions_BN[0] != Region.PADDING
    one = only_sample(batch, 0)
    out = eager(input_ids=one.input_ids_BN[:, seen], pixel_values=one.pixel_values, output_attentions=True)
    asks = (batch.regions_BN[0] == Region.QUERY)[seen]
    expected = out.attentions[0][0][:, asks].mean((0, 1))
    assert torch.allclose(told[0][0, seen], expected, atol=1e-5)
    assert not told[0][2].any()  # no question about an image


@torch.no_grad()
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
@torch.no_grad()
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
