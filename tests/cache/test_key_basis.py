"""Keys in a basis of their own: the same attention, less lost by rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.cache.entries import read_keys, read_values
from subtoken_train.cache.key_basis import BalancedBasis, KeyBasis, MirroredBasis, rotation
from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.functional.key_axes import key_spread, mirrors_of, principal_axes
from subtoken_train.kernels.formats import FORMATS, MODEL, Format
from tests.support.packing import SETS, dense, masked_attention

ROTATED = FORMATS["int4_rotated"]


def uneven(seed: int, batch: int, heads: int, length: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1.5, 1, width)[torch.randperm(width, generator=generator)]
    drawn = torch.randn(batch, heads, length, width, generator=generator)
    return sizes * (drawn + 4 * torch.randn(batch, heads, 1, width, generator=generator))


@pytest.mark.parametrize("width", [1, 7, 8, 64, 80, 96, 128])
def test_the_rotation_is_orthogonal_and_spreads(width):
    turn = rotation(width, torch.device("cpu"))
    assert torch.allclose(turn @ turn.T, torch.eye(width), atol=1e-6)
    assert float(turn.abs().max()) == pytest.approx((width & -width) ** -0.5)
    assert float((torch.ones(width) @ turn).abs().max()) <= 2**0.5 + 1e-6  # of a vector whose channels are alike


def mirrored_basis(key: torch.Tensor, marks: torch.Tensor) -> MirroredBasis:
    centre, covariance = key_spread(key, torch.arange(key.shape[2]).expand(len(key), -1), marks)
    return MirroredBasis(centre.half(), *mirrors_of(principal_axes(covariance), -(-key.shape[-1] // 2))[:2])


MADE = {"balanced": BalancedBasis.of, "mirrored": mirrored_basis}


@given(
    made=st.sampled_from(list(MADE)),
    seed=st.integers(0, 999),
    shape=st.sampled_from([(1, 1, 4, 8), (3, 2, 4, 16), (2, 3, 3, 12), (2, 2, 6, 7)]),
    length=st.sampled_from([0, 1, 9]),
    new=st.sampled_from([1, 3]),
)
def test_scores_are_the_same_but_for_one_number_of_all_keys(made, seed, shape, length, new):
    batch, kv_heads, group, width = shape
    generator, key = torch.Generator().manual_seed(seed), uneven(seed, batch, kv_heads, length, width)
    query = torch.randn(batch, kv_heads * group, new, width, generator=generator)
    later = 3 * torch.randn(batch, kv_heads, 5, width, generator=generator)
    basis = MADE[made](key, torch.rand(batch, 1, length, generator=generator) < 0.7)
    assert all(bool(torch.isfinite(part).all()) for part in basis.stored.values())
    assert not isinstance(basis, BalancedBasis) or bool((basis.size_Bh1d > 0).all())
    everything = torch.cat([key, later], 2)

    def scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return query.reshape(batch, kv_heads, -1, width) @ keys.mT

    plain, turned = scores(query, everything), scores(basis.queries(query), basis.keys(everything))
    apart = turned - plain
    assert float((apart - apart.mean(-1, keepdim=True)).abs().max()) < 1e-5 * (float(plain.abs().max()) + 1)
    assert torch.allclose(basis.own_keys(basis.keys(everything)), everything, atol=1e-4, rtol=1e-4)


def test_padding_does_not_count_and_samples_are_chosen():
    key = uneven(0, 3, 2, 9, 8)
    marks = torch.arange(9) >= torch.tensor([[0], [4], [2]])
    basis = BalancedBasis.of(key, marks[:, None])
    for sample in range(3):
        own = key[sample : sample + 1, :, marks[sample]]
        alone = BalancedBasis.of(own, torch.ones(1, 1, own.shape[2]).bool())
        chosen = basis.select(torch.tensor([sample]))
        assert torch.allclose(chosen.centre_Bh1d.float(), alone.centre_Bh1d.float(), rtol=1e-3, atol=1e-3)
        assert torch.allclose(chosen.size_Bh1d.float(), alone.size_Bh1d.float(), rtol=2e-3)
    assert basis.nbytes == 3 * 2 * 8 * 2 * 2  # two fp16 numbers of every sample, head and channel


def test_autocast_turns_no_key_less_precisely():
    key = uneven(2, 1, 2, 9, 16)
    basis = mirrored_basis(key, torch.ones(1, 1, 9, dtype=torch.bool))
    turned = basis.keys(key)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(basis.keys(key), turned)
        assert torch.allclose(basis.own_keys(turned), key, atol=1e-4, rtol=1e-4)


def layer_of(state, form: Format, key: torch.Tensor, made: str = "balanced") -> PackedLayer:
    basis: KeyBasis = MADE[made](key, torch.ones(len(key), 1, key.shape[2], dtype=torch.bool))
    layer, packing = PackedLayer(), Packing(state.packing.layout, form)
    blocks = pack_layer(basis.keys(key), state.read, layer_plan(state.keep, state.groups), packing)
    layer.store_prompt(blocks, key.shape[2], key, None, basis)
    return layer


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("path", ["reference", "cpu"])
@pytest.mark.parametrize("num_groups", [None, 4])
@pytest.mark.parametrize("sets", SETS)
def test_a_layer_attends_as_one_of_plain_keys(sets, num_groups, path, made, monkeypatch):
    """Unrounded: one token (in C where a compiler is), several, and after samples were chosen; grouped query heads."""
    monkeypatch.setenv("SUBTOKEN_KERNEL", path)
    state = dense(seed=5, num_groups=num_groups, sets=sets)
    state.key = uneven(5, *state.key.shape)
    layer = layer_of(state, MODEL, state.key, made).branch()
    draw = torch.Generator().manual_seed(6)
    tail_key, tail_value = (3 * torch.randn(3, 2, 4, 8, generator=draw) for _ in range(2))
    layer.update(tail_key, tail_value)
    for new in (1, 3):
        query = torch.randn(3, 4, new, 8, generator=draw)
        expected = masked_attention(state, query, tail_key, tail_value)
        assert (layer.attend(query, 8**-0.5) - expected).abs().max() < 1e-4
    order = torch.tensor([2, 0])
    layer.select(order)
    assert (layer.attend(query[order], 8**-0.5) - expected[order]).abs().max() < 1e-4


@pytest.mark.parametrize("num_groups", [None, 4])
def test_rounded_keys_are_those_that_are_read_back(num_groups):
    state = dense(seed=7, num_groups=num_groups, sets="all", width=16)
    state.key = uneven(7, *state.key.shape)
    layer = layer_of(state, ROTATED, state.key)
    rows = len(state.key)
    key, value = layer.own_keys(read_keys(layer.blocks, rows)), read_values(layer.blocks, rows)
    draw = torch.Generator().manual_seed(8)
    tail_key, tail_value = (torch.randn(3, 2, 2, 16, generator=draw) for _ in range(2))
    layer.update(tail_key, tail_value)
    query = torch.randn(3, 4, 1, 16, generator=draw)
    everything = torch.cat([key, tail_key], 2).repeat_interleave(2, 1), torch.cat([value, tail_value], 2)
    weights = (query @ everything[0].mT / 4).softmax(-1)
    assert (layer.attend(query, 0.25) - weights @ everything[1].repeat_interleave(2, 1)).abs().max() < 1e-3
    keys = [part.keys for block in layer.blocks for part in block.parts]
    assert sum(each.nbytes for each in keys) == key[..., 0].numel() * (16 // 2 + 2)
    stored = sum(payload.nbytes for block in layer.blocks for payload in block.payloads)
    assert layer.payload_bytes == stored + layer.basis.nbytes


def test_uneven_keys_lose_less_than_without_a_basis():
    key = uneven(9, 1, 2, 200, 64)
    basis = BalancedBasis.of(key, torch.ones(1, 1, 200, dtype=torch.bool))
    query = torch.randn(1, 2, 50, 64, generator=torch.Generator().manual_seed(1)) / uneven(9, 1, 2, 1, 64).abs().sqrt()

    def lost(own: torch.Tensor) -> float:
        apart = query @ (own - key).mT
        return float((apart - apart.mean(-1, keepdim=True)).square().mean().sqrt())

    plain, turned = FORMATS["int4"].store(key).read(), basis.own_keys(ROTATED.store_keys(basis.keys(key)).read())
    assert lost(turned) < lost(plain) / 3


@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (24, torch.bfloat16), (64, torch.float32)])
def test_feedback_loses_less_of_what_queries_see(width, dtype):
    key, draw = uneven(10, 2, 2, 50, width), torch.Generator().manual_seed(11)
    query = torch.randn(2, 4, 40, 4, generator=draw) @ torch.randn(2, 1, 4, width, generator=draw)
    basis = BalancedBasis.of(key, torch.ones(2, 1, 50, dtype=torch.bool))
    by_head = query.reshape(2, 2, -1, width)
    turned, feedback = basis.keys(key.to(dtype)), basis.feedback(by_head.mT @ by_head / by_head.shape[2])
    assert torch.allclose(feedback, feedback.tril())
    assert torch.allclose(feedback.diagonal(dim1=-2, dim2=-1), torch.ones(2, 2, width))
    assert torch.allclose(basis.feedback(torch.zeros(2, 2, width, width)), torch.eye(width))  # no queries
    plain, fed = ROTATED.store_keys(turned), ROTATED.store_keys(turned, feedback)
    assert fed.nbytes == plain.nbytes
    assert torch.equal(fed.scale, plain.scale)
    own = basis.queries(query).reshape(2, 2, -1, width)
    lost = [float((own @ (each.read().float() - turned.float()).mT).norm()) for each in (plain, fed)]
    assert lost[1] < 0.6 * lost[0]
    assert torch.equal(ROTATED.store_keys(turned, torch.eye(width).expand(2, 2, -1, -1)).data, plain.data)
