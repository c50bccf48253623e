"""Formats: the model's dtype as it is, integers within half a step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.kernels.formats import FORMATS
from subtoken_train.kernels.storage import pack_bits, places_in_bits, prepare_bits
from tests.support.helpers import random_mask
from tests.support.packing import FORMAT_OF


@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from([8, 4]),
    scale=st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 300.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    entries=st.sampled_from([0, 1, 7]),
)
def test_rounding_errs_by_half_a_step(seed, bits, scale, dtype, entries):
    vectors = torch.randn(2, entries, 8, generator=torch.Generator().manual_seed(seed)).mul(scale).to(dtype)
    payload = FORMAT_OF[bits].store(vectors)
    read, top = payload.read(), 2 ** (bits - 1) - 1
    assert read.dtype == dtype
    step = vectors.float().abs().amax(-1, keepdim=True) / top
    # the step is stored in fp16 (11 bits, least number 2^-24) and the result in the model's dtype
    bound = step * (0.5 + 2**-11 * top) + top * 2**-24 + torch.finfo(dtype).eps * vectors.float().abs()
    assert bool(((read.float() - vectors.float()).abs() <= bound).all())
    assert payload.nbytes == vectors.numel() * bits // 8 + 2 * vectors[..., 0].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_keys_take_a_scale_that_loses_no_more(dtype):
    keys = torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys[0, 0] = 0
    form = FORMATS["int4_rotated"]
    lost, plain = ((own.read() - keys).float().norm(dim=-1) for own in (form.store_keys(keys), form.store(keys)))
    assert bool((lost <= plain * 1.01).all())  # reading in bf16 rounds once more
    assert float(lost.square().mean()) < 0.95 * float(plain.square().mean())
    assert form.store_keys(keys[:, :0]).read().shape == (3, 0, 16)
    assert torch.equal(FORMATS["int4"].store_keys(keys).data, FORMATS["int4"].store(keys).data)


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_stretches_and_choices_are_those_of_the_vectors(bits):
    payload = FORMAT_OF[bits].store(torch.randn(4, 9, 8, generator=torch.Generator().manual_seed(0)))
    whole = payload.read()
    assert (whole is payload.data) == (bits == 0)  # the model's dtype is not copied
    assert torch.equal(payload.narrow(1, 2, 5).read(), whole[:, 2:7])
    assert payload.narrow(1, 2, 5).data.data_ptr() != payload.data.data_ptr()
    assert payload.narrow(1, 0, 5).data.data_ptr() == payload.data.data_ptr()
    index = torch.tensor([3, 0, 3])
    assert torch.equal(payload.each(lambda x: x[index]).read(), whole[index])


REFUSED = {"int4": (3, "int4 stores two"), "kivi4": (3, "kivi4 stores two"), "kivi2": (2, "kivi2 stores four")}


@pytest.mark.parametrize(("name", "width", "words"), [(name, *own) for name, own in REFUSED.items()])
def test_pieces_fill_bytes(name, width, words):
    match = f"{words} channels a byte, but the value groups cut heads into pieces of {width} channels"
    with pytest.raises(ValueError, match=match):
        FORMATS[name].store(torch.randn(2, width))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_format_says_what_it_stores(form):
    vectors = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(1))
    payload = form.store(vectors)
    assert payload.format is form
    assert payload.data.dtype == form.code_dtype(torch.float32)
    assert payload.data.shape[-1] == form.code_width(8)
    assert form.width(payload.data.shape[-1]) == 8
    assert payload.nbytes == form.bytes_of(2 * 3 * 5, 8, torch.float32, "values")
    assert (payload.scale is not None) == form.rounds
    if form.rounds:
        assert payload.scale.shape == form.scale_shape((2, 3, 5), 8, "values")


@given(
    seed=st.integers(0, 999),
    rows=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 4]),
    bits=st.sampled_from([1, 2, 4, 8]),
    entries=st.sampled_from([0, 1, 7, 8, 9, 33]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_places_are_those_of_the_flags(seed, rows, heads, bits, entries, share):
    pieces = 2 * heads
    flags_RSM = random_mask(seed, rows, bits, entries, share=share)
    piece_bit = torch.arange(pieces) * bits // pieces
    expected = [
        (row * heads + piece // 2) * entries + entry
        for row in range(rows)
        for piece in range(pieces)
        for entry in range(entries)
        if flags_RSM[row, piece_bit[piece], entry]
    ]
    prepare_bits(flags_RSM.device)
    got = places_in_bits(pack_bits(flags_RSM), piece_bit, heads, entries, len(expected))
    assert got.tolist() == expected
