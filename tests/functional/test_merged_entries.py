"""Merging by key similarity and by position, against loops and the releases' recorded outputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional import merging
from subtoken_train.functional.merging import merged, nearest_key
from tests.support.golden_cases import close, load
from tests.support.plain_choices import merged_by_loop

KINDS = ("average", "weighted", "pivot", "position")


class Named:
    name = "merge"


def drawn(seed, batch=3, heads=2, length=17, width=6, share=0.4, shared=False, dtype=torch.float32):
    """Keys, values, entries that stay [B, h or 1, N], and entries: padding on either side, heads of unlike sizes."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(batch, heads, length, width, generator=generator).to(dtype) for _ in range(2))
    entries = torch.rand(batch, length, generator=generator) < 0.8
    entries[0, :3], entries[-1, -4:] = False, False
    keep = torch.rand(batch, 1 if shared else heads, length, generator=generator) < share
    return key, value, keep & entries[:, None], entries


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    shared=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_a_plain_loop(seed, kind, share, shared, dtype):
    key, value, keep, entries = drawn(seed, share=share, shared=shared, dtype=dtype)
    got = merged(kind, key, value, keep, entries)
    for sample in range(len(key)):
        kept = keep[sample].expand(key.shape[1], -1)
        expected = merged_by_loop(kind, key[sample], value[sample], kept, entries[sample])
        for ours, plain in zip(got, expected, strict=True):
            assert ours.dtype == dtype
            for head in range(key.shape[1]):  # what is dropped is never read
                rows = kept[head]
                error = (ours[sample, head, rows].float() - plain[head, rows].float()).abs()
                assert not error.numel() or error.max() < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing(kind):
    given = drawn(3)
    expected = merged(kind, *given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = merged(kind, *given)
    assert all(torch.equal(ours, plain) for ours, plain in zip(got, expected, strict=True))


def test_nothing_changes_without_merging_or_drops():
    key, value, _, entries = drawn(2)
    keep = entries[:, None].expand(-1, 2, -1)
    assert merged("none", key, value, keep & False, entries) == (key, value)
    for kind in KINDS:
        for ours, before in zip(merged(kind, key, value, keep, entries), (key, value), strict=True):
            assert torch.equal(ours, before)


def test_ties_go_to_the_earlier_row_and_blocks_change_nothing(monkeypatch):
    key, _, keep, entries = drawn(3, length=40)
    key[:, :, 20:] = key[:, :, :20]  # every key twice
    keep[:, :, 20:] = keep[:, :, :20]
    dropped = entries[:, None] & ~keep
    whole = nearest_key(key, keep, dropped)
    assert bool((whole[0][dropped] < 20).all())
    for pairs in (1, 100, 1000):
        monkeypatch.setattr(merging, "PAIRS", pairs)
        for one, other in zip(nearest_key(key, keep, dropped), whole, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["weighted", "pivot"])
def test_golden_of_the_factory(shared, kind):
    """Its kept entries are the chosen ones, in their order, and the last ``window_size``."""
    params, tensors = load(shared, f"merge_{kind}")
    key, value, chosen = tensors["keys"], tensors["values"], tensors["selected_positions"]
    length = key.shape[2]
    recent = torch.arange(length - params["window_size"], length).expand(*chosen.shape[:2], -1)
    places = torch.cat([chosen, recent], 2)
    keep = torch.zeros(key.shape[:3], dtype=torch.bool).scatter(2, places, True)
    got = merged(kind, key, value, keep, torch.ones(len(key), length, dtype=torch.bool))
    for name, ours in zip(("keys_out", "values_out"), got, strict=True):
        taken = ours.gather(2, places[..., None].expand(-1, -1, -1, key.shape[-1]))
        close(Named, f"merge_{kind}: {name}", taken, tensors[name], rtol=1e-5, atol=1e-5)
