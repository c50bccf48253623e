"""What a plan keeps: counted by loops, and reconciled with the nominal ledger through the tiny model."""

from collections import Counter
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.inference.cache_report import held_rows
from subtoken_train.ledger.kv_budget import KVBudget, KVShape
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.ledger.measure import emptied_regions, measured_ledger
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.base import GroupBudget
from subtoken_train.types import LayerPlan, Plan, Region
from tests.support.helpers import compress, make_batch, random_mask, random_scores
from tests.support.sampling import sampled

COUNTS = ("tokens_before", "tokens", "key_bytes", "value_bytes", "index_bytes")
MIXED = [(1, 9), (2, 7), (0, 12)]


def totals(*ledgers):
    total = Counter()
    for ledger in ledgers:
        for entry in ledger.entries:
            total.update({(entry.layer, entry.region, name): getattr(entry, name) for name in COUNTS})
    return +total


def nominal_of(batch, family, reducer, budget):
    for regions in batch.regions_BN:
        counts = {region.label: int((regions == region).sum()) for region in Region if region != Region.PADDING}
        yield nominal_ledger(family.shape, counts, budget, reducer.cut_layer(family.shape.num_layers))


@pytest.mark.parametrize("layout", ["contiguous", "per_head"])
@pytest.mark.parametrize("stage", ["embeds", "decoder"])
@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_reconciles_with_the_nominal_ledger(tiny_family, stage, pad_left, layout):
    batch = make_batch(MIXED, pad_left)
    routing = RoutingConfig(num_groups=16, kept_groups=4, layout=layout)
    backbone = compress(tiny_family, routing, name="fastv", keep_ratio=0.15, stage=stage)
    measured = measured_ledger(backbone.run(batch, pad_left=pad_left).plan(), batch.regions_BN, tiny_family.shape)
    nominal = list(nominal_of(batch, tiny_family, backbone.reducer, KVBudget(0.15, 16, 4)))
    assert totals(measured) == totals(*nominal)
    assert measured.bytes_of() == sum(ledger.bytes_of() for ledger in nominal)
    assert measured.dense_bytes() == sum(ledger.dense_bytes() for ledger in nominal)


@sampled("settings", [{}, {"value_gate": True, "score_prior": "output_norm"}], every=2, ids=["plain", "gated"])
@pytest.mark.parametrize("stage", ["embeds", "decoder"])
@pytest.mark.parametrize(("num_groups", "kept_groups"), [(16, 4), (16, 14), (64, 16)])
@torch.no_grad()
def test_every_budget_costs_the_same_payload(tiny_family, stage, num_groups, kept_groups, settings):
    batch = make_batch(MIXED)
    payloads = set()
    for budget in get_args(GroupBudget):
        routing = RoutingConfig(num_groups=num_groups, kept_groups=kept_groups, budget=budget, **settings)
        backbone = compress(tiny_family, routing, name="fastv", keep_ratio=0.25, stage=stage)
        ledger = measured_ledger(backbone.run(batch).plan(), batch.regions_BN, tiny_family.shape)
        payloads.add((ledger.bytes_of(with_index=False), ledger.bytes_of("visual", with_index=False)))
        if stage == "embeds":
            assert ledger.fraction("visual") == KVBudget(0.25, num_groups, kept_groups).total_kv_fraction
    assert len(payloads) == 1


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 7)),
    num_groups=st.sampled_from([1, 2, 8, 16]),
    seed=st.integers(0, 1000),
    grouped=st.booleans(),
)
def test_any_plan_equals_the_loops(sizes, num_groups, seed, grouped):
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=8, element_bytes=2)
    regions = random_scores(seed, *sizes, levels=len(Region), dtype=torch.int64)
    stays = random_mask(seed, *sizes) & (regions != Region.PADDING)
    entries = torch.where(stays, torch.arange(sizes[1]), -1)
    groups = random_mask(seed + 1, *sizes, num_groups)
    expected = Counter()
    partial = [{tuple(row) for row in own[on].tolist() if not all(row)} for own, on in zip(groups, stays, strict=True)]
    named = any(len(kinds) > 1 for kinds in partial)  # what a sample's entries all keep needs no index
    for sample in range(sizes[0]):
        for position in range(sizes[1]):
            region = Region(int(regions[sample, position]))
            if region == Region.PADDING:
                continue
            expected[0, region.label, "tokens_before"] += 1
            if not stays[sample, position]:
                continue
            kept = int(groups[sample, position].sum()) if grouped else num_groups
            expected[0, region.label, "tokens"] += 1
            expected[0, region.label, "key_bytes"] += 2 * 8 * 2
            expected[0, region.label, "value_bytes"] += 2 * 8 * 2 // num_groups * kept
            expected[0, region.label, "index_bytes"] += (num_groups + 7) // 8 if named and kept < num_groups else 0
    plan = Plan([LayerPlan(entries, groups if grouped else None)])
    assert totals(measured_ledger(plan, regions, shape)) == +expected


def test_a_region_that_an_eviction_empties_takes_nothing():
    regions = torch.tensor([[Region.SYSTEM, Region.VISUAL, Region.QUERY]])
    heads, groups = torch.tensor([[[True, False], [True, True]]]), torch.ones(1, 2, 4, dtype=torch.bool)
    plan = Plan([LayerPlan(torch.tensor([[1, 2]]), groups, heads)])
    rows = {row.region: row for row in measured_ledger(plan, regions, KVShape(1, 2, 8, 4)).entries}
    assert (rows["system"].tokens, rows["system"].payload_bytes, rows["system"].index_bytes) == (0, 0, 0)
    assert (rows["visual"].key_bytes, rows["visual"].value_bytes) == (32, 32)
    assert (rows["query"].key_bytes, rows["query"].value_bytes) == (64, 64)


REGIONS = torch.tensor([[1, 2, 2, 4], [0, 1, 2, 4], [0, 0, 1, 4]])

HELD = [REGIONS != 0] * 2


def test_found_per_sample_and_layer():
    whole = LayerPlan(torch.tensor([[0, 1, 2, 3], [1, 2, 3, -1], [2, 3, -1, -1]]))
    blind = LayerPlan(torch.tensor([[0, 3, -1], [1, 2, 3], [3, -1, -1]]))
    assert emptied_regions(Plan([whole, whole]), REGIONS, HELD) == [{}, {}, {}]
    assert emptied_regions(Plan([whole, blind]), REGIONS, HELD) == [{"visual": 1}, {}, {"system": 1}]
    assert emptied_regions(Plan([blind, blind]), REGIONS, HELD) == [{"visual": 2}, {}, {"system": 2}]


def test_what_a_window_left_behind_was_not_taken_by_compression():
    """A window of 3 holds the last two rows: no system row of the first two samples, and one visual row each."""
    held = held_rows([None, 3], REGIONS)
    assert torch.equal(held[0], HELD[0])
    assert held[1].tolist() == [[False, False, True, True]] * 3
    last = LayerPlan(torch.tensor([[2, 3]] * 3))
    assert emptied_regions(Plan([last]), REGIONS, held[1:]) == [{}, {}, {}]
    assert emptied_regions(Plan([last]), REGIONS, held[:1]) == [{"system": 1}, {"system": 1}, {}]
    text = LayerPlan(torch.tensor([[3]] * 3))
    assert emptied_regions(Plan([text]), REGIONS, held[1:]) == [{"visual": 1}, {"visual": 1}, {"system": 1}]


def test_an_entry_of_one_head_is_something():
    heads = torch.tensor([[[1, 1], [1, 0], [1, 1]]]).bool()
    assert emptied_regions(
        Plan([LayerPlan(torch.tensor([[0, 1, 3]]), heads_BNh=heads)]), REGIONS[:1], [HELD[0][:1]]
    ) == [{}]
