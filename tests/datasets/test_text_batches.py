"""Regions and labels of text samples, position by position."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.datasets.text_batches import TextSample, collate_text, padding_id
from subtoken_train.types import Region

P, C, Q, A = Region.PADDING, Region.CONTEXT, Region.QUERY, Region.ANSWER


def test_context_query_answer_and_padding():
    batch = collate_text([TextSample([5, 6, 7, 8, 9], 2, 1, "a"), TextSample([3, 4, 2], 1, 1, "b")], pad_id=0)
    assert batch.input_ids_BN.tolist() == [[5, 6, 7, 8, 9], [3, 4, 2, 0, 0]]
    assert batch.regions_BN.tolist() == [[C, C, Q, A, A], [C, Q, A, P, P]]
    assert batch.labels_BN.tolist() == [[-100, -100, -100, 8, 9], [-100, -100, 2, -100, -100]]
    assert batch.rank_position_B.tolist() == [2, 1]
    assert batch.pixel_values is None
    assert batch.images_per_sample_B.tolist() == [0, 0]
    assert batch.record_ids == ["a", "b"]


def test_without_an_answer_the_query_is_predicted():
    batch = collate_text([TextSample([5, 6, 7, 8], 2, 2, "a"), TextSample([5, 6, 7], 1, 1, "b")], pad_id=0)
    assert batch.regions_BN.tolist() == [[C, C, Q, Q], [C, Q, A, P]]
    assert batch.labels_BN.tolist() == [[-100, -100, 7, 8], [-100, -100, 7, -100]]
    assert batch.rank_position_B.tolist() == [3, 1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=4))
def test_every_token_has_one_region_and_only_what_is_predicted_a_label(lengths):
    samples = [TextSample(range(1, c + q + a + 1), c, q, "x") for c, q, a in lengths]
    batch = collate_text(samples, pad_id=0)
    for row, (context, query, answer) in enumerate(lengths):
        counts = [int((batch.regions_BN[row] == region).sum()) for region in (C, Q, A)]
        assert counts == [context, query, answer]
        labelled = batch.regions_BN[row] == (A if answer else Q)
        assert (batch.labels_BN[row] != -100).tolist() == labelled.tolist()
        assert (batch.regions_BN[row] == P).tolist() == (batch.input_ids_BN[row] == 0).tolist()
        assert batch.regions_BN[row, batch.rank_position_B[row]] == Q


def test_padding_id():
    assert padding_id(SimpleNamespace(pad_token_id=0, eos_token_id=2)) == 0
    assert padding_id(SimpleNamespace(pad_token_id=None, eos_token_id=2)) == 2
    with pytest.raises(ValueError, match="neither a pad nor an EOS token"):
        padding_id(SimpleNamespace(pad_token_id=None, eos_token_id=None))
