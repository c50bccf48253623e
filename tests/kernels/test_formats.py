"""Formats: the model's dtype as it is, integers within half a step; KIVI's by channel, TurboQuant's by level."""

import math
from itertools import cycle, pairwise

import pytest
import torch
from hypothesis import assume, currently_in_test_context, given, settings
from hypothesis import strategies as st

from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.kernels import formats
from subtoken_train.kernels.formats import FORMATS, LEVELS, MODEL, Format, TurboQuant, packed_codes, unpacked_codes
from subtoken_train.kernels.storage import pack_bits, places_in_bits, prepare_bits
from subtoken_train.types import CutKeys
from tests.support.helpers import random_mask
from tests.support.packing import DRAWN, FORMAT_OF, SETS, Dense, dense, masked_attention, states
from tests.support.plain_parts import E2M1, E4M3, Rounding
from tests.support.refusals import refuses

HOW = {formats.Symmetric: "by_vector", formats.Fp8: "by_float", formats.NVFP4: "by_float"}
"""The plain reference of a class of formats: a method of ``Rounding``; those of ``OTHERS`` are compared below."""
OTHERS = (Format, formats.Rotated, formats.Kivi, TurboQuant)
NEAREST = {name: HOW[type(form)] for name, form in FORMATS.items() if type(form) in HOW}
KIVI, TURBO = ([name for name, form in FORMATS.items() if type(form) is kind] for kind in OTHERS[2:])


@pytest.mark.parametrize(("name", "how"), NEAREST.items())
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-2, 1.0, 6e4])
def test_vectors_read_as_a_plain_reference(name, how, size):
    """Small blocks beside large ones; a block of zeros, and one that its scale's byte rounds to 0."""
    form, own = FORMATS[name], Rounding()
    vectors = torch.randn(40, 64, generator=torch.Generator().manual_seed(form.bits)) * size
    vectors[:, 16:32] /= 1000
    vectors[0, :16], vectors[1, :16] = 0, vectors[1, :16] * 1e-8
    payload = form.store(vectors)
    expected = torch.stack([getattr(own, how)(vector, form.bits) for vector in vectors])
    assert own.edge > 0
    torch.testing.assert_close(payload.read(), expected, rtol=1e-6, atol=0)
    assert torch.equal(form.store(vectors.bfloat16()).read(), form.store(vectors.bfloat16().float()).read().bfloat16())
    assert payload.nbytes == 40 * (64 * form.bits // 8 + 2 + (4 if name == "nvfp4" else 0))
    assert form.store(vectors[:0]).read().shape == (0, 64)


@pytest.mark.parametrize(("name", "levels"), {"fp8": E4M3, "nvfp4": E2M1}.items())
def test_floats_are_the_nearest_levels_and_of_two_the_even_one(name, levels):
    """All levels, all middles between two, what lies beside them, and what is too much; in vectors of scale 1."""
    form, own = FORMATS[name], torch.tensor(levels)
    middles = (own[1:] + own[:-1]) / 2
    about = torch.cat([own, middles, middles * (1 - 1e-6), middles * (1 + 1e-6), own[-1:] * 1.02])
    numbers = torch.cat([about, -about])
    ends = torch.cat([numbers[:, None], own[-1].expand(len(numbers), 15)], 1)
    assert torch.equal(form.decoded(form.coded(ends))[:, 0], Rounding().nearest(numbers, levels))


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
    index = torch.tensor([3, 0, 3])
    assert torch.equal(payload.each(lambda x: x[index]).read(), whole[index])


REFUSED = {
    "int4": (3, "int4 stores 2 channels in 1 B"),
    "nvfp4": (8, "nvfp4 stores 16 channels in 9 B"),
    "kivi2": (2, "kivi2 stores 4 channels in 1 B"),
    "turboquant3": (12, "turboquant3 stores 8 channels in 3 B"),
}


@pytest.mark.parametrize(("name", "width", "words"), [(name, *own) for name, own in REFUSED.items()])
def test_pieces_fill_bytes(name, width, words):
    match = f"{words}, but the value groups cut heads into pieces of {width} channels"
    refuses(match, FORMATS[name].store, torch.randn(2, width))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_format_says_what_it_stores(form):
    vectors = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(1))
    payload = form.store(vectors)
    compared = f"{form.name} is compared with no plain reference: name its class in HOW, or in OTHERS and compare it"
    assert type(form) in (*HOW, *OTHERS), compared
    assert payload.format is form
    assert payload.data.dtype == form.code_dtype(torch.float32)
    assert payload.data.shape[-1] == form.code_width(16)
    assert form.width(payload.data.shape[-1]) == 16
    assert payload.nbytes == form.bytes_of(2 * 3 * 5, 16, torch.float32, "values")
    keys = form.store_keys(vectors.repeat(1, 1, 13, 1)[:, :, :64])
    assert keys.nbytes == form.bytes_of(6 * 64, 16, torch.float32, "keys")
    assert (payload.scale is not None) == form.rounds
    if form.rounds:
        assert payload.scale.shape == form.scale_shape((2, 3, 5), 16, "values")


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
    assert places_in_bits(pack_bits(flags_RSM), piece_bit, heads, entries, len(expected)).tolist() == expected


def plain_rows(key_Md: torch.Tensor, value_Md: torch.Tensor, form: Format, stored_Md: torch.Tensor | None, edges: list):
    """Full runs of 32 entries before the last 32, the others as they are; all of TurboQuant's, entry by entry.

    Keys channel by channel; values in blocks of 32 channels, of all, or of what is stored of a routed entry.
    """
    keys, values, full, bits = key_Md.clone(), value_Md.clone(), max(0, len(key_Md) - 32) // 32 * 32, form.bits
    (width,), block = key_Md.shape[1:], math.gcd(32, key_Md.shape[1])
    if isinstance(form, TurboQuant):
        full, block, rounding = len(key_Md), width, Rounding()
        for entry, key in enumerate(key_Md):
            keys[entry] = rounding.by_level(key.float(), bits).to(key)
        edges.append(rounding.edge)
    for start in range(0, full, 32) if form.run > 1 else ():
        own = slice(start, start + 32)
        for channel in range(width):
            keys[own, channel] = Rounding().by_block(key_Md[own, channel].float(), bits).to(keys)
    for entry in range(full):
        parts = [slice(i, i + block) for i in range(0, width, block)] if stored_Md is None else [stored_Md[entry]]
        for own in (own for own in parts if value_Md[entry, own].numel()):
            values[entry, own] = Rounding().by_block(value_Md[entry, own].float(), bits).to(values)
    return keys, values


def plainly_rounded(state: Dense, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Round keys and values, routed and whole entries in runs of their own; draw anew what rounding decides."""
    edges: list[float] = []
    key, value, keep = state.key.clone(), state.read.clone(), state.keep.expand(-1, state.key.shape[1], -1)
    whole = torch.ones(keep.shape[::2], dtype=torch.bool) if state.groups is None else state.groups.all(-1)
    for sample, head in torch.cartesian_prod(torch.arange(len(key)), torch.arange(key.shape[1])).tolist():
        for routed in (False, True):
            own = keep[sample, head] & (whole[sample] != routed)
            stored = state.channels[sample, head, own] if routed else None
            found = plain_rows(key[sample, head, own], value[sample, head, own], form, stored, edges)
            key[sample, head, own], value[sample, head, own] = found
    if edges and currently_in_test_context():
        assume(min(edges) > 1e-6)
    return key, value


def compare(state: Dense, name: str, new: int, chunk: int, bound: float) -> None:
    layer, (batch, heads, _, width), dtype = state.layer(), state.key.shape, state.key.dtype
    tail = [states(i, batch, heads, new + 2, width, dtype) for i in (1, 2)]
    query = states(3, batch, 2 * heads, new, width, dtype)
    layer.update(*tail)
    expected = masked_attention(state, query, *tail, *plainly_rounded(state, FORMATS[name]))
    for path in ("cpu", "reference"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SUBTOKEN_KERNEL", path)
            patch.setattr(formats, "CHUNK", chunk)
            got = layer.attend(query, width**-0.5)
        assert got.dtype == dtype
        assert (got.float() - expected).abs().max() < bound
    tensors = [x for block in layer.blocks for own in block.payloads for x in (own.data, own.scale) if x is not None]
    assert layer.payload_bytes == sum(x.nbytes for x in tensors)
    order = torch.tensor([2, 0])
    layer.select(order)
    assert (layer.attend(query[order], width**-0.5).float() - expected[order]).abs().max() < bound


@given(
    **DRAWN,
    name=st.sampled_from(KIVI),
    length=st.sampled_from([1, 31, 63, 64, 65, 100, 131]),
    groups=st.sampled_from([None, 2, 4]),
    width=st.sampled_from([16, 64]),
    new=st.sampled_from([1, 3]),
    chunk=st.sampled_from([formats.CHUNK, 1]),
)
def test_attention_is_that_of_a_plain_reference(seed, name, length, sets, groups, layout, share, width, new, chunk):
    """Three samples, heads that keep other entries, two query heads for each; stretches of one run."""
    state = dense(seed, 3, 2, length, width, groups, share, sets, layout)
    state.key[0, 0, :, 1] = 2.5  # a channel without a range
    state.packing = Packing(layout, FORMATS[name])
    compare(state, name, new, chunk, 2e-5)


@settings(deadline=None, max_examples=40)
@given(
    seed=DRAWN["seed"],
    name=st.sampled_from(TURBO),
    sets=st.sampled_from(SETS),
    groups=st.sampled_from([None, 2]),
    width=st.sampled_from([16, 24]),
    new=st.sampled_from([1, 3]),
)
def test_turboquant_is_a_plain_reference(seed, name, sets, groups, width, new):
    """A key of zeros, too; 24 channels are turned in blocks of 8."""
    state = dense(seed, 3, 2, 13, width, groups, 0.5, sets)
    state.key[0, 0, 3] = 0
    state.packing = Packing("contiguous", FORMATS[name])
    compare(state, name, new, formats.CHUNK, 2e-5)


@pytest.mark.parametrize("bits", [4, 3])
def test_levels_are_lloyd_s_and_max_s(bits):
    """Every level is the mean of a normal number between the middles to its neighbours, by error functions."""
    levels = [*(-x for x in reversed(LEVELS[bits])), *LEVELS[bits]]
    edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]

    def density(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    for level, (low, high) in zip(levels, pairwise(edges), strict=True):
        share = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        assert level == pytest.approx((density(low) - density(high)) / share, abs=2e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_codes_are_packed_from_the_lowest_bit_up(bits):
    codes = torch.randint(0, 2**bits, (3, 5, 24), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    packed = packed_codes(codes, bits)
    assert packed.shape == (3, 5, 24 * bits // 8)
    assert torch.equal(unpacked_codes(packed, bits).to(torch.uint8), codes)
    whole = sum(int(code) << bits * place for place, code in enumerate(codes[1, 2]))
    assert bytes(packed[1, 2].tolist()) == whole.to_bytes(3 * bits, "little")


@pytest.mark.parametrize(("layers", "whole"), [(1, []), (3, [0, 2]), (4, [0, 1, 2, 3]), (6, [0, 1, 4, 5])])
def test_turboquant_leaves_the_first_and_the_last_layers(layers, whole):
    form = FORMATS["turboquant3"]
    assert [layer for layer in range(layers) if form.in_layer(layer, layers) is MODEL] == whole
    assert FORMATS["int4"].in_layer(0, layers) is FORMATS["int4"]


@pytest.mark.parametrize(("name", "groups"), [(name, 4 if i else None) for i, name in enumerate(KIVI)])
def test_bf16(name, groups):
    state = dense(3, 3, 2, 100, 32, groups, sets="shared", dtype=torch.bfloat16)
    state.packing = Packing("contiguous", FORMATS[name])
    compare(state, name, 2, formats.CHUNK, 0.03)


@pytest.mark.parametrize(("name", "sets"), zip(KIVI, cycle(SETS), strict=False))
def test_cut_keys_are_rounded_in_the_channels_that_stay(name, sets):
    state, layer = dense(5, 2, 2, 100, 16, None, sets=sets), PackedLayer()
    plan, chosen = layer_plan(state.keep, None), torch.arange(16).expand(2, 2, -1) % 4 != 1
    plan.cut_keys = CutKeys(plan.entries_BN >= 0, 12, chosen)
    layer.store_prompt(pack_layer(state.key, state.value, plan, Packing(form=FORMATS[name])), 100, state.key)
    state.key = state.key * chosen[:, :, None]
    tail, query = [states(i, 2, 2, 3, 16) for i in (1, 2)], states(3, 2, 4, 1, 16)
    layer.update(*tail)
    expected = masked_attention(state, query, *tail, *plainly_rounded(state, FORMATS[name]))
    assert (layer.attend(query, 0.25) - expected).abs().max() < 2e-5


@pytest.mark.parametrize("name", KIVI)
def test_what_has_no_range_and_what_fp16_does_not_hold(name):
    form, keys = FORMATS[name], torch.full((1, 1, 32, 8), 3.25)
    keys[..., 1], keys[..., 2], keys[..., 3] = 0, -1e6, torch.linspace(-1e6, 1e6, 32)
    read = form.store_keys(keys).read()
    assert torch.isfinite(read).all()
    assert torch.equal(read[..., :2], keys[..., :2])
    assert form.store_pieces(torch.randn(2, 4), torch.tensor([0, 2]), (1, 1, 3), 1).scale[0, 0, 1, 0, 1] == 0


@pytest.mark.parametrize("count", [0, 1, 63, 64, 95, 96, 100, 160])
def test_the_last_entries_stay_as_they_are(count):
    whole = count - int(FORMATS["kivi4"].rounded(torch.tensor(count)))
    assert whole == count if count < 64 else 32 <= whole < 64
    assert int(MODEL.rounded(torch.tensor(count))) == count
