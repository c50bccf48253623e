"""Keys at closed-up positions: against turning by hand, against a full recompute, and beyond the model's positions.

Legend: B batch, h key-value heads, N rows, d head width.
"""

from __future__ import annotations

import inspect
from itertools import product

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.families.decoder import CACHE
from subtoken_train.functional.rotary import Rotation
from subtoken_train.inference.layer_packer import Rerotation
from tests.support.golden_cases import golden_view, keep_of, load, record
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import difference

CELL = {"layout": "contiguous", "groups": "8/3", "budget": "per_token", "precision": "fp32", "rerotate": "yes"}


def by_hand(vector_d, position, inv_freq):
    half, out = len(vector_d) // 2, vector_d.clone()
    for i, angle in enumerate((position * inv_freq).tolist()):
        cos, sin = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        x, y = vector_d[i], vector_d[i + half]
        out[i], out[i + half] = x * cos - y * sin, y * cos + x * sin
    return out


@pytest.mark.parametrize("kind", ["llama", "phi3", "glm4", "cohere", "cohere2", "smollm3"])
@torch.no_grad()
def test_kept_keys_are_those_of_transformers_at_their_new_places(kind, monkeypatch):
    """Halves, pairs side by side, parts of a head, layers that turn nothing: by each model's own function and angles.

    Transformers runs the prompt and fills its cache; its keys before their rotation are turned by it once more, at the
    places to which the kept ones close up.
    """
    family, batch = text_family(kind), text_batch([(20, 4, 0), (11, 3, 0)])
    module, layers = inspect.getmodule(type(family.decoder.layers[0].self_attn)), family.decoder.layers
    own, plain, current = module.apply_rotary_pos_emb, {}, []

    def noted(query, key, *angles, **options):
        plain[current[-1]] = key
        return own(query, key, *angles, **options)

    for layer in layers:
        layer.self_attn.register_forward_pre_hook(lambda each, _: current.append(each.layer_idx))
    cache, position = family.dense_cache(), family.positions(batch)
    given = {"attention_mask": (batch.regions_BN != 0).long(), "position_ids": position, CACHE: cache}
    with monkeypatch.context() as patch:
        patch.setattr(module, "apply_rotary_pos_emb", noted)
        family.model(batch.input_ids_BN, **given)
    keep = torch.rand(2, 2, 25, generator=torch.Generator().manual_seed(1)).topk(7).indices
    keep = torch.zeros(2, 2, 25, dtype=torch.bool).scatter(2, keep, True)
    rerotation, places = Rerotation(family.rotation), (keep.cumsum(-1) - 1).clamp(min=0)
    for layer in range(3):
        found = rerotation.closed_up(layer, cache.layers[layer].keys, keep, position)
        for head in range(2):
            expected = cache.layers[layer].keys[:, head]
            if layer in plain:
                one = plain[layer][:, head : head + 1]
                expected = own(one, one, *family.decoder.rotary_emb(one, places[:, head]))[1][:, 0]
            torch.testing.assert_close(found[:, head][keep[:, head]], expected[keep[:, head]], rtol=1e-4, atol=1e-4)
    assert len(plain) == {"cohere2": 2, "smollm3": 2}.get(kind, 3)


@pytest.mark.parametrize("call", ["call", "evict_for_space"])
def test_golden_streaming_llm(shared, call):
    """The release caches unrotated keys and turns them by their place in the cache: the same keys, in the end."""
    params, tensors = load(shared, "streamingllm_original")
    places = tensors[f"kept_positions_{call}" + ("" if call == "call" else f"_{params['num_coming']}")]
    method = build_eviction("streaming_llm", sinks=params["start_size"])
    view = golden_view(method, tensors)
    keep_BhN = keep_of(method, [view], places.shape[-1])[0]
    cached, position = tensors["keys"], torch.arange(params["T"]).expand(params["B"], -1)
    inv_freq = 10000.0 ** (-torch.arange(0, params["D"], 2) / params["D"])

    def rotate(_, position_BN):
        angle = position_BN[..., None] * torch.cat([inv_freq, inv_freq])
        return Rotation(angle.cos(), angle.sin())

    rerotation = Rerotation(rotate)
    ours = rerotation.closed_up(0, rotate(0, position).turn(cached), keep_BhN, position)
    assert (rerotation.next_position == places.shape[-1]).all()
    worst = 0.0
    for sample, head in product(range(len(cached)), range(cached.shape[1])):
        for rank, place in enumerate(places[sample, head].tolist()):
            expected = by_hand(cached[sample, head, place], rank, inv_freq)
            worst = max(worst, float((ours[sample, head, place] - expected).abs().max()))
    record("streaming_llm", f"streamingllm_original {call}: keys as the release turns them", worst)
    assert worst < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@sampled(
    ("family", "reducer", "selector", "eviction", "protocol", "chunk"),
    [
        ("llama", "none", "none", "streaming_llm", "query_aware", None),
        ("llama", "none", "linear", "snapkv", "context_first", None),
        ("qwen2", "quest", "mlp", "h2o", "query_aware", None),
        ("mistral", "none", "none", "knorm", "context_first", 9),
        ("cohere", "none", "linear", "snapkv", "context_first", None),
        ("glm4", "none", "none", "h2o", "query_aware", 9),
        ("llava_gqa", "none", "none", "random", "context_first", None),
        ("llava_gqa", "fastv_embeds", "linear", "h2o", "query_aware", 11),
        ("llava", "visionzip", "gated", "streaming_llm", "context_first", 7),
    ],
    every=3,
)
@pytest.mark.parametrize("scope", ["context", "all"])
def test_the_packed_cache_is_the_recompute(family, reducer, selector, eviction, protocol, chunk, scope, side):
    cell = {"family": family, "reducer": reducer, "selector": selector, "eviction": eviction, "protocol": protocol}
    found = difference({**CELL, **cell, "batch": f"three_{side}", "scope": scope, "chunk": chunk}, 8)
    assert found.fits("fp32"), found


@pytest.mark.parametrize(
    ("family", "reducer", "eviction", "words"),
    [
        ("qwen2_5_vl", "none", "knorm", "the image grids of qwen2_5_vl: a grid has gaps that cannot be closed"),
        ("llava_gqa", "fastv_decoder", "knorm", r"keep between \d+ and \d+ entries of a prompt, but what follows"),
        ("llama", "none", "shared_set", r"heads or layers keep between 1\d and 2\d entries"),
        ("llava_gqa", "none", "own_sets", r"keep between \d+ and \d+ entries of a prompt, but what follows needs one"),
    ],
)
def test_what_cannot_be_closed_up_is_refused(family, reducer, eviction, words):
    cell = {"family": family, "reducer": reducer, "selector": "none", "eviction": eviction, "scope": "context"}
    with pytest.raises(ValueError, match=words):
        difference({**CELL, **cell, "batch": "three_left", "protocol": "query_aware"}, 1)
