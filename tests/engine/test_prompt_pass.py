"""Where a prompt goes on, and which rows are never dropped, whatever a reducer leaves."""

from __future__ import annotations

import torch

from subtoken_train.engine.prompt_pass import Rows, protected_rows
from subtoken_train.types import Region
from tests.support.helpers import make_batch

P, S, V, Q, A = (int(r) for r in (Region.PADDING, Region.SYSTEM, Region.VISUAL, Region.QUERY, Region.ANSWER))


def test_tokens_are_read_before_answers_and_at_the_end():
    batch = make_batch([(1, 6)])
    batch.regions_BN = torch.tensor([[P, S, V, V, A, A, Q, V], [S, V, Q, A, A, P, P, P]])
    assert protected_rows(batch).nonzero().tolist() == [[0, 3], [0, 7], [1, 2], [1, 4]]
    batch.followed = True
    assert protected_rows(batch).nonzero().tolist() == [[0, 3], [1, 2]]


def test_what_follows_stands_where_it_did():
    regions = torch.tensor([[S, V, V, V, V], [P, P, S, V, V]])
    rows = Rows.whole(regions, torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]))
    keep = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 1, 0, 1]]).bool()
    assert rows.take(keep, pad_left=True)[0].next_position.tolist() == [[5], [3]]
    assert rows.take(keep, pad_left=False, policy="renumber")[0].next_position.tolist() == [[3], [2]]
