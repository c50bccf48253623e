"""benchmarks/real_peers.py: what two sides decide of the same context, compared entry by entry."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.real_peers import alike, compare, decided, draw, table, together
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.kvzip import KVzip
from subtoken_train.evictions.thresholds import Threshold
from tests.support.chats import CHATML, byte_level
from tests.support.helpers import compress
from tests.support.text_families import text_family


def marks(*places: int):
    """One layer, one head, six entries."""
    return torch.tensor([[[place in places for place in range(6)]]])


def test_a_scale_is_no_difference_and_what_is_protected_is_not_compared():
    scores = torch.tensor([[[9.0, 5.0, 4.0, 3.0, 2.0, 1.0]]])
    theirs = {"kept": marks(0, 1, 3), "scores": scores / 64}
    theirs["scores"][..., 0] = 70  # the press pads what it protects
    found = compare((marks(0, 1, 2), scores, marks(0)), theirs, scored=True)
    assert (found["ours"], found["kvpress"], found["both"]) == (3, 3, 2)
    assert found["largest"] < 1e-6
    assert found["ranks"] == pytest.approx(1)
    assert found["widest"] == pytest.approx(1 / 64 / 70)  # entry 2 from entry 3, the worst that the press keeps
    assert "widest" not in compare((marks(0), scores, marks()), theirs, scored=False)


def test_ties_and_other_scores_are_told():
    scores = torch.tensor([[[6.0, 5.0, 4.0, 4.0, 2.0, 1.0]]])
    tied = compare((marks(0, 1, 2), scores, marks()), {"kept": marks(0, 1, 3), "scores": scores}, scored=True)
    assert tied["widest"] == 0
    turned = {"kept": marks(3, 4, 5), "scores": scores.flip(-1)}
    apart = compare((marks(0, 1, 2), scores, marks()), turned, scored=True)
    assert apart["ranks"] < 0
    whole = together([tied, apart])
    assert (whole["both"], whole["ours"]) == (2, 6)
    assert (whole["ranks"], whole["largest"]) == (round(apart["ranks"], 4), float(f"{apart['largest']:.3g}"))
    assert alike(tied) == "66.66 (ties)"
    assert alike(whole) == "33.33"
    assert alike({**whole, "both": 6}) == "all"


@pytest.mark.parametrize("notation", ["knorm", "tova", "critical(snapkv)", "kvzip"])
def test_every_head_keeps_the_count_of_the_context_s_own_entries(notation):
    backbone = compress(text_family(layers=2)).eval()
    options = {"snapkv": {"window": 4}}.get(notation.partition("(")[2].rstrip(")"), {})
    ids = torch.randint(10, 60, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    method = build_eviction(notation, **options)
    for opening in ((), (5, 6, 7)):
        found = decided(backbone, method, opening, ids, [20, 5])
        for (kept, scores, protected), count in zip(found, (20, 5), strict=True):
            assert kept.shape == scores.shape == protected.shape == (2, 2, 40)
            each = kept.sum(-1)
            assert each.sum() == 4 * count if isinstance(method, KVzip) else (each == count).all()


def test_a_question_stays_and_thresholds_are_budgets():
    backbone = compress(text_family(layers=6)).eval()
    ids = torch.randint(10, 60, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for kept, _, protected in decided(backbone, build_eviction("finch"), (), ids, [20, 9], asked=6):
        assert bool(kept[..., -6:].all())
        assert torch.equal(protected, torch.arange(40).expand_as(protected) >= 34)
    assert [int(kept[0, 0].sum()) for kept, _, _ in decided(backbone, build_eviction("finch"), (), ids, [20], 6)] == [
        20
    ]
    method = build_eviction("simlayerkv", sinks=2, recent=4)
    some, fewer = (decided(backbone, method, (), ids, [Threshold(value, 0)])[0][0] for value in (0.6, 0.9))
    assert set(some.sum(-1).flatten().tolist()) <= {6, 40}
    assert int(fewer.sum()) <= int(some.sum())


def test_both_sides_read_what_was_drawn_first(tmp_path):
    family = text_family(layers=1, vocab_size=400)
    family.processor = byte_level(CHATML)
    (tmp_path / "test.txt").write_text("the cat sat on the mat . " * 400)
    given = draw(tmp_path / "model", family, tmp_path, tmp_path)
    assert given == json.loads((tmp_path / "contexts.json").read_text())
    assert family.tokenizer.decode(given["opening"]).endswith("<|im_start|>user\n")
    assert given["counts"] == [[int(len(ids) * keep) for keep in (0.5, 0.219, 0.125)] for ids in given["contexts"]]
    assert draw(tmp_path / "model", family, tmp_path, tmp_path) == given
    with pytest.raises(SystemExit, match="take another --folder"):
        draw(tmp_path / "other", family, tmp_path, tmp_path)


def test_a_row_shows_the_models_in_their_order():
    budget = {"ours": 8, "kvpress": 8, "both": 8, "largest": 2e-7, "ranks": 1.0, "widest": 0.0}
    other = {**budget, "both": 6, "ranks": 0.95}
    record = {
        name: {"rows": [{"ours": "knorm", "kvpress": "Knorm", "budgets": [each, budget, budget]}]}
        for name, each in (("a", budget), ("b", other))
    }
    assert table(record).splitlines()[-1] == (
        "| knorm | Knorm | 2e-07 / 2e-07 | 1.0000 / 0.9500 | all / 75.00 (ties) | all / all | all / all |"
    )
