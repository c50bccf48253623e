"""Diagnosing routed arms and evictions: what is observed is what the pass did, beside eager attention and loops."""

import csv
import math

import pytest
import torch
from PIL import Image

from subtoken_train.calibrating.base import record_prompts
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scenes import write_scenes
from subtoken_train.evaluation import diagnostics
from subtoken_train.evaluation.diagnostics import watched
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, make_batch, random_mask, random_scores, sharpen
from tests.support.prompt_views import PROMPTS, layer_views, plan, settings_for
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

S4K1 = RoutingConfig(num_groups=4, kept_groups=1)
GLOBAL = RoutingConfig(num_groups=4, kept_groups=1, budget="global")


def routed_arm(family, routing=S4K1, **reducer):
    """A fresh arm in evaluation mode that keeps a quarter of the tokens by FastV."""
    torch.manual_seed(1)
    return compress(family, routing, **{"name": "fastv", "keep_ratio": 0.25, **reducer}).eval()


@pytest.mark.parametrize("stage", ["embeds", "decoder"])
@torch.no_grad()
def test_an_observation_is_what_the_pass_did(tiny_family, stage):
    backbone, batch = routed_arm(tiny_family, stage=stage), make_batch([(1, 9), (2, 7), (0, 12)])
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
def test_counts_add_up(tiny_family, tmp_path, routing):
    write_scenes(tmp_path / "scenes", train=4, dev=20, test=4)
    records, backbone = InstructionRecords(tmp_path / "scenes" / "dev.json"), routed_arm(tiny_family, routing)
    diagnosis = diagnostics.diagnose(backbone, record_prompts(backbone.family, records, 20, 6))
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
    routing = RoutingConfig(num_groups=4, kept_groups=1, budget=budget, query_conditioned=True)
    backbone = compress(text_family("llama"), routing, name="quest", keep_ratio=0.5, page_size=4, window=4).eval()
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


PROMPT_SIZES = [(24, 6, 0), (15, 3, 0)]
STEPS = 5


def eager_reads(batch, sample, end):
    """One sample alone without a cache: generated rows on its prompt, [L, H, n], counts, and prompt rows."""
    model = text_family().model
    model.set_attn_implementation("eager")
    ids = batch.input_ids_BN[sample][batch.regions_BN[sample] != Region.PADDING]
    length = len(ids)
    for _ in range(STEPS):
        token = model(ids[None]).logits[0, -1].argmax()
        if int(token) == end:
            break
        ids = torch.cat([ids, token[None]])
    layers = torch.stack(model(ids[None], output_attentions=True).attentions)[:, 0]
    rows = [layers[:, :, row, : row + 1] for row in range(length, len(ids))]
    passed = sum((row >= diagnostics.THRESHOLD * row.amax(-1, keepdim=True)).sum(2) for row in rows)
    seen = sum(row.shape[-1] for row in rows)
    return sum(row[..., :length] for row in rows), passed, seen, layers[:, :, :length, :length]


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@torch.no_grad()
def test_reads_are_those_of_eager_attention(pad_left, protocol):
    family, batch = text_family(), text_batch(PROMPT_SIZES, pad_left)
    compression = Compression(build_eviction("snapkv", window=4), 0.5)
    layers = diagnostics.watch_generation(compress(family).eval(), batch, compression, protocol, STEPS)
    for sample in range(2):
        reads, passed, seen, prompt = eager_reads(batch, sample, family.tokenizer.eos_token_id)
        assert seen > 0
        for layer, watched_entries in enumerate(layers):
            entries = watched_entries.entries_BN[sample]
            found = watched_entries.mass_BHN[sample][:, entries]
            if protocol == "context_first":  # the question is no part of what was compressed
                assert int(entries.sum()) == 1 + PROMPT_SIZES[sample][0]
            assert torch.allclose(found, reads[layer][:, : int(entries.sum())], atol=1e-4)
            assert not watched_entries.mass_BHN[sample][:, ~entries].any()
            assert watched_entries.passed_BH[sample].tolist() == passed[layer].tolist()
            assert int(watched_entries.seen_B[sample]) == seen
            rows = prompt[layer][:, : int(entries.sum()), : int(entries.sum())]
            above = (rows >= diagnostics.THRESHOLD * rows.amax(-1, keepdim=True)) & (rows > 0)
            density = above.sum((1, 2)) / (len(rows[0]) * (len(rows[0]) + 1) / 2)  # of the lower triangle
            assert torch.allclose(watched_entries.prompt_density_BH[sample], density)


def test_a_sample_that_ends_is_read_no_further(monkeypatch):
    """Its neighbour goes on; a token that would end the text counts for nothing."""
    family, batch = text_family(), text_batch(PROMPT_SIZES, True)
    compression = Compression(build_eviction("knorm"), 0.5)
    whole = diagnostics.watch_generation(compress(family).eval(), batch, compression, "query_aware", STEPS)
    first = text_family().model(batch.input_ids_BN[:1]).logits[0, -1].argmax()
    monkeypatch.setattr(type(family.tokenizer), "eos_token_id", int(first), raising=False)
    ended = diagnostics.watch_generation(compress(family).eval(), batch, compression, "query_aware", STEPS)
    assert [int(each.seen_B[0]) for each in ended] == [0] * len(ended)
    assert not ended[0].mass_BHN[0].any()
    assert int(ended[0].seen_B[1]) > 0
    assert int(whole[0].seen_B[0]) > 0


@pytest.mark.parametrize("name", [*EVICTIONS, "ada(snapkv)"])
def test_a_watched_method_scores_and_plans_as_it_does(name):
    method, layers = build_eviction(name, **settings_for(name)), []
    other = watched(method, layers)
    assert type(other) is not type(method)
    assert other.name == method.name
    views = layer_views([PROMPTS["text before and after"], PROMPTS["two images"]], other.needs, "left")
    scores, counts, kept, candidates = plan(method, views, 0.4)
    scores_1, counts_1, everything, _ = plan(other, views, 0.4)
    assert torch.equal(counts, counts_1)
    for layer, found in enumerate(layers):
        assert torch.equal(scores_1[layer].scores_BhN, scores[layer].scores_BhN)
        assert torch.equal(found.kept_BhN, kept[layer] & candidates.competes_LBN[layer][:, None])
        assert torch.equal(everything[layer][:, 0], views[layer].entries_BN)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("quest_steps", {}, "eviction 'quest_steps' drops nothing that could be read later"),
        ("h2o", {"unit": "tokens", "every": 4}, "eviction_every=4: nothing is evicted while it is watched"),
    ],
)
def test_what_cannot_be_watched_is_refused(name, options, words):
    compression = Compression(build_eviction(name), **({"keep": 8} if options else {"keep": 0.5}), **options)
    backbone = compress(text_family()).eval()
    refuses(
        words, diagnostics.watch_generation, backbone, text_batch(PROMPT_SIZES, True), compression, "query_aware", STEPS
    )


NAMES = diagnostics.PromptLayer._fields[2:]


def entries(sets, seed=0, kept=None):
    """Two samples of 12 rows, four query heads on two, in a layer whose first rows of sample 1 are padding."""
    length = 12
    real = torch.ones(2, length, dtype=torch.bool)
    real[1, :3] = False
    competes = real & (torch.arange(length) < 9)
    mass = random_scores(seed, 2, 4, length).exp() * real[:, None]
    if kept is None:
        kept = random_mask(seed + 1, 2, sets, length) | (torch.arange(length) == 4)
    counts = torch.tensor([[10, 12, 8, 10], [15, 15, 14, 16]]), torch.tensor([20, 20])
    keys = torch.zeros(2, 2, length, 4)
    body = real & (torch.arange(length) < 6)
    density = torch.tensor([[0.25, 0.2, 0.3, 0.25], [0.5, 0.5, 0.4, 0.6]])
    of_rows = density, density / 2
    return diagnostics.WatchedEntries(keys, real, body, *of_rows, mass, *counts, competes, kept & competes[:, None])


def plain(watched, sample):
    """The measures of one sample, head by head and place by place."""
    places = watched.competes_BN[sample].nonzero()[:, 0].tolist()
    heads = len(watched.kept_BhN[sample])
    group = 4 // heads
    hits = stay = read = of_it = on_body = 0
    for head in range(heads):
        mass = watched.mass_BHN[sample, head * group : (head + 1) * group].mean(0)
        own = [j for j in places if watched.kept_BhN[sample, head, j]]
        best = sorted(places, key=lambda j: -float(mass[j]))[: len(own)]
        hits, stay = hits + len(set(own) & set(best)), stay + len(own)
        on_body += sum(bool(watched.body_BN[sample, j]) for j in best)
        read, of_it = read + float(mass[places].sum()), of_it + float(mass[own].sum())
    whole = watched.mass_BHN[sample]
    return {
        "entries": len(places), "kept": stay / heads, "sparsity": [0.75, 0.5][sample],
        "prompt_sparsity": [0.875, 0.75][sample], "generated_sparsity": [0.5, 0.25][sample],
        "body_coverage": on_body / stay,
        "body_attention": float(whole[:, watched.body_BN[sample]].sum() / whole.sum()), "hit_rate": hits / stay,
        "attention_kept": of_it / read,
    }  # fmt: skip


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("seed", [0, 5])
def test_measures(sets, seed):
    watched = entries(sets, seed)
    found = dict(zip(NAMES, diagnostics.layer_measures(watched), strict=True))
    for sample in range(2):
        for name, expected in plain(watched, sample).items():
            assert float(found[name][sample]) == pytest.approx(expected, rel=1e-5), name


def test_nothing_read_is_no_figure():
    watched = entries(1)
    watched.seen_B[0], watched.passed_BH[0], watched.mass_BHN[0] = 0, 0, 0
    found = dict(zip(NAMES, diagnostics.layer_measures(watched), strict=True))
    for name in ("generated_sparsity", "body_coverage", "hit_rate", "attention_kept", "body_attention"):
        assert math.isnan(float(found[name][0])), name
        assert not math.isnan(float(found[name][1])), name


def test_phases_correlate_over_the_layers_of_a_prompt():
    """1 and -1 where generated tokens follow the prompt, or turn it round; a prompt without any is left out."""
    made = [
        diagnostics.PromptLayer(name, layer, *[0.0] * 3, (0.3, 0.4, 0.6)[layer], own[layer], *[0.0] * 4)
        for name, own in {"a": [0.1, 0.2, 0.4], "b": [0.8, 0.6, 0.2], "c": [math.nan] * 3}.items()
        for layer in range(3)
    ]
    assert diagnostics.phase_correlation([row for row in made if row.record == "a"]) == pytest.approx(1)
    assert diagnostics.phase_correlation([row for row in made if row.record == "b"]) == pytest.approx(-1)
    assert diagnostics.phase_correlation(made) == pytest.approx(0)
    assert math.isnan(diagnostics.phase_correlation(made[-3:]))


@sampled("protocol", ["query_aware", "context_first"], every=2)
def test_diagnosis_and_its_files(protocol, tmp_path):
    family, batches = text_family(), [text_batch([(24, 6, 0), (15, 3, 0)], True), text_batch([(9, 4, 0)])]
    compression = Compression(build_eviction("pyramidkv", window=2, beta=4), 0.5)
    rows = diagnostics.diagnose_eviction(compress(family).eval(), batches, compression, protocol, 4)
    assert [(row.record, row.layer) for row in rows[:3]] == [("text-0", 0), ("text-1", 0), ("text-0", 1)]
    assert len(rows) == 3 * 3
    diagnostics.write_eviction_tables(rows, tmp_path)
    diagnostics.draw_eviction(rows, compression.label, tmp_path)
    with (tmp_path / "eviction_layers.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for layer, row in enumerate(table):
        own = [each for each in rows if each.layer == layer]
        assert float(row["kept"]) == pytest.approx(sum(each.kept for each in own) / 3, rel=1e-5)
        assert float(row["kept_share"]) == pytest.approx(
            sum(each.kept for each in own) / sum(each.entries for each in own), rel=1e-5
        )
    assert len(diagnostics.eviction_layers(rows)) == len(table) == 3
    assert len((tmp_path / "eviction_prompts.csv").read_text().splitlines()) == 1 + 9
    with Image.open(tmp_path / "eviction.png") as picture:
        assert picture.size[0] > 1000
