"""PrefixKV's calibration: the mean of every prompt's own prefixes, and what it does to later prompts."""

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating import CALIBRATORS
from subtoken_train.calibrating.layers import KEEP, PrefixCalibrator
from subtoken_train.calibrations import write_calibration
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions.h2o import LayerShares, PrefixKV
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates, Scores
from tests.support.kvzap_files import NOBODY, written
from tests.support.text_families import text_batch, text_family

SAMPLES = [(40, 4, 0), (25, 3, 0), (0, 6, 0)]


@pytest.fixture(scope="module")
def backbone():
    return CompressedBackbone(text_family(layers=3), build_reducer("none")).eval()


def single(sample, seed):
    """A batch of one prompt."""
    return text_batch([sample], seed=seed)


def test_shares_are_the_mean_of_the_prompts_own(backbone):
    """By hand: the kept share of every layer under every budget, one prompt at a time; no context, no vote."""
    batches = [single(sample, seed) for seed, sample in enumerate(SAMPLES)]
    found = CALIBRATORS["prefixkv"]().numbers(backbone, batches)
    rows = []
    for seed, sample in enumerate(SAMPLES[:2]):
        batch = single(sample, seed)
        context, shares = batch.regions_BN[0] == Region.CONTEXT, []
        for keep in KEEP:
            cache = PackedCache(3)
            layers = prefill(backbone, batch, cache, Compression(PrefixKV(), keep)).plan.layers
            kept = [context[layer.entries_BN[0]] for layer in layers]
            shares.append([int(marks.sum()) / sample[0] for marks in kept])
        rows.append(shares)
    assert found.keep == KEEP
    for ours, expected in zip(found.shares, torch.tensor(rows).mean(0).tolist(), strict=True):
        assert ours == pytest.approx(expected, abs=1e-6)
    assert any(len(set(ours)) > 1 for ours in found.shares)


def test_layers_follow_the_file_and_budgets_are_exact(tmp_path):
    numbers = LayerShares([0.25, 0.5], [[0.4, 0.1], [0.7, 0.3]])
    method = PrefixKV(calibration=written(tmp_path / "prefix.json", "prefixkv", numbers))
    regions = torch.full((1, 100), int(Region.CONTEXT))
    scores = [Scores(torch.rand(1, 1, 100), torch.zeros(1, 100, dtype=torch.bool)) for _ in range(2)]
    cases = {25: [40, 10], 50: [70, 30], 100: [100, 100], 1: [1, 1], 2: [3, 1]}
    for budget, expected in cases.items():
        candidates = Candidates([regions] * 2, [regions > 0] * 2, torch.full((2, 1), budget))
        counts = method.counts(scores, candidates)[:, 0].tolist()
        assert sum(counts) == 2 * budget
        assert counts == expected


def test_between_the_tabulated_budgets_the_line_is_straight():
    numbers = LayerShares([0.2, 0.6], [[0.1, 0.3], [0.5, 0.7]])
    found = numbers.at(torch.tensor([0.0, 0.1, 0.2, 0.3, 0.6, 0.8, 1.0]))
    assert found[0].tolist() == pytest.approx([0, 0.05, 0.1, 0.2, 0.5, 0.75, 1])
    assert found[1].tolist() == pytest.approx([0, 0.15, 0.3, 0.4, 0.7, 0.85, 1])


def test_prompts_without_a_context_calibrate_nothing(backbone):
    with pytest.raises(ValueError, match="none of the prompts has anything in scope 'context'"):
        PrefixCalibrator().numbers(backbone, [text_batch([(0, 5, 0)])])
    assert PrefixCalibrator(scope="all").numbers(backbone, [text_batch([(0, 5, 0)])]).keep == KEEP


def test_the_run_says_what_it_was_made_of(backbone, tmp_path):
    shown = []
    made = PrefixCalibrator(samples=3, batch_size=2, context_length=300).run(
        backbone, NOBODY, show=lambda *counts: shown.append(counts)
    )
    assert (made.data.name, made.data.samples, made.data.sha256) == ("recall", 3, None)
    assert made.data.tokens > 900
    assert shown == [(2, 3), (3, 3)]
    assert made.settings["context_length"] == 300
    write_calibration(tmp_path / "made.json", made)
    assert PrefixKV(calibration=str(tmp_path / "made.json")).calibrated.numbers == made.numbers
    again = PrefixCalibrator(samples=3, batch_size=2, context_length=300).run(backbone, NOBODY)
    assert again.numbers == made.numbers


def test_data_of_the_other_kind(backbone):
    with pytest.raises(ValueError, match="is calibrated on 'recall'; leave it out"):
        PrefixCalibrator().run(backbone, NOBODY, "data/scenes/dev.json")
