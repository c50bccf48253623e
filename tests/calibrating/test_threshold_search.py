"""The threshold that meets a mean: what a run with it keeps is what was recorded; batches and protocols; faults."""

import json
import math

import pytest

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating import CALIBRATORS
from subtoken_train.calibrating.layers import ThresholdCalibrator
from subtoken_train.calibrations import write_calibration
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.inference.compression import compression_of
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.ledger.kv_budget import mean_deviation
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from tests.support.kvzap_files import NOBODY
from tests.support.text_families import text_batch, text_family

SAMPLES = [(40, 4, 0), (25, 3, 0), (60, 5, 0), (0, 6, 0)]


@pytest.fixture(scope="module")
def backbone():
    return CompressedBackbone(text_family(layers=3), build_reducer("none")).eval()


def kept_share(backbone, batch, compression, protocol):
    """What each prompt of a batch keeps of its context, an entry counting for each head."""
    cache = PackedCache(backbone.family.shape.num_layers)
    first = open_prompts(backbone, batch, cache, compression, protocol)
    context_BN, heads, shares = first.regions_BM == Region.CONTEXT, backbone.family.shape.num_kv_heads, []
    for sample, own_N in enumerate(context_BN):
        kept = 0
        for layer in first.plan.layers:
            entries = layer.entries_BN[sample]
            marks = (entries >= 0) & own_N[entries.clamp(min=0)]
            kept += int(layer.heads_BNh[sample][marks].sum())
        whole = int(own_N.sum()) * heads * len(first.plan.layers)
        shares += [kept / whole] if whole else []
    return shares


@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@pytest.mark.parametrize("eviction", ["kvzip", "keydiff", "snapkv"])
def test_a_run_keeps_what_is_recorded(backbone, eviction, protocol):
    options = "rows=mean,window=2" if eviction == "snapkv" else ""
    settings = {"eviction": eviction, "eviction_options": options, "keep": 0.45, "window": 3, "protocol": protocol}
    batches = [text_batch(SAMPLES[:2], seed=1), text_batch(SAMPLES[2:], seed=2)]
    found = ThresholdCalibrator(**settings).numbers(backbone, batches)
    assert 0.4 < found.mean <= 0.45
    method = {"eviction": eviction, "eviction_options": {"rows": "mean", "window": 2} if options else None}
    keep = {"threshold": found.threshold, "window": found.window}
    compression = compression_of({**method, "eviction_keep": keep})
    shares = [share for batch in batches for share in kept_share(backbone, batch, compression, protocol)]
    assert len(shares) == 3  # one prompt has no context
    assert (found.mean, found.deviation) == pytest.approx(mean_deviation(shares), abs=1e-6)
    alone = [text_batch([sample], seed=seed) for seed, sample in enumerate(SAMPLES)]
    assert ThresholdCalibrator(**settings).numbers(backbone, alone).mean <= 0.45


def test_the_run_is_recorded(backbone, tmp_path):
    settings = {"samples": 3, "batch_size": 2, "context_length": 300, "eviction": "keydiff", "keep": 0.6, "window": 20}
    made = CALIBRATORS["threshold"](**settings).run(backbone, NOBODY)
    write_calibration(tmp_path / "made.json", made)
    read = Threshold.read(str(tmp_path / "made.json"))
    assert (read.value, read.window, read.mean) == (made.numbers.threshold, 20, made.numbers.mean)
    assert read.record.settings == {**settings, "seed": 0, "eviction_options": "", "scope": "context",
                                    "protocol": "query_aware"}  # fmt: skip
    assert json.loads((tmp_path / "made.json").read_text())["numbers"]["eviction"] == {"name": "keydiff"}


def test_prompts_without_a_context_and_windows_that_are_all(backbone):
    with pytest.raises(ValueError, match="none of the prompts has anything in scope 'context'"):
        ThresholdCalibrator().numbers(backbone, [text_batch([(0, 5, 0)])])
    with pytest.raises(ValueError, match=r"no threshold keeps 0.5 of the entries and more than what always stays"):
        ThresholdCalibrator(window=100).numbers(backbone, [text_batch([(40, 5, 0)])])


REFUSED = [
    ("kvzap", {"ridge": -0.1}, "ridge is -0.1"),
    ("kvzap", {"ridge": math.nan}, "ridge is nan"),
    ("kvzap", {"samples": 0}, "samples is 0"),
    ("duo_attention", {"sinks": -1}, "sinks is -1"),
    ("duo_attention", {"recent": 0}, "recent is 0"),
    ("duo_attention", {"learning_rate": -1.0}, "learning_rate is"),
    ("duo_attention", {"regularisation": math.nan}, "regularisation is nan"),
    ("duo_attention", {"sinks": 20, "recent": 20, "context_length": 40}, ".*hold a whole context of 40 tokens"),
    ("prefixkv", {"batch_size": 0}, "batch_size is 0"),
    ("prefixkv", {"seed": -1}, "seed is -1"),
    ("prefixkv", {"scope": "visual"}, "scope 'visual'"),
    ("threshold", {"keep": 0.0}, "keep=0 must lie between 0 and 1"),
    ("threshold", {"keep": 1.0}, "keep=1 must lie between 0 and 1"),
    ("threshold", {"window": -1}, "window is -1"),
    ("threshold", {"protocol": "both"}, "protocol 'both'"),
    ("threshold", {"eviction": "compactor"}, "'compactor', as it is set, has no scores"),
    ("threshold", {"eviction": "pooled(kvzip)"}, "divides a budget"),
    ("threshold", {"scope": "everything"}, "scope"),
]


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED)
def test_wrong_settings_are_refused(backbone, name, settings, words):
    with pytest.raises(ValueError, match=words):
        CALIBRATORS[name](**settings).check(backbone)
