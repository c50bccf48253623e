"""Thresholds: the rule beside a plain one, how they are written, what is refused, and the one that meets a mean."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from subtoken_train.evictions import build_eviction, thresholds
from subtoken_train.evictions.thresholds import Threshold, mean_threshold, threshold_file, written_threshold
from subtoken_train.functional.gather import last_marked
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.compression import Compression, compression_of, method_record, settings_record
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates, Scores
from tests.support.helpers import random_scores
from tests.support.prompt_views import written
from tests.support.refusals import refuses, refusing


def plain_rule(read, threshold, competes, protected, entries):
    """One head of one sample: whether each place stays; ``read`` are its scores on the method's scale."""
    places = [place for place, there in enumerate(entries) if there]
    recent = places[-threshold.window :] if threshold.window else []
    return [
        place in places
        and (not competes[place] or protected[place] or place in recent or read[place] >= threshold.value)
        for place in range(len(entries))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 2, 50])
@pytest.mark.parametrize(("name", "value"), [("kvzip", -1.25), ("random", 0.375)])
def test_the_rule_is_the_plain_one(name, value, window, dtype):
    """Padding, ties, scores of 0, a sample without candidates, heads that share a set, half precision."""
    method, threshold = build_eviction(name), Threshold(value, window)
    regions = torch.full((3, 14), int(Region.CONTEXT))
    regions[0, :5], regions[1, 12:], regions[2, 2:] = Region.PADDING, Region.PADDING, Region.QUERY
    entries, competes = regions != Region.PADDING, regions == Region.CONTEXT
    competes[2] = False
    layers, protected = [], torch.zeros(3, 14, dtype=torch.bool)
    protected[:, 3] = True
    for heads in (2, 1):
        scores = random_scores(heads, 3, heads, 14).sigmoid().to(dtype)
        scores[:, :, ::4] = 0.0
        scores[0, :, 6] = scores[0, :, 7] = math.exp(value) if name == "kvzip" else value
        layers.append(Scores(scores, protected))
    candidates = Candidates([regions] * 2, [competes] * 2, torch.zeros(2, 3))
    kept = threshold.keep(method, layers, candidates, [last_marked(entries, window)] * 2)
    for own, found in zip(layers, kept, strict=True):
        assert found.shape == own.scores_BhN.shape
        read = own.scores_BhN.float().log() if name == "kvzip" else own.scores_BhN.float()
        for sample, head in product(range(3), range(found.shape[1])):
            marks = competes[sample], protected[sample], entries[sample]
            assert found[sample, head].tolist() == plain_rule(read[sample, head].tolist(), threshold, *marks)
        if name == "random":
            assert bool(found[0, :, 6:8].all())  # what is as high as the threshold reaches it


WRITTEN = {
    "threshold:-4": Threshold(-4.0),
    " threshold:-4.5e-1:7 ": Threshold(-0.45, 7),
    "threshold:.5": Threshold(0.5),
    "threshold:2:0": Threshold(2.0, 0),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_texts_and_mappings_say_the_same(text):
    own = WRITTEN[text]
    assert written_threshold(text) == own
    assert written_threshold({"threshold": own.value, "window": own.window}) == own
    assert written_threshold({"threshold": own.value}) == Threshold(own.value)


def test_a_file_is_named_before_it_is_read():
    assert threshold_file("threshold:made-4.json") == threshold_file({"threshold": "made-4.json"}) == "made-4.json"
    assert {threshold_file(other) for other in ("threshold:-4:3", {"threshold": -4}, "0.1", 0.1, None)} == {None}


test_what_is_written_wrong_is_said = refusing(
    [
        ("threshold", "names no threshold; write threshold:-4"),
        ("threshold=-4", "names no threshold"),
        ("threshold:nowhere.json", "nowhere.json is not a file; 'subtoken-train calibrate threshold' writes one"),
        ({"window": 3}, "names no threshold"),
        ({"threshold": -4, "windows": 3}, "unknown key of eviction_keep 'windows'. Did you mean 'window'"),
        ({"threshold": "a.json", "window": 3}, "takes its window from a.json"),
        ({"threshold": True}, "is True; it must be a number"),
        ({"threshold": -math.inf}, "threshold of eviction_keep is -inf; it must be finite"),
        ({"threshold": -4, "window": -1}, "is -1; it must be 0 to"),
    ],
    written_threshold,
)


def test_python_flags_and_grids_read_it_alike():
    spec = {"eviction": "kvzip", "eviction_keep": {"threshold": -4, "window": 64}}
    grid = ArmSpec(backbone="x", **spec).compression()
    flag = ArmSpec(backbone="x", eviction="kvzip", eviction_keep="threshold:-4:64", written="flag").compression()
    assert grid == flag == compression_of(spec)
    assert grid.threshold == Threshold(-4, 64)
    assert (grid.keep, grid.unit, grid.share) == (1.0, "fraction", None)
    assert grid.label == "kvzip threshold=-4 window=64"
    assert settings_record(grid)["threshold"] == [-4, 64]
    assert "threshold" not in settings_record(Compression())


REFUSED = [
    ({}, "needs an eviction method, for instance eviction='kvzip'"),
    ({"eviction": "compactor"}, "'compactor' with these settings takes no threshold: its scores do not.*kvzip"),
    ({"eviction": "simlayerkv", "eviction_options": {"recent": 0.1}}, "'simlayerkv' with these settings"),
    ({"eviction": "pooled(kvzip)"}, r"'pooled\(kvzip\)' divides a budget, and eviction_keep is a threshold.*use kvzip"),
    ({"eviction": "tova", "rerotate": True}, "rerotate does not go with eviction_keep threshold.*equally many entries"),
    (
        {"eviction": "keydiff", "eviction_keep": {"threshold": 1.5}},
        "threshold 1.5 keeps nothing.*keydiff are at most 1",
    ),
    ({"eviction": "keydiff", "eviction_keep": {"threshold": -1}}, "threshold -1 keeps all.*keydiff are -1 or more"),
    ({"eviction": "kvzip", "eviction_keep": {"threshold": 0.1}}, "keeps nothing: the logarithms of scores of kvzip"),
]
test_settings_that_make_no_sense_are_refused = refusing(
    REFUSED, lambda settings: compression_of({"eviction_keep": {"threshold": -4}, **settings})
)


def test_an_amount_beside_a_threshold_is_refused():
    with pytest.raises(ValueError, match=r"a threshold or an amount \(0.5 fraction\), and both are given"):
        Compression(build_eviction("kvzip"), 0.5, threshold=Threshold(-4))


def test_a_pool_of_layers_does_not_hinder_chunks():
    assert Compression(build_eviction("keydiff"), threshold=Threshold(0.1), prefill_chunk=8)
    with pytest.raises(ValueError, match="'kvzip': it runs a prompt twice"):
        Compression(build_eviction("kvzip"), threshold=Threshold(-4), prefill_chunk=8)


def record_file(path, **changed):
    made = {"eviction": method_record(build_eviction("kvzip")), "mean": 0.219, "deviation": 0.031, **changed}
    return written(path, "threshold", thresholds.ThresholdRecord(-4.25, 32, **made))


def test_a_recorded_one_is_read_with_its_mean(tmp_path):
    path = record_file(tmp_path / "t.json")
    found = compression_of({"eviction": "kvzip", "eviction_keep": f"threshold:{path}"})
    assert found.threshold == Threshold(-4.25, 32)
    assert (found.share, found.label) == (0.219, "kvzip threshold=-4.25 window=32 mean 0.219")
    assert compression_of({"eviction": "kvzip", "eviction_keep": {"threshold": path}}) == found
    with pytest.raises(ValueError, match=r"was found for eviction .*'kvzip'.*and this is .*'keydiff'"):
        compression_of({"eviction": "keydiff", "eviction_keep": f"threshold:{path}"})
    with pytest.raises(ValueError, match="and this is"):
        compression_of({"eviction": "kvzip", "eviction_keep": f"threshold:{path}", "eviction_options": {"chunk": 512}})
    refuses(r"mean is 1.2; it must be 0 to 1", lambda: record_file(tmp_path / "wrong.json", mean=1.2))


def test_nothing_and_all_are_counted_over_layers_and_heads():
    competes = torch.ones(3, 6, dtype=torch.bool)
    recent = last_marked(competes, 2)
    kept = recent[:, None].repeat(1, 2, 1)
    kept[1, 0, 0], kept[2] = True, True
    one = thresholds.Older.of(kept, Scores(torch.zeros(3, 2, 6), torch.zeros_like(competes)), competes, recent)
    assert (one.among.tolist(), one.kept.tolist(), one.safe.tolist()) == ([8] * 3, [0, 1, 8], [4] * 3)
    both = one + one
    refuses(r"keeps none of the entries of 'a'.*lower it", lambda: both.check(Threshold(-4, 2), ["a", "b", "c"]))
    with pytest.raises(ValueError, match=r"keeps all of the entries of 'c'.*raise it"):
        replace(both, kept=both.kept.clamp(min=1)).check(Threshold(-4, 2), ["a", "b", "c"])
    replace(both, safe=both.among).check(Threshold(-4, 2), ["a", "b", "c"])


def plain_mean_threshold(prompts, keep):
    """Try all: the largest mean that is within the budget."""
    every = sorted({float(score) for each in prompts for score in each.scores_n}, reverse=True)
    means = {score: sum(each.share(score) for each in prompts) / len(prompts) for score in every}
    return max((mean for mean in means.values() if mean <= keep + 1e-9), default=None)


@pytest.mark.parametrize("keep", [0.2, 0.35, 0.5, 0.9])
@pytest.mark.parametrize("ties", [False, True])
def test_the_threshold_meets_the_mean(keep, ties):
    """As near below as any threshold comes; prompts count alike, however long; ties stay or go together."""
    prompts = []
    for number, length in enumerate((40, 7, 90)):
        scores = random_scores(number, 1, 1, length).flatten()
        scores = (scores * 2).round() / 2 if ties else scores
        scores[0] = -torch.inf
        prompts.append(thresholds.ScoredPrompt(scores, number))
    found = mean_threshold(prompts, keep)
    mean = sum(each.share(found) for each in prompts) / len(prompts)
    assert mean <= keep + 1e-9
    assert mean == pytest.approx(plain_mean_threshold(prompts, keep), abs=1e-12)


def test_a_window_that_takes_all_is_said():
    prompts = [thresholds.ScoredPrompt(torch.randn(10), 30)]
    refuses(r"which is 0.75 of them; use a smaller window, longer prompts or a larger", mean_threshold, prompts, 0.7)
    refuses("which is 1 of them", lambda: mean_threshold([thresholds.ScoredPrompt(torch.zeros(0), 30)], 0.7))
