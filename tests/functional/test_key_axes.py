"""Cut keys: ThinK's channels and RotateK's axes beside their releases; rotations; axes of values."""

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.functional import key_axes
from subtoken_train.functional.masks import fixed_mask
from subtoken_train.ledger.kv_budget import kept_channels
from tests.support.golden_cases import load, near, record
from tests.support.prompt_views import llama_turn
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
    return key_axes.key_spread(key, torch.arange(rows).expand(batch, -1), torch.ones(batch, heads, rows).bool())


def turned(key: torch.Tensor, kept: int, length: torch.Tensor | None = None):
    """Centre, mirrors, what joins them, and channels that stay, of keys that are all cut."""
    centre, covariance = spread_of(key)
    return centre, *key_axes.mirrors_of(key_axes.principal_axes(covariance, length), kept)


def as_read(key, centre, mirrors, joint, channels):
    """Keys as attention reads them once they are cut, in the model's channels."""
    thin = key_axes.mirrored(key - centre, mirrors, joint) * channels[:, :, None]
    return key_axes.mirrored(thin, mirrors, joint.mT) + centre


@given(**DRAWN)
def test_mirrors_turn_to_the_axes_and_nothing_else(seed, shape, data):
    key, width, kept = drawn(seed, *shape), shape[-1], data.draw(st.integers(1, shape[-1] - 1))
    axes = key_axes.principal_axes(key.mT @ key)
    mirrors, joint, channels = key_axes.mirrors_of(axes, kept)
    assert mirrors.dtype == torch.float16
    assert mirrors.shape[-1] == joint.shape[-1] == min(kept, width - kept)
    assert bool((channels.sum(-1) == kept).all())
    turn = key_axes.mirrored(torch.eye(width).expand(*shape[:2], -1, -1), mirrors, joint)
    assert torch.allclose(turn @ turn.mT, torch.eye(width), atol=1e-5)
    assert torch.allclose(turn, torch.stack([reflected(own.float()) for own in mirrors]), atol=1e-5)
    assert torch.allclose(
        key_axes.mirrored(key_axes.mirrored(key, mirrors, joint), mirrors, joint.mT), key, atol=1e-4, rtol=1e-4
    )
    assert torch.allclose((turn * channels[:, :, None]) @ turn.mT, axes[..., :kept] @ axes[..., :kept].mT, atol=4e-3)


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_few_keys_lose_nothing_whatever_queries_ask(count):
    """No more than channels stay, of one head; the other's are cut as the queries say."""
    key, lengths = drawn(5, 1, 2, 30, 16), torch.rand(1, 2, 16, generator=torch.Generator().manual_seed(6))
    marks = torch.ones(1, 2, 30, dtype=torch.bool)
    marks[:, 0, count:] = False
    turn, channels = key_axes.turn_of(key, torch.arange(30)[None], marks, lengths, 10)
    read = as_read(key, turn.centre_Bh1d.float(), turn.mirrors_Bhdr, turn.joint_Bhrr, channels)
    assert bool((((read - key).norm(dim=-1) / key.norm(dim=-1))[0, 0, :count] < 2e-3).all())
    other = key[:, 1:]
    assert torch.allclose(read[:, 1:], as_read(other, *turned(other, 10, lengths[:, 1:])), atol=5e-3)


def test_only_marked_keys_count_in_blocks_and_alone(monkeypatch):
    monkeypatch.setattr("subtoken_train.functional.key_axes.BLOCK", 3)
    key, draw = drawn(2, 3, 2, 19, 8), torch.Generator().manual_seed(3)
    rows = torch.stack([torch.randperm(19, generator=draw)[:7].sort().values for _ in range(3)])
    marks = torch.rand(3, 2, 7, generator=draw) < 0.7
    centre, covariance = key_axes.key_spread(key, rows, marks)
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
    found = key_axes.query_lengths(query, asks, 2)
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
    lengths = key_axes.query_lengths(own["query"], asks, heads) if word == "weighted" else None
    query, golden = own["query"].view(1, heads, -1, key.shape[-1]), own[f"{word}.{kept}.logits"]
    size, (centre, covariance) = golden.abs().max(), spread_of(key)
    axes = key_axes.principal_axes(covariance, lengths)[..., :kept]
    logits = query @ (centre + (key - centre) @ axes @ axes.mT).mT
    case = f"eviction_originals: logits of {kept} of 8 channels, {word}"
    near("rotatek", case, logits / size, golden / size, rtol=0, atol=1e-5)
    assert torch.allclose(query @ as_read(key, *turned(key, kept, lengths)).mT / size, golden / size, rtol=0, atol=1e-3)


def plain_scores(query_BHNd, key_BhNd, asks_BN, kept_BhN):
    """Mean q^2 over the rows and heads of a group times mean k^2, a head at a time; 0 where either has none."""
    batch, kv_heads, _, width = key_BhNd.shape
    scores = torch.zeros(batch, kv_heads, width)
    for sample, head in product(range(batch), range(kv_heads)):
        asks, keys = (
            query_BHNd[sample].unflatten(0, (kv_heads, -1))[head][:, asks_BN[sample]].flatten(0, 1).float(),
            key_BhNd[sample, head, kept_BhN[sample, head]].float(),
        )
        scores[sample, head] = (asks.square().mean(0) * keys.square().mean(0)).nan_to_num(0.0)
    return scores


def layer_of(seed=0, batch=3, heads=4, kv_heads=2, length=19, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, width, generator=generator).to(dtype)
    key = torch.randn(batch, kv_heads, length, width, generator=generator).to(dtype)
    rows = torch.stack([torch.randperm(length, generator=generator)[:7].sort().values for _ in range(batch)])
    kept = torch.rand(batch, kv_heads, 7, generator=generator) < 0.6
    kept[0, 0] = False  # a head that keeps nothing
    asks = torch.zeros(batch, length, dtype=torch.bool)
    asks[0, -3:], asks[1, 2:9] = True, True  # padding on either side; the third sample asks nothing
    return query, key, rows, kept, asks


def test_scores_are_the_written_out_ones(monkeypatch):
    monkeypatch.setattr("subtoken_train.functional.key_axes.BLOCK", 3)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        query, key, rows, kept, asks = layer_of(dtype=dtype)
        own = torch.zeros(3, 2, 19, dtype=torch.bool)
        for sample in range(3):
            own[sample, :, rows[sample]] = kept[sample]
        scores = key_axes.query_energy(query, asks, 2) * key_axes.key_energy(key, rows, kept)
        assert scores.dtype == torch.float32
        assert (scores - plain_scores(query, key, asks, own)).abs().max() < bound


def chosen(params, tensors, rows, ratio):
    """Channels that stay of recorded keys, by as many last rows of queries as ``params`` says under ``rows``."""
    query, key = tensors["queries"], tensors["keys"]
    length, width = key.shape[2:]
    asks = torch.arange(length)[None].expand(len(key), -1) >= length - params[rows]
    all_rows, kept = torch.arange(length).expand(len(key), -1), torch.ones(*key.shape[:3], dtype=torch.bool)
    scores = key_axes.query_energy(query, asks, key.shape[1]) * key_axes.key_energy(key, all_rows, kept)
    return fixed_mask(scores, kept_channels(width, 1 - params[ratio]))


def test_golden_of_the_authors(shared):
    """Keys of the release are repeated for its query heads; its last ``recent_size`` keys stay whole."""
    params, tensors = load(shared, "think_official")
    key, stays = tensors["keys"], chosen(params, tensors, "query_rows", "ratio")
    old = key[:, :, : key.shape[2] - params["recent_size"]]
    ours = old.transpose(2, 3)[stays].view(*key.shape[:2], -1, old.shape[2]).transpose(2, 3)
    near("think", "think_official: cut keys", ours, tensors["keys_pruned"], rtol=0, atol=0)
    near("think", "think_official: whole keys", key[:, :, -params["recent_size"] :], tensors["keys_recent"])


def test_golden_of_kvpress(shared):
    """Which zeroes the channels of all keys, and chooses by the same scores."""
    params, tensors = load(shared, "kvpress_think")
    key, stays = tensors["keys"], chosen(params, tensors, "window_size", "key_channel_compression_ratio")
    record("think", "kvpress_think: channels that differ", int((stays == tensors["zeroed"]).sum()))
    assert torch.equal(stays, ~tensors["zeroed"])
    assert torch.equal(key * stays[:, :, None], tensors["keys_out"])


def rotation(stretch=1.0):
    angle = torch.rand(2, 5, 4).repeat(1, 1, 2) * 6
    return llama_turn(angle.cos() * stretch, angle.sin() * stretch)


@pytest.mark.parametrize("stretch", [1.0, 1.3])
def test_turns_as_transformers_and_back(stretch):
    turning, vectors = rotation(stretch), torch.randn(2, 3, 5, 8)
    expected, _ = apply_rotary_pos_emb(vectors, vectors, turning.cos_BNr, turning.sin_BNr)
    assert torch.equal(turning.turn(vectors), expected)
    assert torch.allclose(turning.turn_back(expected), vectors, atol=1e-6)


def test_the_mean_turns_as_the_mean_of_all():
    turning, vectors = rotation(), torch.randn(2, 3, 1, 8)
    each = torch.stack([llama_turn(turning.cos_BNr[:, [i]], turning.sin_BNr[:, [i]]).turn(vectors) for i in range(5)])
    assert torch.allclose(turning.mean().turn(vectors), each.mean(0), atol=1e-6)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(width=6, kv_heads=2, queries=3, entries=200, model=10):
    """Values of unlike channels, and an output projection."""
    mix = normal(kv_heads, width, width, seed=1) * torch.logspace(0, -2, width, dtype=torch.float64)
    return normal(kv_heads, entries, width) @ mix.transpose(-1, -2), normal(model, kv_heads * queries * width, seed=2)


def moments(values_hnd):
    return values_hnd.transpose(-1, -2) @ values_hnd / values_hnd.shape[1]


@pytest.mark.parametrize("queries", [1, 3])
def test_the_output_stays_and_a_group_s_length_is_what_it_adds(queries):
    values, weight = case(queries=queries)
    metric = key_axes.output_metric(weight, 2, 6)
    into, back = key_axes.value_axes(moments(values), metric)
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
        outputs = sum((some @ part.T).pow(2).sum(-1) for part in [part @ back[head] for part in own]) / queries
        lengths = some.pow(2).sum(-1)
        assert torch.allclose(outputs / lengths, (outputs / lengths)[:1])


@pytest.mark.parametrize("what", ["values", "weight"])
def test_heads_without_any_values_or_outputs_are_left_whole(what):
    values, weight = case()
    if what == "values":
        values[1] = 0
    else:
        weight[:, 18:] = 0
    into, back = key_axes.value_axes(moments(values), key_axes.output_metric(weight, 2, 6))
    assert into.isfinite().all()
    assert torch.allclose(into @ back, torch.eye(6, dtype=torch.float64).expand(2, 6, 6), atol=1e-9)
