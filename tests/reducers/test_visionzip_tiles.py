"""VisionZip on pictures in tiles: exact budgets, each tile by itself, the release's order, newlines last."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.families.tiles import TileLayout
from subtoken_train.ledger.kv_budget import kept_count
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.visionzip import contextual_tokens, tile_shares, zipped, zipped_tiles
from subtoken_train.types import Region, VisualStates
from tests.support.helpers import check_alone, compress, unread
from tests.support.sampling import sampled
from tests.support.tiny.llava import TOKENS, next_batch, next_family, next_records

LAYOUT = TileLayout(((24, 48), (48, 24), (48, 48), (72, 24), (24, 72)), 24, 3)


def states_of(size: tuple[int, int], seed: int = 0) -> VisualStates:
    """A random picture; its last channel marks newlines."""
    generator = torch.Generator().manual_seed(seed)
    tiles = LAYOUT.tiles(size)

    def packed(values_IPC, end):
        return LAYOUT.pack(values_IPC, size, torch.tensor(end))

    tokens = packed(torch.randn(tiles, 9, 5, generator=generator) * torch.tensor([1.0, 1, 1, 1, 0]), [0.0, 0, 0, 0, 1])
    received = packed(torch.rand(tiles, 9, 1, generator=generator), [0.0])[:, 0]
    keys = packed(torch.randn(tiles, 9, 4, generator=generator), [0.0] * 4)
    numbers = packed(torch.arange(tiles).float()[:, None, None].expand(-1, 9, 1), [-1.0])[:, 0].long()
    cls = torch.randn(tiles, 5, generator=generator) * torch.tensor([1.0, 1, 1, 1, 0])
    return VisualStates([tokens], [cls], [received], [keys], tiles=[numbers])


@given(patches=st.lists(st.integers(0, 600), min_size=1, max_size=6).filter(any), share=st.floats(0, 1))
def test_shares_are_exact_and_fit_their_tiles(patches, share):
    kept = round(share * sum(patches))
    shares = tile_shares(patches, kept)
    assert sum(shares) == kept
    assert all(0 <= own <= count for own, count in zip(shares, patches, strict=True))
    exact = [kept * count / sum(patches) for count in patches]
    assert all(abs(own - fair) < 1 for own, fair in zip(shares, exact, strict=True))


@sampled("round_up", [False, True], every=2)
@given(high=st.integers(1, 90), wide=st.integers(1, 90), ratio=st.floats(0.01, 0.999))
def test_the_budget_counts_every_placeholder(round_up, high, wide, ratio):
    states = states_of((high, wide))
    reducer = build_reducer(name="visionzip", keep_ratio=ratio, round_up=round_up)
    merged = reducer.merge(states, unread(states))
    kept = kept_count(LAYOUT.placeholders((high, wide)), ratio, round_up)
    assert merged.tokens[0].shape == (kept, 5)
    assert merged.slots[0].nonzero()[:, 0].tolist() == list(range(kept))
    patches = int((states.tiles[0] >= 0).sum())
    newlines = max(0, kept - patches)
    marks = merged.tokens[0][:, -1]
    assert marks.tolist() == [0] * (kept - newlines) + [1] * newlines


def plain(states: VisualStates, kept: int) -> torch.Tensor:
    """Tile by tile as on LLaVA-1.5, then the release's order."""
    tokens, received, keys, tiles = (part[0] for part in (states.tokens, states.received, states.keys, states.tiles))
    counts = [int((tiles == tile).sum()) for tile in range(len(states.cls[0]))]
    dominant_rows, classes, contextual = [], [], []
    first = None
    for tile, share in enumerate(tile_shares(counts, kept)):
        if not share:
            continue
        own = [place for place in range(len(tiles)) if tiles[place] == tile]
        merging = share * 10 // 64
        best = sorted(own, key=lambda place: (-float(received[place]), place))[: share - merging - 1]
        rest = [place for place in own if place not in best]
        step = max(1, len(rest) // max(1, merging))
        targets = torch.tensor([index for index in range(len(rest)) if index % step == 0][:merging], dtype=torch.long)
        made = contextual_tokens(tokens[rest], keys[rest], targets)
        if tile == 0:
            first = torch.cat([states.cls[0][:1], tokens[sorted(best)], made])
        else:
            dominant_rows += best
            classes.append(states.cls[0][tile])
            contextual.append(made)
    after = [tokens[sorted(dominant_rows)], torch.stack(classes), torch.cat(contextual)] if classes else []
    return torch.cat([first, *after])


@pytest.mark.parametrize("size", [(30, 50), (61, 17), (24, 71), (47, 49), (3, 80)])
@pytest.mark.parametrize("kept", [1, 4, 15, 24, 30])
def test_each_tile_is_zipped_by_itself_in_the_releases_order(size, kept):
    states = states_of(size, seed=sum(size))
    kept = min(kept, int((states.tiles[0] >= 0).sum()))
    given_parts = (states.tokens[0], states.received[0], states.keys[0], states.cls[0], states.tiles[0])
    assert torch.equal(zipped_tiles(*given_parts, kept), plain(states, kept))


def test_one_uncropped_tile_is_llavas_own_way():
    """A picture that is its whole alone gives what an image of LLaVA-1.5 gives."""
    states = states_of((24, 48))
    whole = slice(0, 9)
    tokens, received, keys = states.tokens[0][whole], states.received[0][whole], states.keys[0][whole]
    cls = states.cls[0][:1]
    got = zipped_tiles(tokens, received, keys, cls, torch.zeros(9, dtype=torch.long), 7)
    dominant, _, merged = zipped(tokens, received, keys, 7, 1)
    assert torch.equal(got, torch.cat([cls, tokens[dominant], merged]))


@pytest.mark.parametrize("name", ["visionzip", "fastervlm", "prumerge"])
@torch.no_grad()
def test_a_batch_equals_its_samples(tmp_path, name):
    family = next_family()
    batch = next_batch(family, next_records(tmp_path))
    backbone = compress(family, name=name, keep_ratio=0.25)
    together = check_alone(backbone, batch, pad_left=False)
    assert together.rows.regions_BM.eq(Region.VISUAL).sum(-1).tolist() == [TOKENS[0] // 4, sum(TOKENS[1:]) // 4, 0]
