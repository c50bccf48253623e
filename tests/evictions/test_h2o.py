"""H2O: equal to three implementations, to dense column sums, and what the recent share takes."""

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support.golden_cases import close, golden_view, keep_of, load, same_places
from tests.support.host_reads import LargestTensor
from tests.support.prompt_views import dense_attention, layer_views


def test_golden_official_prompt(shared):
    """After the prompt: heavy hitters by accumulated scores, and the recent ones with the next token's slot.

    The recent window of the original counts the slot of the token to come, so that of the prompt it keeps one entry
    less. Its decode steps go on accumulating and are no part of what evicts after the prompt.
    """
    params, tensors = load(shared, "h2o_official_decode")
    length = params["prompt_len"]
    prompt = {name: tensors[name][:, :, :length] for name in ("queries", "keys")}
    method = build_eviction("h2o", recent_share=0.0, window=params["recent_budget"] - 1)
    view = golden_view(method, prompt)
    kept = keep_of(method, [view], params["heavy_budget"] + params["recent_budget"] - 1)[0]
    places = tensors["next_mask_step0"][:, :length].nonzero()[:, 1].view(*kept.shape[:2], -1)
    same_places(method, "h2o_official_decode prompt", kept, places)
    accumulated = tensors["acc_scores_step0"][None]  # of one sample: the original adds the samples of a batch up
    ours = method.score(view).scores_BhN
    alive = accumulated != 0  # the original clears what it evicted
    assert bool((alive | ~kept).all())
    close(method, "h2o_official_decode prompt: scores", ours[alive], accumulated[alive])


@pytest.mark.parametrize(
    ("name", "keys"), [("h2o_factory_prompt", "keys_repeated"), ("h2o_factory_prompt_kvhead", "keys")]
)
def test_golden_factory(shared, name, keys):
    """A fixed window; a set per query head or, reduced, per key-value head."""
    params, tensors = load(shared, name)
    method = build_eviction(
        "h2o", recent_share=0.0, window=params["window_size"], group=params.get("gqa_score_agg", "mean")
    )
    kept = keep_of(method, [golden_view(method, tensors, keys)], params["max_capacity_prompt"])[0]
    same_places(method, name, kept, tensors["kept_positions"])


def test_golden_observed_attention(shared):
    params, tensors = load(shared, "kvpress_observed_attention")
    method = build_eviction("h2o", recent_share=0.0, normalise=True)
    view = golden_view(method, tensors)
    close(method, "kvpress_observed_attention: scores", method.score(view).scores_BhN, tensors["scores"])
    kept = keep_of(method, [view], params["n_kept"])[0]
    same_places(method, "kvpress_observed_attention", kept, tensors["kept_positions"])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_scores_are_dense_column_sums(normalise, group):
    method = build_eviction("h2o", normalise=normalise, group=group)
    prompts = [[1] + [2] * 20 + [4] * 5, [4] * 11]
    view = layer_views(prompts, method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    scores = method.score(view).scores_BhN
    for sample in range(2):
        entries = view.entries_BN[sample]
        matrix = dense_attention(view.query_BHNd[sample], view.key_BhNd[sample], entries, view.scale)
        sums = matrix[:, entries].sum(1)[:, entries]
        if normalise:
            sums = sums / torch.arange(int(entries.sum()), 0, -1)
        grouped = sums.view(2, 2, -1)
        expected = grouped.mean(1) if group == "mean" else grouped.amax(1)
        assert torch.allclose(scores[sample][:, entries], expected, atol=1e-5)


SHARES = [(0.5, 5, 2), (0.29, 100, 29), (0.0, 7, 0), (1.0, 7, 7), (0.1, 5, 0)]
WINDOWS = [(16, 57, 16), (1, 7, 1), (7, 7, 7), (9, 7, 7)]
"""Which no share gives: 16 / 57 of 57, as a binary number, is 15 rounded down."""


@pytest.mark.parametrize(
    ("settings", "count", "recent"),
    [({"recent_share": share}, *rest) for share, *rest in SHARES]
    + [({"recent_share": 0.4, "window": window}, *rest) for window, *rest in WINDOWS],
)
def test_recent_entries_are_a_share_exact_and_rounded_down_or_a_number(settings, count, recent):
    """Early entries gather most attention when all queries are equal: what stays late is the window."""
    method, length = build_eviction("h2o", **settings), 120
    same = torch.ones(1, 1, length, 4)
    view = View(0, same, same, same, torch.full((1, length), int(Region.QUERY)), 0.5, method.needs)
    kept = keep_of(method, [view], count)[0][0, 0].nonzero()[:, 0].tolist()
    assert kept == [*range(count - recent), *range(length - recent, length)]


def test_recent_entries_are_the_last_of_the_prompt():
    """What stays anyway, since only the image competes, costs nothing of the budget: 5 of 10, one of them visual."""
    method = build_eviction("h2o")
    views = layer_views([[1] + [2] * 12 + [4] * 4, [2] * 6 + [4] * 3], method.needs, "right", layers=1)
    competes = views[0].regions_BN == Region.VISUAL
    candidates = Candidates([views[0].regions_BN], [competes], torch.tensor([[10, 2]]))
    scores = method.score(views[0])
    kept = method.keep([scores], candidates)[0]
    assert (kept & competes[:, None]).sum(-1).tolist() == [[10, 10], [2, 2]]
    assert kept[0, :, 12:17].all()
    for head in range(2):
        best = scores.scores_BhN[1, head, :6].topk(2).indices
        assert kept[1, head, :6].nonzero()[:, 0].tolist() == sorted(best.tolist())


def test_no_attention_matrix():
    method = build_eviction("h2o")
    view = layer_views([[4] * 1024], method.needs, layers=1)[0]
    with LargestTensor() as largest:
        method.score(view)
    assert largest.elements == 4 * 128 * 1024  # heads, a block of rows, keys
