"""``torch.autocast`` around decoding: the truth within what bfloat16 costs, for blocks of equal and of unequal rows."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.evictions import EVICTIONS
from tests.support.generation_cells import CELL, PLAIN, inputs_of, model_of, settings_of
from tests.support.reference import recompute
from tests.support.sampling import sampled
from tests.support.truth_cells import backbone_of, batch_of, compression_of, decoded

CELLS = {
    "equal rows": PLAIN | {"batch": "one"},
    "unequal rows": PLAIN,
    "routed": {"eviction": "none"},
    "routed, unequal heads": {},
    "whole heads": {"selector": "none"},
    "turned keys": {"keys": "turned"},
    "int8": {"precision": "int8"},
    "int8, equal rows": {"eviction": "none", "batch": "one", "precision": "int8"},
}
BOUND = 0.04
"""Of the root mean square of a difference over that of the logits: one side rounds to bfloat16, which was measured."""
BY_KEYS = ("average", "weighted", "pivot")


def assert_truth(cell):
    backbone = backbone_of(cell)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = decoded(backbone, batch_of(cell), 6, compression_of(cell))
    assert got.logits_BTV.dtype == torch.bfloat16  # autocast was there
    truth = torch.stack([recompute(backbone, t, ids[:-1]) for t, ids in zip(got.truths, got.tokens_BT, strict=True)])
    assert float((got.logits_BTV.float() - truth).norm() / truth.norm()) < BOUND


@sampled("name", CELLS, every=3)
@pytest.mark.parametrize("family", ["llava_gqa", "qwen2_5_vl", "llama"])
def test_decoding_under_autocast_is_truth(family, name):
    cell = CELL | CELLS[name] | {"family": family}
    if family == "llama" and cell["reducer"] != "none":
        cell["reducer"] = "quest"
    assert_truth(cell)


@sampled("eviction", EVICTIONS, every=4)
def test_every_eviction_scores_under_autocast(eviction):
    own = {"selector": "none"} if EVICTIONS[eviction].reads else {}
    if EVICTIONS[eviction].merges in BY_KEYS:  # which key is nearest is found among rounded ones, and anew by the truth
        own["merge"] = "none"
    assert_truth(CELL | {"eviction": eviction} | own)


@pytest.mark.parametrize("reducer", ["visionzip", "fastv_decoder"])
def test_reducers_run_under_autocast(reducer):
    assert_truth(CELL | {"reducer": reducer})


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_turns_may_enter_and_leave_autocast(precision, first):
    model = model_of(precision=precision)
    inputs, settings = inputs_of(model), settings_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
        out = model.generate(**inputs, **settings, max_new_tokens=3, do_sample=False)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not first):
        more = model.generate(
            input_ids=out, attention_mask=mask, past_key_values=model.last.cache, max_new_tokens=3, **settings
        )
    assert more.shape[1] == out.shape[1] + 3
