"""Principal axes of keys: RotateK's logits, never a worse cut than the model's own channels, orthogonal as stored."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from subtoken_train.functional.key_axes import key_spread, mirrored, mirrors_of, principal_axes, query_lengths, turn_of
from tests.support.golden_cases import near
from tests.support.reference import reflected

ORIGINALS = Path(__file__).resolve().parents[2] / "benchmarks/results/eviction_originals.safetensors"
SHAPES = [(1, 1, 1, 4), (2, 3, 40, 8), (3, 2, 5, 16), (1, 2, 300, 64), (2, 1, 9, 7)]
DRAWN = {"seed": st.integers(0, 999), "shape": st.sampled_from(SHAPES), "data": st.data()}


def drawn(seed: int, batch: int, heads: int, length: int, width: int) -> torch.Tensor:
    """Keys of mixed channels and of means far from 0."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(batch, heads, width, width, generator=generator)
    key = torch.randn(batch, heads, length, width, generator=generator)
    return key @ mixed + 3 * torch.randn(batch, heads, 1, width, generator=generator)


def spread_of(key: torch.Tensor):
    batch, heads, rows, _ = key.shape
    return key_spread(key, torch.arange(rows).expand(batch, -1), torch.ones(batch, heads, rows, dtype=torch.bool))


def turned(key: torch.Tensor, kept: int, length: torch.Tensor | None = None):
    """Centre, mirrors, what joins them, and channels that stay, of keys that are all cut."""
    centre, covariance = spread_of(key)
    return centre, *mirrors_of(principal_axes(covariance, length), kept)


def as_read(key, centre, mirrors, joint, channels):
    """Keys as attention reads them once they are cut, in the model's channels."""
    thin = mirrored(key - centre, mirrors, joint) * channels[:, :, None]
    return mirrored(thin, mirrors, joint.mT) + centre


@given(**DRAWN)
def test_no_channels_of_the_model_lose_less(seed, shape, data):
    """In the mean square of q . k, over queries of all directions alike; fewer keys than channels lose nothing."""
    key, kept = drawn(seed, *shape), data.draw(st.integers(1, shape[-1] - 1))
    centre, *basis = turned(key, kept)
    lost = (as_read(key, centre, *basis) - key).square().sum(-1).mean(-1)
    cuts = [own.square().mean(2).sort(-1).values[..., : shape[-1] - kept].sum(-1) for own in (key, key - centre)]
    slack = 1e-5 * (key - centre).square().sum(-1).mean(-1)  # mirrors are stored in fp16
    assert bool((lost <= torch.minimum(*cuts) + slack).all())
    assert shape[2] - 1 > kept or bool((lost <= slack + 1e-9).all())


@given(**DRAWN)
def test_mirrors_turn_to_the_axes_and_nothing_else(seed, shape, data):
    key, width, kept = drawn(seed, *shape), shape[-1], data.draw(st.integers(1, shape[-1] - 1))
    axes = principal_axes(key.mT @ key)
    mirrors, joint, channels = mirrors_of(axes, kept)
    assert mirrors.dtype == torch.float16
    assert mirrors.shape[-1] == joint.shape[-1] == min(kept, width - kept)
    assert bool((channels.sum(-1) == kept).all())
    turn = mirrored(torch.eye(width).expand(*shape[:2], -1, -1), mirrors, joint)
    assert torch.allclose(turn @ turn.mT, torch.eye(width), atol=1e-5)
    assert torch.allclose(turn, torch.stack([reflected(own.float()) for own in mirrors]), atol=1e-5)
    assert torch.allclose(mirrored(mirrored(key, mirrors, joint), mirrors, joint.mT), key, atol=1e-4, rtol=1e-4)
    stays = (turn * channels[:, :, None]) @ turn.mT
    assert torch.allclose(stays, axes[..., :kept] @ axes[..., :kept].mT, atol=4e-3)


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_few_keys_lose_nothing_whatever_queries_ask(count):
    """No more than channels stay, of one head; the other's are cut as the queries say."""
    key, lengths = drawn(5, 1, 2, 30, 16), torch.rand(1, 2, 16, generator=torch.Generator().manual_seed(6))
    marks = torch.ones(1, 2, 30, dtype=torch.bool)
    marks[:, 0, count:] = False
    turn, channels = turn_of(key, torch.arange(30)[None], marks, lengths, 10)
    read = as_read(key, turn.centre_Bh1d.float(), turn.mirrors_Bhdr, turn.joint_Bhrr, channels)
    lost = (read - key).norm(dim=-1) / key.norm(dim=-1)
    assert bool((lost[0, 0, :count] < 2e-3).all())
    other = key[:, 1:]
    assert torch.allclose(read[:, 1:], as_read(other, *turned(other, 10, lengths[:, 1:])), atol=5e-3)


def test_keys_that_are_all_alike_and_heads_without_any():
    key, marks = torch.full((2, 2, 6, 8), 3.0), torch.ones(2, 2, 6, dtype=torch.bool)
    key[0, 0], marks[0, 1] = drawn(1, 1, 1, 6, 8), False
    centre, covariance = key_spread(key, torch.arange(6).expand(2, -1), marks)
    assert not covariance[0, 1].any()
    assert not centre[0, 1].any()
    basis = mirrors_of(principal_axes(covariance, torch.zeros(2, 2, 8)), 5)
    assert all(bool(torch.isfinite(part.float()).all()) for part in basis)
    assert torch.allclose(as_read(key, centre, *basis)[1], key[1], atol=1e-6)


def test_only_marked_keys_count_in_blocks_and_alone(monkeypatch):
    monkeypatch.setattr("subtoken_train.functional.key_channels.BLOCK", 3)
    key, draw = drawn(2, 3, 2, 19, 8), torch.Generator().manual_seed(3)
    rows = torch.stack([torch.randperm(19, generator=draw)[:7].sort().values for _ in range(3)])
    marks = torch.rand(3, 2, 7, generator=draw) < 0.7
    centre, covariance = key_spread(key, rows, marks)
    for sample, head in torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist():
        own = key[sample, head, rows[sample, marks[sample, head]]]
        assert torch.allclose(centre[sample, head, 0], own.mean(0), atol=1e-5)
        assert torch.allclose(covariance[sample, head], own.T.cov(correction=0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_are_of_the_groups_mean_query(dtype):
    query = torch.randn(2, 4, 9, 6, generator=torch.Generator().manual_seed(4)).to(dtype)
    query[..., 2] = 0
    asks = torch.zeros(2, 9, dtype=torch.bool)
    asks[0, -3:], asks[1, 1:3] = True, True
    found = query_lengths(query, asks, 2)
    for sample, head in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        expected = query[sample, 2 * head : 2 * head + 2][:, asks[sample]].float().mean(0).norm(dim=0)
        assert torch.allclose(found[sample, head], expected.clamp(min=1e-3 * expected.median()), atol=1e-5)


@pytest.mark.parametrize("kept", [2, 6])
@pytest.mark.parametrize("word", ["weighted", "plain"])
def test_logits_are_the_release_s(word, kept):
    """Its shift of the cut keys' logits is the mean that stays here; in units of the largest, and as stored in fp16."""
    own = {key[8:]: each for key, each in load_file(ORIGINALS).items() if key.startswith("rotatek.")}
    (start, stop), (heads, rows) = own["image"].tolist(), own["key"].shape[1:3]
    key, asks = own["key"][:, :, start:stop], torch.arange(rows)[None] >= rows - int(own["window"])
    lengths = query_lengths(own["query"], asks, heads) if word == "weighted" else None
    query, golden = own["query"].view(1, heads, -1, key.shape[-1]), own[f"{word}.{kept}.logits"]
    size, (centre, covariance) = golden.abs().max(), spread_of(key)
    axes = principal_axes(covariance, lengths)[..., :kept]
    logits = query @ (centre + (key - centre) @ axes @ axes.mT).mT
    case = f"eviction_originals: logits of {kept} of 8 channels, {word}"
    near("rotatek", case, logits / size, golden / size, rtol=0, atol=1e-5)
    stored = query @ as_read(key, *turned(key, kept, lengths)).mT
    assert torch.allclose(stored / size, golden / size, rtol=0, atol=1e-3)
