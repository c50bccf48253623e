"""Calibrations of layers beside loops: PrefixKV, FitPrune, thresholds, KVzap's maps; their prompts, who reads files."""

import json
import math

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating import CALIBRATORS
from subtoken_train.calibrating import layers as layerwise
from subtoken_train.calibrating.base import recall_prompts, record_prompts
from subtoken_train.calibrations import write_calibration
from subtoken_train.cli.main import main
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scenes import write_scenes
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions.h2o import LayerShares, PrefixKV
from subtoken_train.inference.compression import Compression, compression_of
from subtoken_train.inference.prefill import prefill
from subtoken_train.ledger.kv_budget import mean_deviation
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates, Scores
from tests.support.helpers import compress, make_batch, only_sample, opened, random_scores, sharpen
from tests.support.places import ROOT
from tests.support.prompt_views import NOBODY, written
from tests.support.refusals import refuses, refusing
from tests.support.text_families import text_batch, text_family

SAMPLES = [(40, 4, 0), (25, 3, 0), (0, 6, 0)]
CONTEXTS = [(40, 4, 0), (25, 3, 0), (60, 5, 0), (0, 6, 0)]


@pytest.fixture(scope="module")
def backbone():
    return CompressedBackbone(text_family(layers=3), build_reducer("none")).eval()


def test_shares_are_the_mean_of_the_prompts_own(backbone):
    """By hand: the kept share of every layer under every budget, one prompt at a time; no context, no vote."""
    batches = [text_batch([sample], seed=seed) for seed, sample in enumerate(SAMPLES)]
    found, rows = CALIBRATORS["prefixkv"]().numbers(backbone, batches), []
    for sample, batch in zip(SAMPLES[:2], batches, strict=False):
        context, shares = batch.regions_BN[0] == Region.CONTEXT, []
        for keep in layerwise.KEEP:
            layers = prefill(backbone, batch, PackedCache(3), Compression(PrefixKV(), keep)).plan.layers
            kept = [context[layer.entries_BN[0]] for layer in layers]
            shares.append([int(marks.sum()) / sample[0] for marks in kept])
        rows.append(shares)
    assert found.keep == layerwise.KEEP
    for ours, expected in zip(found.shares, torch.tensor(rows).mean(0).tolist(), strict=True):
        assert ours == pytest.approx(expected, abs=1e-6)
    assert any(len(set(ours)) > 1 for ours in found.shares)


def test_layers_follow_the_file_and_budgets_are_exact(tmp_path):
    numbers = LayerShares([0.25, 0.5], [[0.4, 0.1], [0.7, 0.3]])
    method = PrefixKV(calibration=written(tmp_path / "prefix.json", "prefixkv", numbers))
    regions = torch.full((1, 100), int(Region.CONTEXT))
    scores = [Scores(torch.rand(1, 1, 100), torch.zeros(1, 100, dtype=torch.bool)) for _ in range(2)]
    for budget, expected in {25: [40, 10], 50: [70, 30], 100: [100, 100], 1: [1, 1], 2: [3, 1]}.items():
        candidates = Candidates([regions] * 2, [regions > 0] * 2, torch.full((2, 1), budget))
        counts = method.counts(scores, candidates)[:, 0].tolist()
        assert sum(counts) == 2 * budget
        assert counts == expected


def test_between_the_tabulated_budgets_the_line_is_straight():
    found = LayerShares([0.2, 0.6], [[0.1, 0.3], [0.5, 0.7]]).at(torch.tensor([0.0, 0.1, 0.2, 0.3, 0.6, 0.8, 1.0]))
    assert found[0].tolist() == pytest.approx([0, 0.05, 0.1, 0.2, 0.5, 0.75, 1])
    assert found[1].tolist() == pytest.approx([0, 0.15, 0.3, 0.4, 0.7, 0.85, 1])


def test_the_run_says_what_it_was_made_of(backbone, tmp_path):
    shown = []
    made = layerwise.PrefixCalibrator(samples=3, batch_size=2, context_length=300).run(
        backbone, NOBODY, show=lambda *counts: shown.append(counts)
    )
    assert (made.data.name, made.data.samples, made.data.sha256) == ("recall", 3, None)
    assert made.data.tokens > 900
    assert shown == [(2, 3), (3, 3)]
    assert made.settings["context_length"] == 300
    write_calibration(tmp_path / "made.json", made)
    assert PrefixKV(calibration=str(tmp_path / "made.json")).calibrated.numbers == made.numbers
    again = layerwise.PrefixCalibrator(samples=3, batch_size=2, context_length=300).run(backbone, NOBODY)
    assert again.numbers == made.numbers


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 0.7, 1.0])
def test_what_leaves_is_the_longest_row_of_the_lowest(alpha):
    mass, visual = random_scores(0, 3, 12).abs(), random_scores(1, 3, 12) > -0.5
    total = torch.tensor([1.2, 1.0, 1.5]) * (mass * visual).sum(-1)
    leave = layerwise.bearable(mass, visual, total, alpha)
    for sample in range(3):
        places = sorted(visual[sample].nonzero().flatten().tolist(), key=lambda i: float(mass[sample, i]))
        whole, count = float((mass * visual)[sample].sum()), 0
        while count < len(places) - 1:
            if whole - sum(float(mass[sample, i]) for i in places[: count + 1]) < (1 - alpha) * float(total[sample]):
                break
            count += 1
        assert leave[sample].nonzero().flatten().tolist() == sorted(places[:count])


def test_nothing_leaves_once_the_average_is_met():
    shares = [1.0, 0.8, 0.5, 0.2]
    assert layerwise.stopped_at(shares, 0.9) == [1.0, 0.8, 0.8, 0.8]
    assert layerwise.stopped_at(shares, 0.7) == [1.0, 0.8, 0.5, 0.5]
    assert layerwise.stopped_at(shares, 0.625) == [1.0, 0.8, 0.5, 0.2]
    assert layerwise.stopped_at(shares, 0.6) is None
    assert layerwise.stopped_at(shares, 1.0) == [1.0] * 4


def test_shares_of_a_batch_are_those_of_its_samples(tiny_family):
    sharpen(tiny_family)
    batch, backbone = make_batch([(1, 9), (2, 7), (0, 12)]), compress(tiny_family)
    together = layerwise.BearableCuts()
    together.run(backbone, batch)
    found = together.shares(backbone, batch, 0.25)
    assert found.shape == (2, 4)
    for sample in range(2):
        alone = layerwise.BearableCuts()
        alone.run(backbone, only_sample(batch, sample))
        assert torch.equal(alone.shares(backbone, only_sample(batch, sample), 0.25)[0], found[sample])
    assert (found[:, 0] == 1).all()
    assert (found[:, 1:] < 1).all()
    assert (found.diff(dim=-1) <= 0).all()
    assert (together.shares(backbone, batch, 0.6) <= found).all()


def test_the_command_writes_what_the_reducer_reads(tmp_path, capsys):
    data, out, llava = tmp_path / "scenes", tmp_path / "fit.json", str(ROOT / "checkpoints/tiny-llava")
    write_scenes(data, train=4, dev=4, test=4)
    words = ["calibrate", "fitprune", "--backbone", llava, "--out", str(out), "--data", str(data / "dev.json")]
    assert main([*words, "--option", "samples=2"]) == 0
    assert "share of the visual tokens in every layer" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert (content["method"], content["data"]["samples"]) == ("fitprune", 2)
    rows = content["numbers"]["shares"]
    averages = [sum(row) / len(row) for row in rows]
    assert averages == sorted(averages, reverse=True)
    reducer = build_reducer("fitprune", (averages[0] + 1) / 2, calibration=str(out))
    assert float(sum(reducer.layer_shares(len(rows[0])))) == pytest.approx(len(rows[0]) * (averages[0] + 1) / 2)


def test_prompts_and_models_without_images_are_refused(tiny_family):
    calibrator = CALIBRATORS["fitprune"]()
    refuses("none of the prompts has an image", calibrator.numbers, compress(tiny_family), [make_batch([(0, 12)])])
    with pytest.raises(ValueError, match=r"fitprune prunes visual tokens, and a language model has none"):
        calibrator.check(compress(text_family(layers=2)))


def kept_share(backbone, batch, compression, protocol):
    """What each prompt of a batch keeps of its context, an entry counting for each head."""
    first, _ = opened(backbone, batch, compression, protocol)
    context_BN, heads, shares = first.regions_BM == Region.CONTEXT, backbone.family.shape.num_kv_heads, []
    for sample, own_N in enumerate(context_BN):
        kept = 0
        for layer in first.plan.layers:
            entries = layer.entries_BN[sample]
            kept += int(layer.heads_BNh[sample][(entries >= 0) & own_N[entries.clamp(min=0)]].sum())
        whole = int(own_N.sum()) * heads * len(first.plan.layers)
        shares += [kept / whole] if whole else []
    return shares


@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@pytest.mark.parametrize("eviction", ["kvzip", "keydiff", "snapkv"])
def test_a_run_keeps_what_is_recorded(backbone, eviction, protocol):
    options = "rows=mean,window=2" if eviction == "snapkv" else ""
    settings = {"eviction": eviction, "eviction_options": options, "keep": 0.45, "window": 3, "protocol": protocol}
    batches = [text_batch(CONTEXTS[:2], seed=1), text_batch(CONTEXTS[2:], seed=2)]
    found = layerwise.ThresholdCalibrator(**settings).numbers(backbone, batches)
    assert 0.4 < found.mean <= 0.45
    method = {"eviction": eviction, "eviction_options": {"rows": "mean", "window": 2} if options else None}
    compression = compression_of({**method, "eviction_keep": {"threshold": found.threshold, "window": found.window}})
    shares = [share for batch in batches for share in kept_share(backbone, batch, compression, protocol)]
    assert len(shares) == 3  # one prompt has no context
    assert (found.mean, found.deviation) == pytest.approx(mean_deviation(shares), abs=1e-6)
    alone = [text_batch([sample], seed=seed) for seed, sample in enumerate(CONTEXTS)]
    assert layerwise.ThresholdCalibrator(**settings).numbers(backbone, alone).mean <= 0.45


@pytest.mark.parametrize("name", ["prefixkv", "threshold", "kvzap"])
def test_prompts_without_a_context_are_refused(name):
    with pytest.raises(ValueError, match=r"none of the prompts has (anything in scope 'context'|a context to score)"):
        CALIBRATORS[name]().numbers(compress(text_family(layers=2)).eval(), [text_batch([(0, 5, 0)])])


def test_a_scope_of_all_needs_no_context_and_a_window_may_not_be_all(backbone):
    refuses("threshold keep=1 must lie between 0 and 1", layerwise.ThresholdCalibrator, keep=1)
    assert layerwise.PrefixCalibrator(scope="all").numbers(backbone, [text_batch([(0, 5, 0)])]).keep == layerwise.KEEP
    with pytest.raises(ValueError, match=r"no threshold keeps 0.5 of the entries and more than what always stays"):
        layerwise.ThresholdCalibrator(window=100).numbers(backbone, [text_batch([(40, 5, 0)])])


REFUSED = [
    ("kvzap", {"ridge": -0.1}, "ridge is -0.1"),
    ("kvzap", {"samples": 0}, "samples is 0"),
    ("kvzap", {"hidden": -1}, "hidden is -1"),
    ("duo_attention", {"sinks": -1}, "sinks is -1"),
    ("duo_attention", {"learning_rate": -1.0}, "learning_rate is"),
    ("duo_attention", {"regularisation": math.nan}, "regularisation is nan"),
    ("duo_attention", {"sinks": 20, "recent": 20, "context_length": 40}, ".*hold a whole context of 40 tokens"),
    ("prefixkv", {"batch_size": 0}, "batch_size is 0"),
    ("prefixkv", {"scope": "visual"}, "scope 'visual'"),
    ("threshold", {"keep": 0.0}, "keep=0 must lie between 0 and 1"),
    ("threshold", {"window": -1}, "window is -1"),
    ("threshold", {"protocol": "both"}, "protocol 'both'"),
    ("threshold", {"eviction": "compactor"}, "'compactor' with these settings takes no threshold"),
    ("threshold", {"eviction": "pooled(kvzip)"}, "divides a budget"),
    ("threshold", {"scope": "everything"}, "scope"),
]
test_wrong_settings_are_refused = refusing(REFUSED, lambda it, own, backbone: CALIBRATORS[it](**own).check(backbone))


def test_records_in_order_up_to_the_limit(tiny_family, tmp_path):
    write_scenes(tmp_path / "scenes", train=2, dev=9, test=2)
    records = InstructionRecords(tmp_path / "scenes" / "dev.json")
    batches = list(record_prompts(tiny_family, records, limit=7, batch_size=3))
    assert [len(batch.record_ids) for batch in batches] == [3, 3, 1]
    assert [name for batch in batches for name in batch.record_ids] == [records[i].id for i in range(7)]
    for batch in batches:
        assert not (batch.regions_BN == Region.ANSWER).any()
    assert sum(len(batch.record_ids) for batch in record_prompts(tiny_family, records, limit=99)) == 9


def test_recall_questions_without_answers():
    family = text_family("llama")
    batches = list(recall_prompts(family, limit=5, batch_size=2, context_length=2048))
    assert [len(batch.record_ids) for batch in batches] == [2, 2, 1]
    records = RecallRecords(RecallTask(family.tokenizer, 2048), "dev", 5)
    for number, batch in enumerate(batches):
        assert not (batch.regions_BN == Region.ANSWER).any()
        assert (batch.regions_BN == Region.CONTEXT).sum(-1).tolist() == [2048] * len(batch.record_ids)
        first = records[2 * number].text
        length = first.prompt_length
        assert batch.input_ids_BN[0, :length].tolist() == list(first.input_ids[:length])
        assert (batch.regions_BN[0, length:] == Region.PADDING).all()
