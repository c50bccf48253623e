"""Diagnosis of an eviction: reads are those of eager attention, measures those of plain loops; ends and padding."""

import csv
import math

import pytest
import torch
from PIL import Image

from subtoken_train.evaluation.diagnostics import (
    THRESHOLD,
    PromptLayer,
    WatchedEntries,
    diagnose_eviction,
    draw_eviction,
    eviction_layers,
    layer_measures,
    phase_correlation,
    watch_generation,
    watched,
    write_eviction_tables,
)
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.types import Region
from tests.support.helpers import compress, random_mask, random_scores
from tests.support.prompt_views import PROMPTS, layer_views, plan, settings_for
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

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
    passed = sum((row >= THRESHOLD * row.amax(-1, keepdim=True)).sum(2) for row in rows)
    seen = sum(row.shape[-1] for row in rows)
    return sum(row[..., :length] for row in rows), passed, seen, layers[:, :, :length, :length]


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@torch.no_grad()
def test_reads_are_those_of_eager_attention(pad_left, protocol):
    family, batch = text_family(), text_batch(PROMPT_SIZES, pad_left)
    compression = Compression(build_eviction("snapkv", window=4), 0.5)
    layers = watch_generation(compress(family).eval(), batch, compression, protocol, STEPS)
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
            above = (rows >= THRESHOLD * rows.amax(-1, keepdim=True)) & (rows > 0)
            density = above.sum((1, 2)) / (len(rows[0]) * (len(rows[0]) + 1) / 2)  # of the lower triangle
            assert torch.allclose(watched_entries.prompt_density_BH[sample], density)


def test_a_sample_that_ends_is_read_no_further(monkeypatch):
    """Its neighbour goes on; a token that would end the text counts for nothing."""
    family, batch = text_family(), text_batch(PROMPT_SIZES, True)
    compression = Compression(build_eviction("knorm"), 0.5)
    whole = watch_generation(compress(family).eval(), batch, compression, "query_aware", STEPS)
    first = text_family().model(batch.input_ids_BN[:1]).logits[0, -1].argmax()
    monkeypatch.setattr(type(family.tokenizer), "eos_token_id", int(first), raising=False)
    ended = watch_generation(compress(family).eval(), batch, compression, "query_aware", STEPS)
    assert [int(each.seen_B[0]) for each in ended] == [0] * len(ended)
    assert not ended[0].mass_BHN[0].any()
    assert int(ended[0].seen_B[1]) > 0
    assert int(whole[0].seen_B[0]) > 0


@pytest.mark.parametrize("name", [*EVICTIONS, "ada(snapkv)"])
def test_a_watched_method_scores_and_plans_as_it_does(name):
    prompts = [PROMPTS["text before and after"], PROMPTS["two images"]]
    method, layers = build_eviction(name, **settings_for(name)), []
    other = watched(method, layers)
    assert type(other) is not type(method)
    assert other.name == method.name
    views = layer_views(prompts, other.needs, "left")
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
    refuses(words, watch_generation, backbone, text_batch(PROMPT_SIZES, True), compression, "query_aware", STEPS)


NAMES = PromptLayer._fields[2:]


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
    return WatchedEntries(keys, real, body, *of_rows, mass, *counts, competes, kept & competes[:, None])


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
    found = dict(zip(NAMES, layer_measures(watched), strict=True))
    for sample in range(2):
        for name, expected in plain(watched, sample).items():
            assert float(found[name][sample]) == pytest.approx(expected, rel=1e-5), name


def test_nothing_read_is_no_figure():
    watched = entries(1)
    watched.seen_B[0], watched.passed_BH[0], watched.mass_BHN[0] = 0, 0, 0
    found = dict(zip(NAMES, layer_measures(watched), strict=True))
    for name in ("generated_sparsity", "body_coverage", "hit_rate", "attention_kept", "body_attention"):
        assert math.isnan(float(found[name][0])), name
        assert not math.isnan(float(found[name][1])), name


def test_phases_correlate_over_the_layers_of_a_prompt():
    """1 and -1 where generated tokens follow the prompt, or turn it round; a prompt without any is left out."""
    generated = {"a": [0.1, 0.2, 0.4], "b": [0.8, 0.6, 0.2], "c": [math.nan] * 3}
    made = [
        PromptLayer(name, layer, *[0.0] * 3, (0.3, 0.4, 0.6)[layer], own[layer], *[0.0] * 4)
        for name, own in generated.items()
        for layer in range(3)
    ]
    assert phase_correlation([row for row in made if row.record == "a"]) == pytest.approx(1)
    assert phase_correlation([row for row in made if row.record == "b"]) == pytest.approx(-1)
    assert phase_correlation(made) == pytest.approx(0)
    assert math.isnan(phase_correlation(made[-3:]))


@sampled("protocol", ["query_aware", "context_first"], every=2)
def test_diagnosis_and_its_files(protocol, tmp_path):
    family, batches = text_family(), [text_batch([(24, 6, 0), (15, 3, 0)], True), text_batch([(9, 4, 0)])]
    compression = Compression(build_eviction("pyramidkv", window=2, beta=4), 0.5)
    rows = diagnose_eviction(compress(family).eval(), batches, compression, protocol, 4)
    assert [(row.record, row.layer) for row in rows[:3]] == [("text-0", 0), ("text-1", 0), ("text-0", 1)]
    assert len(rows) == 3 * 3
    write_eviction_tables(rows, tmp_path)
    draw_eviction(rows, compression.label, tmp_path)
    with (tmp_path / "eviction_layers.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for layer, row in enumerate(table):
        own = [each for each in rows if each.layer == layer]
        assert float(row["kept"]) == pytest.approx(sum(each.kept for each in own) / 3, rel=1e-5)
        assert float(row["kept_share"]) == pytest.approx(
            sum(each.kept for each in own) / sum(each.entries for each in own), rel=1e-5
        )
    assert len(eviction_layers(rows)) == len(table) == 3
    assert len((tmp_path / "eviction_prompts.csv").read_text().splitlines()) == 1 + 9
    with Image.open(tmp_path / "eviction.png") as picture:
        assert picture.size[0] > 1000
