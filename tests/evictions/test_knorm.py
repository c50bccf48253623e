"""Key norm: equal to the press, and padding's large keys count for nothing."""

import torch

from subtoken_train.evictions import build_eviction
from tests.support.golden_cases import close, golden_view, keep_of, load, same_places
from tests.support.prompt_views import layer_views


def test_golden_press(shared):
    params, tensors = load(shared, "kvpress_knorm")
    method = build_eviction("knorm")
    view = golden_view(method, tensors)
    close(method, "kvpress_knorm: scores", method.score(view).scores_BhN, tensors["scores"])
    same_places(method, "kvpress_knorm", keep_of(method, [view], params["n_kept"])[0], tensors["kept_positions"])


def test_shortest_keys_stay_in_every_head():
    method = build_eviction("knorm")
    view = layer_views([[4] * 9, [4] * 5], method.needs, "right", layers=1)[0]
    kept = keep_of(method, [view], 3)[0]
    for sample, length in enumerate((9, 5)):
        norms = (view.key_BhNd[sample, :, :length] ** 2).sum(-1)
        for head in range(2):
            best = sorted(range(length), key=lambda index: float(norms[head, index]))[:3]
            assert kept[sample, head].nonzero()[:, 0].tolist() == sorted(best)
    assert not torch.equal(kept[0, 0], kept[0, 1])
