"""Payloads: the model's dtype as it is, integers within half a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.kernels.storage import Payload


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from([8, 4]),
    scale=st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 300.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    entries=st.sampled_from([0, 1, 7]),
)
def test_rounding_errs_by_half_a_step(seed, bits, scale, dtype, entries):
    vectors = torch.randn(2, entries, 8, generator=torch.Generator().manual_seed(seed)).mul(scale).to(dtype)
    payload = Payload.store(vectors, bits)
    read, top = payload.read(), 2 ** (bits - 1) - 1
    assert read.dtype == dtype
    step = vectors.float().abs().amax(-1, keepdim=True) / top
    # the step is stored in fp16 (11 bits, least number 2^-24) and the result in the model's dtype
    bound = step * (0.5 + 2**-11 * top) + top * 2**-24 + torch.finfo(dtype).eps * vectors.float().abs()
    assert bool(((read.float() - vectors.float()).abs() <= bound).all())
    assert payload.nbytes == vectors.numel() * bits // 8 + 2 * vectors[..., 0].numel()


def test_the_models_dtype_is_not_copied_when_read():
    payload = Payload.store(torch.randn(2, 5, 8))
    assert payload.read() is payload.data
    assert payload.scale is None


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_stretches_and_choices_are_those_of_the_vectors(bits):
    payload = Payload.store(torch.randn(4, 9, 8, generator=torch.Generator().manual_seed(0)), bits)
    whole = payload.read()
    assert torch.equal(payload.narrow(1, 2, 5).read(), whole[:, 2:7])
    assert payload.narrow(1, 2, 5).data.data_ptr() != payload.data.data_ptr()
    assert payload.narrow(1, 0, 5).data.data_ptr() == payload.data.data_ptr()
    index = torch.tensor([3, 0, 3])
    assert torch.equal(payload.select(index).read(), whole[index])


def test_four_bits_need_an_even_width():
    with pytest.raises(ValueError, match="pieces of 3 channels"):
        Payload.store(torch.randn(2, 3), 4)
    assert Payload.store(torch.randn(2, 3), 8).read().shape == (2, 3)
