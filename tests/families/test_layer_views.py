"""What an eviction is told of a layer beside its states: queries before their rotation, the output projection."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.reducers import build_reducer
from subtoken_train.view.view import View
from tests.support.truth_models import FAMILIES, family_of, prompts


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_states_before_their_rotation(name, pad_left):
    family, seen = family_of(name), {}
    batch = prompts(family, "three", pad_left)
    use_packed_attention(family.decoder.config)

    def observe(layer, query, key, value, scale, rows):
        view = View(layer, query, key, value, rows.regions_BM, scale, frozenset())
        view.position, view.next_position = rows.position, rows.next_position
        view.rotate = partial(family.rotation, layer)
        seen[layer] = view

    CompressedBackbone(family, build_reducer("none")).run(batch, observer=observe)
    block = family.decoder.layers[0]
    with torch.no_grad():
        normed = block.input_layernorm(family.embed(batch))
        for side, states in (("q", seen[0].unrotated_queries()), ("k", seen[0].unrotated_keys())):
            heads = getattr(block.self_attn, f"{side}_proj")(normed).unflatten(-1, (-1, states.shape[-1]))
            norm = getattr(block.self_attn, f"{side}_norm", torch.nn.Identity())  # Qwen3's, of every head
            expected = norm(heads).transpose(1, 2)
            entries = seen[0].entries_BN[:, None].expand(expected.shape[:3])
            assert torch.allclose(states[entries], expected[entries], atol=1e-4)
    following = seen[0].next_position[..., :, 0]
    assert (following > seen[0].position.masked_fill(~seen[0].entries_BN, -1).amax(-1)).all()


def test_the_output_projection_with_its_lora():
    family = deepcopy(family_of("llama"))
    projection = family.decoder.layers[1].self_attn.o_proj
    assert torch.equal(family.output_weight(1), projection.weight)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False), family.model)
    wrapped = family.decoder.layers[1].self_attn.o_proj
    inputs = torch.randn(3, projection.in_features)
    with torch.no_grad():
        assert torch.allclose(inputs @ family.output_weight(1).T, wrapped(inputs), atol=1e-5)


def test_an_unreadable_output_projection_is_a_mistake():
    family = deepcopy(family_of("qwen2"))
    projection = family.decoder.layers[0].self_attn.o_proj
    projection.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="o_proj is quantised"):
        family.output_weight(0)
