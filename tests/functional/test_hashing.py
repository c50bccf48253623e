"""The random controls' numbers: of the keys alone, uniform, and unrelated between keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional.hashing import sample_seeds, uniform_hash

KEYS = st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=5)


@given(keys=KEYS, others=st.lists(st.integers(0, 2**31), max_size=4), data=st.data())
def test_a_number_depends_on_its_own_keys_only(keys, others, data):
    """Whatever else stands in the batch, and however the keys are broadcast."""
    alone = uniform_hash(torch.tensor(keys[0]), *keys[1:])
    assert 0 <= alone.item() < 1
    place = data.draw(st.integers(0, len(others)))
    batch = torch.tensor([*others[:place], keys[0], *others[place:]])
    assert uniform_hash(batch, *keys[1:])[place] == alone
    as_tensors = [torch.tensor([[key]]) for key in keys]
    assert uniform_hash(*as_tensors).item() == alone.item()


def test_uniform_over_consecutive_keys():
    """Small consecutive integers, as positions and groups are: mean, and chi-square over 64 bins."""
    sample, position, group = torch.arange(5)[:, None, None], torch.arange(600)[:, None], torch.arange(32)
    numbers = uniform_hash(sample, position, group, 7, 3).flatten()
    assert abs(numbers.mean().item() - 0.5) < 0.005
    observed = torch.histc(numbers, 64, 0, 1)
    expected = len(numbers) / 64
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert 20 < chi_square < 130  # 63 +- 11 for uniform numbers


@pytest.mark.parametrize("changed", ["sample", "position", "group", "seed", "layer"])
def test_every_key_matters_and_leaves_no_correlation(changed):
    first = {"sample": 11, "position": torch.arange(200)[:, None], "group": torch.arange(32), "seed": 0, "layer": 0}
    second = {**first, changed: first[changed] + 1000}
    one, two = (uniform_hash(*keys.values()).flatten() for keys in (first, second))
    assert (one == two).float().mean() < 0.01
    assert torch.corrcoef(torch.stack([one, two]))[0, 1].abs() < 0.06


def test_the_order_of_keys_matters():
    numbers = torch.arange(100)
    assert not torch.equal(uniform_hash(numbers, 3), uniform_hash(torch.tensor(3), numbers))


def test_all_zero_keys_are_no_special_case():
    """The first group of the first layer under seed 0 must not be the lowest by construction."""
    zeros = [uniform_hash(torch.tensor(0), *[0] * more).item() for more in range(4)]
    assert len(set(zeros)) == 4
    assert min(zeros) > 0


def test_sample_seeds_follow_the_records_names():
    device = torch.device("cpu")
    seeds = sample_seeds(["a", "b", "a"], device)
    assert seeds.dtype == torch.int64
    assert seeds[0] == seeds[2] != seeds[1]
    assert torch.equal(sample_seeds(["b", "a"], device), seeds[1:])
    assert len(set(sample_seeds([f"record-{i}" for i in range(500)], device).tolist())) == 500
