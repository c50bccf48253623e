"""The context/query split of language models: what rows see, what caches keep, and that nothing looks ahead."""

from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.objective import answer_loss, predicting_rows
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, gqa_family, make_batch, only_sample
from tests.support.refusals import refusing
from tests.support.sampling import sampled
from tests.support.text_families import KINDS, NAMED, text_batch, text_family

MIXED = [(24, 6, 5), (16, 4, 7), (21, 3, 4)]
QUEST = {"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 4}
ROUTED = RoutingConfig(num_groups=8, kept_groups=2, budget="global", query_conditioned=True)


def hf_logits(family, batch):
    mask = batch.regions_BN != Region.PADDING
    positions = family.positions(batch)
    return family.model(batch.input_ids_BN, attention_mask=mask.long(), position_ids=positions, use_cache=False).logits


def naive_logits(backbone, batch, result):
    """One sample: every layer with an explicit softmax over all rows, from the pass's own choices."""
    family = backbone.family
    hidden = family.embed(batch)
    cos, sin = family.decoder.rotary_emb(hidden, family.positions(batch))
    length = batch.input_ids_BN.shape[1]
    apart = torch.arange(length)[:, None] - torch.arange(length)
    whole = torch.isin(batch.regions_BN[0], torch.tensor([Region.SYSTEM, Region.CONTEXT]))[:, None]
    for index, layer in enumerate(family.decoder.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        query, key, value = (
            projection(normed).view(1, length, -1, 16).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if family.model.config.model_type == "qwen3":
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        groups = result.state.masks[index][0].repeat_interleave(4, dim=-1)
        routed = (value.transpose(1, 2).flatten(2) * groups).view(1, length, -1, 16).transpose(1, 2)
        key, value, routed = (states.repeat_interleave(2, 1) for states in (key, value, routed))
        sees = (apart >= 0) & (apart < (family.windows[index] or length)) & (whole | result.kept[index][0])
        weights = (query @ key.mT * 0.25).masked_fill(~sees, -torch.inf).softmax(-1)
        out = torch.where(whole, weights @ value, weights @ routed)
        hidden = hidden + attention.o_proj(out.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return family.logits(hidden)


@sampled("kind", KINDS, every=4)
@pytest.mark.parametrize("pad_left", [False, True])
def test_neutral_settings_are_the_backbone_bit_for_bit_and_through_a_forced_split(kind, pad_left):
    family, batch = text_family(kind), text_batch(MIXED, pad_left)
    expected = hf_logits(family, batch)
    add_lora(family, LoraSettings(dropout=0.0))
    whole = RoutingConfig(num_groups=8, kept_groups=8)
    real = batch.regions_BN != Region.PADDING
    for reducer in ({"name": "none"}, {**QUEST, "keep_ratio": 1.0}):
        neutral = compress(family, whole, **reducer)
        assert torch.equal(neutral.logits(neutral.run(batch))[real], expected[real])
    result = neutral.run(batch, force_gather=True)
    assert sorted(result.kept) == [0, 1, 2]
    assert (neutral.logits(result)[real] - expected[real]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", NAMED)
def test_split_equals_a_plain_loop(kind):
    batch = text_batch([(24, 6, 5)])
    backbone = compress(text_family(kind), ROUTED, **QUEST)
    result = backbone.run(batch)
    torch.testing.assert_close(backbone.logits(result), naive_logits(backbone, batch, result), rtol=1e-4, atol=1e-5)


def test_nothing_after_the_prefix_changes_what_came_before():
    """Pages, summary and logits of the prefix reading depend on no predicted token."""
    batch, backbone = text_batch(MIXED), compress(text_family(), ROUTED, **QUEST)
    before = backbone.logits(backbone.run(batch))
    for place in range(MIXED[0][2]):
        changed = text_batch(MIXED)
        answer = 1 + 24 + 6 + place
        changed.input_ids_BN[0, answer] = 9
        after = backbone.logits(backbone.run(changed))
        assert torch.equal(after[0, :answer], before[0, :answer])
        assert not torch.equal(after[0, answer], before[0, answer])


REFUSED = [
    (lambda: compress(text_family(), name="fastv"), "'fastv' reduces visual tokens and a language model has none"),
    (lambda: compress(gqa_family(), **QUEST), "'quest' evicts the context of a language model; llava takes fastv"),
    (lambda: compress(text_family(attn_implementation="eager"), **QUEST), "loaded with 'eager'; set model.backbone"),
    (lambda: compress(text_family()).run(make_batch([(1, 9)])), "llama is a language model and takes no images"),
]
test_what_does_not_fit_is_refused = refusing(REFUSED)

SHORT = [(0, 9, 6), (0, 3, 4)]


def trained_loss(backbone, batch):
    backbone.zero_grad()
    rows, targets = predicting_rows(batch.labels_BN)
    result = backbone.run(batch)
    loss = answer_loss(backbone.logits(result, rows), targets)
    (loss + 0 * result.state.mean_balance()).backward()
    return loss.item(), {name: p.grad.clone() for name, p in backbone.named_parameters() if p.requires_grad}


def check_trained_as_alone(backbone, batch):
    loss, gradients = trained_loss(backbone, batch)
    alone = [trained_loss(backbone, only_sample(batch, index)) for index in range(len(batch.record_ids))]
    assert loss == pytest.approx(sum(each for each, _ in alone), rel=1e-6)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, sum(each[parameter] for _, each in alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["quest", "compactor", "expected_attention", "kvzip"])
def test_samples_with_and_without_a_context_are_trained_together_as_each_alone(name):
    family = text_family()
    add_lora(family, LoraSettings(dropout=0.0))
    check_trained_as_alone(compress(family, ROUTED, name=name, keep_ratio=0.5), text_batch([*MIXED, *SHORT]))


def test_samples_without_a_context_are_trained_whole():
    family, batch = text_family(), text_batch(SHORT)
    backbone = compress(family, ROUTED, **QUEST)
    real = batch.regions_BN != Region.PADDING
    torch.testing.assert_close(backbone.logits(backbone.run(batch))[real], hf_logits(family, batch)[real])


@pytest.mark.parametrize("kept", ["pages", "scores", "bytes", "image"])
def test_training_compiles_routed_layers_without_a_graph_break(kept):
    family, batch = (gqa_family(), make_batch([(1, 6)] * 2)) if kept == "image" else (text_family(), text_batch(MIXED))
    add_lora(family, LoraSettings(dropout=0.0))
    shares = {"budget": "bytes", "kept_groups": 8, "byte_share": 0.5} if kept == "bytes" else {}
    reducers = {"pages": QUEST, "scores": {"name": "expected_attention", "keep_ratio": 0.5}}
    backbone = compress(family, replace(ROUTED, **shares), **reducers.get(kept, {})).train()
    plain = trained_loss(backbone, batch)
    torch.compiler.reset()
    for layer in family.decoder.layers:
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(trained_loss(backbone, batch), plain)
