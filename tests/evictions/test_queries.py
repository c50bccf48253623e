"""TOVA, Finch, Quest's steps, Q-Filters and ExpectedAttention beside plain references and goldens; refusals."""

from functools import partial

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating.layers import DirectionCalibrator
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.queries import HeadDirections, QFilter, QuestSteps
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from tests.support.golden_cases import close, golden_view, load, same_sets
from tests.support.prompt_views import KV_HEADS, LAYERS, NOBODY, PROMPTS, WIDTH, layer_views, rope, samples, written
from tests.support.refusals import refusing
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of

TWO = [[1] + [2] * 14 + [4] * 4, [4] * 9]
CODES = [[1] + [3] * 14 + [4] * 5, [3] * 6 + [4] * 3, [2] * 4 + [4] + [2] * 3 + [4]]


@pytest.mark.parametrize("protect_last", [False, True])
def test_tova_is_the_last_row(protect_last):
    method = build_eviction("tova", protect_last=protect_last)
    view = layer_views(TWO, method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    found = method.score(view)
    for sample, entries, matrix, _, _ in samples(view):
        assert torch.allclose(found.scores_BhN[sample, 0, entries], matrix[:, -1].mean(0), atol=1e-6)
        assert found.protected_BN[sample, entries].tolist() == [False] * (len(matrix[0]) - 1) + [protect_last]


@pytest.mark.parametrize("pad", ["left", "right"])
def test_finch_is_a_plain_sum(pad):
    """Three lengths, two images, rows that are no entries; question rows are what follows the context."""
    method = build_eviction("finch")
    view = layer_views(CODES, method.needs, pad, layers=1, dropped=[(0, 0.2)])[0]
    found = method.score(view)
    for (sample, entries, matrix, _, _), asking in zip(samples(view), (5, 3, 1), strict=True):
        length = matrix.shape[-1]
        asks = torch.arange(length) >= length - asking
        weighted = matrix * (torch.arange(1, length + 1) * asks)[:, None]
        expected = weighted.sum(1).view(KV_HEADS, -1, length).mean(1) / asking
        torch.testing.assert_close(found.scores_BhN[sample][:, entries], expected.masked_fill(asks, 0.0))
        assert found.protected_BN[sample, entries].tolist() == asks.tolist()


def test_prompts_that_ask_nothing_are_refused():
    method = build_eviction("finch")
    for notation in ("finch", "ada(finch)"):
        assert build_eviction(notation).reads_question
    cell = {**PLAIN_CELL, "family": "llava", "eviction": "finch", "scope": "context", "batch": "last_left"}
    backbone = backbone_of(cell)
    cache = PackedCache(backbone.family.shape.num_layers)
    with pytest.raises(ValueError, match=r"'finch' scores by the question .* and '.*' ends with its context"):
        open_prompts(backbone, batch_of(cell), cache, Compression(method, 0.5), "query_aware")
    asked = batch_of({**cell, "batch": "three_left"})
    with pytest.raises(ValueError, match=r"context_first compresses before .* eviction 'finch' scores by the question"):
        open_prompts(backbone, asked, cache, Compression(method, 0.5), "context_first")


def test_the_first_layers_read_everything():
    assert [QuestSteps().pages(layer) for layer in range(4)] == [None, None, (16, 3), (16, 3)]
    assert QuestSteps(page_size=8, least_pages=1, dense_layers=0).pages(0) == (8, 1)


def direction_by_svd(queries):
    """Of one head's rows [N, d]."""
    first = torch.linalg.svd(queries.double()).Vh[0]
    return first if float((queries.double() @ first).mean()) >= 0 else -first


def test_scores_equal_a_decomposition_of_every_prompt_s_queries():
    for pad in ("left", "right"):
        for view in layer_views(list(PROMPTS.values()), QFilter.needs, pad):
            found = QFilter().score(view).scores_BhN
            for sample, entries in enumerate(view.entries_BN):
                queries, keys = view.query_BHNd[sample][:, entries], view.key_BhNd[sample]
                each = torch.stack([direction_by_svd(head) for head in queries])
                for head, shared in enumerate(each.view(KV_HEADS, -1, WIDTH).mean(1)):
                    expected = keys[head].double() @ shared
                    torch.testing.assert_close(found[sample, head].double(), expected, atol=1e-4, rtol=1e-4)


def test_the_keys_that_queries_look_for_stay(tmp_path):
    """A file's direction: entries whose keys point along it score highest, whatever the queries are."""
    direction = [[[0.0] * (WIDTH - 1) + [1.0]] * KV_HEADS] * LAYERS
    method = QFilter(written(tmp_path / "q.json", "q_filter", HeadDirections(direction)))
    for view in layer_views([PROMPTS["context"]], method.needs):
        assert torch.equal(method.score(view).scores_BhN, view.key_BhNd[..., -1])


def test_the_calibration_is_that_of_all_prompts_together():
    family = text_family(layers=2)
    batches = [text_batch([(20, 4, 0), (11, 3, 0)], seed=1), text_batch([(9, 2, 0)], pad_left=True, seed=2)]
    found = DirectionCalibrator().numbers(CompressedBackbone(family, build_reducer("none")).eval(), batches)
    queries = {layer: [] for layer in range(2)}

    def observe(layer, query, key, value, scale, rows):
        for sample, marks in enumerate(rows.regions_BM != Region.PADDING):
            queries[layer].append(query[sample][:, marks])

    backbone = CompressedBackbone(family, build_reducer("none")).eval()
    with torch.no_grad():
        for batch in batches:
            backbone.run(batch, observer=observe)
    for layer, parts in queries.items():
        each = torch.stack([direction_by_svd(head) for head in torch.cat(parts, 1)])
        expected = each.view(family.shape.num_kv_heads, -1, each.shape[-1]).mean(1)
        torch.testing.assert_close(torch.tensor(found.direction[layer]).double(), expected, atol=1e-4, rtol=1e-4)
    found.check_shape(2, 2, 16)
    assert len(found.words().splitlines()) == 3


FAULTS = [
    ([], "a table for every layer"),
    ([[[1.0]], [[1.0], [2.0]]], "all of one shape"),
    ([[[1.0, 2.0], [1.0]]], r"direction\[0\] must be a table"),
    ([[[1e9]]], r"direction\[0\]\[0\]\[0\] is 1e\+09"),
]
test_directions_that_fit_no_model = refusing(FAULTS, HeadDirections)


def test_another_width_is_refused(tmp_path):
    path = written(tmp_path / "q.json", "q_filter", HeadDirections([[[1.0, 0.0]]]))
    made = build_eviction("q_filter", calibration=path).calibrated
    made.check_backbone(NOBODY.model_type, NOBODY.digest, 1, 1, 2)
    with pytest.raises(ValueError, match="direction has 1 layers of 1 heads of width 2, and the backbone 1 of 1 of 4"):
        made.check_backbone(NOBODY.model_type, NOBODY.digest, 1, 1, 4)


@pytest.mark.parametrize(
    "name", ["kvpress_expected_attention", "kvpress_expected_attention_eps", "kvpress_expected_attention_nocov"]
)
def test_golden_press(shared, name):
    """The press scores the sinks above all others, where here they are protected."""
    params, tensors = load(shared, name)
    own = {"future": params["n_future_positions"], "sinks": params["n_sink"], "covariance": params["use_covariance"]}
    own |= {"value_norm": params["use_vnorm"], "epsilon": params["epsilon"]}
    method = build_eviction("expected_attention", **own)
    batch, _, length, width = tensors["keys"].shape
    rotate = partial(rope, width=width, theta=params["rope_theta"])
    position = torch.arange(length).expand(batch, -1)
    assert torch.allclose(rotate(position[:1]).cos_BNr, tensors["cos"][:1], atol=1e-5)
    view = golden_view(
        method, tensors, values="values", position=position, next_position=position[:, -1:] + 1, rotate=rotate
    )
    assert torch.allclose(view.unrotated_queries(), tensors["queries_prerope"], atol=1e-5)
    ours = method.score(view).scores_BhN[..., method.sinks :]
    close(method, f"{name}: scores", ours, tensors["scores"][..., method.sinks :])
    same_sets(method, name, view, tensors["kept_positions"])


def plain_scores(view, sample, rows, method):
    """Scores of one prompt: each future position by itself, and matrices in full."""
    width, kv_heads = view.key_BhNd.shape[-1], view.key_BhNd.shape[1]
    counted, scores = rows[method.sinks :], torch.zeros(kv_heads, len(rows))
    if not counted:
        return scores
    ahead = view.next_position[sample] + torch.arange(method.future)
    turns = [rope(place.view(1, 1)).turn(torch.eye(width)[None, None])[0, 0].T for place in ahead]
    rotation = torch.stack(turns).mean(0)
    turned = rope(view.position[sample : sample + 1]).turn_back(view.query_BHNd[sample : sample + 1])[0, :, counted]
    for head, queries in enumerate(turned.unflatten(0, (kv_heads, -1))):
        keys, share = view.key_BhNd[sample, head, counted], torch.zeros(len(counted))
        if method.name == "capkv":
            values = view.value_BhNd[sample, head, counted]
            leverages = [plain_leverage(rotation @ own.mean(0), keys, values) for own in queries]
            scores[head, method.sinks :] = torch.stack(leverages).mean(0)
            continue
        for own in queries:
            spread = rotation @ torch.cov(own.T, correction=0).view(width, width) @ rotation.T
            squares = torch.stack([key @ spread @ key for key in keys]) * view.scale**2 / 2 * method.covariance
            share += (keys @ (rotation @ own.mean(0)) * view.scale + squares).softmax(0) / len(queries)
        if method.value_norm:
            share = (share + method.epsilon) * view.value_BhNd[sample, head, counted].norm(dim=-1)
        scores[head, method.sinks :] = share
    return scores


def plain_leverage(query, keys, values):
    """CapKV's scores of one query head, its capacity inverted as a whole."""
    weights = torch.stack([5 * (key @ query) / key.norm() / query.norm() for key in keys])
    weights = (weights - weights.max()).exp()
    capacity = torch.eye(len(query)) + (weights[:, None] * values).T @ values
    return torch.stack([w * value @ capacity.inverse() @ value for w, value in zip(weights, values, strict=True)])


EXPECTED = [{}, {"covariance": False}, {"value_norm": False}, {"epsilon": 0.3, "sinks": 0}]


@pytest.mark.parametrize(("name", "settings"), [("capkv", {}), *(("expected_attention", each) for each in EXPECTED)])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_equal_to_the_plain_reference(name, settings, pad):
    """Padding, three lengths (one of sinks only, one with a single entry more), and rows that are no entries."""
    method = build_eviction(name, future=7, **settings)
    prompts = [[1] + [2] * 14 + [4] * 4, [4] * 5, [4] * 3]
    view = layer_views(prompts, method.needs, pad, layers=1, dropped=[(0, 0.3)])[0]
    found = method.score(view)
    for sample in range(3):
        rows = view.entries_BN[sample].nonzero()[:, 0].tolist()
        assert torch.allclose(found.scores_BhN[sample][:, rows], plain_scores(view, sample, rows, method), atol=1e-5)
        assert found.protected_BN[sample, rows].tolist() == [i < method.sinks for i in range(len(rows))]


def test_future_positions_move_on_every_axis():
    """Under mRoPE the ids are [3, B, 1], and a token of text moves all three alike."""
    method = build_eviction("expected_attention", future=3)
    view = layer_views([[4] * 12, [4] * 9], method.needs, "left", layers=1)[0]
    asked = []

    def rotate(position):
        asked.append(position)
        return rope(position[0])

    plain = method.score(view).scores_BhN
    view.position, view.next_position = (each.expand(3, -1, -1) for each in (view.position, view.next_position))
    view.rotate = rotate
    assert torch.equal(method.score(view).scores_BhN, plain)
    assert asked[-1].tolist() == [[[12, 13, 14], [9, 10, 11]]] * 3
