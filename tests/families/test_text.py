"""Language models: published sizes, head norms and scaled frequencies, and transformers' own greedy answers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.load import layout_family
from subtoken_train.inference.model import SubTokenModel
from tests.support.generation_cells import CELL, PLAIN, inputs_of
from tests.support.sampling import sampled
from tests.support.text_families import KINDS, text_batch, text_family
from tests.support.truth_cells import backbone_of, compression_of
from tests.support.truth_models import CONTEXT


@pytest.mark.parametrize(
    ("path", "parameters", "kibibytes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 128),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096, 128),
        ("Qwen/Qwen3-8B", 8_190_735_360, 144),
        ("Qwen/Qwen3-14B", 14_768_307_200, 160),
    ],
)
def test_published_models_have_their_published_sizes(path, parameters, kibibytes):
    family = layout_family(BackboneConfig(path, dtype="bfloat16"))
    assert sum(parameter.numel() for parameter in family.model.parameters()) == parameters
    assert family.shape.token_bytes == kibibytes * 1024
    assert family.licences[path].identifier in ("llama3.1", "apache-2.0")


def test_llama_31_scales_its_slow_frequencies():
    inverse_d = text_family("llama31").decoder.rotary_emb.inv_freq
    plain_d = text_family("llama").decoder.rotary_emb.inv_freq
    ratio_d = plain_d / inverse_d
    assert ratio_d[0] == 1
    assert ratio_d[-1] == 8
    assert bool(((ratio_d > 1.01) & (ratio_d < 7.9)).any())


@sampled("kind", KINDS, every=4)
@torch.no_grad()
def test_heads_before_their_rotation_are_the_models(kind):
    """What evictions undo of cached queries and keys is what ``query_heads`` and ``key_heads`` make."""
    family, batch, seen = text_family(kind), text_batch([(20, 4, 0), (11, 3, 0)]), {}
    position = family.positions(batch)

    def note(layer, _, __, given):
        seen[layer] = given["hidden_states"]

    handles = [
        layer.self_attn.register_forward_pre_hook(partial(note, number), with_kwargs=True)
        for number, layer in enumerate(family.decoder.layers)
    ]
    cache, mask = family.dense_cache(), (batch.regions_BN != 0).long()
    family.model(batch.input_ids_BN, attention_mask=mask, position_ids=position, **{CACHE: cache})
    for handle in handles:
        handle.remove()
    for layer, normed_BND in seen.items():
        key_BhNd, before = cache.layers[layer].keys, family.key_heads(layer, normed_BND)
        rotation = family.rotation(layer, position)
        torch.testing.assert_close(rotation.turn(before), key_BhNd, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rotation.turn_back(key_BhNd), before, rtol=1e-4, atol=1e-4)
        assert family.query_heads(layer, normed_BND, position).shape == (2, 4, 25, 16)


@pytest.mark.parametrize("pad_left", [True, False])
@sampled("kind", KINDS, every=4)
@torch.no_grad()
def test_answers_without_compression_are_those_of_transformers(kind, pad_left):
    """Left-padded prompts as ``generate`` takes them; of right-padded ones, the first token."""
    cell = CELL | PLAIN | {"family": kind}
    model = SubTokenModel.around(backbone_of(cell), compression_of(cell))
    inputs, settings = inputs_of(model, pad_left=pad_left), {"pad_token_id": model.tokenizer.pad_token_id}
    if pad_left:
        expected = model.backbone.model.generate(**inputs, max_new_tokens=12, do_sample=False, **settings)
        got = model.generate(**inputs, context_length=CONTEXT, max_new_tokens=12, do_sample=False, **settings)
        assert torch.equal(got, expected)
    else:
        logits = model.backbone.model(**inputs).logits
        got = model.generate(**inputs, context_length=CONTEXT, max_new_tokens=1, do_sample=False, **settings)
        last_B = inputs["attention_mask"].sum(-1) - 1
        assert torch.equal(got[:, -1], logits[torch.arange(len(last_B)), last_B].argmax(-1))


def test_images_are_refused_by_names_that_the_registry_holds():
    with pytest.raises(ValueError, match=r"takes no images; use a backbone that does \(.*llava.*\)"):
        text_family().visual_tokens()
