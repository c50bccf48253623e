"""Axes of values: the layer's output stays, the first channels hold most of it, a group's length is what it adds."""

import pytest
import torch

from subtoken_train.functional.key_axes import output_metric, value_axes


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(width=6, kv_heads=2, queries=3, entries=200, model=10):
    """Values of unlike channels, and an output projection."""
    mix = drawn(kv_heads, width, width, seed=1) * torch.logspace(0, -2, width, dtype=torch.float64)
    values_hnd = drawn(kv_heads, entries, width) @ mix.transpose(-1, -2)
    return values_hnd, drawn(model, kv_heads * queries * width, seed=2)


def moments(values_hnd):
    return values_hnd.transpose(-1, -2) @ values_hnd / values_hnd.shape[1]


@pytest.mark.parametrize("queries", [1, 3])
def test_the_output_stays_and_a_group_s_length_is_what_it_adds(queries):
    values, weight = case(queries=queries)
    metric = output_metric(weight, 2, 6)
    into, back = value_axes(moments(values), metric)
    assert torch.allclose(into @ back, torch.eye(6, dtype=torch.float64).expand(2, 6, 6), atol=1e-9)
    mapped = values @ into.transpose(-1, -2)
    assert torch.allclose(mapped @ back.transpose(-1, -2), values)
    energy = mapped.pow(2).mean(1)
    assert (energy[:, :-1] >= energy[:, 1:] - 1e-12).all()
    assert torch.allclose(energy.sum(-1), values.pow(2).mean(1).sum(-1))  # numbers keep their size
    for head in range(2):  # the lengths of any channels of a value, against those of the outputs that these alone give
        some = torch.cat([mapped[head][:, :2], torch.zeros_like(mapped[head][:, 2:])], 1)
        own = weight.split(6, 1)[queries * head : queries * (head + 1)]
        assert torch.allclose(metric[head], sum(part.T @ part for part in own) / queries)
        parts = [part @ back[head] for part in own]
        outputs = sum((some @ part.T).pow(2).sum(-1) for part in parts) / queries
        lengths = some.pow(2).sum(-1)
        assert torch.allclose(outputs / lengths, (outputs / lengths)[:1])


def test_no_basis_holds_more_in_its_first_channels():
    """Against random bases: the error of an output without the last channels of its values, summed over entries."""
    values, weight = case(kv_heads=1, queries=2)
    metric = output_metric(weight, 1, 6)
    into, back = value_axes(moments(values), metric)

    def error(into, back):
        mapped = values[0] @ into.T
        mapped[:, 3:] = 0
        apart = values[0] - mapped @ back.T
        return float((apart @ metric[0] * apart).sum())

    best = error(into[0], back[0])
    for seed in range(20):
        basis = drawn(6, 6, seed=seed)
        assert error(basis, basis.inverse()) > best


@pytest.mark.parametrize("what", ["values", "weight"])
def test_heads_without_any_values_or_outputs_are_left_whole(what):
    values, weight = case()
    if what == "values":
        values[1] = 0
    else:
        weight[:, 18:] = 0
    into, back = value_axes(moments(values), output_metric(weight, 2, 6))
    assert into.isfinite().all()
    assert torch.allclose(into @ back, torch.eye(6, dtype=torch.float64).expand(2, 6, 6), atol=1e-9)
