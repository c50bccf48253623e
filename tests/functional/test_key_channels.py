"""Key channels that stay (ThinK and its two releases), and rotations: those of transformers, undone, their mean."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.functional.key_channels import best_channels, key_energy, query_energy
from subtoken_train.functional.rotary import Rotation
from subtoken_train.ledger.kv_budget import kept_channels
from tests.support.golden_cases import load, near, record


def plain_scores(query_BHNd, key_BhNd, asks_BN, kept_BhN):
    """Mean q^2 over the rows and heads of a group times mean k^2, written out."""
    batch, heads, _, width = query_BHNd.shape
    kv_heads = key_BhNd.shape[1]
    scores = torch.zeros(batch, kv_heads, width)
    for sample in range(batch):
        for head in range(kv_heads):
            group = range(head * heads // kv_heads, (head + 1) * heads // kv_heads)
            asks = [query_BHNd[sample, h, n] for h in group for n in asks_BN[sample].nonzero()[:, 0]]
            keys = key_BhNd[sample, head, kept_BhN[sample, head]]
            if asks and len(keys):
                asked = torch.stack([q.float() ** 2 for q in asks]).mean(0)
                scores[sample, head] = asked * (keys.float() ** 2).mean(0)
    return scores


def drawn(seed=0, batch=3, heads=4, kv_heads=2, length=19, width=8, dtype=torch.float32):
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
    monkeypatch.setattr("subtoken_train.functional.key_channels.BLOCK", 3)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        query, key, rows, kept, asks = drawn(dtype=dtype)
        own = torch.zeros(3, 2, 19, dtype=torch.bool)
        for sample in range(3):
            own[sample, :, rows[sample]] = kept[sample]
        scores = query_energy(query, asks, 2) * key_energy(key, rows, kept)
        assert scores.dtype == torch.float32
        assert (scores - plain_scores(query, key, asks, own)).abs().max() < bound


def test_ties_go_to_the_lower_channel():
    scores = torch.tensor([[[1.0, 2.0, 2.0, 2.0, 0.0]]])
    assert best_channels(scores, 2)[0, 0].tolist() == [False, True, True, False, False]
    assert best_channels(torch.zeros(1, 1, 4), 3)[0, 0].tolist() == [True, True, True, False]


def chosen(params, tensors, rows, ratio):
    """Channels that stay of recorded keys, by as many last rows of queries as ``params`` says under ``rows``."""
    query, key = tensors["queries"], tensors["keys"]
    length, width = key.shape[2:]
    asks = torch.arange(length)[None].expand(len(key), -1) >= length - params[rows]
    all_rows, kept = torch.arange(length).expand(len(key), -1), torch.ones(*key.shape[:3], dtype=torch.bool)
    scores = query_energy(query, asks, key.shape[1]) * key_energy(key, all_rows, kept)
    return best_channels(scores, kept_channels(width, 1 - params[ratio]))


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
    return Rotation(angle.cos() * stretch, angle.sin() * stretch)


@pytest.mark.parametrize("stretch", [1.0, 1.3])
def test_turns_as_transformers_and_back(stretch):
    turning, vectors = rotation(stretch), torch.randn(2, 3, 5, 8)
    expected, _ = apply_rotary_pos_emb(vectors, vectors, turning.cos_BNr, turning.sin_BNr)
    assert torch.equal(turning.turn(vectors), expected)
    assert torch.allclose(turning.turn_back(expected), vectors, atol=1e-6)


def test_the_mean_turns_as_the_mean_of_all():
    turning, vectors = rotation(), torch.randn(2, 3, 1, 8)
    each = torch.stack([Rotation(turning.cos_BNr[:, [i]], turning.sin_BNr[:, [i]]).turn(vectors) for i in range(5)])
    assert torch.allclose(turning.mean().turn(vectors), each.mean(0), atol=1e-6)


def test_lower_precision_is_turned_in_fp32():
    turning, vectors = rotation(), torch.randn(2, 3, 5, 8).bfloat16()
    assert torch.equal(turning.turn(vectors), turning.turn(vectors.float()))
