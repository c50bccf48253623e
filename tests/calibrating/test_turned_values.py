"""Value axes folded into models: the same answers, another identity, and what cannot be folded is refused."""

import pytest
import torch

from subtoken_train.calibrating.turned_values import ValueMoments, check_foldable, fold_value_axes, turn_values
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.families.family import shapes_digest
from tests.support.helpers import compress
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

SIZES = [(20, 4, 0), (9, 5, 0)]


def turned(family, seen=None):
    seen = [] if seen is None else seen
    batches = [text_batch([size], pad_left=True, seed=number) for number, size in enumerate(SIZES)]
    return turn_values(compress(family).eval(), iter(batches), seen.append)


@sampled("kind", ["llama", "qwen2", "gemma3", "phi3", "olmo3", "glm4", "qwen3_moe"], every=3)
def test_a_turned_model_says_the_same_and_is_another_backbone(kind):
    family, seen = text_family(kind, initializer_range=0.2), []
    ids = torch.arange(3, 30)[None]
    logits, digest = family.model(ids).logits, shapes_digest(family)
    before, after, apart = turned(family, seen)
    assert 0 < apart < 1e-3
    assert seen == [1, 2]
    assert after > before
    assert torch.allclose(family.model(ids).logits, logits, atol=1e-3 * float(logits.abs().max()))
    assert shapes_digest(family) != digest
    again = shapes_digest(family)
    turned(family)  # turned once more: other axes
    assert shapes_digest(family) != again


def test_moments_are_of_entries_whatever_stands_beside_them():
    family = text_family("llama", initializer_range=0.2)
    backbone = compress(family).eval()
    use_packed_attention(family.decoder.config)
    found = []
    for batches in ([SIZES], [[size] for size in SIZES]):
        moments = ValueMoments()
        for sizes in batches:
            backbone.run(text_batch(sizes, pad_left=True, seed=3), pad_left=True, observer=moments.observe)
        found.append(moments)
    assert found[0].counts == found[1].counts
    assert found[0].counts[0] == sum(1 + sum(size) for size in SIZES)  # with what begins a text
    alone = ValueMoments()
    cache = family.dense_cache()
    backbone.run(text_batch([SIZES[0]], pad_left=True, seed=3), pad_left=True, observer=alone.observe, cache=cache)
    value_hnd = cache.layers[1].values[0].double()
    expected = value_hnd.transpose(-1, -2) @ value_hnd / value_hnd.shape[1]
    assert torch.allclose(alone.means(torch.float32)[1], expected, rtol=1e-5, atol=1e-7)


def test_numbers_that_are_none_are_named():
    moments = ValueMoments()
    moments.sums, moments.counts = {0: torch.full((2, 3, 3), float("nan"), dtype=torch.float64)}, {0: 1}
    refuses("while its values were read", moments.means, torch.float16)


def test_no_prompts_and_a_model_with_something_between():
    family = text_family("llama", initializer_range=0.2)
    with pytest.raises(ValueError, match="there are no prompts to find value axes on; choose other data"):
        turn_values(compress(family).eval(), iter([]), lambda done: None)
    for layer in family.decoder.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: (args[0].tanh(),))
    refuses(r"something lies between v_proj and o_proj.; use its own channels", turned, family)


def test_values_with_a_norm_and_rounded_weights_are_refused():
    family = text_family("llama")
    check_foldable(family)
    attention = family.decoder.layers[0].self_attn
    attention.v_norm = torch.nn.Identity()
    refuses("normalises its values", check_foldable, family)
    del attention.v_norm
    attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight.to(torch.int8), requires_grad=False)
    refuses("name an unquantised backbone", check_foldable, family)


def test_folding_needs_every_layer_s_moments_and_keeps_dtypes():
    family = text_family("llama", initializer_range=0.2)
    family.model.to(torch.bfloat16)
    shape = family.shape
    eye = torch.eye(shape.head_dim, dtype=torch.float64).expand(shape.num_kv_heads, -1, -1)
    fold_value_axes(family, [eye] * shape.num_layers)
    assert {parameter.dtype for parameter in family.model.parameters()} == {torch.bfloat16}
