"""Methods that read queries, R-KV, and their calibrations: beside plain references and goldens; refusals."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating.layers import CentreCalibrator, DirectionCalibrator
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.queries import HeadDirections, QFilter, QueryCentres, QuestSteps
from subtoken_train.families.positions import LENGTH_DEPENDENT
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support import prompt_views
from tests.support.golden_cases import close, golden_view, load, same_sets
from tests.support.prompt_views import KV_HEADS, NOBODY, PROMPTS, WIDTH, layer_views, rope, settings_for, written
from tests.support.refusals import refuses, refusing
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of

CODES = [[1] + [3] * 14 + [4] * 5, [3] * 6 + [4] * 3, [2] * 4 + [4] + [2] * 3 + [4]]


@pytest.mark.parametrize("protect_last", [False, True])
def test_tova_is_the_last_row(protect_last):
    method = build_eviction("tova", protect_last=protect_last)
    view = layer_views([[1] + [2] * 14 + [4] * 4, [4] * 9], method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    found = method.score(view)
    for sample, entries, matrix, _, _ in prompt_views.samples(view):
        assert torch.allclose(found.scores_BhN[sample, 0, entries], matrix[:, -1].mean(0), atol=1e-6)
        assert found.protected_BN[sample, entries].tolist() == [False] * (len(matrix[0]) - 1) + [protect_last]


@pytest.mark.parametrize("pad", ["left", "right"])
def test_finch_is_a_plain_sum(pad):
    """Three lengths, two images, rows that are no entries; question rows are what follows the context."""
    method = build_eviction("finch")
    view = layer_views(CODES, method.needs, pad, layers=1, dropped=[(0, 0.2)])[0]
    found = method.score(view)
    for (sample, entries, matrix, _, _), asking in zip(prompt_views.samples(view), (5, 3, 1), strict=True):
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
    direction = [[[0.0] * (WIDTH - 1) + [1.0]] * KV_HEADS] * prompt_views.LAYERS
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
    view = layer_views([[1] + [2] * 14 + [4] * 4, [4] * 5, [4] * 3], method.needs, pad, layers=1, dropped=[(0, 0.3)])[0]
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


GROUP, HALF = prompt_views.HEADS // KV_HEADS, WIDTH // 2
RUNS = [(pad, dtype) for pad in ("left", "right") for dtype in (torch.float32, torch.bfloat16)]


def methods():
    rkv = build_eviction("rkv", window=3, kernel=3, importance=0.3, alike=0.2)
    return [build_eviction("triattention", **settings_for("triattention")), rkv]


def foretold(method, view, sample, head):
    """A query head's scores of all rows of a sample before they are standardised, in complex numbers."""
    numbers, key = method.read_numbers(), view.key_BhNd[sample, head // GROUP].double()
    mean, length = (torch.tensor(each[view.layer][head]).double() for each in (numbers.mean, numbers.length))
    centre, turned = torch.complex(mean[:HALF], mean[HALF:]), torch.complex(key[:, :HALF], key[:, HALF:])
    ahead = int(view.next_position[sample, 0]) + 2.0 ** torch.arange(17)[:, None]
    queries = centre * (1j * ahead * 100.0 ** -(2 * torch.arange(HALF).double() / WIDTH)).exp()
    beside = (length.view(2, HALF) - centre.abs()).clamp(min=0).mean(0) * turned.abs()
    return ((queries.mean(0) * turned.conj()).real + beside).sum(-1).float()


@pytest.mark.parametrize(("pad", "dtype"), RUNS)
def test_triattention_is_a_sum_over_frequencies_and_distances(pad, dtype):
    method = methods()[0]
    for view in layer_views(list(PROMPTS.values()), method.needs, pad, dtype=dtype):
        found = method.score(view).scores_BhN
        for sample, entries in enumerate(view.entries_BN):
            each = torch.stack([foretold(method, view, sample, head)[entries] for head in range(prompt_views.HEADS)])
            each = (each - each.mean(-1, keepdim=True)) / each.std(-1, correction=0, keepdim=True)
            expected = each.view(KV_HEADS, GROUP, -1).amax(1)
            torch.testing.assert_close(found[sample][:, entries], expected, atol=5e-4, rtol=5e-4)


def repeated(keys, alike):
    """Mean similarity of each key of a head to all others, the latest one that is alike left out of each row."""
    unit = keys.float() / keys.float().norm(dim=-1, keepdim=True)
    similar = (unit @ unit.T).fill_diagonal_(0)
    for row in similar:
        row[(row > alike).nonzero()[-1:, 0]] = 0
    return similar.mean(0).softmax(0)


@pytest.mark.parametrize(("pad", "dtype"), RUNS)
def test_rkv_is_attention_less_redundancy(pad, dtype):
    method = methods()[1]
    for view in layer_views([PROMPTS["context"], PROMPTS["image last"]], method.needs, pad, dtype=dtype):
        found = method.score(view)
        for sample, entries in enumerate(view.entries_BN):
            keys, queries = view.key_BhNd[sample][:, entries].float(), view.query_BHNd[sample][:, entries].float()
            before = keys.shape[1] - 3
            for head, own in enumerate(keys):
                logits = queries[head * GROUP : (head + 1) * GROUP, before:] @ own[:before].T
                paid = (logits.amax(0) * view.scale).softmax(-1).mean(0)
                expected = -0.7 * repeated(own, 0.2)
                expected[:before] += 0.3 * torch.stack([paid[max(i - 1, 0) : i + 2].amax() for i in range(before)])
                torch.testing.assert_close(found.scores_BhN[sample, head, entries], expected, atol=1e-5, rtol=1e-4)
            assert found.protected_BN[sample, entries].tolist() == [False] * before + [True] * 3


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.name)
def test_heads_that_are_rows_score_alike(method):
    """While tokens are decoded a row is one head of one sample."""
    (prompt,) = layer_views([PROMPTS["context"]], method.needs, layers=1)
    length = prompt.key_BhNd.shape[2]
    key, query = prompt.key_BhNd[0][:, None], prompt.query_BHNd[0].view(KV_HEADS, GROUP, length, WIDTH)[:, :, -5:]
    online = View(
        0, query, key, key, torch.full((KV_HEADS, length), int(Region.GENERATED)), prompt.scale, method.needs,
        place_BN=torch.arange(length).expand(KV_HEADS, -1), seen_B=torch.full((KV_HEADS,), length), heads=KV_HEADS,
        rotate=rope, next_position=prompt.next_position.expand(KV_HEADS, 1), budget=lambda: torch.tensor([20, 20]),
    )  # fmt: skip
    torch.testing.assert_close(method.score(online).scores_BhN[:, 0], method.score(prompt).scores_BhN[0])


def test_centres_are_means_of_unturned_queries():
    family, queries = text_family(layers=2), {0: [], 1: []}
    backbone = CompressedBackbone(family, build_reducer("none")).eval()
    batches = [text_batch([(20, 4, 0), (11, 3, 0)], seed=1), text_batch([(9, 2, 0)], pad_left=True, seed=2)]
    found = CentreCalibrator().numbers(backbone, batches)

    def observe(layer, query, key, value, scale, rows):
        rotation, half = family.rotation(layer, rows.position), query.shape[-1] // 2
        for sample, row in rows.visible_BM.nonzero().tolist():
            turned = torch.complex(query[sample, :, row, :half], query[sample, :, row, half:])
            cos, sin = rotation.cos_BNr[sample, row, :half], rotation.sin_BNr[sample, row, :half]
            queries[layer].append(turned * torch.complex(cos, -sin))

    for batch in batches:
        backbone.run(batch, pad_left=True, observer=observe)
    for layer, each in queries.items():
        centre, length = torch.stack(each).mean(0), torch.stack(each).abs().mean(0)
        own = torch.cat([centre.real, centre.imag], -1), length.repeat(1, 2)
        for table, expected in zip((found.mean, found.length), own, strict=True):
            torch.testing.assert_close(torch.tensor(table[layer]), expected, atol=1e-5, rtol=1e-4)
    assert "concentration" in found.words()


def test_what_does_not_fit_is_refused():
    own = settings_for("triattention")
    made = build_eviction("triattention", **own).calibrated
    with pytest.raises(ValueError, match=r"make its own: subtoken-train calibrate triattention"):
        made.check_backbone("qwen2", "1" * 64, 3, KV_HEADS, WIDTH)
    with pytest.raises(ValueError, match="3 layers of 4 heads of width 8, and the backbone 3 of"):
        made.check_backbone(NOBODY.model_type, NOBODY.digest, 3, 3, WIDTH)
    with pytest.raises(ValueError, match="'subtoken-train calibrate triattention' writes one"):
        build_eviction("triattention").check_shape(3, KV_HEADS, WIDTH)
    refuses("must hold a table for every layer, all of one shape", QueryCentres, [[[1.0, 2.0]]], [[[1.0, 2.0, 3.0]]])
    for method in (build_eviction("triattention", window=8, **own), build_eviction("rkv", window=8)):
        (view,) = layer_views([[int(Region.CONTEXT)] * 20], method.needs, layers=1)
        candidates = Candidates([view.regions_BN], [view.entries_BN], torch.tensor([[5]]))
        with pytest.raises(ValueError, match=rf"{method.name} window=8 is larger than the budget of 5 entries"):
            method.keep([method.score(view)], candidates)


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_positions_that_depend_on_the_length_are_refused(kind):
    family = SimpleNamespace(length_dependent=True, decoder=SimpleNamespace(rotary_emb=SimpleNamespace(rope_type=kind)))
    with pytest.raises(ValueError, match=f"cannot foretell attention under '{kind}' positions"):
        CentreCalibrator().check(SimpleNamespace(family=family))
