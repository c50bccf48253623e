"""Leverage: equal to the projection's diagonal; sketches; numbers that are all the same."""

import torch

from subtoken_train.evictions.compactor import JITTER, gaussian_sketch, leverage_scores, standardised


def test_equal_to_the_diagonal_of_the_projection():
    torch.manual_seed(0)
    vectors, sketch = torch.randn(2, 40, 8), gaussian_sketch(2, 8, 5, 0)
    found = leverage_scores(vectors, sketch)
    for head in range(2):
        x = ((vectors[head] - vectors[head].mean(0)) @ sketch[head]).double()
        projection = x @ torch.linalg.inv(x.T @ x + JITTER * torch.eye(5)) @ x.T
        assert torch.allclose(found[head].double(), projection.diagonal(), atol=1e-5)
    assert (found >= 0).all()


def test_without_a_jitter_they_sum_to_the_rank():
    torch.manual_seed(0)
    vectors = torch.randn(1, 500, 8) * 100
    wide = leverage_scores(vectors, torch.eye(8)[None])
    assert abs(float(wide.sum()) - 8) < 1e-3


def test_a_sketch_wider_than_the_vectors_and_vectors_of_large_size():
    """The Gram matrix is singular, and rounding exceeds the first jitter."""
    torch.manual_seed(0)
    for size in (1.0, 1e4):
        found = leverage_scores(torch.randn(2, 300, 8) * size, gaussian_sketch(2, 8, 48, 0))
        assert found.isfinite().all()
        assert (abs(found.sum(-1) - 8) < 0.5).all()


def test_one_vector_has_none():
    assert leverage_scores(torch.randn(2, 1, 8), gaussian_sketch(2, 8, 4, 0)).tolist() == [[0.0], [0.0]]


def test_sketches_are_drawn_from_their_seed():
    once, other = gaussian_sketch(2, 64, 48, 3), gaussian_sketch(2, 64, 48, 4)
    assert torch.equal(once, gaussian_sketch(2, 64, 48, 3))
    assert not torch.equal(once, other)
    assert not torch.equal(once[0], once[1])
    assert abs(float(once.var()) * 48 - 1) < 0.1


def test_standardised():
    values = torch.randn(2, 30) * 3 + 7
    found = standardised(values)
    assert torch.allclose(found, (values - values.mean()) / values.std(), atol=1e-5)
    assert standardised(torch.full((2, 3), 5.0)).tolist() == [[0.0] * 3] * 2
    assert standardised(torch.tensor([[4.0]])).tolist() == [[0.0]]
