"""Q-Filters: directions against a plain singular value decomposition, their sign, and the file's shape."""

import pytest
import torch

from subtoken_train.calibrating.layers import DirectionCalibrator
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.queries import HeadDirections, QFilter, directions, query_moments
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from tests.support.kvzap_files import NOBODY, written
from tests.support.prompt_views import KV_HEADS, LAYERS, PROMPTS, WIDTH, layer_views
from tests.support.text_families import text_batch, text_family


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


def test_queries_project_to_the_positive_side():
    queries = torch.randn(3, 4, 30, WIDTH) - 2.0
    found = directions(*query_moments(queries, torch.ones(3, 30, dtype=torch.bool)), kv_heads=4)
    assert ((queries.double() * found[:, :, None]).sum(-1).mean(-1) > 0).all()


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


@pytest.mark.parametrize(("direction", "words"), FAULTS)
def test_directions_that_fit_no_model(direction, words):
    with pytest.raises(ValueError, match=words):
        HeadDirections(direction)


def test_another_width_is_refused(tmp_path):
    path = written(tmp_path / "q.json", "q_filter", HeadDirections([[[1.0, 0.0]]]))
    made = build_eviction("q_filter", calibration=path).calibrated
    made.check_backbone(NOBODY.model_type, NOBODY.digest, 1, 1, 2)
    with pytest.raises(ValueError, match="direction has 1 layers of 1 heads of width 2, and the backbone 1 of 1 of 4"):
        made.check_backbone(NOBODY.model_type, NOBODY.digest, 1, 1, 4)
