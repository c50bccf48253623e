"""DuoAttention: heads by alpha, exact budgets, the release's masks, and alphas read off a prompt."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions.duo_attention import DuoAttention, HeadAlphas, attention_outside, head_counts
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support.golden_cases import load, record
from tests.support.kvzap_files import written
from tests.support.prompt_views import KV_HEADS, PROMPTS, dense_attention, layer_views


def counts_by_loop(alphas, least, most, total):
    """Heads one after another by falling alpha, each up to its whole cache; None where streaming costs too much."""
    heads = [(layer, head) for layer in range(len(alphas)) for head in range(len(alphas[layer]))]
    counts = {(layer, head): least[layer] for layer, head in heads}
    left = total - sum(counts.values())
    if left < 0:
        return None
    for layer, head in sorted(heads, key=lambda place: -alphas[place[0]][place[1]]):
        given = min(left, most[layer] - least[layer])
        counts[layer, head] += given
        left -= given
    return [[counts[layer, head] for head in range(len(alphas[layer]))] for layer in range(len(alphas))]


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 200))
def test_counts_equal_a_loop_and_the_total(seed, layers, heads, total):
    generator = torch.Generator().manual_seed(seed)
    most = torch.randint(1, 20, (layers, 1), generator=generator)
    least = torch.minimum(torch.randint(1, 8, (layers, 1), generator=generator), most)
    alphas = torch.randint(0, 4, (layers, 1, heads), generator=generator) / 3  # with ties
    found = head_counts(alphas, least, most, torch.tensor([total]))[:, 0]
    assert int(found.sum()) == min(max(total, layers * heads), int(most.sum()) * heads)
    assert (found >= 1).all()
    assert (found <= most).all()
    expected = counts_by_loop(alphas[:, 0].tolist(), least[:, 0].tolist(), most[:, 0].tolist(), total)
    if expected is None:
        assert (found <= least).all()  # all give way alike
    else:
        assert found.tolist() == expected


def test_masks_are_the_release_s(shared, tmp_path):
    """Its streaming heads at alpha 0, the others at 1, the budget that its masks leave: the same entries go."""
    params, tensors = load(shared, "kvpress_duo")
    streaming, length = tensors["streaming_mask"], params["T"]
    sinks, recent = params["sink_size"], params["recent_size"]
    numbers = HeadAlphas((~streaming).float().tolist(), sinks, recent)
    method = DuoAttention(calibration=written(tmp_path / "duo.json", "duo_attention", numbers))
    assert method.streaming == (sinks, recent)
    layers, heads = streaming.shape
    batch = len(tensors["evicted_mask"])
    regions = torch.full((batch, length), int(Region.QUERY))
    states = torch.zeros(batch, heads, length, 1)
    views = [View(i, states, states, states, regions, 1.0, method.needs) for i in range(layers)]
    total = streaming.numel() * length - int(streaming.sum()) * (length - sinks - recent)
    assert total % heads == 0
    budget = torch.zeros(layers, batch, dtype=torch.long)
    budget[0] = total // heads
    kept = method.keep(
        [method.score(view) for view in views], Candidates([regions] * layers, [regions > 0] * layers, budget)
    )
    differing = int((kept[params["layer_idx"]] != ~tensors["evicted_mask"]).sum())
    record(method.name, "kvpress_duo: places that differ", differing)
    assert differing == 0
    for layer in range(layers):
        whole = kept[layer].all(-1)
        assert torch.equal(whole, ~streaming[layer].expand_as(whole))
    share = 1 - sum(int(each.sum()) for each in kept) / (batch * streaming.numel() * length)
    assert share == pytest.approx(float(tensors["compression_ratio"]), abs=1e-6)


@pytest.mark.slow
def test_alphas_of_a_prompt_equal_a_plain_loop():
    sinks, recent = 2, 3
    for pad in ("left", "right"):
        for view in layer_views(list(PROMPTS.values()), DuoAttention.needs, pad):
            found = attention_outside(view, sinks, recent)
            for sample, entries in enumerate(view.entries_BN):
                matrix = dense_attention(view.query_BHNd[sample], view.key_BhNd[sample], entries, view.scale)
                rows = entries.nonzero()[:, 0].tolist()
                outside = torch.zeros(len(matrix))
                for i, row in enumerate(rows):
                    for j, key in enumerate(rows[: i + 1]):
                        if j >= sinks and i - j >= recent:
                            outside += matrix[:, row, key]
                expected = (outside / len(rows)).view(KV_HEADS, -1).mean(1)
                torch.testing.assert_close(found[sample], expected)
            assert ((found >= 0) & (found <= 1)).all()


def test_the_heads_that_look_far_keep_everything():
    """Without a calibration: one head looks at an early fact, the others at what is near."""
    length, method = 40, DuoAttention(sinks=1, recent=4)
    query = torch.zeros(1, KV_HEADS, length, length)
    query[0, 0] = torch.eye(length) * 50
    query[0, 1, :, 10] = 50
    key = torch.eye(length).expand(1, KV_HEADS, -1, -1)
    regions = torch.full((1, length), int(Region.CONTEXT))
    view = View(0, query, key, key, regions, 1.0, method.needs)
    candidates = Candidates([regions], [regions > 0], torch.tensor([[(length + 5) // 2 + 1]]))
    kept = method.keep([method.score(view)], candidates)[0][0]
    assert kept.sum(-1).tolist()[1] == length
    assert kept[0].nonzero()[:, 0].tolist()[0] == 0


def test_settings_of_the_file_and_own_ones(tmp_path):
    path = written(tmp_path / "duo.json", "duo_attention", HeadAlphas([[1.0]], 4, 32))
    assert DuoAttention().streaming == (128, 256)
    assert DuoAttention(path).streaming == (4, 32)
    assert DuoAttention(path, sinks=0).streaming == (0, 32)
