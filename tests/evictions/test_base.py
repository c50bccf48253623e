"""The contract of eviction methods: what a layer shows, and which entries a score keeps."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evictions.base import Eviction, keep_best_entries
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View


def view_of(regions, needs=(), dtype=torch.float32):
    regions = torch.tensor(regions)
    batch, length = regions.shape
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(batch, heads, length, 4, generator=generator).to(dtype) for heads in (4, 2, 2)]
    return View(0, *tensors, regions, 0.5, frozenset(needs))


def plain_best(scores, competes, protected, count):
    """Kept places of one head."""
    able = [place for place, able in enumerate(competes) if able]
    always = sorted((place for place in able if protected[place]), reverse=True)
    others = sorted((place for place in able if not protected[place]), key=lambda place: (-scores[place], place))
    return set((always + others)[: max(count, 1)])


@st.composite
def choices(draw):
    batch, heads, length = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 10))
    score = st.sampled_from([-torch.inf, -3.4e38, -1.5, -0.0, 0.0, 0.5, 2.0, torch.inf])  # few values: many ties
    count = batch * heads * length
    scores = torch.tensor(draw(st.lists(score, min_size=count, max_size=count))).view(batch, heads, length)
    marks = st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)
    competes, protected = (torch.tensor(draw(marks)).view(batch, length) for _ in range(2))
    counts = draw(st.lists(st.integers(0, length + 2), min_size=batch, max_size=batch))
    return scores, competes, protected, torch.tensor(counts)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(choices())
def test_best_entries_are_the_plain_ones(choice):
    scores, competes, protected, counts = choice
    kept = keep_best_entries(*choice)
    assert kept.dtype == torch.bool
    for sample, count in enumerate(counts.tolist()):
        for head, row in enumerate(scores[sample].tolist()):
            expected = plain_best(row, competes[sample], protected[sample], count)
            assert set(kept[sample, head].nonzero()[:, 0].tolist()) == expected


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(choices(), st.integers(0, 3))
def test_heads_that_share_scores_can_keep_unlike_numbers(choice, least):
    scores, competes, protected, counts = choice
    each = torch.stack([counts, counts // 2, counts + 1], dim=-1)
    kept = keep_best_entries(scores[:, :1], competes, protected, each, least)
    alone = [keep_best_entries(scores[:, :1], competes, protected, count, least) for count in each.unbind(-1)]
    assert torch.equal(kept.expand(-1, 3, -1), torch.cat(alone, 1))


def test_a_score_that_is_no_number_is_a_fault():
    everything = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(AssertionError):
        keep_best_entries(torch.tensor([[[0.0, torch.nan]]]), everything, everything, torch.tensor([1]))


@pytest.mark.parametrize("window", [1, 3, 9])
def test_last_rows(window):
    """Left, right and inner padding, fewer entries than the window, none at all."""
    regions = [[0, 0, 1, 2, 4, 4], [1, 2, 2, 4, 0, 0], [1, 0, 2, 0, 4, 4], [0, 0, 0, 4, 0, 0], [0] * 6]
    found = view_of(regions).last_rows(window).tolist()
    for row, codes in zip(found, regions, strict=True):
        entries = [place for place, code in enumerate(codes) if code][-window:]
        assert row == [-1] * (window - len(entries)) + entries


def test_only_what_was_declared_is_given():
    view = view_of([[1, 2, 4]])
    index, rows = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
    asked = {
        "rows": lambda: view.rows(index),
        "blocks": lambda: view.blocks(rows),
        "key_norms": view.key_norms,
        "value_norms": view.value_norms,
        "values": lambda: view.value_BhNd,
    }
    for need, ask in asked.items():
        with pytest.raises(ValueError, match=rf"did not ask for it: add '{need}' to the method's needs"):
            ask()
    assert view.query_BHNd.shape == (1, 4, 3, 4)
    assert view_of([[1, 2, 4]], ["values"]).value_BhNd.shape == (1, 2, 3, 4)
    assert view_of([[1, 2, 4]], ["value_norms"]).value_BhNd.shape == (1, 2, 3, 4)


def test_statistics_see_entries_only():
    view = view_of([[0, 1, 0, 4, 4]], ["rows", "blocks", "key_norms", "value_norms"], torch.bfloat16)
    assert view.entries_BN.tolist() == [[False, True, False, True, True]]
    rows = view.rows(torch.tensor([[4]]))
    assert rows[..., [0, 2]].eq(0).all()
    assert rows[..., [1, 3, 4]].gt(0).all()
    (index, block), *_ = view.blocks(view.entries_BN)
    assert index.tolist() == [[1, 3, 4]]
    assert torch.allclose(block[:, :, 2], rows[:, :, 0])
    narrow = view.rows(torch.tensor([[4]]), view.regions_BN == Region.QUERY)
    assert narrow[..., [0, 1, 2]].eq(0).all()
    assert view.key_norms().dtype == view.value_norms().dtype == torch.float32
    assert torch.allclose(view.key_norms(), (view.key_BhNd.float() ** 2).sum(-1).sqrt())


@dataclass(frozen=True)
class Last(Eviction):
    """Later entries first; layer 1 gives an entry to layer 0."""

    name: ClassVar[str] = "last"

    def score(self, view):
        places = torch.arange(view.regions_BN.shape[1]).float()
        return Scores(places.expand(len(view.regions_BN), 1, -1), torch.zeros_like(view.entries_BN))

    def counts(self, scores, candidates):
        return candidates.budget_LB + torch.tensor([[1], [-1]])


def test_keep_joins_the_chosen_with_all_that_do_not_compete():
    """Counts per layer and sample; padding is never kept; a sample without candidates keeps its entries."""
    view = view_of([[1, 2, 2, 2, 4], [0, 1, 4, 4, 4]])
    competes = view.regions_BN == Region.VISUAL
    candidates = Candidates([view.regions_BN] * 2, [competes] * 2, torch.tensor([[1, 0], [1, 0]]))
    kept = Last().keep([Last().score(view)] * 2, candidates)
    assert [layer[:, 0].long().tolist() for layer in kept] == [
        [[1, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
        [[1, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
    ]
