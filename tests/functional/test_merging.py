"""VisionZip's pure functions against a plain loop and both released implementations."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from subtoken_train.reducers.visionzip import contextual_targets, contextual_tokens, dominant_tokens
from tests.support.golden_cases import alike, near
from tests.support.helpers import random_scores


def merged_by_loop(tokens, keys, targets):
    """One token at a time: find its target, sum, divide, add to the target."""
    groups = {target: [] for target in targets}
    for place in range(len(tokens)):
        if place not in groups:
            similarity = {t: float(torch.cosine_similarity(keys[place], keys[t], dim=0)) for t in targets}
            groups[max(targets, key=lambda t: similarity[t])].append(tokens[place])
    return [tokens[t] + (torch.stack(joined).mean(0) if joined else 0) for t, joined in groups.items()]


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 100))
def test_merging_equals_a_plain_loop(rest, count, seed):
    count = min(rest, count)
    tokens, keys = random_scores(seed, rest, 6), random_scores(seed + 1, rest, 4)
    targets = contextual_targets(rest, count)
    assert len(set(targets.tolist())) == count
    merged = contextual_tokens(tokens, keys, targets)
    torch.testing.assert_close(merged, torch.stack(merged_by_loop(tokens, keys, targets.tolist())))


def test_nothing_to_merge_into_and_nothing_to_merge():
    tokens = random_scores(0, 5, 3)
    assert contextual_tokens(tokens, tokens, contextual_targets(5, 0)).shape == (0, 3)
    assert torch.equal(contextual_tokens(tokens, tokens, contextual_targets(5, 5)), tokens)
    assert contextual_tokens(tokens[:0], tokens[:0], contextual_targets(0, 0)).shape == (0, 3)


def test_bf16_tokens_are_averaged_in_fp32():
    tokens = torch.cat([torch.zeros(1, 1), torch.full((300, 1), 1.0)]).bfloat16()
    keys = torch.ones(301, 2)
    assert contextual_tokens(tokens, keys, torch.tensor([0])).item() == 1.0


def test_dominant_tokens_come_in_order_and_ties_go_to_the_lower_index():
    assert dominant_tokens(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3).tolist() == [1, 2, 3]
    assert dominant_tokens(torch.ones(4), 0).tolist() == []


SPREADS = [(38, 5, [0, 7, 14, 21, 28]), (7, 3, [0, 2, 4]), (4, 4, [0, 1, 2, 3])]


@pytest.mark.parametrize(("rest", "count", "expected"), SPREADS)
def test_targets_are_spread_evenly(rest, count, expected):
    assert contextual_targets(rest, count).tolist() == expected


def test_golden_of_the_clip_release(shared):
    folder = shared / "golden" / "visionzip_clip"
    params = json.loads((folder / "set_a.json").read_text())["params"]
    golden = load_file(folder / "set_a.safetensors")
    for sample, expected in enumerate(golden["tokens_out"]):
        received, states = golden["attentions_m2"][sample].sum(0)[0, 1:], golden["hidden_states_m2"][sample]
        dominant = dominant_tokens(received, params["dominant_num"])
        assert {0, *(dominant + 1).tolist()} == set(golden["all_indices"][sample].tolist())
        rest = torch.ones(len(received), dtype=torch.bool)
        rest[dominant] = False
        targets = contextual_targets(int(rest.sum()), params["contextual"])
        merged = contextual_tokens(states[1:][rest], golden["metric_m2"][sample, 1:][rest], targets)
        ours = torch.cat([states[:1], states[1:][dominant], merged])
        near("visionzip", "visionzip_clip: tokens", ours, expected, atol=1e-5)


def test_golden_of_the_qwen_release(shared):
    folder = shared / "golden" / "visionzip_qwen25vl_lightcompress"
    params = json.loads((folder / "set_a.json").read_text())["params"]
    golden = load_file(folder / "set_a.safetensors")
    assert len(golden["input_ids"]) == 1  # the release takes one prompt at a time
    ids, embeds, out = (golden[name][0] for name in ("input_ids", "inputs_embeds", "inputs_embeds_out"))
    visual, text = ((ids == params["vision_token_index"]) == seen for seen in (True, False))
    visual, text = visual.nonzero()[:, 0], text.nonzero()[:, 0]
    tokens = embeds[visual]
    dominant = dominant_tokens(golden["score_merged"], int(params["dominant_ratio"] * len(tokens)))
    rest = torch.ones(len(tokens), dtype=torch.bool)
    rest[dominant] = False
    targets = contextual_targets(int(rest.sum()), max(int(params["contextual_ratio"] * len(tokens)), 1))
    merged = contextual_tokens(tokens[rest], golden["key_merged"].mean(0)[rest], targets)
    places = rest.nonzero()[targets, 0]
    kept = sorted([*dominant.tolist(), *places.tolist()])
    positions = torch.cat([visual[kept], text]).sort().values
    alike("visionzip", "visionzip_qwen25vl_lightcompress", positions, golden["kept_positions"])
    ours = embeds.index_copy(0, visual, tokens.index_copy(0, places, merged))[golden["kept_positions"]]
    near("visionzip", "visionzip_qwen25vl_lightcompress: embeddings", ours, out, rtol=1e-5)
