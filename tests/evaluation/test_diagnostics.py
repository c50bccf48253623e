"""Diagnosing a routed arm: what is observed is what the pass did, counts add up, and tables and pictures hold them."""

import csv

import pytest
import torch

from subtoken_train.calibrating.base import record_prompts
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scenes import write_scenes
from subtoken_train.evaluation import diagnostics
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, make_batch, sharpen
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

S4K1 = RoutingConfig(num_groups=4, kept_groups=1)
GLOBAL = RoutingConfig(num_groups=4, kept_groups=1, budget="global")
MIXED = [(1, 9), (2, 7), (0, 12)]


def routed_arm(family, routing=S4K1, **reducer):
    """A fresh arm in evaluation mode that keeps a quarter of the tokens by FastV."""
    torch.manual_seed(1)
    return compress(family, routing, **{"name": "fastv", "keep_ratio": 0.25, **reducer}).eval()


@pytest.fixture
def prompts(tmp_path):
    """A function from an arm, a number of prompts and a batch size to batches."""
    write_scenes(tmp_path / "scenes", train=4, dev=20, test=4)
    records = InstructionRecords(tmp_path / "scenes" / "dev.json")
    return lambda backbone, limit=20, batch_size=16: record_prompts(backbone.family, records, limit, batch_size)


@pytest.mark.parametrize("stage", ["embeds", "decoder"])
@torch.no_grad()
def test_an_observation_is_what_the_pass_did(tiny_family, stage):
    backbone, batch = routed_arm(tiny_family, stage=stage), make_batch(MIXED)
    result = backbone.run(batch, pad_left=True)
    found = diagnostics.observe(backbone, batch, with_relevance=True)
    layers = list(range(4) if stage == "embeds" else range(2, 4))
    assert list(found.masks) == list(found.relevance) == layers
    for layer in layers:
        assert torch.equal(found.masks[layer], result.state.masks[layer])
    visual_BM = result.rows.regions_BM == Region.VISUAL
    assert visual_BM.sum(-1).tolist() == [16, 32, 0]
    for layer in layers:
        assert torch.equal(found.routed[layer], visual_BM)
        assert (found.relevance[layer][visual_BM] > 0).all()
        assert (found.relevance[layer].sum(-1) < 1 + 1e-5).all()
    modules = list(tiny_family.decoder.modules())
    assert sum(len(part._forward_pre_hooks) for part in modules) == 0
    assert sum(len(part._forward_hooks) for part in modules) == 0


@torch.no_grad()
def test_relevance_reads_the_query_region(tiny_family):
    """A question about nothing else than the image attends elsewhere when its words change."""
    sharpen(tiny_family)
    backbone, batch = routed_arm(tiny_family, name="none", keep_ratio=1.0), make_batch([(1, 9)])
    before = diagnostics.observe(backbone, batch, with_relevance=True).relevance[0]
    batch.input_ids_BN[batch.regions_BN == Region.ANSWER] = 11
    assert torch.equal(diagnostics.observe(backbone, batch, with_relevance=True).relevance[0], before)
    batch.input_ids_BN[batch.regions_BN == Region.QUERY] = 11
    assert not torch.allclose(diagnostics.observe(backbone, batch, with_relevance=True).relevance[0], before, atol=1e-3)


@sampled("routing", [S4K1, GLOBAL], every=2, ids=["per_token", "global"])
def test_counts_add_up(tiny_family, prompts, routing):
    backbone = routed_arm(tiny_family, routing)
    diagnosis = diagnostics.diagnose(backbone, prompts(backbone, batch_size=6))
    tokens = 20 * 16
    assert diagnosis.layers == [0, 1, 2, 3]
    assert diagnosis.counts_LS.sum(-1).tolist() == [tokens] * 4  # mean K is 1
    assert diagnosis.kept_LK.sum(-1).tolist() == [tokens] * 4
    assert diagnosis.figure_LK.sum(-1).tolist() == [tokens] * 4
    assert (diagnosis.figure_LK * torch.arange(5)).sum(-1).tolist() == [tokens] * 4
    assert diagnosis.rank_tokens_R[:17].tolist() == [20 * 4] * 16 + [0]
    assert int(diagnosis.rank_kept_R.sum()) == 4 * tokens
    assert (diagnosis.rank_relevance_R[:16].diff() <= 0).all()
    if routing is S4K1:
        assert diagnosis.kept_LK.tolist() == [[0, tokens, 0, 0, 0]] * 4
        assert (diagnosis.figure_LK[:, 1] < tokens).all()
    else:
        assert torch.equal(diagnosis.kept_LK, diagnosis.figure_LK)


@pytest.mark.parametrize("budget", ["per_token", "global"])
def test_a_language_model(budget):
    """Quest keeps other context tokens in every layer; only those are routed, ranked and attended to."""
    family = text_family("llama")
    routing = RoutingConfig(num_groups=4, kept_groups=1, budget=budget, query_conditioned=True)
    backbone = compress(family, routing, name="quest", keep_ratio=0.5, page_size=4, window=4).eval()
    batch = text_batch([(24, 6, 0), (16, 4, 0)])
    found = diagnostics.observe(backbone, batch, with_relevance=True)
    context_BN = batch.regions_BN == Region.CONTEXT
    for layer, routed_BN in found.routed.items():
        assert routed_BN.sum(-1).tolist() == [12, 8]
        assert not (routed_BN & ~context_BN).any()
        assert not found.relevance[layer][context_BN & ~routed_BN].any()
        assert (found.relevance[layer][routed_BN] > 0).all()
    diagnosis = diagnostics.diagnose(backbone, [batch, batch])
    layers = len(diagnosis.layers)
    assert diagnosis.counts_LS.sum(-1).tolist() == [40] * layers
    assert diagnosis.rank_tokens_R[:13].tolist() == [4 * layers] * 8 + [2 * layers] * 4 + [0]


def test_batches_of_different_width_add_up():
    backbone = compress(text_family("llama"), RoutingConfig(num_groups=4, kept_groups=1), name="none").eval()
    wide, narrow = text_batch([(24, 6, 0)]), text_batch([(8, 3, 0)])
    both, other = diagnostics.diagnose(backbone, [wide, narrow]), diagnostics.diagnose(backbone, [narrow, wide])
    layers = len(both.layers)
    assert both.rank_tokens_R.tolist() == [2 * layers] * 8 + [layers] * 16 + [0] * 7
    assert torch.equal(both.rank_tokens_R, other.rank_tokens_R)
    assert torch.equal(both.rank_kept_R, other.rank_kept_R)


def test_nothing_to_diagnose(tiny_family, tmp_path):
    with pytest.raises(ValueError, match="a token-only arm routes nothing"):
        diagnostics.diagnose(compress(tiny_family, None), [make_batch([(1, 8)])])
    with pytest.raises(ValueError, match="none of the prompts has a token to route"):
        diagnostics.diagnose(routed_arm(tiny_family), [make_batch([(0, 8)])])


def diagnosis(kept):
    """Two layers (2 and 3) of four tokens each that keep four pairs per layer; three ranks, one of which is empty."""
    return diagnostics.Diagnosis(
        layers=[2, 3],
        counts_LS=torch.tensor([[1, 1, 1, 1], [4, 0, 0, 0]]),
        kept_LK=torch.tensor([kept, kept]),
        figure_LK=torch.tensor([[1, 2, 1, 0, 0], [3, 0, 0, 0, 1]]),
        rank_tokens_R=torch.tensor([4, 4, 0]),
        rank_relevance_R=torch.tensor([1.0, 0.5, 0.0]),
        rank_kept_R=torch.tensor([6, 2, 0]),
    )


def table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_tables(tmp_path):
    diagnostics.write_tables(diagnosis([0, 4, 0, 0, 0]), S4K1, tmp_path)
    histogram = table(tmp_path / "figure1a.csv")
    assert histogram[:6] == [
        ["layer", "kept_groups", "tokens", "share"], ["all", "0", "4", "0.5"], ["all", "1", "2", "0.25"],
        ["all", "2", "1", "0.125"], ["all", "3", "0", "0"], ["all", "4", "1", "0.125"],
    ]  # fmt: skip
    assert histogram[6] == ["2", "0", "1", "0.25"]
    assert len(histogram) == 1 + 3 * 5
    assert table(tmp_path / "figure1b.csv") == [
        ["rank", "tokens", "relevance", "kept_groups"],
        ["0", "4", "0.25", "1.5"],
        ["1", "4", "0.125", "0.5"],
    ]
    groups = table(tmp_path / "groups.csv")
    assert groups[1] == ["2", "0", "0.25"]
    assert groups[5] == ["3", "0", "1"]
    layers = table(tmp_path / "layers.csv")
    assert layers[0][-2:] == ["entropy", "largest_share"]
    assert layers[2] == ["3", "1", "0.25", "0", "1"]
