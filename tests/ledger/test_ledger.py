"""The byte ledger: exact figures of the paper's models, the anchor solver; FLOPs as torch counts; what a plan keeps."""

from collections import Counter
from fractions import Fraction
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from subtoken_train.inference.cache_report import held_rows
from subtoken_train.ledger.flops import DecoderSize, TrainingFlops
from subtoken_train.ledger.kv_budget import GEOMETRIES, KVBudget, KVShape, exact, geometry, kept_count
from subtoken_train.ledger.ledger import nominal_ledger, solve_anchor
from subtoken_train.ledger.measure import emptied_regions, measured_ledger
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.base import GroupBudget
from subtoken_train.types import LayerPlan, Plan, Region
from tests.support.helpers import compress, make_batch, random_mask, random_scores
from tests.support.refusals import refuses
from tests.support.sampling import sampled

LLAVA = GEOMETRIES["llava-1.5-7b"]
TINY = KVShape(num_layers=4, num_kv_heads=4, head_dim=32, element_bytes=4)
RATIOS = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)


@st.composite
def budgets(draw):
    num_groups = draw(st.integers(1, 128))
    return KVBudget(draw(RATIOS), num_groups, draw(st.integers(1, num_groups)))


def anchor_bytes(shape, tokens, kept_tokens, cut_layer=0):
    return nominal_ledger(shape, {"visual": tokens}, KVBudget(), cut_layer, kept_tokens=kept_tokens).bytes_of()


@pytest.mark.parametrize(("keep_ratio", "kept", "anchor"), [(0.25, 144, 90), (0.125, 72, 45)])
def test_llava_with_576_tokens(keep_ratio, kept, anchor):
    budget = KVBudget(keep_ratio, 16, 4)
    solved = solve_anchor(LLAVA, 576, budget.total_kv_fraction)
    ledger = nominal_ledger(LLAVA, {"visual": 576}, budget)
    assert {entry.tokens for entry in ledger.entries} == {kept}
    assert solved.kept_tokens == anchor
    assert solved.fraction == ledger.fraction() == budget.total_kv_fraction
    assert solved.keep_ratio == anchor / 576
    assert anchor_bytes(LLAVA, 576, anchor) == ledger.bytes_of(with_index=False)


@pytest.mark.parametrize("keep_ratio", [1.0, 0.5, 0.25, 0.1, 0.3, 0.7, 0.07])
def test_counts_are_exact_rationals(keep_ratio):
    """In binary 0.07 * 100 is 7.000000000000001, which an anchor would round up to 8."""
    for tokens in (100, 200, 700, 1000):
        whole = int(exact(keep_ratio) * tokens)
        assert kept_count(tokens, keep_ratio) == kept_count(tokens, keep_ratio, round_up=True) == whole
    assert exact(0.1) == Fraction(1, 10)
    assert exact(Fraction(1, 3)) == Fraction(1, 3)


def test_decoder_stage_anchor_pays_for_the_layers_below():
    target = nominal_ledger(LLAVA, {"visual": 576}, KVBudget(0.25, 16, 4), cut_layer=2).fraction("visual")
    solved = solve_anchor(LLAVA, 576, target, cut_layer=2)
    assert solved.kept_tokens == 90
    assert solved.fraction == target


def test_decoder_stage_anchor_is_infeasible_on_a_shallow_model():
    with pytest.raises(ValueError, match=r"the 2 of 4 layers below the cut .* cost 50.00% alone; use stage 'embeds'"):
        solve_anchor(TINY, 64, 0.15625, cut_layer=2)
    refuses("no token-only anchor", solve_anchor, TINY, 64, 1.0, cut_layer=4)


@pytest.mark.parametrize("arguments", [(0.0, 1, 1), (1.01, 1, 1), (-0.5, 1, 1), (0.5, 4, 5), (0.5, 4, 0), (0.5, 0, 0)])
def test_impossible_budgets(arguments):
    refuses("must lie", lambda: KVBudget(*arguments))


def test_unknown_geometry():
    refuses(r"unknown model 'llava-1.5-7'. Did you mean 'llava-1.5-7b'\?", geometry, "llava-1.5-7")


@pytest.mark.slow
@given(budgets(), st.integers(1, 3000))
def test_anchor_never_has_fewer_bytes_than_ours(budget, tokens):
    ours = nominal_ledger(LLAVA, {"visual": tokens}, budget)
    solved = solve_anchor(LLAVA, tokens, budget.exact_total)
    if kept_count(tokens, budget.keep_ratio) <= exact(budget.keep_ratio) * tokens:  # else: the one token that stays
        assert anchor_bytes(LLAVA, tokens, solved.kept_tokens) >= ours.bytes_of(with_index=False)
    if solved.kept_tokens > 1:
        assert anchor_bytes(LLAVA, tokens, solved.kept_tokens - 1) < budget.exact_total * ours.dense_bytes()


@given(RATIOS, st.integers(0, 5000))
def test_counts_bracket_the_exact_product(keep_ratio, tokens):
    product = exact(keep_ratio) * tokens
    down, up = kept_count(tokens, keep_ratio), kept_count(tokens, keep_ratio, round_up=True)
    assert down == min(tokens, max(1, product // 1))
    assert 0 <= up - down <= 1
    assert up >= product


def test_a_stored_mean_is_paid_with_groups():
    """16 tokens of the embedded model: S64K16 in elements is 16 * 32 = 512 = 16 * 24 + 128 for S64K12 and a mean."""
    plain, filled = KVBudget(0.25, 64, 16), KVBudget(0.25, 64, 12, fill="mean")
    ours, theirs = (nominal_ledger(TINY, {"visual": 64}, budget) for budget in (filled, plain))
    assert ours.bytes_of(with_index=False) == theirs.bytes_of(with_index=False)
    assert filled.total_of(64) == plain.exact_total == Fraction(5, 32)
    assert solve_anchor(TINY, 64, filled.total_of(64)).kept_tokens == 10


@pytest.mark.parametrize("samples", [1, 3])
def test_a_mean_is_stored_once_per_sample_and_routed_layer(samples):
    tokens, budget = {"visual": 64 * samples, "query": 9, "context": 0}, KVBudget(0.25, 16, 4, fill="mean")
    given = {"cut_layer": 1, "samples": samples}
    without = nominal_ledger(TINY, tokens, KVBudget(0.25, 16, 4), **given).bytes_of()
    assert nominal_ledger(TINY, tokens, budget, **given).bytes_of() - without == samples * 3 * TINY.side_bytes


SIZE = DecoderSize(hidden=32, intermediate=48, num_heads=4, num_kv_heads=2, head_dim=8, vocabulary=40)
LAYERS, BATCH, ROWS, RANK = 3, 2, 10, 4


class Adapted(torch.nn.Module):
    """A frozen projection with a trained low-rank addition."""

    def __init__(self, frozen: torch.nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = torch.nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted_llama() -> LlamaForCausalLM:
    heads = {"num_attention_heads": SIZE.num_heads, "num_key_value_heads": SIZE.num_kv_heads}
    sizes = {"hidden_size": SIZE.hidden, "intermediate_size": SIZE.intermediate, "vocab_size": SIZE.vocabulary}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=LAYERS, attn_implementation="eager")
    model = LlamaForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model


def counted(first_trained: int) -> int:
    """Operations of one training step by torch's counter; eager attention, so all pairs and not half of them."""
    model = adapted_llama()
    for layer in model.model.layers[:first_trained]:
        layer.self_attn.v_proj.requires_grad_(False)
    ids = torch.randint(SIZE.vocabulary, (BATCH, ROWS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("first_trained", [0, 1])
def test_against_the_counter_of_torch(first_trained):
    adapter = RANK * (SIZE.hidden + SIZE.num_kv_heads * SIZE.head_dim)
    flops = TrainingFlops(SIZE, [adapter if layer >= first_trained else 0 for layer in range(LAYERS)])
    lengths = torch.full((BATCH,), ROWS)
    formula = float(flops.layers(lengths, 0, LAYERS) + flops.head(lengths))
    # the counter sees whole attention matrices: add the pairs that causal kernels skip
    formula += BATCH * ROWS * (ROWS - 1) / 2 * sum(map(flops.per_pair, range(LAYERS)))
    formula += first_trained * 2 * adapter * BATCH * ROWS  # adapters that do not train still run forward
    # the first trained layer's input needs no gradient: of its backward pass, only what lies behind v's adapter runs
    q_and_k = SIZE.hidden * SIZE.head_dim * (SIZE.num_heads + SIZE.num_kv_heads)
    v = SIZE.hidden * SIZE.head_dim * SIZE.num_kv_heads
    pairs = BATCH * ROWS * ROWS * 2 * SIZE.num_heads * SIZE.head_dim
    formula -= 2 * BATCH * ROWS * (q_and_k + v + RANK * SIZE.hidden)  # gradients of the layer's input
    formula -= 2 * pairs + pairs  # of the scores: towards q and k, and of the probabilities
    assert formula == counted(first_trained)


def test_layers_below_the_first_trained_one_run_forward_only():
    flops = TrainingFlops(SIZE, [0, 5, 0])
    weights = SIZE.layer_weights
    assert [flops.per_row(layer) for layer in range(3)] == [2 * weights, 4 * weights + 30, 4 * weights]
    assert flops.per_pair(1) == 3 * flops.per_pair(0) == 3 * 4 * SIZE.num_heads * SIZE.head_dim


COUNTS = ("tokens_before", "tokens", "key_bytes", "value_bytes", "index_bytes")
MIXED = [(1, 9), (2, 7), (0, 12)]


def totals(*ledgers):
    total = Counter()
    for ledger in ledgers:
        for entry in ledger.entries:
            total.update({(entry.layer, entry.region, name): getattr(entry, name) for name in COUNTS})
    return +total


@pytest.mark.parametrize("layout", ["contiguous", "per_head"])
@pytest.mark.parametrize("stage", ["embeds", "decoder"])
@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_reconciles_with_the_nominal_ledger(tiny_family, stage, pad_left, layout):
    batch = make_batch(MIXED, pad_left)
    routing = RoutingConfig(num_groups=16, kept_groups=4, layout=layout)
    backbone = compress(tiny_family, routing, name="fastv", keep_ratio=0.15, stage=stage)
    measured = measured_ledger(backbone.run(batch, pad_left=pad_left).plan(), batch.regions_BN, tiny_family.shape)
    shape, cut = tiny_family.shape, backbone.reducer.cut_layer(tiny_family.shape.num_layers)
    labels = [region for region in Region if region != Region.PADDING]
    counted = [{each.label: int((own == each).sum()) for each in labels} for own in batch.regions_BN]
    nominal = [nominal_ledger(shape, counts, KVBudget(0.15, 16, 4), cut) for counts in counted]
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
    assert totals(measured_ledger(Plan([LayerPlan(entries, groups if grouped else None)]), regions, shape)) == +expected


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
